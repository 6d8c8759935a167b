// Package blockdev tells who uses a block device of this host.
//
// The kernel keeps the number of openers to itself. What can be seen from
// outside is taken together: /proc tells which processes have the device open,
// what is mounted and what is swapped to, /sys which devices are built on it.
// Processes that this one may not look into, as those of other users for an
// unprivileged one, are not seen. Who wants to be sure opens it exclusively,
// which the kernel refuses to all but one: nobody can mount it meanwhile, so
// Users, which only asks, does not.
package blockdev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Users is how many use the block device at path or its partitions: processes,
// not counting this one, and one more if it is mounted or held by the kernel
// otherwise.
func Users(path string) (int, error) {
	numbers, err := family(path)
	if err != nil {
		return 0, err
	}
	n, err := openers("/proc", numbers)
	if err == nil && held("/proc", numbers) {
		n++
	}
	return n, err
}

// patience is for programs that look at every device that appears and are gone
// soon: udev and its helpers.
const patience = time.Second

// Claim opens the device so that nobody can mount it or build on it as long as
// the file is open. EBUSY in the chain: it is in use.
func Claim(ctx context.Context, path string) (*os.File, error) {
	for end := time.Now().Add(patience); ; {
		f, err := claim(path)
		if !errors.Is(err, syscall.EBUSY) || time.Now().After(end) || ctx.Err() != nil {
			return f, err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func claim(path string) (*os.File, error) {
	f, err := exclusive(path)
	if errors.Is(err, syscall.EBUSY) {
		return nil, fmt.Errorf("it is mounted, or another device or swap uses it: %w", syscall.EBUSY)
	}
	if err != nil {
		return nil, err
	}
	numbers, err := family(path)
	n := 0
	if err == nil {
		n, err = openers("/proc", numbers)
	}
	if err == nil && n > 0 {
		err = fmt.Errorf("processes that have it open: %d: %w", n, syscall.EBUSY)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func exclusive(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_EXCL|unix.O_NONBLOCK, 0)
}

// family are the device numbers of a disk and its partitions.
func family(path string) (map[uint64]bool, error) {
	numbers := map[uint64]bool{}
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	number, ok := deviceNumber(st)
	if !ok {
		return nil, fmt.Errorf("%s: %w", path, syscall.ENOTBLK)
	}
	numbers[number] = true
	dir := fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(number), unix.Minor(number))
	parts, _ := filepath.Glob(dir + "/*/partition") // fails for a bad pattern only
	for _, p := range parts {
		b, err := os.ReadFile(filepath.Join(filepath.Dir(p), "dev"))
		var major, minor uint32
		if _, serr := fmt.Sscanf(string(b), "%d:%d", &major, &minor); err == nil && serr == nil {
			numbers[unix.Mkdev(major, minor)] = true
		}
	}
	return numbers, nil
}

func deviceNumber(st os.FileInfo) (uint64, bool) {
	sys, ok := st.Sys().(*syscall.Stat_t)
	return uint64(sys.Rdev), ok && st.Mode()&os.ModeDevice != 0 && st.Mode()&os.ModeCharDevice == 0
}

// openers counts the processes below proc that have one of the devices open.
func openers(proc string, numbers map[uint64]bool) (int, error) {
	procs, err := os.ReadDir(proc)
	if err != nil {
		return 0, err
	}
	n, self := 0, fmt.Sprint(os.Getpid())
	for _, p := range procs {
		if name := p.Name(); name[0] >= '1' && name[0] <= '9' && name != self && hasOpen(filepath.Join(proc, name, "fd"), numbers) {
			n++
		}
	}
	return n, nil
}

// hasOpen looks at the files below /dev only: asking for others may hang, on a
// file system whose server is gone.
func hasOpen(dir string, numbers map[uint64]bool) bool {
	fds, _ := os.ReadDir(dir) // the process may be gone, or not ours to look into
	for _, fd := range fds {
		link := filepath.Join(dir, fd.Name())
		if target, err := os.Readlink(link); err != nil || !strings.HasPrefix(target, "/dev/") {
			continue
		}
		st, err := os.Stat(link)
		if err != nil {
			continue
		}
		if number, ok := deviceNumber(st); ok && numbers[number] {
			return true
		}
	}
	return false
}
