package main

import (
	"os/exec"
	"strings"
	"testing"
)

// TestImports: a plugin is built from the SDK alone, so that it can be released
// and replaced without the daemons.
func TestImports(t *testing.T) {
	out, err := exec.Command("go", "list", "-f", `{{join .Imports "\n"}}`, ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	const sdk = "github.com/rnbd-go/rnbd/modules/rnbd-sdk/"
	for _, path := range strings.Fields(string(out)) {
		switch path {
		case sdk + "access", sdk + "blk", sdk + "blockdev", sdk + "extents", sdk + "nbdwire", sdk + "shm", sdk + "pump", sdk + "plugin", sdk + "selfstats", sdk + "sockpair", sdk + "tally", "golang.org/x/sys/unix",
			"github.com/mdlayher/genetlink", "github.com/mdlayher/netlink":
			continue
		}
		if strings.Contains(path, ".") {
			t.Errorf("%s is imported; a plugin uses the SDK, and netlink", path)
		}
	}
}
