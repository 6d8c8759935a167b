package rtrs

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// currentCPU is the CPU that the thread runs on now.
func currentCPU() (cpu uint32) {
	_, _, _ = unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), 0, 0)
	return cpu
}

// setTimer makes a timerfd readable once after d; 0: never. A raw call, since an
// ordinary one wakes the monitor thread of Go's runtime.
func setTimer(fd int, d time.Duration) {
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(d))}
	_, _, _ = unix.RawSyscall6(unix.SYS_TIMERFD_SETTIME, uintptr(fd), 0, uintptr(unsafe.Pointer(&spec)), 0, 0, 0)
}

// PossibleCPUs returns the number of CPUs that the system may ever have, one more
// than the largest number of a CPU. Control files show one value for each.
var PossibleCPUs = sync.OnceValue(func() int {
	text, _ := os.ReadFile("/sys/devices/system/cpu/possible") // "0-7", "0,2-5"
	last := strings.TrimSpace(string(text))
	last = last[strings.LastIndexAny(last, ",-")+1:]
	if n, err := strconv.Atoi(last); err == nil && n < 1<<16 {
		return n + 1
	}
	return runtime.NumCPU()
})
