package cm

import (
	"bytes"
	"crypto/rand"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

var (
	addrA = netip.MustParseAddr("127.77.0.1")
	addrB = netip.MustParseAddr("127.77.0.2")
)

const qpnA, qpnB = 0xa0a0a0, 0xb0b0b0

// side is a manager and its received messages.
type side struct {
	*Manager
	fabric verbs.ServiceDevice

	mu  sync.Mutex
	got [][]byte
	// from are the senders of got.
	from []peerAddr
}

func newFabric(t *testing.T, addr netip.Addr) verbs.ServiceDevice {
	t.Helper()
	d, err := rocev2.Open(rocev2.Config{Addrs: []netip.Addr{addr}, ConnectTimeout: 2 * time.Second, RetryTimeout: time.Second, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d.(verbs.ServiceDevice)
}

func newSide(t *testing.T, f verbs.ServiceDevice, cfg Config) *side {
	t.Helper()
	s := &side{fabric: f}
	cfg.Fabric, cfg.Headroom, cfg.Logger = f, 6, slog.New(slog.DiscardHandler)
	cfg.Receive = func(addr netip.Addr, qpn uint32, b []byte) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.got, s.from = append(s.got, bytes.Clone(b[6:])), append(s.from, peerAddr{addr, qpn})
	}
	var err error
	if s.Manager, err = Open(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// sides are two managers that know of each other.
func sides(t *testing.T, a, b Config) (*side, *side) {
	t.Helper()
	a.Local, a.QPN, b.Local, b.QPN = addrA, qpnA, addrB, qpnB
	return newSide(t, newFabric(t, addrA), a), newSide(t, newFabric(t, addrB), b)
}

func (s *side) messages() [][]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.got)
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not after 30 s", what)
		}
	}
}

// reach waits until the connection to b is in a state.
func (s *side) reach(t *testing.T, to netip.Addr, qpn uint32, want State) *Conn {
	t.Helper()
	var c *Conn
	eventually(t, "the connection is "+want.String(), func() bool {
		c = s.Lookup(to, qpn)
		got, _ := c.State()
		return got == want
	})
	return c
}

func TestConn_CarriesMessages(t *testing.T) {
	a, b := sides(t, Config{}, Config{})
	first := []byte("waits for the connection")
	if c := a.Lookup(addrB, qpnB); !c.Wait(first) {
		t.Fatal("nothing waits for a connection that is being made")
	}
	c := a.reach(t, addrB, qpnB, Up)
	if _, mtu := c.State(); mtu != MaxMTU+wire.EncapLen {
		t.Errorf("the peer receives %d bytes, want %d", mtu, MaxMTU+wire.EncapLen)
	}
	want := [][]byte{first}
	for k := range 300 { // more than the ring and the receives have room for
		m := make([]byte, 1+k*218)
		rand.Read(m)
		want = append(want, m)
		if !c.Send(m, 30*time.Second) {
			t.Fatalf("message %d was not taken", k)
		}
	}
	eventually(t, "all messages are there", func() bool { return len(b.messages()) == len(want) })
	for k, m := range b.messages() {
		if !bytes.Equal(m, want[k]) {
			t.Fatalf("message %d of %d bytes is another one, want %d bytes", k, len(m), len(want[k]))
		}
	}
	if b.from[0] != (peerAddr{addrA, qpnA}) {
		t.Errorf("messages came from %v", b.from[0])
	}
	if c.Send(make([]byte, MaxMTU+5), 0) {
		t.Error("a message that the peer cannot receive was taken")
	}
	if s := b.Stats(); s.Passive != 1 || s.Accepts != 1 || s.RxMessages != 301 {
		t.Errorf("stats of the receiver %+v", s)
	}
}

// TestConn_W12_ReceiveMTU: the peer declares its receive MTU, and this end
// keeps to it.
func TestConn_W12_ReceiveMTU(t *testing.T) {
	a, b := sides(t, Config{}, Config{ReceiveMTU: 9004})
	c := a.reach(t, addrB, qpnB, Up)
	if _, mtu := c.State(); mtu != 9004 || c.Send(make([]byte, 9005), 0) || !c.Send(make([]byte, 9004), 0) {
		t.Errorf("messages of up to %d bytes are taken, want 9004", mtu)
	}
	eventually(t, "the longest message is there", func() bool { return len(b.messages()) == 1 && len(b.messages()[0]) == 9004 })
	if _, mtu := b.reach(t, addrA, qpnA, Up).State(); mtu != MaxMTU+wire.EncapLen {
		t.Errorf("in the other direction: %d bytes", mtu)
	}
}

// A peer that listens at the service ID of the RFC only is reached; one that
// listens at none gets datagrams for a while.
func TestConn_ServiceIDs(t *testing.T) {
	fb := newFabric(t, addrB)
	a := newSide(t, newFabric(t, addrA), Config{Local: addrA, QPN: qpnA, Retry: 50 * time.Millisecond})
	c := a.reach(t, addrB, qpnB, Refused)
	if c.Wait(nil) || c.Send([]byte{1}, 0) {
		t.Error("a refused connection takes frames")
	}
	l, err := fb.ListenService(verbs.Service{Local: addrB, ID: wire.ServiceIDRFC(qpnB)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			r, err := l.Accept()
			if err != nil {
				return
			}
			r.Reject(nil)
		}
	}()
	before := a.Stats().Refused
	eventually(t, "the peer is asked again", func() bool { a.Lookup(addrB, qpnB); return a.Stats().Refused > before })
	l.Close()
	b := newSide(t, fb, Config{Local: addrB, QPN: qpnB})
	b.listeners[0].Close() // Linux's
	a.reach(t, addrB, qpnB, Up)
}

// A request with wrong private data is refused and counted.
func TestPassive_BadRequests(t *testing.T) {
	_, b := sides(t, Config{}, Config{MaxPassive: 1})
	evil := newFabric(t, netip.MustParseAddr("127.77.0.3"))
	pd, _ := evil.AllocPD()
	cq, err := evil.CreateCQ(16)
	if err != nil {
		t.Fatal(err)
	}
	ask := func(private []byte) error {
		q, err := evil.CreateQP(pd, verbs.QPConfig{CQ: cq, SendQueue: 1, RecvQueue: 1, MaxSGE: 1})
		if err != nil {
			t.Fatal(err)
		}
		_, err = evil.ConnectService(t.Context(), q, verbs.Service{Local: netip.MustParseAddr("127.77.0.3"), ID: wire.ServiceIDLinux(qpnB)}, addrB, private)
		return err
	}
	for name, private := range map[string][]byte{
		"none":                     nil,
		"no receive MTU":           wire.NewCMPrivate(5, 0),
		"no room for a packet":     wire.NewCMPrivate(5, 4),
		"no queue pair":            wire.NewCMPrivate(0, 2048),
		"the multicast queue pair": wire.NewCMPrivate(0xffffff, 2048),
	} {
		before := b.Stats().BadRequests
		if err := ask(private); err == nil {
			t.Errorf("%s: accepted", name)
		}
		if n := b.Stats().BadRequests; n != before+1 {
			t.Errorf("%s: %d counted", name, n-before)
		}
	}
	for k, want := range []bool{true, false} {
		if err := ask(wire.NewCMPrivate(uint32(7+k), 2048)); (err == nil) != want {
			t.Errorf("connection %d: %v", k, err)
		}
	}
	if s := b.Stats(); s.Crowded != 1 || s.Passive != 1 {
		t.Errorf("stats %+v", s)
	}
}

// A peer that has started again gets a new connection, and the old one ends.
// A connection that the peer has closed is made again.
func TestConn_PeerStartsAgain(t *testing.T) {
	fa, fb := newFabric(t, addrA), newFabric(t, addrB)
	a := newSide(t, fa, Config{Local: addrA, QPN: qpnA, Retry: 10 * time.Millisecond})
	b := newSide(t, fb, Config{Local: addrB, QPN: qpnB})
	old := a.reach(t, addrB, qpnB, Up)
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the end is seen", func() bool { s, _ := old.State(); return s == Gone })
	b = newSide(t, fb, Config{Local: addrB, QPN: qpnB})
	eventually(t, "a frame arrives again", func() bool {
		if c := a.Lookup(addrB, qpnB); !c.Wait([]byte("x")) {
			c.Send([]byte("x"), 0)
		}
		return len(b.messages()) > 0
	})
	// The predecessor of a peer with the same address and queue pair.
	before := b.Stats().Accepts
	a.mu.Lock()
	lost := a.conns[peerAddr{addrB, qpnB}]
	delete(a.conns, lost.to)
	a.mu.Unlock()
	a.reach(t, addrB, qpnB, Up)
	eventually(t, "the stale connection is gone", func() bool { s := b.Stats(); return s.Accepts == before+1 && s.Passive == 1 })
}

// An unused connection ends at both ends.
func TestConn_Idle(t *testing.T) {
	a, b := sides(t, Config{Idle: 50 * time.Millisecond}, Config{})
	a.reach(t, addrB, qpnB, Up)
	eventually(t, "the connection has ended", func() bool { return a.Stats().Active == 0 && b.Stats().Passive == 0 })
}

func TestRing(t *testing.T) {
	r := sendRing{buf: make([]byte, 100)}
	if _, ok := r.push(make([]byte, 101)); ok {
		t.Fatal("more was taken than there is room for")
	}
	for k := range 1000 {
		b := bytes.Repeat([]byte{byte(k)}, 1+k%40)
		for {
			p, ok := r.push(b)
			if ok {
				if !bytes.Equal(r.buf[p.at:p.at+p.n], b) {
					t.Fatal("other bytes are in the ring")
				}
				break
			}
			r.popOldest()
		}
		for _, p := range r.pieces[:len(r.pieces)-1] { // the last one is new
			for _, c := range r.buf[p.at : p.at+p.n] {
				if c != r.buf[p.at] {
					t.Fatalf("piece %+v was overwritten", p)
				}
			}
		}
	}
	for len(r.pieces) > 0 {
		r.popOldest()
	}
	if r.used != 0 {
		t.Errorf("%d bytes are used by nothing", r.used)
	}
}
