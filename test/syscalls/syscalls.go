package syscalls

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrUnavailable means that system calls cannot be counted here.
var ErrUnavailable = errors.New("system calls cannot be counted")

// Others is the name of the calls in Counts that are not in Names.
const Others = "others"

// Names are the calls that are counted by name: those that move data, wake or
// wait.
var Names = []string{
	"clock_nanosleep", "epoll_ctl", "epoll_pwait", "futex", "io_uring_enter", "nanosleep", "ppoll", "read", "readv",
	"recvfrom", "recvmmsg", "recvmsg", "sched_yield", "sendmmsg", "sendmsg", "sendto", "timerfd_settime", "write", "writev",
}

// Counts are numbers of calls by name. Those of no calls are left out.
type Counts map[string]uint64

// Sub returns the calls since before.
func (c Counts) Sub(before Counts) Counts {
	d := Counts{}
	for name, n := range c {
		if n -= before[name]; n > 0 {
			d[name] = n
		}
	}
	return d
}

// Sum adds up all calls but those named.
func (c Counts) Sum(but ...string) (sum uint64) {
	for name, n := range c {
		if !slices.Contains(but, name) {
			sum += n
		}
	}
	return sum
}

// Counter counts the calls of one process.
type Counter struct {
	fds map[string][]int // by name, one per thread
}

// all is the tracepoint that every call passes.
const all = "raw_syscalls/sys_enter"

// Watch begins to count the calls of a process.
func Watch(pid int) (*Counter, error) {
	ids, err := tracepoints()
	if err != nil {
		return nil, err
	}
	for range 100 {
		before := threads(pid)
		c := &Counter{fds: map[string][]int{}}
		if err = c.open(ids, before); err == nil && slices.Equal(before, threads(pid)) {
			return c, nil
		}
		c.Close() // a new thread may be counted twice or not at all
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return nil, fmt.Errorf("%w: process %d: %w", ErrUnavailable, pid, err)
		}
	}
	return nil, fmt.Errorf("count system calls of process %d: it does not stop starting and ending threads: %w", pid, errors.Join(err))
}

// open watches threads, and the threads and processes that they start.
func (c *Counter) open(ids map[string]uint64, tids []int) error {
	if len(tids) == 0 {
		return unix.ESRCH
	}
	for name, id := range ids {
		attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_TRACEPOINT, Config: id, Bits: unix.PerfBitInherit}
		attr.Size = unix.PERF_ATTR_SIZE_VER5
		for _, tid := range tids {
			fd, err := unix.PerfEventOpen(&attr, tid, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
			if err != nil {
				return err
			}
			c.fds[name] = append(c.fds[name], fd)
		}
	}
	return nil
}

// Read returns the counts since Watch.
func (c *Counter) Read() (Counts, error) {
	counts, named, total := Counts{}, uint64(0), uint64(0)
	for name, fds := range c.fds {
		n, err := sum(fds)
		if err != nil {
			return nil, fmt.Errorf("read the count of %s: %w", name, err)
		}
		if name == all {
			total = n
			continue
		}
		counts[name] = n
		named += n
	}
	counts[Others] = total - min(named, total) // a call may come in between
	return counts, nil
}

func sum(fds []int) (n uint64, err error) {
	var b [8]byte
	for _, fd := range fds {
		if _, err := unix.Read(fd, b[:]); err != nil {
			return 0, err
		}
		n += binary.NativeEndian.Uint64(b[:])
	}
	return n, nil
}

// Close ends the counting.
func (c *Counter) Close() {
	for _, fds := range c.fds {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}
	c.fds = nil
}

func threads(pid int) (tids []int) {
	entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, e := range entries {
		if tid, err := strconv.Atoi(e.Name()); err == nil {
			tids = append(tids, tid)
		}
	}
	slices.Sort(tids)
	return tids
}

// tracepoints returns the kernel's numbers of the tracepoints, by the names of
// the calls. Calls that the kernel does not have are left out.
func tracepoints() (map[string]uint64, error) {
	dir, err := os.MkdirTemp("", "tracefs-")
	if err != nil {
		return nil, err
	}
	defer os.Remove(dir)
	if err := unix.Mount("tracefs", dir, "tracefs", unix.MS_RDONLY, ""); err != nil {
		return nil, fmt.Errorf("%w: mount tracefs: %w", ErrUnavailable, err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	ids := map[string]uint64{}
	if ids[all], err = number(filepath.Join(dir, "events", all, "id")); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	for _, name := range Names {
		if id, err := number(filepath.Join(dir, "events/syscalls/sys_enter_"+name, "id")); err == nil {
			ids[name] = id
		}
	}
	return ids, nil
}

func number(path string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
}
