// Package blockdev finds the users of a block device of this host.
//
// The kernel does not publish the number of openers. Users counts the visible
// ones: /proc shows the processes that have the device open, mounts and swap
// areas; /sys shows the devices that are built on it. An unprivileged process
// does not see the files of other users' processes. Only an exclusive open is
// certain, because the kernel grants it once: Claim does that. While it is held
// no mount of the device succeeds, so Users does not use it.
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

// Users returns the number of users of the block device at path and its
// partitions: processes, without this one, and one more if the device is mounted
// or held by the kernel otherwise.
func Users(path string) (int, error) {
	numbers, err := family(path)
	if err != nil {
		return 0, err
	}
	return users(numbers)
}

// UsersOf returns the number of users of the disk that the kernel calls name, as Users
// does. The disk needs no node: processes may have opened one that is gone.
func UsersOf(name string) (int, error) {
	text, err := os.ReadFile(filepath.Join("/sys/block", name, "dev"))
	if err != nil {
		return 0, err
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(string(text), "%d:%d", &major, &minor); err != nil {
		return 0, fmt.Errorf("device number of %s: %w", name, err)
	}
	return users(withPartitions(unix.Mkdev(major, minor)))
}

func users(numbers map[uint64]bool) (int, error) {
	n, err := openers("/proc", numbers)
	if err == nil && held("/proc", numbers) {
		n++
	}
	return n, err
}

// patience is the time that Claim waits for short users: udev and its helpers
// open every device that appears.
const patience = time.Second

// Claim opens the device exclusively: while the file is open, no mount of it and
// no device on it can be made. The error wraps EBUSY if the device is in use.
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

// family returns the device numbers of a disk and its partitions.
func family(path string) (map[uint64]bool, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	number, ok := deviceNumber(st)
	if !ok {
		return nil, fmt.Errorf("%s: %w", path, syscall.ENOTBLK)
	}
	return withPartitions(number), nil
}

// withPartitions returns number, of a disk, and the numbers of the disk's partitions.
func withPartitions(number uint64) map[uint64]bool {
	numbers := map[uint64]bool{number: true}
	dir := fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(number), unix.Minor(number))
	parts, _ := filepath.Glob(dir + "/*/partition") // fails for a bad pattern only
	for _, p := range parts {
		b, err := os.ReadFile(filepath.Join(filepath.Dir(p), "dev"))
		var major, minor uint32
		if _, serr := fmt.Sscanf(string(b), "%d:%d", &major, &minor); err == nil && serr == nil {
			numbers[unix.Mkdev(major, minor)] = true
		}
	}
	return numbers
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

// hasOpen reports whether a process, given its fd folder, has one of the devices
// open. It looks at files below /dev only: a stat of others may hang, on a file
// system without its server.
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
