package uring

import "testing"

// A transfer is left to a thread of the kernel if its start may block, and no
// other is.
func TestTransferThatMayBlockIsAsync(t *testing.T) {
	for _, op := range []Op{Pread, Pwrite} {
		for _, fixed := range []uint16{0, 1} {
			for flags, blocks := range map[uint8]bool{0: false, Async: true} {
				var s SQE
				(&Request{Op: op, Buf: make([]byte, 512), Fixed: fixed, Blocks: blocks}).fill(&s)
				if s.Flags != flags {
					t.Errorf("operation %d, fixed %d, blocks %v: flags %#x, want %#x", op, fixed, blocks, s.Flags, flags)
				}
			}
		}
	}
}
