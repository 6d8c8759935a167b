package main

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Vectored calls on non-blocking sockets. The wrappers of x/sys build their
// vector anew in every call; these take one that the queue keeps.

// setIovec points v at b, which is not empty.
func setIovec(v *unix.Iovec, b []byte) {
	v.Base = unsafe.SliceData(b)
	v.SetLen(len(b))
}

func readv(fd int, iov []unix.Iovec) (int, unix.Errno) {
	return vectored(unix.SYS_READV, fd, iov)
}

func writev(fd int, iov []unix.Iovec) (int, unix.Errno) {
	return vectored(unix.SYS_WRITEV, fd, iov)
}

// vectored is a raw call: on a non-blocking socket it never waits, and the
// scheduler need not know of it.
func vectored(call uintptr, fd int, iov []unix.Iovec) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(call, uintptr(fd), uintptr(unsafe.Pointer(&iov[0])), uintptr(len(iov)))
	runtime.KeepAlive(iov)
	return int(n), errno
}

// hungUp: nobody has the other end of the socket, or it is shut down.
func hungUp(fd int) bool {
	p := unix.PollFd{Fd: int32(fd)}
	var now unix.Timespec
	n, _, errno := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&now)), 0, 0, 0)
	return errno == 0 && n == 1 && p.Revents&(unix.POLLHUP|unix.POLLERR) != 0
}

// epollNow collects waiting events without blocking.
func epollNow(fd int, events []unix.EpollEvent) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(fd), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 0, 0, 0)
	return int(n), errno
}
