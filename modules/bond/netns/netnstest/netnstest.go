// Package netnstest skips tests where network namespaces cannot be used.
package netnstest

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
)

// Need skips the test unless network namespaces are Usable.
func Need(t testing.TB) {
	t.Helper()
	if err := Usable(); err != nil {
		t.Skipf("network namespaces cannot be used here: %v", err)
	}
}

// Usable returns why this process cannot make network namespaces and run commands in them,
// nil if it can. It tries that once: it takes root, ip(8), and a root folder that is a
// mount, since ip-netns(8) mounts /sys for its commands. A plain chroot has none.
var Usable = sync.OnceValue(func() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("they need root")
	}
	name := fmt.Sprintf("rnbd-probe-%d", os.Getpid())
	if err := ip("netns", "add", name); err != nil {
		return err
	}
	err := ip("netns", "exec", name, "true")
	if derr := ip("netns", "del", name); err == nil {
		err = derr
	}
	return err
})

func ip(args ...string) error {
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
