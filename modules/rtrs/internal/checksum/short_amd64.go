package checksum

import "golang.org/x/sys/cpu"

// sums reports whether the CPU has the instruction of sumShort.
var sums = cpu.X86.HasSSE42

// sumShort continues a CRC32C over the n bytes from p on, n > 0. For less than
// foldMin bytes, a header for instance, the calls of hash/crc32 down to the same
// instruction take longer than the instruction.
//
//go:noescape
func sumShort(crc uint32, p *byte, n int) uint32
