package iwarp

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A connection takes the memory of its queues when it needs it, in the middle
// of a message as well, and nothing is lost or out of order.
func TestQueuesGrowWithUse(t *testing.T) {
	const (
		depth = 1000
		size  = 100 // of each message
		bulk  = 8 << 20
	)
	c, s := newEnd(t, Config{}), newEnd(t, Config{})
	for _, e := range []*end{c, s} {
		e.qp.Destroy()
		qp, err := e.dev.CreateQP(e.pd, verbs.QPConfig{CQ: e.cq, Context: 1, SendQueue: depth, RecvQueue: depth, MaxSGE: 3})
		if err != nil {
			t.Fatal(err)
		}
		e.qp = qp
	}
	join(t, c, s, "127.0.0.1:0")
	sender, receiver := c.qp.(*qp), s.qp.(*qp)
	if sender.SQ.Room() > 64 || len(receiver.rx.stage) != stageFirst {
		t.Errorf("a new connection has room for %d sends, and stages %d bytes", sender.SQ.Room(), len(receiver.rx.stage))
	}
	src, smr := c.region(bulk, 0)
	dst, dmr := s.region(bulk, verbs.AccessRemoteWrite)
	fill(src, 3)
	in, imr := s.region(depth*size, 0)
	for i := range depth {
		s.recv(verbs.RecvWR{ID: uint64(i), Buf: in[i*size:][:size], LKey: imr.LKey()})
	}
	piece := func(from, n int) verbs.SGE { return verbs.SGE{Buf: src[from:][:n], LKey: smr.LKey()} }
	c.send(verbs.SendWR{Op: verbs.OpWrite, SGEs: []verbs.SGE{piece(0, bulk/2), piece(bulk/2, bulk/2)}, RemoteAddr: dmr.Addr(), RKey: dmr.RKey()})
	for stop := time.Now().Add(testLimit); !sender.tx.cur.active || !sender.tx.blocked; c.poll() { // the peer does not read yet
		if time.Now().After(stop) {
			t.Fatal("8 MiB fit into the socket")
		}
	}
	for i := range depth - 1 {
		at := 17 * i
		c.send(verbs.SendWR{ID: uint64(i), Op: verbs.OpSend, Signaled: i == depth-2, SGEs: []verbs.SGE{piece(at, 1), piece(at+1, size/2), piece(at+1+size/2, size/2-1)}})
	}
	if sender.SQ.Room() != 1024 {
		t.Errorf("%d sends are under way in a ring of %d", depth, sender.SQ.Room())
	}
	if _, err := c.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend}}); !errors.Is(err, verbs.ErrQueueFull) {
		t.Errorf("send %d: %v", depth+1, err)
	}
	for i := range depth - 1 {
		if wc := s.next(c); wc.ID != uint64(i) || wc.Status != verbs.StatusOK || wc.ByteLen != size {
			t.Fatalf("message %d: %+v", i, wc)
		}
		if !bytes.Equal(in[i*size:][:size], src[17*i:][:size]) {
			t.Fatalf("message %d has other bytes", i)
		}
	}
	if !bytes.Equal(dst, src) {
		t.Error("the Write has other bytes")
	}
	if wc := c.next(s); wc.ID != depth-2 || wc.Status != verbs.StatusOK {
		t.Errorf("last send: %+v", wc)
	}
	if len(receiver.rx.stage) != stageSize {
		t.Errorf("%d bytes of messages came, but %d are staged at most", depth*size, len(receiver.rx.stage))
	}
}
