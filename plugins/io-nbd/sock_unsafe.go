package main

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Vectored calls on non-blocking sockets. The wrappers of x/sys make a vector in every
// call; these take one of the caller.

// setIovec points v at b, which is not empty.
func setIovec(v *unix.Iovec, b []byte) {
	v.Base = unsafe.SliceData(b)
	v.SetLen(len(b))
}

func readv(fd int, iov []unix.Iovec) (int, unix.Errno) { return vectored(unix.SYS_READV, fd, iov) }

func writev(fd int, iov []unix.Iovec) (int, unix.Errno) { return vectored(unix.SYS_WRITEV, fd, iov) }

// vectored makes a raw system call: on a non-blocking socket it does not block, so the
// scheduler of Go need not know of it.
func vectored(call uintptr, fd int, iov []unix.Iovec) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(call, uintptr(fd), uintptr(unsafe.Pointer(&iov[0])), uintptr(len(iov)))
	runtime.KeepAlive(iov)
	return int(n), errno
}

// epollNow returns pending events without waiting.
func epollNow(fd int, events []unix.EpollEvent) int {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(fd), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 0, 0, 0)
	if errno != 0 {
		return 0
	}
	return int(n)
}
