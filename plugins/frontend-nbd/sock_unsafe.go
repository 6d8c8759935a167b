package main

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Vectored calls on non-blocking sockets. The wrappers of x/sys allocate a
// vector in every call; these take the queue's vector.

// setIovec points v at b. b must not be empty.
func setIovec(v *unix.Iovec, b []byte) {
	v.Base = unsafe.SliceData(b)
	v.SetLen(len(b))
}

func readv(fd int, iov []unix.Iovec) (int, unix.Errno) {
	if len(iov) == 1 { // one buffer is the quicker call
		n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(iov[0].Base)), uintptr(iov[0].Len))
		runtime.KeepAlive(iov)
		return int(n), errno
	}
	return rawVectorCall(unix.SYS_READV, fd, iov)
}

func writev(fd int, iov []unix.Iovec) (int, unix.Errno) {
	return rawVectorCall(unix.SYS_WRITEV, fd, iov)
}

// rawVectorCall makes a raw system call. On a non-blocking socket it never blocks, so
// the Go scheduler need not be told.
func rawVectorCall(call uintptr, fd int, iov []unix.Iovec) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(call, uintptr(fd), uintptr(unsafe.Pointer(&iov[0])), uintptr(len(iov)))
	runtime.KeepAlive(iov)
	return int(n), errno
}

// hungUp reports whether the other end of the socket is closed or shut down.
func hungUp(fd int) bool { return pollsAny(fd, unix.POLLHUP|unix.POLLERR) }

// shutDown reports whether the other end sends nothing more. Bytes that it sent
// before can still be read.
func shutDown(fd int) bool { return pollsAny(fd, unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) }

// pollsAny reports whether poll finds one of the events on fd now.
func pollsAny(fd int, events int16) bool {
	p := unix.PollFd{Fd: int32(fd), Events: events}
	var now unix.Timespec
	n, _, errno := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&now)), 0, 0, 0)
	return errno == 0 && n == 1 && p.Revents&events != 0
}

// epollNow returns pending events without blocking.
func epollNow(fd int, events []unix.EpollEvent) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(fd), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 0, 0, 0)
	return int(n), errno
}
