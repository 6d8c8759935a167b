package plugin

import "unsafe"

// bytePointer is an argument of a system call; the caller keeps p alive.
func bytePointer(p *byte) uintptr { return uintptr(unsafe.Pointer(p)) }
