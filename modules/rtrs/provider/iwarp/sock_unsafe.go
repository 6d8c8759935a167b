package iwarp

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// vec is a scatter/gather list for one socket call.
type vec struct {
	hdr unix.Msghdr
	iov []unix.Iovec
}

func newVec(n int) vec { return vec{iov: make([]unix.Iovec, n)} }

// set makes entry i describe b. b must not be empty.
func (v *vec) set(i int, b []byte) {
	v.iov[i].Base = &b[0]
	v.iov[i].SetLen(len(b))
}

// grow makes entry i n bytes longer. They must follow it in memory.
func (v *vec) grow(i, n int) { v.iov[i].SetLen(int(v.iov[i].Len) + n) }

// addr returns the address of entry i.
func (v *vec) addr(i int) uint64 { return uint64(uintptr(unsafe.Pointer(v.iov[i].Base))) }

// bytes returns entry i.
func (v *vec) bytes(i int) []byte { return unsafe.Slice(v.iov[i].Base, int(v.iov[i].Len)) }

// drop removes n bytes from the front of entry i.
func (v *vec) drop(i, n int) {
	v.iov[i].Base = (*byte)(unsafe.Add(unsafe.Pointer(v.iov[i].Base), n))
	v.iov[i].SetLen(int(v.iov[i].Len) - n)
}

// send and recv pass entries from..to to the socket without blocking. The raw
// system call bypasses the scheduler. That is safe because the call never
// waits.
func (v *vec) send(fd, from, to int) (int, unix.Errno) {
	if to-from == 1 {
		return v.one(unix.SYS_SENDTO, fd, from, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}
	return v.call(unix.SYS_SENDMSG, fd, from, to, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
}

func (v *vec) recv(fd, n int) (int, unix.Errno) {
	if n == 1 {
		return v.one(unix.SYS_RECVFROM, fd, 0, unix.MSG_DONTWAIT)
	}
	return v.call(unix.SYS_RECVMSG, fd, 0, n, unix.MSG_DONTWAIT)
}

// one is the quicker call, for one entry: the kernel has no list to copy and to check.
func (v *vec) one(trap uintptr, fd, i int, flags uintptr) (int, unix.Errno) {
	p := &v.iov[i]
	n, _, errno := unix.RawSyscall6(trap, uintptr(fd), uintptr(unsafe.Pointer(p.Base)), uintptr(p.Len), flags, 0, 0)
	return int(n), unix.Errno(errno)
}

func (v *vec) call(trap uintptr, fd, from, to int, flags uintptr) (int, unix.Errno) {
	v.hdr.Iov = &v.iov[from]
	v.hdr.SetIovlen(to - from)
	n, _, errno := unix.RawSyscall(trap, uintptr(fd), uintptr(unsafe.Pointer(&v.hdr)), flags)
	return int(n), unix.Errno(errno)
}
