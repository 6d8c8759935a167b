package softverbs

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// AddrOf returns the address of the first byte of b. b must not be empty.
func AddrOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(&b[0]))) }

// EpollNow takes waiting events of the epoll descriptor fd and returns how many
// it took. It does not block. The raw system call bypasses the scheduler. That
// is safe because the call never waits.
func EpollNow(fd int, events []unix.EpollEvent) int {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(fd), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 0, 0, 0)
	if errno != 0 {
		return 0
	}
	return int(n)
}
