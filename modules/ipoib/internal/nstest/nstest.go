// Package nstest makes network namespaces for tests. They need root, ip-netns(8), and a
// root folder that is a mount; without, the test is skipped.
package nstest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// Namespace is a network namespace that ends with its test.
type Namespace struct {
	Name string
	t    testing.TB
}

var count atomic.Int32

// usable tries once to make a namespace and to run a command in it: ip-netns(8) mounts /sys
// for its commands, which fails in a plain chroot.
var usable = sync.OnceValue(func() error {
	if os.Geteuid() != 0 {
		return errors.New("they need root")
	}
	name := fmt.Sprintf("ipoib-probe-%d", os.Getpid())
	err := ip("netns", "add", name)
	if err != nil {
		return err
	}
	defer func() { _ = ip("netns", "del", name) }()
	return ip("netns", "exec", name, "true")
})

func ip(args ...string) error {
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// New makes a namespace and sets its loopback interface up.
func New(t testing.TB) *Namespace {
	t.Helper()
	if err := usable(); err != nil {
		t.Skipf("network namespaces cannot be used here: %v", err)
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Skip(err)
	}
	n := &Namespace{fmt.Sprintf("ipoib-%d-%d", os.Getpid(), count.Add(1)), t}
	run(t, "ip", "netns", "add", n.Name)
	t.Cleanup(func() { run(t, "ip", "netns", "del", n.Name) })
	n.Run("ip", "link", "set", "lo", "up")
	return n
}

// Pair makes two namespaces joined by a cable with the MTU given, in bytes.
// The ends have the addresses 10.9.0.1 and 10.9.0.2.
func Pair(t testing.TB, mtu int) (a, b *Namespace) {
	t.Helper()
	a, b = New(t), New(t)
	a.Run("ip", "link", "add", "eth0", "mtu", fmt.Sprint(mtu), "type", "veth", "peer", "name", "eth0", "mtu", fmt.Sprint(mtu), "netns", b.Name)
	for i, n := range []*Namespace{a, b} {
		n.Run("ip", "addr", "add", fmt.Sprintf("10.9.0.%d/24", i+1), "dev", "eth0")
		n.Run("ip", "link", "set", "eth0", "up")
	}
	return a, b
}

// Run runs a command in the namespace and returns its output. The test fails if
// the command fails.
func (n *Namespace) Run(args ...string) string {
	n.t.Helper()
	return run(n.t, append([]string{"ip", "netns", "exec", n.Name}, args...)...)
}

// Command returns a command that runs in the namespace.
func (n *Namespace) Command(args ...string) *exec.Cmd {
	return exec.Command("ip", append([]string{"netns", "exec", n.Name}, args...)...)
}

func run(t testing.TB, args ...string) string {
	t.Helper()
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Do calls f in the namespace and waits for it. Sockets and devices made by f
// itself belong to the namespace. Those of goroutines started by f do not.
func (n *Namespace) Do(f func()) {
	n.t.Helper()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // not unlocked: the thread ends with the goroutine
		fd, err := unix.Open("/run/netns/"+n.Name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			err = unix.Setns(fd, unix.CLONE_NEWNET)
			unix.Close(fd)
		}
		if err == nil {
			defer func() { done <- nil }()
			f()
			return
		}
		done <- err
	}()
	if err := <-done; err != nil {
		n.t.Fatalf("enter namespace %s: %v", n.Name, err)
	}
}
