package main

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// vec is a scatter/gather list. Its calls never wait, so the Go scheduler is not told.
type vec struct {
	hdr *unix.Msghdr
	iov []unix.Iovec
}

func newVec(n int) vec { return vec{new(unix.Msghdr), make([]unix.Iovec, n)} }

func (v vec) set(i int, b []byte) {
	v.iov[i].Base = &b[0]
	v.iov[i].SetLen(len(b))
}

func (v vec) receive(fd, n int) (int, unix.Errno) {
	if n == 1 {
		return v.one(unix.SYS_RECVFROM, fd, unix.MSG_DONTWAIT)
	}
	return v.call(unix.SYS_RECVMSG, fd, n, unix.MSG_DONTWAIT)
}

func (v vec) send(fd, n int) (int, unix.Errno) {
	if n == 1 {
		return v.one(unix.SYS_SENDTO, fd, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}
	return v.call(unix.SYS_SENDMSG, fd, n, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
}

// one is the quicker call, for one buffer.
func (v vec) one(trap uintptr, fd int, flags uintptr) (int, unix.Errno) {
	got, _, errno := unix.RawSyscall6(trap, uintptr(fd), uintptr(unsafe.Pointer(v.iov[0].Base)), uintptr(v.iov[0].Len), flags, 0, 0)
	return int(got), errno
}

func (v vec) call(trap uintptr, fd, n int, flags uintptr) (int, unix.Errno) {
	v.hdr.Iov = &v.iov[0]
	v.hdr.SetIovlen(n)
	got, _, errno := unix.RawSyscall(trap, uintptr(fd), uintptr(unsafe.Pointer(v.hdr)), flags)
	return int(got), errno
}

// epollNow returns the number of events that there are.
func epollNow(fd int, events []unix.EpollEvent) int {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(fd), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 0, 0, 0)
	if errno != 0 {
		return 0
	}
	return int(n)
}
