package main

import (
	"io"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// A request is measured once, from its header to the last byte of its reply,
// in one piece or many; a request that is refused at once is not.
func TestRequestsAreMeasured(t *testing.T) {
	for _, v := range []struct {
		name       string
		structured bool
		send       []byte
		reply      int
		op         blk.Op // of the one that is measured
		none       bool
	}{
		{"read", false, command(nbdwire.CmdRead, 0, 1, 4096, 4096), nbdwire.SimpleSize + 4096, blk.Read, false},
		{"read of several slots", false, command(nbdwire.CmdRead, 0, 1, 0, 32<<10), nbdwire.SimpleSize + 32<<10, blk.Read, false},
		{"structured read", true, command(nbdwire.CmdRead, 0, 1, 4096, 4096), nbdwire.DataChunkSize + 4096, blk.Read, false},
		{"write", false, append(command(nbdwire.CmdWrite, 0, 1, 0, 4096), make([]byte, 4096)...), nbdwire.SimpleSize, blk.Write, false},
		{"unaligned write, read before", false, append(command(nbdwire.CmdWrite, 0, 1, 100, 1000), make([]byte, 1000)...), nbdwire.SimpleSize, blk.Write, false},
		{"write zeroes", false, command(nbdwire.CmdWriteZeroes, 0, 1, 4096, 4096), nbdwire.SimpleSize, blk.WriteZeroes, false},
		{"flush", false, command(nbdwire.CmdFlush, 0, 1, 0, 0), nbdwire.SimpleSize, blk.Flush, false},
		{"beyond the end", false, command(nbdwire.CmdRead, 0, 1, 1<<40, 512), nbdwire.SimpleSize, 0, true},
	} {
		t.Run(v.name, func(t *testing.T) {
			b := newBench(t, 32, 4096, v.structured)
			now, first := int64(100), int64(0)
			b.q.now = func() int64 {
				now += 10
				if first == 0 {
					first = now
				}
				return now
			}
			var ops []blk.Op
			var ns int64
			b.q.served = func(_ uint32, op blk.Op, took int64) { ops, ns = append(ops, op), took }
			b.peer.Write(v.send)
			b.settle()
			if _, err := io.ReadFull(b.peer, make([]byte, v.reply)); err != nil {
				t.Fatal(err)
			}
			if v.none {
				if len(ops) != 0 {
					t.Errorf("measured %v", ops)
				}
				return
			}
			if len(ops) != 1 || ops[0] != v.op || ns != now-first || ns <= 0 {
				t.Errorf("measured %v, %d ns; want %v, %d ns", ops, ns, v.op, now-first)
			}
		})
	}
}
