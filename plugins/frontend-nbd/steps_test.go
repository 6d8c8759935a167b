package main

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// bench is one queue with one connection, driven by hand on one goroutine.
type bench struct {
	t    testing.TB
	q    *queue
	c    *conn
	h    *host
	d    *disk
	exp  *export
	peer net.Conn
}

func newBench(t testing.TB, slots, slotSize int, structured bool) *bench {
	ring, err := shm.NewHeapRing(64)
	if err != nil {
		t.Fatal(err)
	}
	q, err := newQueue(ring.Submitter(), quiet())
	if err != nil {
		t.Fatal(err)
	}
	d := newDisk(testLimits(1<<20), slots, slotSize)
	e, err := newExport(spec{Name: "x", Limits: d.limits, Arena: d.arena, SlotSize: slotSize, Slots: slots})
	if err != nil {
		t.Fatal(err)
	}
	e.addOpener()
	fd, peer := pair(t)
	b := &bench{t: t, q: q, d: d, exp: e, peer: peer, h: newHost(ring, map[uint32]*disk{0: d}, 0)}
	q.now, q.served = func() int64 { return 1 }, func(_ uint32, op blk.Op, _ int64) { // as in earnest
		if !op.Valid() {
			t.Errorf("operation %d is measured", op)
		}
	}
	b.c = newConn(fd, "test", handshakeResult{exp: e, structured: structured, allocation: structured && e.listsExtents()}, e.assignShare([]*queue{q}))
	q.addConn(b.c)
	t.Cleanup(func() { peer.Close(); q.close(); ring.Close() })
	return b
}

// settle runs both sides until nothing happens any more.
func (b *bench) settle() {
	for quiet := 0; quiet < 3; quiet++ {
		if b.q.Poll()+b.h.step() > 0 {
			quiet = 0
		}
	}
}

func TestNoAllocationPerRequest(t *testing.T) {
	for _, v := range []struct {
		name       string
		structured bool
		send       []byte
		reply      int
	}{
		{"read", false, command(nbdwire.CmdRead, 0, 1, 4096, 4096), nbdwire.SimpleSize + 4096},
		{"structured read", true, command(nbdwire.CmdRead, 0, 1, 4096, 4096), nbdwire.DataChunkSize + 4096},
		{"large read", false, command(nbdwire.CmdRead, 0, 1, 0, 32<<10), nbdwire.SimpleSize + 32<<10},
		{"write", false, append(command(nbdwire.CmdWrite, 0, 1, 0, 4096), make([]byte, 4096)...), nbdwire.SimpleSize},
		{"large write", false, append(command(nbdwire.CmdWrite, 0, 1, 0, 64<<10), make([]byte, 64<<10)...), nbdwire.SimpleSize},
		{"unaligned write", false, append(command(nbdwire.CmdWrite, 0, 1, 100, 1000), make([]byte, 1000)...), nbdwire.SimpleSize},
		{"write zeroes", false, command(nbdwire.CmdWriteZeroes, nbdwire.CmdFlagFUA, 1, 100, 1000), nbdwire.SimpleSize},
		{"flush", false, command(nbdwire.CmdFlush, 0, 1, 0, 0), nbdwire.SimpleSize},
		{"block status", true, command(nbdwire.CmdBlockStatus, 0, 1, 100, 70000), nbdwire.ChunkSize + 12},
		{"error", false, command(nbdwire.CmdRead, 0, 1, 1<<40, 1), nbdwire.SimpleSize},
	} {
		t.Run(v.name, func(t *testing.T) {
			b := newBench(t, 32, 4096, v.structured)
			reply := make([]byte, v.reply)
			n := testing.AllocsPerRun(100, func() {
				b.peer.Write(v.send)
				b.settle()
				if _, err := io.ReadFull(b.peer, reply); err != nil {
					t.Fatal(err)
				}
			})
			if n != 0 {
				t.Errorf("%v allocations", n)
			}
			if len(b.c.sh.free) != 32 || !b.c.allAnswered() {
				t.Error("slots or requests are lost")
			}
		})
	}
}

// Small payload is copied once, large payload never; a part of a block once
// more, into the block.
func TestPlacedBytes(t *testing.T) {
	for _, v := range []struct {
		name   string
		off, n int
		bulk   bool // an earlier write was large
		copied uint64
	}{
		{"small write", 0, 4096, false, 4096},
		{"small write after large ones", 0, 4096, true, 0},
		{"large write", 0, 64 << 10, true, 0},
		{"very large write", 0, 192 << 10, true, 0},
		{"part of a block", 10, 100, false, 200},
	} {
		t.Run(v.name, func(t *testing.T) {
			b := newBench(t, 32, 64<<10, false)
			b.c.bulk = v.bulk
			sent := make(chan error, 1)
			go func() {
				_, err := b.peer.Write(append(command(nbdwire.CmdWrite, 0, 1, uint64(v.off), uint32(v.n)), pattern(v.n, 1)...))
				sent <- err
			}()
			for done := false; !done; {
				select {
				case err := <-sent:
					if err != nil {
						t.Fatal(err)
					}
					done = true
				default:
				}
				b.settle()
			}
			b.settle()
			if n := b.q.stats.placedBytes.Load(); n != v.copied {
				t.Errorf("%d bytes are copied, want %d", n, v.copied)
			}
		})
	}
}

// Many small requests in one segment: one publish, one reply call.
func TestRepliesLeaveTogether(t *testing.T) {
	b := newBench(t, 32, 4096, false)
	var batch []byte
	for i := range 16 {
		batch = append(batch, command(nbdwire.CmdRead, 0, uint64(i), 0, 512)...)
	}
	b.peer.Write(batch)
	b.q.Poll()
	if n := b.h.step(); n != 16 {
		t.Errorf("%d of 16 requests are published at once", n)
	}
	b.q.Poll()
	got := make([]byte, 64<<10)
	if n, err := b.peer.Read(got); err != nil || n != 16*(nbdwire.SimpleSize+512) {
		t.Errorf("%d bytes in one piece, %v", n, err)
	}
}

// A queue with nothing to do sleeps, and an event wakes it.
func TestArm(t *testing.T) {
	b := newBench(t, 4, 4096, false)
	b.settle()
	if !b.q.Arm() {
		t.Fatal("an idle queue does not sleep")
	}
	b.q.Disarm()
	b.c.readable = true
	if b.q.Arm() {
		t.Error("a queue sleeps on unread bytes")
	}
}

// FuzzTransmission feeds a connection the bytes of a client, in pieces. For any
// input, no slot is lost, the device sees only valid requests, and the replies
// are well formed.
func FuzzTransmission(f *testing.F) {
	f.Add(command(nbdwire.CmdRead, 0, 1, 4096, 4096), byte(200), false)
	f.Add(append(append(command(nbdwire.CmdWrite, 1, 2, 100, 1000), make([]byte, 1000)...), command(nbdwire.CmdRead, 0, 3, 0, 5000)...), byte(7), true)
	f.Add(append(command(nbdwire.CmdWriteZeroes, 3, 4, 513, 9000), command(nbdwire.CmdDisc, 0, 0, 0, 0)...), byte(28), false)
	f.Add(append(command(nbdwire.CmdTrim, 0, 4, 1, 70000), command(nbdwire.CmdFlush, 0, 9, 0, 0)...), byte(100), true)
	f.Add(append(command(nbdwire.CmdWrite, 0, 4, 1<<63, 600), make([]byte, 700)...), byte(0), true)
	f.Add(append(command(nbdwire.CmdBlockStatus, nbdwire.CmdFlagReqOne, 4, 100, 70000), command(nbdwire.CmdBlockStatus, 0, 5, 0, 1<<20)...), byte(40), true)
	f.Add(append(command(nbdwire.CmdBlockStatus, 0, 4, 1<<20-1, 2), command(nbdwire.CmdBlockStatus, 0, 5, 0, 0)...), byte(90), true)
	f.Add(command(nbdwire.CmdBlockStatus, 0, 4, 0, 512), byte(90), false)
	f.Fuzz(func(t *testing.T, in []byte, piece byte, structured bool) {
		if len(in) > 1<<16 {
			return
		}
		b := newBench(t, 6, 4096, structured)
		out := make(chan []byte)
		go func() { all, _ := io.ReadAll(b.peer); out <- all }()
		for len(in) > 0 {
			n := min(len(in), int(piece)+1)
			if _, err := b.peer.Write(in[:n]); err != nil {
				break
			}
			in = in[n:]
			b.settle()
		}
		b.peer.(*net.UnixConn).CloseWrite()
		for len(b.q.conns) > 0 {
			b.settle()
		}
		checkStream(t, <-out, structured)
		if s := b.c.sh; len(s.free) != len(s.ops) || s.gather != nil || b.exp.claims.active.Load() != 0 {
			t.Fatalf("%d of %d slots are back", len(s.free), len(s.ops))
		}
		b.d.check(t)
	})
}

// An event between a round and the sleep prevents the sleep.
func TestArm_SeesWhatTheLastRoundDidNot(t *testing.T) {
	b := newBench(t, 32, 4096, false)
	b.settle()
	b.peer.Write(command(nbdwire.CmdRead, 0, 1, 0, 4096))
	for end := time.Now().Add(10 * time.Second); b.q.Arm(); b.q.Disarm() {
		if time.Now().After(end) {
			t.Fatal("a request is in the socket, and the queue may sleep")
		}
	}
	b.settle()
	if _, err := io.ReadFull(b.peer, make([]byte, nbdwire.SimpleSize+4096)); err != nil {
		t.Fatal(err)
	}
}

// checkStream: simple replies may carry payload of unknown length, so only
// structured streams can be followed to the end.
func checkStream(t *testing.T, b []byte, structured bool) {
	for structured && len(b) >= nbdwire.SimpleSize {
		switch be32(b) {
		case nbdwire.MagicSimple:
			b = b[nbdwire.SimpleSize:]
		case nbdwire.MagicChunk:
			if len(b) < nbdwire.ChunkSize {
				return
			}
			n := nbdwire.ChunkSize + int(be32(b[16:]))
			if n > len(b) {
				return // the connection ended in the middle
			}
			b = b[n:]
		default:
			t.Fatalf("% x is no reply", b[:nbdwire.SimpleSize])
		}
	}
	if !structured && len(b) >= 4 && be32(b) != nbdwire.MagicSimple {
		t.Fatalf("% x is no reply", b[:4])
	}
}

func be32(b []byte) uint32 {
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}
