package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/test/lab"
)

// delegated makes a control group, marked as systemd marks one that it delegates.
func delegated(t *testing.T) string {
	t.Helper()
	needRoot(t, "to make a control group")
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st unix.Statfs_t
		if unix.Statfs(root, &st) != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
			continue
		}
		path := filepath.Join(root, fmt.Sprintf("rnbd-e2e-%d", os.Getpid()))
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Skipf("control groups cannot be made here: %v", err)
		}
		t.Cleanup(func() { removeGroup(t, path) })
		if err := unix.Setxattr(path, "user.delegate", []byte("1"), 0); err != nil {
			t.Skipf("control groups of this kernel have no attributes: %v", err)
		}
		return path
	}
	t.Skip("no control groups of version 2 are mounted")
	return ""
}

// removeGroup waits for the processes that end.
func removeGroup(t *testing.T, path string) {
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		for _, g := range groupsIn(path) {
			unix.Rmdir(filepath.Join(path, g))
		}
		err := unix.Rmdir(path)
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Errorf("control group %s: %v", path, err)
			return
		}
	}
}

// groupsIn lists the groups below path.
func groupsIn(path string) (out []string) {
	entries, _ := os.ReadDir(path)
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, e.Name())
		}
	}
	return out
}

// groupOf is the group below path that a process is in.
func groupOf(t *testing.T, path string, pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Errorf("process %d: %v", pid, err)
	}
	_, group, _ := strings.Cut(string(b), filepath.Base(path)+"/")
	group, _, _ = strings.Cut(group, "\n")
	return group
}

// A plugin has a control group of its own where the daemon may make groups, and
// nothing of it is left when the plugin has ended.
func TestPluginHasAControlGroup(t *testing.T) {
	path := delegated(t)
	l := lab.New(t)
	s, err := l.StartServer(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}})
	if err != nil {
		t.Fatal(err)
	}
	c := l.Client(lab.ClientOptions{Prefix: []string{"sh", "-c", `echo 0 > ` + path + `/cgroup.procs && exec "$@"`, "sh"}})
	d := l.Map(c, "disk.img", s)
	front, err := c.Plugin("nbd")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(front.Confined, "cgroup") || strings.Contains(front.Confined, "without cgroup") {
		t.Errorf("show says %q", front.Confined)
	}
	if got := groupOf(t, path, c.PID()); got != "daemon" {
		t.Errorf("the daemon is in %q", got)
	}
	first := groupOf(t, path, int(front.Pid))
	if !strings.HasPrefix(first, "nbd-") {
		t.Errorf("the plugin is in %q", first)
	}
	if err := unix.Kill(int(front.Pid), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the next process has another group, and the first one's is gone", func() bool {
		next, err := c.Plugin("nbd")
		if err != nil || next.Pid == 0 || next.Pid == front.Pid || slices.Contains(groupsIn(path), first) {
			return false
		}
		return strings.HasPrefix(groupOf(t, path, int(next.Pid)), "nbd-")
	})
	run(t, "qemu-io", "-f", "raw", "-c", "write -P 7 4k 64k", "-c", "read -P 7 4k 64k", c.URI(d.Name))
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
	if got := strings.Join(groupsIn(path), " "); got != "daemon" {
		t.Errorf("after the end: %s", got)
	}
}

// A limit that cannot be kept is refused.
func TestPluginMemoryNeedsAControlGroup(t *testing.T) {
	l := lab.New(t)
	_, err := l.StartServer(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Extra: []string{"--plugin-memory", "512M"}})
	if err == nil || !strings.Contains(err.Error(), "--plugin-memory") {
		t.Errorf("%v", err)
	}
}
