package verbstest

import (
	"time"

	"golang.org/x/sys/unix"
)

// stallTimer measures how long a case that polls has seen no progress. Time counts
// only as far as this process has run: on a busy machine the bound grows.
type stallTimer struct {
	since time.Time
	cpu   time.Duration // of this process, at since
}

func newStallTimer() stallTimer { return stallTimer{time.Now(), cpuTime()} }

// expired reports whether Patience has passed without progress, by the clock and in
// CPU time of this process.
func (s *stallTimer) expired() bool {
	return time.Since(s.since) > Patience && cpuTime()-s.cpu > Patience
}

// cpuTime returns the CPU time that this process has used.
func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
