package rocev2

import (
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// ask sends n connection requests, each with an id of its own from first on, and
// waits until the device has taken them.
func (r *raw) ask(d *Device, l verbs.Listener, first, n int) {
	r.t.Helper()
	for i := range n {
		f := r.request(l.Addr())
		f.id, f.qpn = uint32(first+i), uint32(1000+first+i)
		r.say(f.encode(rawTID))
		if i%16 != 15 && i != n-1 {
			continue
		}
		key := peerKey{r.addr, rawGUID, f.id}
		for stop := time.Now().Add(testLimit); !d.knows(key); runtime.Gosched() {
			if time.Now().After(stop) {
				r.t.Fatalf("request %d was not taken", first+i)
			}
		}
	}
}

func (d *Device) knows(key peerKey) bool {
	d.cm.mu.Lock()
	defer d.cm.mu.Unlock()
	return d.cm.byPeer[key] != nil
}

// kept counts the entries of the connection manager, and checks that its
// tables agree.
func (d *Device) kept(t *testing.T) int {
	t.Helper()
	d.cm.mu.Lock()
	defer d.cm.mu.Unlock()
	m := &d.cm
	if len(m.byPeer) != len(m.conns) || m.handshakes.Len() > len(m.conns) {
		t.Errorf("%d connections, %d by peer, %d handshakes", len(m.conns), len(m.byPeer), m.handshakes.Len())
	}
	return len(m.conns)
}

// Requests that nobody finishes keep neither memory nor other peers out.
func TestC050_HandshakesAreBounded(t *testing.T) {
	for _, tt := range []struct {
		name    string
		cfg     Config
		answer  func(t *testing.T, e *end, r verbs.ConnRequest) // the consumer's, nil: none
		floods  int                                             // addresses that send requests
		of      int                                             // requests of each
		most    int                                             // connections kept
		atLeast uint64                                          // that gave way
	}{
		{"of one address, which wait for the consumer", Config{MaxHandshakes: 64, MaxHandshakesPerAddress: 8}, nil, 1, 50, 8, 42},
		{"of many addresses, which wait for the consumer", Config{MaxHandshakes: 20, MaxHandshakesPerAddress: 8}, nil, 4, 16, 20, 44},
		{"of one address, which were accepted", Config{MaxHandshakes: 64, MaxHandshakesPerAddress: 8}, acceptRequest, 1, 50, 8, 42},
		{"of one address, which were refused", Config{MaxHandshakes: 64, MaxHandshakesPerAddress: 8}, func(t *testing.T, _ *end, r verbs.ConnRequest) {
			if err := r.Reject(nil); err != nil {
				t.Error(err)
			}
		}, 1, 50, 8, 42},
		{"with the defaults", Config{}, nil, 1, 1000, defaultPerAddress, 1000 - defaultPerAddress},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newEnd(t, tt.cfg, addrB)
			l := must(s.dev.Listen(netip.AddrPortFrom(addrB, 0)))(t)
			defer l.Close()
			for n := range tt.floods {
				r := newRaw(t, testAddr(byte(10+n)), addrB)
				for i := range tt.of {
					if tt.answer == nil {
						r.ask(s.dev, l, 1, tt.of)
						break
					}
					r.ask(s.dev, l, 1+i, 1)
					tt.answer(t, s, must(l.Accept())(t))
					s.poll()
				}
			}
			if n := s.dev.kept(t); n != tt.most {
				t.Errorf("%d connections are kept, want %d", n, tt.most)
			}
			if n := s.dev.Stats().Displaced; n != tt.atLeast {
				t.Errorf("%d gave way, want %d", n, tt.atLeast)
			}
			c := newEnd(t, Config{}, addrA)
			connectAmong(t, c, s, l)
			send1(t, c, s)
		})
	}
}

// acceptRequest accepts with a queue pair of its own. It is destroyed when
// its connection is given up.
func acceptRequest(t *testing.T, e *end, r verbs.ConnRequest) {
	t.Helper()
	q := e.newQP(99)
	t.Cleanup(q.Destroy)
	if err := r.Accept(q, nil); err != nil {
		t.Error(err)
	}
}

// connectAmong connects c to s while the listener of s has other requests.
func connectAmong(t *testing.T, c, s *end, l verbs.Listener) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		_, err := c.dev.Connect(patient(t), c.qp, verbs.ConnectParams{Dst: l.Addr()})
		done <- err
	}()
	for {
		r := must(l.Accept())(t)
		if r.RemoteAddr().Addr() != addrA {
			continue // it is left waiting
		}
		if err := r.Accept(s.qp, nil); err != nil {
			t.Fatal(err)
		}
		break
	}
	if err := <-done; err != nil {
		t.Fatalf("connect among many: %v", err)
	}
}

// send1 sends a message from c to s.
func send1(t *testing.T, c, s *end) {
	t.Helper()
	s.recv(verbs.RecvWR{ID: 7})
	c.send(verbs.SendWR{ID: 1, Op: verbs.OpSend, Signaled: true})
	s.until("the message", func() bool {
		for _, wc := range s.wcs {
			if wc.Op == verbs.OpRecv && wc.Status == verbs.StatusOK {
				return true
			}
		}
		return false
	}, c)
}

// A connection is no handshake any more when its peer was heard.
func TestC050_ConnectionsDoNotGiveWay(t *testing.T) {
	for _, tt := range []struct {
		name string
		rtu  bool
	}{{"after the RTU", true}, {"after a packet", false}} {
		t.Run(tt.name, func(t *testing.T) {
			c := newRawConn(t, Config{MaxHandshakes: 4, MaxHandshakesPerAddress: 2}, tt.rtu)
			c.end.recv(verbs.RecvWR{ID: 1}, verbs.RecvWR{ID: 2})
			if !tt.rtu {
				c.send(c.packet(opSendOnly, nil, nil))
				c.wantAck(ackCreditsInvalid, c.psn-1)
			}
			l := must(c.end.dev.Listen(netip.AddrPortFrom(addrB, 0)))(t)
			defer l.Close()
			c.ask(c.end.dev, l, 50, 20)
			c.send(c.packet(opSendOnly, nil, nil))
			c.wantAck(ackCreditsInvalid, c.psn-1) // it lives
			if n := c.end.dev.kept(t); n != 3 {
				t.Errorf("%d connections are kept", n)
			}
		})
	}
}

// A request that gave way cannot be accepted, and a queue pair of one ends.
func TestC050_ConsumerHearsThatARequestGaveWay(t *testing.T) {
	r, s, l := listening(t, Config{MaxHandshakes: 4, MaxHandshakesPerAddress: 1})
	r.ask(s.dev, l, 1, 1)
	first := must(l.Accept())(t)
	r.ask(s.dev, l, 2, 1)
	if err := first.Accept(s.newQP(5), nil); err == nil {
		t.Error("a request that gave way was accepted")
	}
	if err := must(l.Accept())(t).Accept(s.qp, nil); err != nil {
		t.Fatal(err)
	}
	r.ask(s.dev, l, 3, 1)
	if wc := s.next(); wc.Op != verbs.OpDisconnected || wc.Status != verbs.StatusFatal {
		t.Errorf("%+v", wc)
	}
}

// Counters of a completion queue outlive it, its memory does not.
func TestC050_CountersOfClosedQueuesAreAddedUp(t *testing.T) {
	d := openDevice(t, Config{})
	for range 3 {
		c := must(d.CreateCQ(1))(t).(*compQueue)
		c.stats.sent.Store(5)
		c.stats.dropped[dropICRC].Store(2)
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if s := d.Stats(); s.SentPackets != 15 || s.Dropped[dropICRC] != 6 || d.stats.Len() != 1 {
		t.Errorf("%+v, %d sets of counters", s, d.stats.Len())
	}
}
