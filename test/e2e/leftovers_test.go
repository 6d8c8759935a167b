package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestNothingIsLeftOfAKilledDaemon kills each daemon with its plugins running:
// the next one clears away the folders of its plugins' sockets and its mounts.
func TestNothingIsLeftOfAKilledDaemon(t *testing.T) {
	sys := ""
	if os.Geteuid() == 0 {
		if _, err := os.Stat("/dev/fuse"); err == nil {
			sys = filepath.Join(shortDir(t), "sys")
		}
	}
	r := newRig(t, rigOptions{size: 1 << 20,
		server: lab.ServerOptions{Sys: sys},
		client: lab.ClientOptions{Sys: sys},
	})
	sockets := filepath.Dir(r.server.Socket)
	for _, d := range []struct {
		name  string
		kill  func() error
		start func() error
	}{
		{"server", r.server.Kill, r.server.Start},
		{"client", r.client.Kill, r.client.Start},
	} {
		t.Run(d.name, func(t *testing.T) {
			for range 2 {
				before := pluginFolders(t, sockets)
				if len(before) == 0 {
					t.Fatal("daemons that run have no folder: the test looks in the wrong place")
				}
				if err := d.kill(); err != nil {
					t.Fatal(err)
				}
				if err := d.start(); err != nil {
					t.Fatal(err)
				}
				// Those of the killed daemon are replaced, those of the other one stay.
				if after := pluginFolders(t, sockets); len(after) != len(before) || slices.Equal(after, before) {
					t.Errorf("folders %q, and %q before", after, before)
				}
				if sys == "" {
					continue
				}
				if _, err := os.ReadDir(filepath.Join(sys, "class", "rnbd-"+d.name)); err != nil {
					t.Errorf("control files of the next daemon: %v", err)
				}
			}
		})
	}
	for _, stop := range []func() error{r.client.Stop, r.server.Stop} {
		if err := stop(); err != nil {
			t.Error(err)
		}
	}
	if left := pluginFolders(t, sockets); len(left) > 0 {
		t.Errorf("left by daemons that were stopped: %q", left)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || sys != "" && strings.Contains(string(mounts), sys) {
		t.Errorf("mounts are left: %v\n%s", err, mounts)
	}
}

// pluginFolders returns the folders of plugins' sockets in dir.
func pluginFolders(t *testing.T, dir string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "rnbd-plugin-*"))
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// TestMountPointInUse has something else mounted where control files belong: a
// daemon that was told that folder refuses it, and says what is there.
func TestMountPointInUse(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount")
	}
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	dir := shortDir(t)
	place := filepath.Join(dir, "sys", "class", "rnbd-client")
	if err := os.MkdirAll(place, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", place, "tmpfs", 0, ""); err != nil {
		t.Skipf("mount: %v", err)
	}
	defer syscall.Unmount(place, 0)
	args := []string{"client", "run", "--socket", filepath.Join(dir, "c.sock"), "--plugin-dir", bin, "--frontend", "nbd-socket", "--frontend-plugin", "ublk=none"}
	rnbd(t, append(args, "--sys", filepath.Join(dir, "sys"))...).want(t, 5, "--sys", place, "tmpfs", "mounted there already")
	if _, err := os.Lstat(filepath.Join(dir, "c.sock")); err == nil {
		t.Error("a socket is left behind")
	}
}
