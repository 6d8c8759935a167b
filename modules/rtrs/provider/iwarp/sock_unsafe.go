package iwarp

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// iovecList is a scatter/gather list for one socket call.
type iovecList struct {
	hdr unix.Msghdr
	iov []unix.Iovec
}

func newVec(n int) iovecList { return iovecList{iov: make([]unix.Iovec, n)} }

// setEntry makes entry i describe b. b must not be empty.
func (v *iovecList) setEntry(i int, b []byte) {
	v.iov[i].Base = &b[0]
	v.iov[i].SetLen(len(b))
}

// growEntry makes entry i n bytes longer. They must follow it in memory.
func (v *iovecList) growEntry(i, n int) { v.iov[i].SetLen(int(v.iov[i].Len) + n) }

// entryAddr returns the address of entry i.
func (v *iovecList) entryAddr(i int) uint64 { return uint64(uintptr(unsafe.Pointer(v.iov[i].Base))) }

// entryBytes returns entry i.
func (v *iovecList) entryBytes(i int) []byte { return unsafe.Slice(v.iov[i].Base, int(v.iov[i].Len)) }

// dropFront removes n bytes from the front of entry i.
func (v *iovecList) dropFront(i, n int) {
	v.iov[i].Base = (*byte)(unsafe.Add(unsafe.Pointer(v.iov[i].Base), n))
	v.iov[i].SetLen(int(v.iov[i].Len) - n)
}

// send and recv pass entries from..to to the socket without blocking. The raw
// system call bypasses the scheduler. That is safe because the call never
// waits.
func (v *iovecList) send(fd, from, to int) (int, unix.Errno) {
	if to-from == 1 {
		return v.singleCall(unix.SYS_SENDTO, fd, from, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}
	return v.vectorCall(unix.SYS_SENDMSG, fd, from, to, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
}

func (v *iovecList) recv(fd, n int) (int, unix.Errno) {
	if n == 1 {
		return v.singleCall(unix.SYS_RECVFROM, fd, 0, unix.MSG_DONTWAIT)
	}
	return v.vectorCall(unix.SYS_RECVMSG, fd, 0, n, unix.MSG_DONTWAIT)
}

// singleCall is the quicker call, for one entry: the kernel has no list to copy and to check.
func (v *iovecList) singleCall(trap uintptr, fd, i int, flags uintptr) (int, unix.Errno) {
	p := &v.iov[i]
	n, _, errno := unix.RawSyscall6(trap, uintptr(fd), uintptr(unsafe.Pointer(p.Base)), uintptr(p.Len), flags, 0, 0)
	return int(n), unix.Errno(errno)
}

func (v *iovecList) vectorCall(trap uintptr, fd, from, to int, flags uintptr) (int, unix.Errno) {
	v.hdr.Iov = &v.iov[from]
	v.hdr.SetIovlen(to - from)
	n, _, errno := unix.RawSyscall(trap, uintptr(fd), uintptr(unsafe.Pointer(&v.hdr)), flags)
	return int(n), unix.Errno(errno)
}
