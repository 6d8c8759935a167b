package main

import (
	"bytes"
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// The context stays in force, there and back.
func TestHanded_Context(t *testing.T) {
	l := newRelay(t, rigConfig{})
	c := l.rigs[0].connect(true)
	model := sectors(l.disk(), rand.New(rand.NewPCG(2, 4)))
	for range 4 {
		if at := matches(model, 1000, c.blockStatus(0, 1000, 2<<20)); at >= 0 {
			t.Errorf("byte %d is of another kind", at)
		}
		l.move()
	}
}

// A process that does not know the context, or whose slots are too small for it,
// refuses the command.
func TestHanded_ContextIsLost(t *testing.T) {
	for name, v := range map[string]struct {
		slotSize int
		forgets  bool
	}{
		"an older process": {4096, true},
		"smaller slots":    {2048, false},
	} {
		t.Run(name, func(t *testing.T) {
			from, to := newRig(t, rigConfig{}), newRig(t, rigConfig{slotSize: v.slotSize})
			c := from.connect(true)
			if got := c.blockStatus(0, 0, 512); len(got) != 1 {
				t.Fatal(got)
			}
			all := release(t, from)
			const key = `,"allocation":true`
			if !strings.Contains(string(all[0].State), key) {
				t.Fatalf("state %s", all[0].State)
			}
			if v.forgets {
				all[0].State = []byte(strings.Replace(string(all[0].State), key, "", 1))
			}
			serve(t, to, all)
			if code := c.do(nbdwire.CmdBlockStatus, 0, 0, 512, nil); code != nbdEINVAL {
				t.Errorf("code %d", code)
			}
			if code := c.read(0, make([]byte, 512)); code != 0 {
				t.Errorf("a read: code %d", code)
			}
		})
	}
}

// A connection without the context gets none by the change.
func TestHanded_NoContext(t *testing.T) {
	sock, peer := pair(t)
	r := newRig(t, rigConfig{})
	serve(t, r, []plugin.Connection{{Device: "disk0", State: []byte(`{"version":1,"structured":true}`), FDs: []int{sock}}})
	c := &client{t: t, conn: peer, pending: map[uint64]*call{}}
	t.Cleanup(func() { peer.Close() })
	if code := running(c).do(nbdwire.CmdBlockStatus, 0, 0, 512, nil); code != nbdEINVAL {
		t.Errorf("code %d", code)
	}
}

// A block status that the device has is awaited.
func TestHanded_BlockStatusHangs(t *testing.T) {
	r := newRig(t, rigConfig{})
	c := r.connect(true)
	block := make(chan struct{})
	r.disks[0].telling(func(e *shm.SQE, b []byte) blk.Errno {
		<-block
		return puts(hole(512))(e, b)
	})
	p := c.start(nbdwire.CmdBlockStatus, 0, 0, 512, nil)
	r.awaitInDevice()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, _, err := r.f.ReleaseConnections(ctx); blk.ToErrno(err) != blk.EBUSY {
		t.Errorf("error %v, want EBUSY", err)
	}
	close(block)
	if code, err := p.wait(); code != 0 || err != nil || !slices.Equal(p.list, []extent{{512, 3}}) {
		t.Errorf("code %d, error %v, %v", code, err, p.list)
	}
}

// A block status that waits for a slot is left as the command that it was.
func TestHanded_BlockStatusWithoutSlot(t *testing.T) {
	for _, flags := range []uint16{0, nbdwire.CmdFlagReqOne} {
		b := newBench(t, 1, 4096, true)
		b.h.hold.Store(true)
		b.peer.Write(command(nbdwire.CmdRead, 0, 1, 0, 512))
		b.peer.Write(command(nbdwire.CmdBlockStatus, flags, 2, 100, 5000))
		b.settle()
		if b.c.cur == nil || b.c.cur.op != blk.Extents {
			t.Fatalf("flags %d: it does not wait", flags)
		}
		b.q.pauseConns(true)
		b.h.hold.Store(false)
		b.settle()
		s, left, err := b.c.exportState()
		if want := command(nbdwire.CmdBlockStatus, flags, 2, 100, 5000); err != nil || b.c.inDevice() != 0 || !bytes.Equal(left[:s.Received], want) {
			t.Errorf("% x is left, want % x, error %v", left, want, err)
		}
	}
}

// Replies that are sent in part go on where they were cut.
func TestHanded_BlockStatusUnsent(t *testing.T) {
	l := newRelay(t, rigConfig{slots: 16, slotSize: 8192, limits: testLimits(1 << 20)})
	model := make([]bool, 2048)
	var list []extents.Extent
	for i := range model {
		if model[i] = i%2 == 0; i < extents.Max {
			list, _ = extents.Add(list, 512, model[i])
		}
	}
	for _, r := range l.rigs {
		r.disks[0].telling(puts(list...))
	}
	c := dial(t, "unix", l.rigs[0].addr, "disk0", true) // nobody reads
	var calls []*call
	var all []byte
	for i := range 700 { // more than the socket's buffers take, in one piece
		p := &call{off: uint64(i % 512), n: 1<<20 - i%512, done: make(chan struct{})}
		c.pending[uint64(i)] = p
		calls, all = append(calls, p), append(all, command(nbdwire.CmdBlockStatus, 0, uint64(i), p.off, uint32(p.n))...)
	}
	c.must(c.conn.Write(all))
	for range 4 {
		eventually(t, "the socket is full", func() (full bool) {
			l.rigs[l.at].onQueue(0, func(q *queue) { full = len(q.conns) == 1 && q.conns[0].sendBlocked() })
			return full
		})
		l.move()
	}
	go c.run()
	for i, p := range calls {
		if code, err := p.wait(); code != 0 || err != nil {
			t.Fatalf("command %d: code %d, error %v", i, code, err)
		}
		if at := matches(model, p.off, p.list); at >= 0 || len(p.list) < extents.Max-1 {
			t.Fatalf("command %d: byte %d is of another kind, %d extents", i, at, len(p.list))
		}
	}
}
