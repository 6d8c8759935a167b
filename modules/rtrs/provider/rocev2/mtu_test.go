package rocev2

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// narrow makes a network lose the packets to d that are longer than most bytes,
// without a word, as a tunnel or a switch with a smaller MTU does.
func narrow(d *Device, most int) {
	d.faults.Store(&testFaults{inject: func(p receivedPacket) []receivedPacket {
		if len(p.b)+20+8 > most { // with the headers of IPv4 and UDP
			return nil
		}
		return []receivedPacket{p}
	}})
}

// renew gives two ends new queue pairs and connects them, with whatever is
// asked for again in between.
func renew(t *testing.T, c, s *end) {
	t.Helper()
	for _, e := range []*end{c, s} {
		e.qp.Destroy()
		e.poll()
		e.qp, e.wcs = e.newQP(1), nil
	}
	join(t, c, s)
}

// tryWrite writes size bytes from one end to the other, with an immediate behind
// them, and returns how it ended.
func tryWrite(t *testing.T, from, to *end, size int) verbs.Status {
	t.Helper()
	src, mr := from.region(size, 0)
	dst, rmr := to.region(size, verbs.AccessRemoteWrite)
	fill(src, size)
	to.recv(verbs.RecvWR{ID: 2})
	from.send(
		verbs.SendWR{ID: 1, Op: verbs.OpWrite, Signaled: true, RemoteAddr: rmr.Addr(), RKey: rmr.RKey(), SGEs: []verbs.SGE{{Buf: src, LKey: mr.LKey()}}},
		verbs.SendWR{ID: 3, Op: verbs.OpWriteImm, Signaled: true})
	wc := from.next(to)
	for wc.ID != 1 { // of an earlier receive
		wc = from.next(to)
	}
	if wc.Status == verbs.StatusOK && !bytes.Equal(src, dst) {
		t.Errorf("first difference at %d", differs(src, dst))
	}
	return wc.Status
}

// ended polls until the connection has ended at both ends and the messages about
// it were exchanged.
func ended(c, s *end) {
	c.t.Helper()
	c.until("the end of the connection", func() bool {
		for _, e := range []*end{c, s} {
			m := &e.dev.cm
			m.mu.Lock()
			for _, k := range m.conns {
				if k.state != connTimeWait {
					m.mu.Unlock()
					return false
				}
			}
			m.mu.Unlock()
		}
		return c.qp.End.State == softverbs.EndDone && s.qp.End.State == softverbs.EndDone
	}, s)
}

// A path that carries less than the interfaces fails once; then it works.
func TestC051_SmallerPathMTUIsLearned(t *testing.T) {
	for _, tt := range []struct {
		name    string
		mtu     int  // of the network
		passive bool // the passive end sends
		size    int
		want    uint32 // path MTU
		fails   int    // connections before that
	}{
		{"Ethernet between jumbo frames, the active end sends", 1500, false, 64 << 10, 1024, 1},
		{"Ethernet between jumbo frames, the passive end sends", 1500, true, 64 << 10, 1024, 1},
		{"Ethernet, and a message without a short packet in the window", 1500, false, 1 << 20, 1024, 1},
		{"a tunnel", 1000, false, 64 << 10, 512, 2},
		{"nothing in between", 9000, false, 64 << 10, 4096, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, s := pairOf(t, Config{RetryTimeout: 500 * time.Millisecond})
			narrow(c.dev, tt.mtu)
			narrow(s.dev, tt.mtu)
			from, to := c, s
			if tt.passive {
				from, to = s, c
			}
			for i := range tt.fails {
				if st := tryWrite(t, from, to, tt.size); st != verbs.StatusRetryExceeded {
					t.Fatalf("connection %d with path MTU %d ended with status %d", i, c.qp.mtu, st)
				}
				ended(c, s)
				renew(t, c, s)
			}
			if c.qp.mtu != tt.want || s.qp.mtu != tt.want {
				t.Errorf("path MTU %d and %d, want %d", c.qp.mtu, s.qp.mtu, tt.want)
			}
			if st := tryWrite(t, from, to, tt.size); st != verbs.StatusOK {
				t.Errorf("connection with path MTU %d ended with status %d", c.qp.mtu, st)
			}
		})
	}
}

// Neither a peer that is gone nor one that lost its short packets too tells
// anything about the MTU.
func TestC051_PathMTUIsNotToBlame(t *testing.T) {
	for _, tt := range []struct {
		name string
		most int  // bytes of a packet that arrives
		dead bool // the messages of the connection manager are lost too
	}{
		{"the peer is gone", 0, true},
		{"packets of full size had arrived before", 1500, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, s := pairOf(t, Config{RetryTimeout: 300 * time.Millisecond})
			if !tt.dead {
				if st := tryWrite(t, c, s, 8<<10); st != verbs.StatusOK {
					t.Fatalf("status %d", st)
				}
				c.until("the immediate", func() bool { return len(c.wcs) > 0 }, s)
				c.wcs = nil
			}
			s.dev.faults.Store(&testFaults{inject: func(p receivedPacket) []receivedPacket {
				if len(p.b) > tt.most {
					return nil
				}
				return []receivedPacket{p}
			}, control: func(mad) bool { return !tt.dead }})
			if st := tryWrite(t, c, s, 64<<10); st != verbs.StatusRetryExceeded {
				t.Fatalf("status %d", st)
			}
			if !tt.dead {
				ended(c, s)
			}
			m := &c.dev.cm
			m.mu.Lock()
			defer m.mu.Unlock()
			if len(m.learned) > 0 {
				t.Errorf("learned %+v", m.learned)
			}
		})
	}
}

// The active side takes the path MTU that the passive one tells, and no other.
func TestC051_RefusedPathMTUIsLowered(t *testing.T) {
	r, e, req, done := active(t, Config{})
	refuse := func(m mad, code byte) {
		r.say((&rejFields{about: aboutREQ, reason: reasonInvalidMTU, ari: []byte{code}}).encode(m.tid(), 0, m.sender()))
	}
	refuse(req, 3)
	again := r.hear(attrREQ)
	if f := decodeREQ(again); f.mtu != 3 || f.qpn != e.qp.qpn || again.sender() == req.sender() {
		t.Errorf("asked again for path MTU %d", f.mtu)
	}
	refuse(again, 3) // it was this that was asked for
	var less *mtuError
	if err := <-done; !errors.As(err, &less) {
		t.Errorf("connect: %v", err)
	}
}

// The learned MTU is dropped in time.
func TestC051_FullPathMTUIsTriedAgain(t *testing.T) {
	d := openDevice(t, Config{Addrs: []netip.Addr{addrA}})
	m, p := &d.cm, d.ports[addrA]
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, step := range []struct{ lost, want uint32 }{{4096, 1024}, {1024, 512}, {512, 256}} {
		m.onPacketsLost(addrB, step.lost)
		if got := mtuBytes(m.mtuTo(p, addrB)); got != step.want {
			t.Errorf("after %d comes %d, want %d", step.lost, got, step.want)
		}
	}
	m.learned[addrB] = learnedMTU{1, time.Now().Add(-time.Second)}
	if got := m.mtuTo(p, addrB); got != p.mtu {
		t.Errorf("code %d, want %d", got, p.mtu)
	}
	m.onPacketsLost(addrRaw, 4096)
	if len(m.learned) != 1 {
		t.Errorf("%d path MTUs are kept", len(m.learned))
	}
}

func TestC051_RouteTellsItsMTU(t *testing.T) {
	for _, a := range []netip.Addr{addrA, addr6} {
		if n := routeMTU(a, a); n < 1500 && !(a.Is6() && n == 0) {
			t.Errorf("route from %s to itself takes %d bytes", a, n)
		}
	}
	if n := routeMTU(addrA, netip.MustParseAddr("::1")); n != 0 {
		t.Errorf("a route between families takes %d bytes", n)
	}
}
