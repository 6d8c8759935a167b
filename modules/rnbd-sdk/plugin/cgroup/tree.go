package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// ErrNotDelegated is returned where the group of this process belongs to another
// manager.
var ErrNotDelegated = errors.New("the control group of this process is not delegated to it")

// Tree is a delegated group. Its methods may be called from any goroutine.
type Tree struct {
	path   string
	limits Limits
	number atomic.Uint64
}

// Limits bound each group. A zero value is no limit.
type Limits struct {
	Memory int64 // bytes, with the shared memory that the process touches first
}

// Open takes the group of this process, moves the process into a group "daemon"
// below it, and passes the controllers on that limits need. The error is
// ErrNotDelegated where nothing was left to this process. A limit without its
// controller is an error.
func Open(limits Limits) (*Tree, error) {
	path, err := own()
	if err != nil {
		return nil, err
	}
	if filepath.Base(path) == daemonName && delegated(filepath.Dir(path)) {
		path = filepath.Dir(path) // a daemon that another one has started, to follow it
	}
	return openAt(path, limits)
}

// daemonName is the group of the daemon.
const daemonName = "daemon"

func openAt(path string, limits Limits) (*Tree, error) {
	if !delegated(path) {
		return nil, ErrNotDelegated
	}
	t := &Tree{path: path, limits: limits}
	// An earlier daemon of the same group may have left some.
	t.removeEmpty()
	daemon := filepath.Join(path, daemonName)
	if err := os.Mkdir(daemon, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	if err := Join(daemon); err != nil {
		return nil, err
	}
	if limits.Memory > 0 {
		if err := write(path, "cgroup.subtree_control", "+memory"); err != nil {
			return nil, fmt.Errorf("pass on the controller memory: %w; delegate it (Delegate=memory)", err)
		}
	}
	return t, nil
}

// removeEmpty removes the groups without processes. The others are in use.
func (t *Tree) removeEmpty() {
	entries, _ := os.ReadDir(t.path)
	for _, e := range entries {
		if e.IsDir() {
			_ = unix.Rmdir(filepath.Join(t.path, e.Name()))
		}
	}
}

// Group is the group of one process.
type Group struct{ path string }

// New makes a group with the limits of t. Its folder is called name and a number.
func (t *Tree) New(name string) (*Group, error) {
	name = strings.Map(func(r rune) rune {
		if r == '/' || r <= ' ' {
			return '_'
		}
		return r
	}, name)
	g, err := t.mkdir(name)
	if err != nil {
		return nil, err
	}
	if err := g.limit(t.limits); err != nil {
		_ = unix.Rmdir(g.path)
		return nil, err
	}
	return g, nil
}

// mkdir takes the first number that is free. Another daemon's groups stay.
func (t *Tree) mkdir(name string) (*Group, error) {
	for {
		path := filepath.Join(t.path, fmt.Sprintf("%s-%d", name, t.number.Add(1)))
		switch err := os.Mkdir(path, 0o755); {
		case err == nil:
			return &Group{path: path}, nil
		case !errors.Is(err, os.ErrExist):
			return nil, err
		}
	}
}

func (g *Group) limit(l Limits) error {
	if l.Memory == 0 {
		return nil
	}
	if err := write(g.path, "memory.max", strconv.FormatInt(l.Memory, 10)); err != nil {
		return err
	}
	return write(g.path, "memory.oom.group", "1")
}

// Path is the folder of the group.
func (g *Group) Path() string { return g.path }

// Join moves the calling process into the group at path.
func Join(path string) error { return write(path, "cgroup.procs", "0") }

// Close kills what is left in the group, waits up to a second for its end, and
// removes the group. A process whose I/O does not end keeps it; the next Open
// removes it.
func (g *Group) Close() {
	_ = write(g.path, "cgroup.kill", "1") // Linux 5.14
	for range 100 {
		if unix.Rmdir(g.path) != unix.EBUSY {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func write(dir, file, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString(value)
	return err
}

// delegated reports whether path has the mark that systemd sets: user.delegate
// since version 251, trusted.delegate before.
func delegated(path string) bool {
	b := make([]byte, 8)
	for _, name := range []string{"user.delegate", "trusted.delegate"} {
		if n, err := unix.Getxattr(path, name, b); err == nil && string(b[:n]) == "1" {
			return true
		}
	}
	return false
}

// own returns the folder of the group of version 2 that this process is in.
func own() (string, error) {
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	return find(string(groups), string(mounts))
}

// find looks up the group, "0::PATH" of /proc/PID/cgroup, in the mount points.
func find(groups, mounts string) (string, error) {
	group, ok := "", false
	for line := range strings.Lines(groups) {
		if group, ok = strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok {
			break
		}
	}
	if !ok || strings.HasPrefix(group, "/..") { // outside of the namespace
		return "", ErrNotDelegated
	}
	s := bufio.NewScanner(strings.NewReader(mounts))
	for s.Scan() {
		// ID PARENT DEV ROOT POINT OPTIONS ... - TYPE SOURCE OPTIONS, proc_pid_mountinfo(5)
		before, after, _ := strings.Cut(s.Text(), " - ")
		f := strings.Fields(before)
		if len(f) < 5 || !strings.HasPrefix(after, "cgroup2 ") {
			continue
		}
		if rest, ok := strings.CutPrefix(group, strings.TrimSuffix(f[3], "/")); ok && (rest == "" || rest[0] == '/') {
			return filepath.Join(f[4], rest), nil
		}
	}
	return "", ErrNotDelegated
}
