package rtrs

import (
	"context"
	"sync"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A request costs the server no allocation, from its arrival to the answer's
// departure. The test's goroutine owns all queues, so that nothing else runs.
func TestServerDoesNotAllocatePerRequest(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	both(t, func(t *testing.T, mode serverOption, newRkey bool) {
		p, err := NewPoller(0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Close() })
		stop := runPoller(p)
		t.Cleanup(func() { stop() }) // after the server's end, because the server needs it
		net := loopback.New()
		startServer(t, net, serve, mode, func(c *ServerConfig) { c.Pollers = []*Poller{p} })
		c := newSession(t, net, 2, "s")
		stop()
		l := newLeanClient(c, newRkey)
		for range 2000 { // every queue reaches its size
			l.request(p, l.write)
			l.request(p, l.read)
		}
		for name, wr := range map[string]*verbs.SendWR{"WRITE": l.write, "READ": l.read} {
			if n := testing.AllocsPerRun(2000, func() { l.request(p, wr) }); n != 0 {
				t.Errorf("%s: %v allocations", name, n)
			}
		}
		stop = runPoller(p)
	})
}

// runPoller runs p in a goroutine until the returned function is called.
func runPoller(p *Poller) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { p.Run(ctx) })
	return sync.OnceFunc(func() { cancel(); wg.Wait() })
}

// leanClient sends the same requests again and again without allocating.
type leanClient struct {
	*rawPath
	newRkey     bool
	write, read *verbs.SendWR
	wcs         [16]verbs.WC
	post        [1]verbs.SendWR
	recv        [1]verbs.RecvWR
}

func newLeanClient(c *rawPath, newRkey bool) *leanClient {
	l := &leanClient{rawPath: c, newRkey: newRkey}
	hdr := c.mem[100:]
	n := rtrswire.PutWriteHdr(hdr, 32)
	l.write = &verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(rtrswire.IOReqImm(c.shift, 1, 100)), SGEs: []verbs.SGE{{Buf: c.mem[:100+n], LKey: c.mr.LKey()}}}
	hdr = c.mem[c.chunk+32:]
	n = rtrswire.PutReadDescHdr(hdr, 32, false, c.desc(1, 512))
	l.read = &verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(rtrswire.IOReqImm(c.shift, 1, 512+32)), SGEs: []verbs.SGE{{Buf: c.mem[c.chunk:][:32+n], LKey: c.mr.LKey()}}}
	return l
}

// request sends wr and polls both ends until it is answered.
func (l *leanClient) request(p *Poller, wr *verbs.SendWR) {
	l.post[0] = *wr
	l.post[0].Signaled = true
	l.post[0].RKey, l.post[0].RemoteAddr = l.bufs[1].rkey, l.bufs[1].addr
	if wr == l.read {
		l.post[0].RemoteAddr += 512
	}
	if _, err := l.qps[1].PostSend(l.post[:]); err != nil {
		l.t.Fatal(err)
	}
	for {
		n := l.cq.Poll(l.wcs[:])
		for i := range n {
			if l.answered(&l.wcs[i]) {
				return
			}
		}
		p.Poll()
	}
}

func (l *leanClient) answered(wc *verbs.WC) bool {
	if wc.Op != verbs.OpRecv && wc.Op != verbs.OpRecvImm || wc.QP != 1 {
		return false
	}
	if l.newRkey {
		l.bufs[1].rkey = rtrswire.RkeyRsp(l.slots[int(wc.ID)*rawRecv:]).Rkey()
	}
	l.recv[0] = verbs.RecvWR{ID: wc.ID, Buf: l.slots[int(wc.ID)*rawRecv:][:rawRecv], LKey: l.slotMR.LKey()}
	if _, err := l.qps[1].PostRecv(l.recv[:]); err != nil {
		l.t.Fatal(err)
	}
	return true
}
