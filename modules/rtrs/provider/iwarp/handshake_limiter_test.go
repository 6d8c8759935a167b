package iwarp

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// dialFrom connects from an address of the loopback network.
func dialFrom(t *testing.T, from string, to netip.AddrPort) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(mustAddr(from), 0))}
	conn, err := d.Dial("tcp", to.String())
	if errors.Is(err, syscall.EMFILE) {
		t.Skip("too few descriptors for a crowd: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// connectWithin connects a client at from, as an ordinary one does, and fails
// where that takes longer than limit.
func connectWithin(t *testing.T, limit time.Duration, l verbs.Listener, s *end, from string) {
	t.Helper()
	c := newEnd(t, DefaultConfig())
	done := acceptOne(t, l, s.newQP(1))
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if _, err := c.dev.Connect(ctx, c.qp, verbs.ConnectParams{Src: mustAddr(from), Dst: l.Addr()}); err != nil {
		t.Fatalf("a client at %s: %v", from, err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestIdleConnectionsKeepNobodyOut(t *testing.T) {
	half := DefaultConfig()
	frame := half.mpaRequest(nil)
	request := frame.encode(mpaKeyRequest)
	for _, tt := range []struct {
		name  string
		say   []byte
		crowd []string // addresses, in turns
	}{
		{"that say nothing, of one address", nil, []string{"127.0.0.2"}},
		{"that say half a request, of one address", request[:11], []string{"127.0.0.2"}},
		{"of many addresses", nil, []string{"127.0.0.2", "127.0.0.4", "127.0.0.5", "127.0.0.6", "127.0.0.7", "127.0.0.8", "127.0.0.9"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newEnd(t, Config{RequestTimeout: time.Minute})
			l := listen(t, s.dev)
			for i := range 1000 {
				dialFrom(t, tt.crowd[i%len(tt.crowd)], l.Addr()).Write(tt.say)
			}
			connectWithin(t, 5*time.Second, l, s, "127.0.0.3")
			connectWithin(t, 5*time.Second, l, s, "127.0.0.2")
			gave := s.dev.Stats().Handshakes.GaveWay
			if gave < 1000-defaultHandshakes {
				t.Errorf("%d handshakes gave way", gave)
			}
		})
	}
}

// An address gives way to itself, others keep their places.
func TestCrowdOfOneAddressClosesItsOwn(t *testing.T) {
	s := newEnd(t, Config{RequestTimeout: time.Minute, MaxHandshakes: 8, MaxHandshakesPerAddress: 4})
	l := listen(t, s.dev)
	patient := []net.Conn{dialFrom(t, "127.0.0.3", l.Addr()), dialFrom(t, "127.0.0.4", l.Addr())}
	var crowd []net.Conn
	for range 50 {
		crowd = append(crowd, dialFrom(t, "127.0.0.2", l.Addr()))
	}
	for i, c := range crowd[:46] {
		c.SetReadDeadline(time.Now().Add(testLimit))
		if _, err := c.Read(make([]byte, 1)); err == nil || isTimeout(err) {
			t.Fatalf("connection %d of 50 is still open: %v", i, err)
		}
	}
	for _, c := range append(patient, crowd[46:]...) {
		c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		if _, err := c.Read(make([]byte, 1)); !isTimeout(err) {
			t.Errorf("a connection that should have its place: %v", err)
		}
	}
	if n := s.dev.Stats().Handshakes.GaveWay; n != 46 {
		t.Errorf("%d handshakes gave way, want 46", n)
	}
}

// Connections that all have sent something keep the next one out only until
// that was read.
func TestCrowdThatWasBusyGivesWay(t *testing.T) {
	s := newEnd(t, Config{RequestTimeout: time.Minute, MaxHandshakes: 4})
	l := listen(t, s.dev)
	var asked atomic.Int32
	c := l.(*listener).handshakes
	c.mu.Lock()
	c.Settled = func(*pendingHandshake) bool { return asked.Add(1) <= 20 }
	c.mu.Unlock()
	for range 5 {
		dialFrom(t, "127.0.0.2", l.Addr())
	}
	connectWithin(t, testLimit, l, s, "127.0.0.2")
}

// Requests that are whole wait for the consumer, and nothing pushes them out:
// the listener takes no more connections instead.
func TestWholeRequestsWaitForTheConsumer(t *testing.T) {
	s := newEnd(t, Config{RequestTimeout: time.Minute, MaxHandshakes: 4, MaxHandshakesPerAddress: 2})
	l := listen(t, s.dev)
	frame := s.dev.cfg.mpaRequest(nil)
	request := frame.encode(mpaKeyRequest)
	const clients = 20
	for range clients {
		dialFrom(t, "127.0.0.2", l.Addr()).Write(request)
	}
	for i := range clients {
		got := make(chan verbs.ConnRequest, 1)
		go func() {
			r, _ := l.Accept()
			got <- r
		}()
		select {
		case r := <-got:
			r.Reject(nil)
		case <-time.After(testLimit):
			t.Fatalf("%d of %d requests came", i, clients)
		}
	}
	if n := s.dev.Stats().Handshakes.GaveWay; n != 0 {
		t.Errorf("%d whole requests gave way", n)
	}
}

func TestHandshakesThatFailAreCounted(t *testing.T) {
	for _, tt := range []struct {
		name    string
		timeout time.Duration // generous where it must not pass
		fail    func(l verbs.Listener)
		want    HandshakeStats
	}{
		{"a request that does not come", 50 * time.Millisecond, func(l verbs.Listener) { dialFrom(t, "127.0.0.2", l.Addr()) }, HandshakeStats{Late: 1}},
		{"one that is none, and a peer that leaves", time.Minute, func(l verbs.Listener) {
			dialFrom(t, "127.0.0.2", l.Addr()).Write(make([]byte, mpaHeaderLen))
			dialFrom(t, "127.0.0.2", l.Addr()).Close()
		}, HandshakeStats{Refused: 2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newEnd(t, Config{RequestTimeout: tt.timeout})
			tt.fail(listen(t, s.dev))
			for stop := time.Now().Add(testLimit); s.dev.Stats().Handshakes != tt.want; time.Sleep(time.Millisecond) {
				if time.Now().After(stop) {
					t.Fatalf("counted %+v, want %+v", s.dev.Stats().Handshakes, tt.want)
				}
			}
		})
	}
}
