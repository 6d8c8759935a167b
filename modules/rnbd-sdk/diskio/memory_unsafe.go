package diskio

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Aligned reports whether the memory of buf starts at a multiple of align, a
// power of two. An align of 0 is no demand.
func Aligned(buf []byte, align uint32) bool {
	if align < 2 || len(buf) == 0 {
		return true
	}
	return uintptr(unsafe.Pointer(unsafe.SliceData(buf)))&uintptr(align-1) == 0
}

// transfer reads or writes buf at off on the calling thread. iov is scratch
// memory, so that nothing is allocated.
func transfer(write bool, fd int32, buf []byte, off uint64, flags uint32, iov *unix.Iovec) (int, unix.Errno) {
	iov.Base = unsafe.SliceData(buf)
	iov.SetLen(len(buf))
	trap := uintptr(unix.SYS_PREADV2)
	if write {
		trap = unix.SYS_PWRITEV2
	}
	// The kernel takes the offset as two words; on 64-bit machines it ignores
	// the upper one.
	n, _, errno := unix.Syscall6(trap, uintptr(fd), uintptr(unsafe.Pointer(iov)), 1, uintptr(off), uintptr(off>>32), uintptr(flags))
	iov.Base = nil
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}
