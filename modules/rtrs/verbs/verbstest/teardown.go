package verbstest

import (
	"errors"
	"os"
	"sync"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func flushOnce(t *testing.T, f Fabric) {
	p := newPair(t, f)
	const recvs, sends = 20, 30
	for i := range recvs {
		p.client.recv(p.client.qp, uint64(100+i), 0, 8)
	}
	for i := range sends { // no receive waits for them
		p.client.send(p.client.qp, verbs.SendWR{ID: uint64(i), Op: verbs.OpSend, Signaled: i%2 == 0, SGEs: p.client.sge(0, 64, 1)})
		if i == sends/2 {
			p.client.poll() // so that some have left
		}
	}
	p.client.qp.Disconnect()
	p.settle(1)
	p.idle()
	for i := range recvs {
		if got := p.client.byID(uint64(100 + i)); len(got) != 1 || got[0].Status != verbs.StatusFlushed {
			t.Errorf("receive %d completed as %+v, want one flush", i, got)
		}
	}
	for i := range sends {
		got := p.client.byID(uint64(i))
		for _, wc := range got {
			if wc.Status != verbs.StatusFlushed && (wc.Status != verbs.StatusOK || i%2 != 0) {
				t.Errorf("send %d completed as %+v", i, wc)
			}
		}
		// One that is not signalled and was executed reports nothing.
		if len(got) > 1 || len(got) == 0 && i%2 == 0 {
			t.Errorf("send %d completed %d times", i, len(got))
		}
	}
	p.disconnectedLast(p.client)
	p.disconnectedLast(p.server)
	p.postsAreRefused()
}

// flushUnsignalled posts more than any socket takes to a peer without
// receives, so that the last request cannot have been executed.
func flushUnsignalled(t *testing.T, f Fabric) {
	p := newPair(t, f)
	const sends, size = 64, 512 << 10
	for i := range sends {
		p.client.send(p.client.qp, verbs.SendWR{ID: uint64(i), Op: verbs.OpSend, SGEs: p.client.sge(0, size, 1)})
	}
	p.idle()
	p.client.qp.Disconnect()
	p.settle(1)
	for i := range sends {
		if got := p.client.byID(uint64(i)); len(got) > 1 {
			t.Errorf("send %d completed %d times", i, len(got))
		}
	}
	if got := p.client.byID(sends - 1); len(got) != 1 || got[0].Status != verbs.StatusFlushed {
		t.Errorf("the last send completed as %+v, want one flush", got)
	}
	p.disconnectedLast(p.client)
}

func (p *pair) disconnectedLast(e *end) {
	p.t.Helper()
	ends := e.find(func(wc *verbs.WC) bool { return wc.Op == verbs.OpDisconnected })
	if last := e.wcs[len(e.wcs)-1]; len(ends) != 1 || last.Op != verbs.OpDisconnected || last.QP != 1 {
		p.t.Errorf("%d times OpDisconnected, last completion %+v", len(ends), last)
	}
}

func (p *pair) postsAreRefused() {
	p.t.Helper()
	n, err := p.client.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend}})
	if n != 0 || !errors.Is(err, verbs.ErrNotConnected) {
		p.t.Errorf("PostSend after the end took %d, %v", n, err)
	}
	n, err = p.client.qp.PostRecv([]verbs.RecvWR{{}})
	if n != 0 || !errors.Is(err, verbs.ErrNotConnected) {
		p.t.Errorf("PostRecv after the end took %d, %v", n, err)
	}
	p.idle()
	p.disconnectedLast(p.client)
}

func disconnectReaches(t *testing.T, f Fabric) {
	for _, who := range []string{"active end", "passive end", "both ends"} {
		t.Run(who, func(t *testing.T) {
			p := newPair(t, f)
			p.client.recv(p.client.qp, 1, 0, 8)
			p.server.recv(p.server.qp, 2, 0, 8)
			if who != "passive end" {
				p.client.qp.Disconnect()
			}
			if who != "active end" {
				p.server.qp.Disconnect()
			}
			p.settle(1)
			for i, e := range []*end{p.client, p.server} {
				if got := e.byID(uint64(i + 1)); len(got) != 1 || got[0].Status != verbs.StatusFlushed {
					t.Errorf("receive completed as %+v", got)
				}
				p.disconnectedLast(e)
			}
		})
	}
}

// disconnectAtOnce disconnects at the passive end before the active end may know
// that it was accepted.
func disconnectAtOnce(t *testing.T, f Fabric) {
	p := &pair{t, newEnd(t, f.Client), newEnd(t, f.Server)}
	l := must(f.Server.Listen(f.Addr))(t)
	t.Cleanup(func() { l.Close() })
	for i := range uint64(10) {
		client, server := p.client.newQP(i), p.server.newQP(i)
		done := answerOne(l, func(req verbs.ConnRequest) error {
			err := req.Accept(server, nil)
			server.Disconnect()
			return err
		})
		_, err := f.Client.Connect(patient(t), client, verbs.ConnectParams{Dst: l.Addr()})
		check(t, <-done)
		p.wait("the ends that were connected to be disconnected", func() bool {
			return p.server.gone(i) && (err != nil || p.client.gone(i))
		})
		client.Destroy()
		server.Destroy()
	}
}

func disconnectConcurrent(t *testing.T, f Fabric) {
	p := newPair(t, f)
	var others sync.WaitGroup
	for i := range 4 {
		qp := []verbs.QP{p.client.qp, p.server.qp}[i%2]
		others.Go(func() {
			for range 50 {
				qp.Disconnect()
			}
		})
	}
	for i := range queueDepth { // the owner goes on meanwhile
		n, err := p.client.qp.PostSend([]verbs.SendWR{{ID: uint64(i), Op: verbs.OpWrite, Signaled: true}})
		if n == 0 && !errors.Is(err, verbs.ErrNotConnected) {
			t.Errorf("PostSend: %v", err)
		}
		p.client.poll()
		p.server.poll()
	}
	p.settle(1)
	others.Wait()
	p.idle()
	p.disconnectedLast(p.client)
	p.disconnectedLast(p.server)
	p.client.qp.Disconnect()
}

func noLeak(t *testing.T, f Fabric) {
	p := &pair{t, newEnd(t, f.Client), newEnd(t, f.Server)}
	cycle := func(i int) {
		client, server := p.client.newQP(uint64(i)), p.server.newQP(uint64(i))
		dial(t, f.Client, f.Server, f.Addr, client, server)
		p.server.recv(server, uint64(i), 0, 8)
		p.client.send(client, verbs.SendWR{ID: uint64(i), Op: verbs.OpSend, Signaled: true})
		p.waitOK(p.server, uint64(i))
		[]verbs.QP{client, server}[i%2].Disconnect()
		p.settle(uint64(i))
		client.Destroy()
		server.Destroy()
		p.client.wcs, p.server.wcs = nil, nil
	}
	cycle(0) // the first cycle makes everything that is made only once
	before := openFiles(t)
	for i := range 20 {
		cycle(i + 1)
	}
	if after := openFiles(t); after > before {
		t.Errorf("%d descriptors before 20 connections, %d after", before, after)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	return len(must(os.ReadDir("/proc/self/fd"))(t))
}
