package verbstest

import (
	"context"
	"net/netip"
	"runtime"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

const (
	queueDepth = 128
	memSize    = 2 << 20
	allAccess  = verbs.AccessRemoteWrite | verbs.AccessRemoteRead
)

// end is one side of a case: a queue with its owner's view, and memory. The
// goroutine of the case owns the queue unless it hands it over.
type end struct {
	t   *testing.T
	dev verbs.Device
	pd  verbs.PD
	cq  verbs.CQ
	mem []byte
	mr  verbs.MR
	qp  verbs.QP   // the first one
	wcs []verbs.WC // completions so far; cases empty it

	ended map[uint64]bool // contexts with an OpDisconnected
}

func newEnd(t *testing.T, dev verbs.Device) *end {
	t.Helper()
	e := &end{t: t, dev: dev, mem: make([]byte, memSize), ended: map[uint64]bool{}}
	e.pd = must(dev.AllocPD())(t)
	t.Cleanup(func() { check(t, e.pd.Close()) })
	e.cq = must(dev.CreateCQ(2 * queueDepth))(t)
	t.Cleanup(func() { check(t, e.cq.Close()) })
	mr := must(e.pd.RegMR(e.mem, allAccess))(t)
	e.mr = mr // cases may put another one there
	t.Cleanup(func() { check(t, mr.Close()) })
	return e
}

func (e *end) newQP(context uint64) verbs.QP {
	e.t.Helper()
	sges := min(4, e.dev.Info().MaxSGE)
	cfg := verbs.QPConfig{CQ: e.cq, Context: context, SendQueue: queueDepth, RecvQueue: queueDepth, MaxSGE: sges}
	return must(e.dev.CreateQP(e.pd, cfg))(e.t)
}

// must is must(f())(t): the value of f, or the end of the test.
func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		check(t, err)
		return v
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// pair is a connection with both ends.
type pair struct {
	t              *testing.T
	client, server *end
}

func newPair(t *testing.T, f Fabric) *pair {
	t.Helper()
	p := &pair{t, newEnd(t, f.Client), newEnd(t, f.Server)}
	p.client.qp, p.server.qp = p.connect(f.Addr, 1)
	return p
}

// connect makes one more connection. Its queue pairs have the same context at
// both ends; they are disconnected and destroyed after the test.
func (p *pair) connect(addr netip.AddrPort, context uint64) (client, server verbs.QP) {
	p.t.Helper()
	client, server = p.client.newQP(context), p.server.newQP(context)
	p.t.Cleanup(func() {
		client.Disconnect()
		server.Disconnect()
		p.settle(context)
		client.Destroy()
		server.Destroy()
	})
	dial(p.t, p.client.dev, p.server.dev, addr, client, server)
	return client, server
}

// settle waits until both ends of the connection are gone.
func (p *pair) settle(context uint64) {
	p.t.Helper()
	p.wait("both ends to be disconnected", func() bool {
		return p.client.gone(context) && p.server.gone(context)
	})
}

// dial connects two queue pairs through a listener of its own.
func dial(t *testing.T, from, to verbs.Device, addr netip.AddrPort, client, server verbs.QP) {
	t.Helper()
	l := must(to.Listen(addr))(t)
	accepted := make(chan error, 1)
	go func() {
		req, err := l.Accept()
		if err == nil {
			err = req.Accept(server, nil)
		}
		accepted <- err
	}()
	_, err := from.Connect(patient(t), client, verbs.ConnectParams{Dst: l.Addr()})
	if err != nil {
		l.Close()
		<-accepted
		t.Fatalf("connect: %v", err)
	}
	check(t, <-accepted)
	check(t, l.Close())
}

func patient(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	t.Cleanup(cancel)
	return ctx
}

// poll collects completions and returns how many came.
func (e *end) poll() int {
	var wcs [8]verbs.WC // small, so that Poll has to hand over in pieces
	n := e.cq.Poll(wcs[:])
	e.wcs = append(e.wcs, wcs[:n]...)
	for _, wc := range wcs[:n] {
		if wc.Op == verbs.OpDisconnected {
			e.ended[wc.QP] = true
		}
	}
	return n
}

// wait polls both ends until cond holds. It fails when nothing completes for
// Patience.
func (p *pair) wait(what string, cond func() bool) {
	p.t.Helper()
	for idle := newStallTimer(); !cond(); {
		if p.client.poll()+p.server.poll() > 0 {
			idle = newStallTimer()
		} else if idle.expired() {
			p.t.Fatalf("waited in vain for %s\nclient completions: %+v\nserver completions: %+v", what, tail(p.client.wcs), tail(p.server.wcs))
		}
		runtime.Gosched()
	}
}

func tail(wcs []verbs.WC) []verbs.WC { return wcs[max(0, len(wcs)-8):] }

// idle polls both ends for a while, so that a forbidden event can occur.
func (p *pair) idle() {
	for range 2000 {
		p.client.poll()
		p.server.poll()
		runtime.Gosched()
	}
}

// find returns the completions that match.
func (e *end) find(match func(*verbs.WC) bool) []verbs.WC {
	var found []verbs.WC
	for i := range e.wcs {
		if match(&e.wcs[i]) {
			found = append(found, e.wcs[i])
		}
	}
	return found
}

func (e *end) byID(id uint64) []verbs.WC {
	return e.find(func(wc *verbs.WC) bool { return wc.Op != verbs.OpDisconnected && wc.ID == id })
}

// gone reports whether the connection of context has ended at e.
func (e *end) gone(context uint64) bool { return e.ended[context] }

// waitFor waits for the completion id at e.
func (p *pair) waitFor(e *end, id uint64) verbs.WC {
	p.t.Helper()
	p.wait("a completion", func() bool { return len(e.byID(id)) > 0 })
	return e.byID(id)[0]
}

// waitOK is waitFor for a completion without error.
func (p *pair) waitOK(e *end, id uint64) verbs.WC {
	p.t.Helper()
	wc := p.waitFor(e, id)
	if wc.Status != verbs.StatusOK {
		p.t.Fatalf("request %d completed with status %d: %+v", id, wc.Status, wc)
	}
	return wc
}

// sge is n bytes of e's memory at off, in parts elements.
func (e *end) sge(off, n, parts int) []verbs.SGE {
	var sges []verbs.SGE
	for i := range parts {
		a, b := off+n*i/parts, off+n*(i+1)/parts
		sges = append(sges, verbs.SGE{Buf: e.mem[a:b:b], LKey: e.mr.LKey()})
	}
	return sges
}

// at is the address of offset off of e's memory, for the peer.
func (e *end) at(off int) uint64 { return e.mr.Addr() + uint64(off) }

func (e *end) send(qp verbs.QP, wrs ...verbs.SendWR) {
	e.t.Helper()
	if n, err := qp.PostSend(wrs); n != len(wrs) || err != nil {
		e.t.Fatalf("PostSend took %d of %d: %v", n, len(wrs), err)
	}
}

// recv posts a receive of n bytes at off of e's memory.
func (e *end) recv(qp verbs.QP, id uint64, off, n int) {
	e.t.Helper()
	wr := verbs.RecvWR{ID: id, Buf: e.mem[off : off+n], LKey: e.mr.LKey()}
	if n, err := qp.PostRecv([]verbs.RecvWR{wr}); n != 1 || err != nil {
		e.t.Fatalf("PostRecv took %d of 1: %v", n, err)
	}
}

// fill writes a pattern that differs by seed and position.
func fill(b []byte, seed int) {
	for i := range b {
		b[i] = byte(seed*131 + i*7 + i>>8 + 1)
	}
}

// filled reports where b stops to be the pattern, -1 if it is whole.
func filled(b []byte, seed int) int {
	for i := range b {
		if b[i] != byte(seed*131+i*7+i>>8+1) {
			return i
		}
	}
	return -1
}
