//go:build linux && cgo && ibverbs

package ibverbs

import (
	"os"

	"golang.org/x/sys/unix"
)

// currentMemlock returns the limit of the process and its locked memory.
func currentMemlock() memlockUsage {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r); err != nil {
		return memlockUsage{unlimited: true}
	}
	m := memlockUsage{limit: r.Cur, unlimited: r.Cur == unix.RLIM_INFINITY}
	status, _ := os.ReadFile("/proc/self/status")
	m.pinned = statusBytes(string(status), "VmPin") + statusBytes(string(status), "VmLck")
	return m
}
