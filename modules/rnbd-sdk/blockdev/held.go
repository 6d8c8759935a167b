package blockdev

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// held tells whether the kernel itself uses one of the devices: it is mounted, swapped
// to, or part of another device.
func held(proc string, numbers map[uint64]bool) bool {
	return mounted(proc, numbers) || swapped(proc, numbers) || builtOn(numbers)
}

// mounted looks at the mounts of every namespace that a process is in.
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

// isMountOf judges a line of mountinfo (proc_pid_mountinfo(5)): the third word is the
// device, and the second behind the dash the source, which counts where a file system
// has a number of its own, as btrfs.
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

// swapped looks at the first word of each line of /proc/swaps.
func swapped(proc string, numbers map[uint64]bool) bool {
	swaps, _ := os.ReadFile(filepath.Join(proc, "swaps"))
	for line := range strings.Lines(string(swaps)) {
		if path, _, _ := strings.Cut(line, " "); isOneOf(path, numbers) {
			return true
		}
	}
	return false
}

// isOneOf asks for paths below /dev only: others may hang.
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

// builtOn: RAID, device mapper and the like leave their names with what they hold.
func builtOn(numbers map[uint64]bool) bool {
	for number := range numbers {
		holders, _ := os.ReadDir(fmt.Sprintf("/sys/dev/block/%d:%d/holders", unix.Major(number), unix.Minor(number)))
		if len(holders) > 0 {
			return true
		}
	}
	return false
}
