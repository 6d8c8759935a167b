package verbstest

import (
	"runtime"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The cases of this file close a region while work requests name it, and use its
// memory for other data at once: the region's data have the pattern before, the
// data after Close the pattern after. No peer may see the second or change it.
const (
	before, after = 1, 2
	// lentSize is the size of a region that is closed early, lentTimes how often
	// it is sent: together more than any socket takes.
	lentSize  = 64 << 10
	lentTimes = 100
)

// lent is memory with a registration that ends while it is in use.
type lent struct {
	mem []byte
	mr  verbs.MR
}

func (e *end) lend() *lent {
	e.t.Helper()
	l := &lent{mem: make([]byte, lentSize)}
	fill(l.mem, before)
	l.mr = must(e.pd.RegMR(l.mem, allAccess))(e.t)
	return l
}

func (l *lent) sge() []verbs.SGE { return []verbs.SGE{{Buf: l.mem, LKey: l.mr.LKey()}} }

// takeBack ends the registration and reuses the memory.
func (l *lent) takeBack() error {
	err := l.mr.Close()
	fill(l.mem, after)
	return err
}

type closeCase struct {
	name string
	ends func(p *pair) (owner, peer *end) // the region is the owner's
	// start posts requests that name l. goOn is called after the close.
	start, goOn func(p *pair, l *lent)
	// reached reports whether the close is due; nil: after some polls.
	reached func(p *pair, l *lent) bool
	// check looks at the outcome, when the peer's or the owner's last request
	// has completed or the connection has ended.
	check func(p *pair, l *lent)
}

func clientOwns(p *pair) (owner, peer *end) { return p.client, p.server }
func serverOwns(p *pair) (owner, peer *end) { return p.server, p.client }

const lastID = 1000

var closeCases = []closeCase{
	{"writes from it", clientOwns, func(p *pair, l *lent) {
		for i := range lentTimes {
			p.client.send(p.client.qp, verbs.SendWR{ID: uint64(i), Op: verbs.OpWrite, Signaled: true, SGEs: l.sge(), RemoteAddr: p.server.at(0), RKey: p.server.mr.RKey()})
		}
		p.client.send(p.client.qp, verbs.SendWR{ID: lastID, Op: verbs.OpWrite, Signaled: true})
	}, nil, nil, checkWritten},
	{"messages from it that wait for receives", clientOwns, func(p *pair, l *lent) {
		for i := range 4 {
			p.client.send(p.client.qp, verbs.SendWR{ID: uint64(i), Op: verbs.OpSend, Signaled: true, SGEs: l.sge()})
		}
		p.client.send(p.client.qp, verbs.SendWR{ID: lastID, Op: verbs.OpSend, Signaled: true})
	}, func(p *pair, l *lent) {
		for i := range 5 {
			p.server.recv(p.server.qp, uint64(i), i*lentSize, lentSize)
		}
	}, nil, checkReceived},
	{"reads into it", clientOwns, func(p *pair, l *lent) {
		for i := range 8 {
			p.client.send(p.client.qp, verbs.SendWR{ID: uint64(i), Op: verbs.OpRead, Signaled: true, SGEs: l.sge(), RemoteAddr: p.server.at(0), RKey: p.server.mr.RKey()})
		}
		p.client.send(p.client.qp, verbs.SendWR{ID: lastID, Op: verbs.OpWrite, Signaled: true})
	}, nil, nil, nil},
	{"receives into it", clientOwns, func(p *pair, l *lent) {
		for i := range 4 {
			wr := verbs.RecvWR{ID: uint64(i), Buf: l.mem[:lentSize/2], LKey: l.mr.LKey()}
			if _, err := p.client.qp.PostRecv([]verbs.RecvWR{wr}); err != nil {
				p.t.Fatal(err)
			}
		}
	}, func(p *pair, l *lent) {
		for i := range 4 {
			p.server.send(p.server.qp, verbs.SendWR{ID: uint64(i), Op: verbs.OpSend, Signaled: true, SGEs: p.server.sge(0, lentSize/2, 1)})
		}
		p.server.send(p.server.qp, verbs.SendWR{ID: lastID, Op: verbs.OpWrite, Signaled: true})
	}, nil, checkNothingReceived},
	{"writes of the peer to it", serverOwns, func(p *pair, l *lent) {
		for i := range lentTimes {
			p.client.send(p.client.qp, verbs.SendWR{ID: uint64(i), Op: verbs.OpWrite, SGEs: p.client.sge(0, lentSize, 1), RemoteAddr: l.mr.Addr(), RKey: l.mr.RKey()})
		}
		p.client.send(p.client.qp, verbs.SendWR{ID: lastID, Op: verbs.OpSend, Signaled: true})
	}, receiveLast, func(p *pair, l *lent) bool { return l.mem[0] == 0 }, nil},
	{"reads of the peer from it", serverOwns, func(p *pair, l *lent) {
		for i := range lentTimes {
			p.client.send(p.client.qp, verbs.SendWR{ID: uint64(i), Op: verbs.OpRead, SGEs: p.client.sge(0, lentSize, 1), RemoteAddr: l.mr.Addr(), RKey: l.mr.RKey()})
		}
		p.client.send(p.client.qp, verbs.SendWR{ID: lastID, Op: verbs.OpSend, Signaled: true})
	}, receiveLast, func(p *pair, l *lent) bool { return p.client.mem[0] != 0 }, checkRead},
}

// receiveLast lets the peer's last message come, if the connection is still up.
func receiveLast(p *pair, _ *lent) {
	_, _ = p.server.qp.PostRecv([]verbs.RecvWR{{ID: 1}})
}

func regionClosed(t *testing.T, f Fabric) {
	for _, tt := range closeCases {
		for _, polls := range []int{0, 2} {
			t.Run(tt.name, func(t *testing.T) {
				p := newPair(t, f)
				owner, _ := tt.ends(p)
				l := owner.lend()
				tt.start(p, l)
				if tt.reached != nil {
					p.wait("the first bytes", func() bool { return tt.reached(p, l) })
				}
				for range polls {
					owner.poll()
				}
				check(t, l.takeBack())
				if tt.goOn != nil {
					tt.goOn(p, l)
				}
				p.wait("the last request to complete", func() bool {
					return len(p.client.byID(lastID))+len(p.server.byID(lastID)) > 0 || p.client.gone(1) && p.server.gone(1)
				})
				p.idle()
				if at := filled(l.mem, after); at >= 0 {
					t.Errorf("byte %d of the memory was changed after Close", at)
				}
				if tt.check != nil {
					tt.check(p, l)
				}
			})
		}
	}
}

// foreign returns the first index at which b is neither zero nor the region's
// byte, or -1.
func foreign(b []byte) int {
	want := make([]byte, len(b))
	fill(want, before)
	for i := range b {
		if b[i] != 0 && b[i] != want[i] {
			return i
		}
	}
	return -1
}

func checkWritten(p *pair, l *lent) {
	if at := foreign(p.server.mem[:lentSize]); at >= 0 {
		p.t.Errorf("byte %d was sent from the memory after Close", at)
	}
	if wcs := p.client.byID(lastID); len(wcs) > 0 && wcs[0].Status == verbs.StatusOK && filled(p.server.mem[:lentSize], before) >= 0 {
		// The last one may be complete when it was handed to a reliable stream.
		p.wait("the bytes that were written", func() bool { return filled(p.server.mem[:lentSize], before) < 0 || p.server.gone(1) })
	}
}

func checkReceived(p *pair, l *lent) {
	for i := range 4 {
		got := p.server.mem[i*lentSize:][:lentSize]
		if at := foreign(got); at >= 0 {
			p.t.Errorf("byte %d of message %d was sent from the memory after Close", at, i)
		}
		for _, wc := range p.server.byID(uint64(i)) {
			if wc.Op == verbs.OpRecv && wc.Status == verbs.StatusOK && filled(got, before) >= 0 {
				p.t.Errorf("message %d is not whole", i)
			}
		}
	}
}

func checkNothingReceived(p *pair, l *lent) {
	if ok := p.client.find(func(wc *verbs.WC) bool { return wc.Op == verbs.OpRecv && wc.Status == verbs.StatusOK }); len(ok) > 0 {
		p.t.Errorf("messages were received into memory that was taken back: %+v", ok)
	}
}

func checkRead(p *pair, l *lent) {
	if at := foreign(p.client.mem[:lentSize]); at >= 0 {
		p.t.Errorf("byte %d was read from the memory after Close", at)
	}
}

// regionClosedByOther closes regions while the owners are at work: no reader of
// the memory is left when Close returns, as the race detector sees it.
func regionClosedByOther(t *testing.T, f Fabric) {
	p := newPair(t, f)
	regions, posted, stop, done := make(chan *lent), make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() { // the owner of both queues
		defer close(done)
		for ; ; runtime.Gosched() {
			select {
			case <-stop:
				return
			case l := <-regions:
				wr := verbs.SendWR{Op: verbs.OpWrite, SGEs: l.sge(), RemoteAddr: p.server.at(0), RKey: p.server.mr.RKey()}
				_, _ = p.client.qp.PostSend([]verbs.SendWR{wr}) // an earlier close may have ended the connection
				posted <- struct{}{}
			default:
			}
			p.client.poll()
			p.server.poll()
		}
	}()
	for i := range 20 {
		l := p.client.lend()
		regions <- l
		<-posted
		for range i {
			runtime.Gosched()
		}
		if err := l.takeBack(); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	<-done
	p.idle()
	if at := foreign(p.server.mem[:lentSize]); at >= 0 {
		t.Errorf("byte %d was sent from the memory after Close", at)
	}
}
