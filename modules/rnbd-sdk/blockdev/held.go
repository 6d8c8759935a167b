package blockdev

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// held reports whether the kernel itself uses one of the devices.
func held(proc string, numbers map[uint64]bool) bool { return kernelUse(proc, numbers) != "" }

// kernelUse says what the kernel itself uses one of the devices for; empty: nothing.
func kernelUse(proc string, numbers map[uint64]bool) string {
	switch {
	case mounted(proc, numbers):
		return "it is mounted on this host"
	case swapped(proc, numbers):
		return "it is a swap area of this host"
	case builtOn(numbers):
		return "another device of this host is built on it"
	}
	return ""
}

// CheckUnused returns an error that wraps EBUSY if the kernel uses the block device at
// path or one of its partitions: it is mounted, a swap area, or part of another device.
func CheckUnused(path string) error {
	numbers, err := family(path)
	if err != nil {
		return err
	}
	if use := kernelUse("/proc", numbers); use != "" {
		return fmt.Errorf("%s: %w", use, unix.EBUSY)
	}
	return nil
}

// mounted reports whether one of the devices is mounted, in any mount namespace
// that has a process.
func mounted(proc string, numbers map[uint64]bool) bool {
	seen := map[string]bool{}
	procs, _ := filepath.Glob(filepath.Join(proc, "[1-9]*"))
	for _, p := range procs {
		namespace, err := os.Readlink(filepath.Join(p, "ns/mnt"))
		if err != nil || seen[namespace] { // it is gone, or not ours to look into
			continue
		}
		seen[namespace] = true
		mounts, _ := os.ReadFile(filepath.Join(p, "mountinfo"))
		for line := range strings.Lines(string(mounts)) {
			if isMountOf(line, numbers) {
				return true
			}
		}
	}
	return false
}

// isMountOf reports whether a line of mountinfo (proc_pid_mountinfo(5)) is a
// mount of one of the devices. The third word is the device number. For file
// systems with numbers of their own, as btrfs, the source counts: the second
// word behind the dash.
func isMountOf(line string, numbers map[uint64]bool) bool {
	own, rest, _ := strings.Cut(line, " - ")
	words := strings.Fields(own)
	var major, minor uint32
	if len(words) > 2 {
		if _, err := fmt.Sscanf(words[2], "%d:%d", &major, &minor); err == nil && numbers[unix.Mkdev(major, minor)] {
			return true
		}
	}
	words = strings.Fields(rest)
	return len(words) > 1 && isOneOf(words[1], numbers)
}

// swapped reports whether one of the devices is a swap area. The first word of
// each line of /proc/swaps is its path.
func swapped(proc string, numbers map[uint64]bool) bool {
	swaps, _ := os.ReadFile(filepath.Join(proc, "swaps"))
	for line := range strings.Lines(string(swaps)) {
		if path, _, _ := strings.Cut(line, " "); isOneOf(path, numbers) {
			return true
		}
	}
	return false
}

// isOneOf reports whether path is the node of one of the devices. Only paths
// below /dev are looked at, since a stat of others may hang.
func isOneOf(path string, numbers map[uint64]bool) bool {
	if !strings.HasPrefix(path, "/dev/") {
		return false
	}
	st, err := os.Stat(path)
	if err != nil {
		return false
	}
	number, ok := deviceNumber(st)
	return ok && numbers[number]
}

// builtOn reports whether another device is built on one of the devices. RAID,
// device mapper and the like are listed in the holders folder.
func builtOn(numbers map[uint64]bool) bool {
	for number := range numbers {
		holders, _ := os.ReadDir(fmt.Sprintf("/sys/dev/block/%d:%d/holders", unix.Major(number), unix.Minor(number)))
		if len(holders) > 0 {
			return true
		}
	}
	return false
}
