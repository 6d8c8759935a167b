package rtrs

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// currentCPU is the CPU that the thread runs on now.
func currentCPU() (cpu uint32) {
	_, _, _ = unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), 0, 0)
	return cpu
}

// possibleCPUs is one more than the largest number that a CPU can have.
var possibleCPUs = sync.OnceValue(func() int {
	text, _ := os.ReadFile("/sys/devices/system/cpu/possible") // "0-7", "0,2-5"
	last := strings.TrimSpace(string(text))
	last = last[strings.LastIndexAny(last, ",-")+1:]
	if n, err := strconv.Atoi(last); err == nil && n < 1<<16 {
		return n + 1
	}
	return runtime.NumCPU()
})
