package plugin

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// readMemory reads from another process's memory.
func readMemory(pid int) error {
	var b [8]byte
	local := unix.Iovec{Base: &b[0], Len: 8}
	remote := unix.RemoteIovec{Base: uintptr(unsafe.Pointer(&secret)), Len: 8}
	_, err := unix.ProcessVMReadv(pid, []unix.Iovec{local}, []unix.RemoteIovec{remote}, 0)
	return err
}

var secret [8]byte

func pointer(p *byte) unsafe.Pointer { return unsafe.Pointer(p) }
