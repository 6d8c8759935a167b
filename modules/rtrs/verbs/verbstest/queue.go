package verbstest

import (
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func receiverNotReady(t *testing.T, f Fabric) {
	p := newPair(t, f)
	const messages = 5
	for i := range messages {
		fill(p.client.mem[100*i:][:100], i)
		p.client.send(p.client.qp, verbs.SendWR{ID: uint64(i), Op: verbs.OpSend, Signaled: true, SGEs: p.client.sge(100*i, 100, 1)})
	}
	p.idle()
	if len(p.server.wcs) > 0 {
		t.Fatalf("completions without a receive: %+v", p.server.wcs)
	}
	for i := range messages {
		p.server.recv(p.server.qp, uint64(i), 100*i, 100)
		p.waitOK(p.server, uint64(i))
		if at := filled(p.server.mem[100*i:][:100], i); at >= 0 {
			t.Errorf("byte %d of message %d is wrong", at, i)
		}
	}
	p.waitOK(p.client, messages-1)
}

func receiverNotReadyOther(t *testing.T, f Fabric) {
	p := newPair(t, f)
	client, server := p.connect(f.Addr, 2)
	p.client.send(p.client.qp, verbs.SendWR{ID: 1, Op: verbs.OpSend, Signaled: true})
	p.idle()
	p.server.recv(server, 2, 0, 8)
	p.client.send(client, verbs.SendWR{ID: 2, Op: verbs.OpSend, Signaled: true})
	p.waitOK(p.server, 2)
	p.server.recv(p.server.qp, 1, 0, 8)
	p.waitOK(p.server, 1)
}

func sendQueueFull(t *testing.T, f Fabric) {
	p := newPair(t, f)
	const enough = 1 << 16 // no provider rounds up that far
	taken := 0
	wrs := make([]verbs.SendWR, 7) // no divisor of the queue's size
	for {
		for i := range wrs {
			wrs[i] = verbs.SendWR{ID: uint64(taken + i), Op: verbs.OpWrite, Signaled: true}
		}
		n, err := p.client.qp.PostSend(wrs)
		taken += n
		if n == len(wrs) && taken < enough {
			continue
		}
		if !errors.Is(err, verbs.ErrQueueFull) {
			t.Fatalf("PostSend took %d of %d after %d: %v, want ErrQueueFull", n, len(wrs), taken, err)
		}
		break
	}
	if taken < queueDepth {
		t.Errorf("the queue took %d requests, %d were asked for", taken, queueDepth)
	}
	p.waitOK(p.client, uint64(taken-1))
	for i, wc := range p.client.wcs {
		if wc.ID != uint64(i) || wc.Status != verbs.StatusOK {
			t.Fatalf("completion %d is %+v", i, wc)
		}
	}
	if len(p.client.wcs) != taken {
		t.Errorf("%d completions for %d requests", len(p.client.wcs), taken)
	}
	p.transfer(verbs.OpWrite, 100, 1)
}

func sharedCQ(t *testing.T, f Fabric) {
	p := newPair(t, f)
	client, server := p.connect(f.Addr, 2)
	p.server.recv(p.server.qp, 11, 0, 8)
	p.server.recv(server, 12, 8, 8)
	p.client.send(client, verbs.SendWR{ID: 2, Op: verbs.OpSend, Signaled: true})
	p.client.send(p.client.qp, verbs.SendWR{ID: 1, Op: verbs.OpSend, Signaled: true})
	for qp := range uint64(2) {
		for _, wc := range []verbs.WC{p.waitOK(p.server, 11+qp), p.waitOK(p.client, 1+qp)} {
			if wc.QP != 1+qp {
				t.Errorf("completion %+v, want that of queue pair %d", wc, 1+qp)
			}
		}
	}
	client.Disconnect()
	p.settle(2)
	p.transfer(verbs.OpWrite, 100, 1) // the other one lives
}

func manyConns(t *testing.T, f Fabric) {
	p := &pair{t, newEnd(t, f.Client), newEnd(t, f.Server)}
	const conns = 64
	var clients, servers [conns]verbs.QP
	for i := range conns {
		clients[i], servers[i] = p.connect(f.Addr, uint64(i))
		p.server.recv(servers[i], uint64(1000+i), i*8, 8)
	}
	for i := range conns {
		fill(p.client.mem[i*8:][:8], i)
		p.client.send(clients[i], verbs.SendWR{ID: uint64(i), Op: verbs.OpSend, Signaled: true, SGEs: p.client.sge(i*8, 8, 1)})
	}
	for i := range conns {
		wc := p.waitOK(p.server, uint64(1000+i))
		if wc.QP != uint64(i) || filled(p.server.mem[i*8:][:8], i) >= 0 {
			t.Errorf("message of connection %d arrived as %+v", i, wc)
		}
	}
}

// manyOwners runs connections with queues of different goroutines and memory
// of one region.
func manyOwners(t *testing.T, f Fabric) {
	const owners, messages = 4, 300
	client, server := newEnd(t, f.Client), newEnd(t, f.Server)
	results := make(chan error, 2*owners)
	for i := range owners {
		c, s := newOwner(client), newOwner(server)
		for id := range queueDepth {
			s.end.recv(s.qp, uint64(id), 0, 0)
			c.end.recv(c.qp, uint64(id), 0, 0)
		}
		dial(t, f.Client, f.Server, f.Addr, c.qp, s.qp)
		go func() { results <- c.pingPong(s, i*messages*8, messages, true) }()
		go func() { results <- s.pingPong(c, i*messages*8, messages, false) }()
	}
	for range 2 * owners {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
}

// owner is a queue with one connection, on the memory of end.
type owner struct {
	end *end
	cq  verbs.CQ
	qp  verbs.QP
}

func newOwner(e *end) *owner {
	o := &owner{end: e}
	o.cq = must(e.dev.CreateCQ(2 * queueDepth))(e.t)
	cfg := verbs.QPConfig{CQ: o.cq, SendQueue: queueDepth, RecvQueue: queueDepth, MaxSGE: 1}
	o.qp = must(e.dev.CreateQP(e.pd, cfg))(e.t)
	e.t.Cleanup(func() {
		o.qp.Destroy()
		check(e.t, o.cq.Close())
	})
	return o
}

// pinger is one end of an exchange of messages.
type pinger struct {
	*owner
	peer           *owner
	off, messages  int
	first          bool // begins
	sent, received int
}

// pingPong writes 8 bytes per message to the peer's memory from off on, and
// waits for the answer of each. It ends with the connection.
func (o *owner) pingPong(peer *owner, off, messages int, first bool) error {
	p := &pinger{owner: o, peer: peer, off: off, messages: messages, first: first}
	if first {
		if err := p.send(); err != nil {
			return fmt.Errorf("first message: %w", err)
		}
	}
	for idle := newStallTimer(); ; {
		var wcs [4]verbs.WC
		n := o.cq.Poll(wcs[:])
		for _, wc := range wcs[:n] {
			idle = newStallTimer()
			if over, err := p.take(wc); over || err != nil {
				return err
			}
		}
		if n == 0 && idle.expired() {
			return fmt.Errorf("nothing came after %d messages", p.received)
		}
		runtime.Gosched()
	}
}

// send writes the next message.
func (p *pinger) send() error {
	at := p.off + 8*p.sent
	if !p.first {
		at += memSize / 2
	}
	buf := p.end.mem[at:][:8]
	fill(buf, p.sent)
	wr := verbs.SendWR{Op: verbs.OpWriteImm, Signaled: true, Imm: uint32(p.sent), SGEs: []verbs.SGE{{Buf: buf, LKey: p.end.mr.LKey()}},
		RemoteAddr: p.peer.end.at(at), RKey: p.peer.end.mr.RKey()}
	p.sent++
	_, err := p.qp.PostSend([]verbs.SendWR{wr})
	return err
}

// take handles a completion, and reports whether the connection is over.
func (p *pinger) take(wc verbs.WC) (over bool, err error) {
	switch {
	case wc.Op == verbs.OpDisconnected && p.received != p.messages:
		return true, fmt.Errorf("connection ended after %d messages", p.received)
	case wc.Op == verbs.OpDisconnected:
		return true, nil
	case wc.Status == verbs.StatusFlushed:
	case wc.Status != verbs.StatusOK:
		return true, fmt.Errorf("completion %+v", wc)
	case wc.Op == verbs.OpRecvImm && wc.Imm != uint32(p.received):
		return true, fmt.Errorf("message %d has immediate %d", p.received, wc.Imm)
	case wc.Op == verbs.OpRecvImm:
		return false, p.answer()
	}
	return false, nil
}

// answer sends the next message, or ends the connection after the last.
func (p *pinger) answer() error {
	p.received++
	p.qp.PostRecv([]verbs.RecvWR{{}})
	if p.sent < p.messages {
		if err := p.send(); err != nil {
			return fmt.Errorf("message %d: %w", p.sent, err)
		}
	}
	if p.received == p.messages && p.first {
		p.qp.Disconnect()
	}
	return nil
}
