package cgroup

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Arguments of a test binary that plays the daemon, and the process of a plugin.
const (
	child  = "cgroup-daemon"
	joiner = "cgroup-joiner"
)

func TestMain(m *testing.M) {
	switch {
	case len(os.Args) == 2 && os.Args[1] == child:
		if err := daemon(); err != nil {
			fmt.Println("error:", err)
		}
		os.Exit(0)
	case len(os.Args) == 3 && os.Args[1] == joiner:
		fmt.Println(Join(os.Args[2]))
		time.Sleep(10 * time.Minute)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// daemon opens its tree, starts a process in a group of its own and prints where
// both are.
func daemon() error {
	t, err := Open(Limits{})
	if err != nil {
		return err
	}
	g, err := t.New("io/test")
	if err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe", joiner, g.Path())
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	if _, err := out.Read(make([]byte, 1)); err != nil { // it has joined
		return err
	}
	for _, pid := range []int{os.Getpid(), cmd.Process.Pid} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil {
			return err
		}
		_, path, _ := strings.Cut(string(b), "0::")
		fmt.Println(strings.TrimSpace(path))
	}
	go func() { time.Sleep(10 * time.Second); cmd.Process.Kill() }() // where the kernel has no cgroup.kill
	g.Close()
	fmt.Println("ended:", cmd.Wait())
	fmt.Println("left:", exists(g.Path()))
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// group makes a group in the place of systemd, and skips where that is not
// possible.
func group(t *testing.T, mark bool) string {
	t.Helper()
	root, err := own()
	if err != nil {
		t.Skipf("no mount of control groups of version 2 with this process: %v", err)
	}
	path := filepath.Join(root, fmt.Sprintf("rnbd-test-%d-%s", os.Getpid(), t.Name()))
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Skipf("cannot make a control group: %v", err)
	}
	t.Cleanup(func() {
		for _, sub := range []string{"daemon", "."} {
			for end := time.Now().Add(10 * time.Second); exists(filepath.Join(path, sub)) && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
				unix.Rmdir(filepath.Join(path, sub))
			}
		}
	})
	if mark {
		if err := unix.Setxattr(path, "user.delegate", []byte("1"), 0); err != nil {
			t.Skipf("control groups of this kernel have no attributes: %v", err)
		}
	}
	return path
}

// run plays the daemon in the group, and returns what it prints.
func run(t *testing.T, path string) []string {
	t.Helper()
	dir, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	cmd := exec.Command("/proc/self/exe", child)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	out, err := cmd.Output()
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EBUSY) {
		t.Skipf("cannot start a process in a control group: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

func TestProcessesGetGroupsOfTheirOwn(t *testing.T) {
	path := group(t, true)
	got := run(t, path)
	base := filepath.Base(path)
	if len(got) != 4 || !strings.HasSuffix(got[0], base+"/daemon") || !strings.HasSuffix(got[1], base+"/io_test-1") {
		t.Fatalf("%q", got)
	}
	if got[2] != "ended: signal: killed" || got[3] != "left: false" {
		t.Errorf("after Close: %q", got[2:])
	}
}

func TestGroupsOfOthersAreLeftAlone(t *testing.T) {
	path := group(t, false)
	if got := run(t, path); len(got) != 1 || got[0] != "error: "+ErrNotDelegated.Error() {
		t.Errorf("%q", got)
	}
	if exists(filepath.Join(path, "daemon")) {
		t.Error("a group was made")
	}
}

// A limit that cannot hold is an error, not a limit that nobody keeps.
func TestLimitsWithoutAController(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Setxattr(dir, "user.delegate", []byte("1"), 0); err != nil {
		t.Skipf("the temporary folder has no attributes: %v", err)
	}
	// A plain folder stands for a group whose parent passes no controllers on.
	if err := os.Mkdir(filepath.Join(dir, "daemon"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "daemon", "cgroup.procs"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := openAt(dir, Limits{Memory: 1 << 20})
	if err == nil || !strings.Contains(err.Error(), "Delegate=memory") {
		t.Errorf("%v", err)
	}
}

func TestFind(t *testing.T) {
	const mounts = `25 1 0:22 / /sys rw - sysfs sysfs rw
30 25 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw
`
	const inner = `30 25 0:26 /machine/a /sys/fs/cgroup rw - cgroup2 cgroup2 rw
`
	for _, c := range []struct{ name, groups, mounts, want string }{
		{"unit", "0::/system.slice/rnbd-server.service\n", mounts, "/sys/fs/cgroup/system.slice/rnbd-server.service"},
		{"both versions", "4:memory:/x\n0::/y\n", mounts, "/sys/fs/cgroup/y"},
		{"root", "0::/\n", mounts, "/sys/fs/cgroup"},
		{"a part is mounted", "0::/machine/a/b\n", inner, "/sys/fs/cgroup/b"},
		{"all of a part", "0::/machine/a\n", inner, "/sys/fs/cgroup"},
		{"another part", "0::/machine/ab\n", inner, ""},
		{"outside of the namespace", "0::/../c\n", mounts, ""},
		{"version 1 only", "4:memory:/x\n", mounts, ""},
		{"no mount", "0::/y\n", "", ""},
	} {
		got, err := find(c.groups, c.mounts)
		if got != c.want || (err != nil) != (c.want == "") {
			t.Errorf("%s: %q, %v", c.name, got, err)
		}
	}
}
