package main

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// vector returns an entry for writev.
func vector(b []byte) unix.Iovec {
	v := unix.Iovec{Base: unsafe.SliceData(b)}
	v.SetLen(len(b))
	return v
}

// writev writes the memory of iov in one call. It allocates nothing.
func writev(fd int, iov []unix.Iovec) (int, unix.Errno) {
	n, _, errno := unix.Syscall(unix.SYS_WRITEV, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)))
	runtime.KeepAlive(iov)
	return int(n), errno
}
