package main

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// leaveBehind connects a client, has it send a write of block 16 that the device
// keeps, and ends the client. The device keeps everything of queue 0 until the
// caller releases it.
func (r *rig) leaveBehind() {
	r.t.Helper()
	r.hosts[0].hold.Store(true)
	c := dial(r.t, "unix", r.addr, "disk0", false)
	write4K(r.t, c.conn, 1)
	e := r.f.exportAt(0)
	eventually(r.t, "the device has the write", func() bool { return inFlight(e) == 1 })
	c.conn.Close()
}

// awaitWaiting waits until call, the only one of its client, waits for a write. It
// fails if the device gets the request.
func (r *rig) awaitWaiting(call *call) {
	r.t.Helper()
	e := r.f.exportAt(0)
	overtakes := func() bool {
		select {
		case <-call.done:
			return true
		default:
			return r.hosts[0].kept.Load() > 1
		}
	}
	eventually(r.t, "the request waits", func() bool { return e.claims.waiting.Load() == 1 || overtakes() })
	if overtakes() {
		r.t.Error("the device has the request, and the write of the client that has gone")
	}
}

func (r *rig) release() { r.hosts[0].hold.Store(false) }

// Requests that overlap the write of a client that has gone wait for that write,
// whether the same queue serves both clients or not.
func TestEnded_WritesAreNotOvertaken(t *testing.T) {
	full := bytes.Repeat([]byte{2}, 4096)
	for _, c := range []struct {
		name     string
		cmd      uint16
		at       uint64
		n        int
		buf      []byte
		wantByte byte
	}{
		{"write", nbdwire.CmdWrite, sentAt, 4096, full, 2},
		{"write around it", nbdwire.CmdWrite, sentAt - 512, 512 + 4096 + 512, bytes.Repeat([]byte{2}, 5120), 2},
		{"write of its last block", nbdwire.CmdWrite, sentAt + 3584, 512, full[:512], 2},
		{"write of a part of a block", nbdwire.CmdWrite, sentAt + 10, 20, full[:20], 2},
		{"write zeroes", nbdwire.CmdWriteZeroes, sentAt, 4096, nil, 0},
		{"write zeroes to a part of a block", nbdwire.CmdWriteZeroes, sentAt + 600, 10, nil, 0},
		{"trim", nbdwire.CmdTrim, sentAt, 4096, nil, 0},
		{"read", nbdwire.CmdRead, sentAt, 4096, make([]byte, 4096), 1},
		{"read of a part of a block", nbdwire.CmdRead, sentAt + 700, 8, make([]byte, 8), 1},
	} {
		for queues, where := range map[int]string{1: "one queue", 2: "two queues"} {
			t.Run(c.name+", "+where, func(t *testing.T) {
				r := newRig(t, rigConfig{queues: queues})
				r.leaveBehind()
				next := r.connect(false)
				call := next.start(c.cmd, 0, c.at, c.n, c.buf)
				r.awaitWaiting(call)
				r.release()
				if code, err := call.wait(); code != 0 || err != nil {
					t.Fatal(code, err)
				}
				got := r.disks[0].at(c.at, c.n)
				if c.cmd == nbdwire.CmdRead {
					got = c.buf
				}
				if want := bytes.Repeat([]byte{c.wantByte}, c.n); !bytes.Equal(got, want) {
					t.Errorf("%d..., want %d", got[:8], c.wantByte)
				}
			})
		}
	}
}

// The write of a part of a block that a client has left behind keeps the block.
func TestEnded_PartOfABlockIsNotOvertaken(t *testing.T) {
	r := newRig(t, rigConfig{queues: 2})
	e := r.f.exportAt(0)
	r.hosts[0].hold.Store(true)
	c := dial(t, "unix", r.addr, "disk0", false)
	c.conn.Write(append(command(nbdwire.CmdWrite, 0, 1, sentAt+8, 16), make([]byte, 16)...))
	eventually(t, "the device has its read", func() bool { return e.claims.active.Load() == 1 })
	c.conn.Close()
	next := r.connect(false)
	call := next.start(nbdwire.CmdRead, 0, sentAt, 512, make([]byte, 512))
	r.awaitWaiting(call)
	r.release()
	if code, err := call.wait(); code != 0 || err != nil {
		t.Fatal(code, err)
	}
}

// Requests that overlap nothing, and flushes, do not wait.
func TestEnded_OthersDoNotWait(t *testing.T) {
	r := newRig(t, rigConfig{queues: 2})
	r.leaveBehind()
	next := r.connect(false)
	for _, code := range []uint32{
		next.write(sentAt-512, make([]byte, 512)), next.write(sentAt+4096, make([]byte, 512)),
		next.write(sentAt+4096+100, make([]byte, 8)), next.read(0, make([]byte, 4096)), next.do(nbdwire.CmdFlush, 0, 0, 0, nil),
	} {
		if code != 0 {
			t.Errorf("error %d", code)
		}
	}
	r.release()
}

// Commands that the client has sent before its end, and that have not been read, go
// ahead of all requests of later connections: their ranges are not known.
func TestEnded_UnreadWritesAreNotOvertaken(t *testing.T) {
	r := newRig(t, rigConfig{queues: 2, slots: 8})
	e := r.f.exportAt(0)
	r.hosts[0].hold.Store(true)
	c := dial(t, "unix", r.addr, "disk0", false)
	const ahead = 12 // more than there are slots
	for i := range ahead {
		c.conn.Write(append(command(nbdwire.CmdWrite, 0, uint64(i), uint64(i)<<16, 512), make([]byte, 512)...))
	}
	write4K(t, c.conn, 1)
	eventually(t, "no slot is left for it", func() (stalled bool) {
		r.onQueue(0, func(q *queue) { stalled = len(q.conns) == 1 && q.conns[0].stalled })
		return stalled
	})
	c.conn.Close()
	next := r.connect(false)
	call := next.start(nbdwire.CmdWrite, 0, sentAt, 4096, bytes.Repeat([]byte{2}, 4096))
	eventually(t, "the request waits or is with the device", func() (seen bool) {
		r.onQueue(1, func(q *queue) { seen = len(q.conns) == 1 && (q.conns[0].stalled || q.stats.requests.Load() > 0) })
		return seen
	})
	if e.claims.ahead.Load() == 0 {
		t.Error("the commands of the first client do not go ahead")
	}
	r.release()
	if code, err := call.wait(); code != 0 || err != nil {
		t.Fatal(code, err)
	}
	eventually(t, "the end of the first", func() bool { return e.claims.ended.Load() == 0 })
	if got := r.disks[0].at(sentAt, 1)[0]; got != 2 {
		t.Errorf("the device has the data of write %d", got)
	}
}

// A hand-over waits for the requests of a client that has gone, also for those that
// have not been read.
func TestEnded_HandOverWaits(t *testing.T) {
	r := newRig(t, rigConfig{queues: 2})
	r.leaveBehind()
	next := r.connect(false)
	call := next.start(nbdwire.CmdWrite, 0, sentAt, 4096, bytes.Repeat([]byte{2}, 4096))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, _, err := r.f.ReleaseConnections(ctx); !errors.Is(err, blk.EBUSY) {
		t.Fatalf("given up with a write of a client that has gone: %v", err)
	}
	r.release()
	if code, err := call.wait(); code != 0 || err != nil {
		t.Fatal(code, err)
	}
}

// Ended connections take their commands in the order of their ends, all others
// afterwards.
func TestClaims_EndedGoFirst(t *testing.T) {
	var c rangeClaims
	if !c.mayTake(0) {
		t.Fatal("nobody has ended")
	}
	first, second := c.addEnded(), c.addEnded()
	check := func(want ...bool) {
		t.Helper()
		for i, number := range []uint64{first, second, 0} {
			if c.mayTake(number) != want[i] {
				t.Errorf("connection %d may take a slot: %v", number, !want[i])
			}
		}
	}
	check(true, false, false)
	c.endPrecedence(first)
	check(false, true, false)
	third := c.addEnded()
	c.endPrecedence(third)
	check(false, true, false)
	c.endPrecedence(second)
	check(true, true, true)
}
