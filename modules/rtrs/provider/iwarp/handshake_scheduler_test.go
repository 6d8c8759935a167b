package iwarp

import (
	"errors"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"
)

// waitTurns waits until so many handshakes wait.
func waitTurns(t *testing.T, e *handshakeScheduler, n int) {
	t.Helper()
	for stop := time.Now().Add(testLimit); ; time.Sleep(time.Millisecond) {
		e.mu.Lock()
		have := 0
		for _, list := range e.queue {
			have += len(list)
		}
		e.mu.Unlock()
		if have == n {
			return
		}
		if time.Now().After(stop) {
			t.Fatalf("%d handshakes wait, want %d", have, n)
		}
	}
}

// Hosts have turns one after the other, however many handshakes each of them has,
// and the handshakes of a host come in their order.
func TestHandshakesOfAllHostsHaveTurns(t *testing.T) {
	e := &handshakeScheduler{moved: func() uint64 { return 0 }}
	later := time.Now().Add(testLimit)
	must := func(err error) {
		if err != nil {
			t.Error(err)
		}
	}
	must(e.acquire(netip.MustParseAddr("10.0.0.9"), later, nil))
	order := make(chan string, 10)
	waiting := 0
	for _, h := range []struct{ host, name string }{
		{"10.0.0.1", "a1"}, {"10.0.0.1", "a2"}, {"10.0.0.1", "a3"}, {"10.0.0.2", "b1"}, {"2001:db8::1", "c1"}, {"2001:db8::2", "c2"},
	} {
		go func() {
			must(e.acquire(netip.MustParseAddr(h.host), later, nil))
			order <- h.name
			e.release()
		}()
		waiting++
		waitTurns(t, e, waiting)
	}
	e.release()
	var got []string
	for range waiting {
		got = append(got, <-order)
	}
	if want := []string{"a1", "b1", "c1", "a2", "c2", "a3"}; !slices.Equal(got, want) {
		t.Errorf("turns %v, want %v", got, want)
	}
	must(e.acquire(netip.MustParseAddr("10.0.0.1"), later, nil)) // nobody has the turn any more
	e.release()
	if len(e.queue)+len(e.hosts) > 0 {
		t.Errorf("left: %v, %v", e.queue, e.hosts)
	}
}

// A handshake that waits too long, or gives way, leaves; the others have their turns.
func TestHandshakesThatLeaveTakeNoTurn(t *testing.T) {
	e := &handshakeScheduler{moved: func() uint64 { return 0 }}
	a := netip.MustParseAddr("10.0.0.1")
	later := time.Now().Add(testLimit)
	if err := e.acquire(a, later, nil); err != nil {
		t.Fatal(err)
	}
	if err := e.acquire(a, time.Now(), nil); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("too late: %v", err)
	}
	out, result := make(chan struct{}), make(chan error)
	go func() { result <- e.acquire(a, later, out) }()
	waitTurns(t, e, 1)
	close(out)
	if err := <-result; err != errGaveWay {
		t.Errorf("gave way: %v", err)
	}
	go func() { result <- e.acquire(a, later, nil) }()
	waitTurns(t, e, 1)
	e.release()
	if err := <-result; err != nil {
		t.Error(err)
	}
	e.release()
}

// Beside connections that carry data a turn is followed by a pause, else by the
// next turn.
func TestHandshakesPauseBesideALoad(t *testing.T) {
	if runtime.NumCPU() >= effortShare {
		t.Skipf("on %d CPUs one handshake at a time takes no more than its share", runtime.NumCPU())
	}
	var bytes atomic.Uint64
	e := &handshakeScheduler{moved: bytes.Load}
	a := netip.MustParseAddr("10.0.0.1")
	for _, load := range []bool{false, true} {
		if err := e.acquire(a, time.Now().Add(testLimit), nil); err != nil {
			t.Fatal(err)
		}
		e.mu.Lock()
		e.began = time.Now().Add(-time.Hour) // the turn was long
		e.mu.Unlock()
		if load {
			bytes.Add(1)
		}
		gave := time.Now()
		e.release()
		if err := e.acquire(a, time.Now().Add(testLimit), nil); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(gave); load && took < maxPause {
			t.Errorf("beside a load the next turn came after %v", took)
		}
		e.release()
	}
}
