package pump

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// currentCPU returns the CPU that the thread is on, or -1.
func currentCPU() int {
	var cpu uint32
	if _, _, errno := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), 0, 0); errno != 0 {
		return -1
	}
	return int(cpu)
}
