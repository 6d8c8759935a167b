package verbstest

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Datagrams is a fabric with unreliable datagrams between two addresses.
type Datagrams struct {
	A, B         verbs.DatagramDevice
	AddrA, AddrB netip.Addr
}

// RunDatagrams runs the suite for verbs.DatagramDevice. Each test gets devices of
// its own from open.
func RunDatagrams(t *testing.T, open func(*testing.T) Datagrams) {
	for _, tc := range []struct {
		name string
		run  func(*testing.T, Datagrams)
	}{
		{"datagrams of all lengths arrive whole and tell where they come from", datagramLengths},
		{"datagrams of another partition or queue key are dropped and counted", datagramKeys},
		{"multicast reaches those that are attached", datagramMulticast},
		{"a datagram that nobody receives is dropped and counted", datagramFull},
		{"Send refuses what cannot be sent", datagramRefused},
		{"Close ends Receive, and Send", datagramClose},
		{"limited members speak to full members only", datagramMembership},
	} {
		t.Run(tc.name, func(t *testing.T) { tc.run(t, open(t)) })
	}
}

// datagramEnd is a queue pair of a test. Its datagrams come to a channel.
type datagramEnd struct {
	verbs.DatagramQP
	t  *testing.T
	in chan verbs.Datagram
}

func openEnd(t *testing.T, d verbs.DatagramDevice, cfg verbs.DatagramConfig) *datagramEnd {
	t.Helper()
	qp, err := d.OpenDatagrams(cfg)
	if err != nil {
		t.Fatal(err)
	}
	e := &datagramEnd{DatagramQP: qp, t: t, in: make(chan verbs.Datagram, 1024)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			msgs := []verbs.Datagram{{Payload: make([]byte, 4096)}, {Payload: make([]byte, 4096)}}
			n, err := qp.Receive(msgs)
			if err != nil {
				return
			}
			for _, m := range msgs[:n] {
				e.in <- m
			}
		}
	}()
	t.Cleanup(func() { qp.Close(); <-done })
	return e
}

func (e *datagramEnd) to(o *datagramEnd, payload []byte, qkey uint32) {
	e.t.Helper()
	if n, err := e.Send([]verbs.Datagram{{Payload: payload, Peer: o.LocalAddr(), QPN: o.QPN(), QKey: qkey}}); n != 1 || err != nil {
		e.t.Fatalf("Send: %d, %v", n, err)
	}
}

func (e *datagramEnd) next() verbs.Datagram {
	e.t.Helper()
	select {
	case m := <-e.in:
		return m
	case <-time.After(10 * time.Second):
		e.t.Fatal("no datagram came")
		panic("not reached")
	}
}

// settle sends a datagram from o with the right key, and fails if another one
// came before it: whatever was sent before was dropped.
func (e *datagramEnd) settle(o *datagramEnd, qkey uint32) {
	e.t.Helper()
	o.to(e, []byte("settled"), qkey)
	if m := e.next(); string(m.Payload) != "settled" {
		e.t.Errorf("received %q, which had to be dropped", m.Payload)
	}
}

func datagramLengths(t *testing.T, f Datagrams) {
	a := openEnd(t, f.A, verbs.DatagramConfig{Local: f.AddrA, QKey: 7})
	b := openEnd(t, f.B, verbs.DatagramConfig{Local: f.AddrB, QKey: 7})
	for _, n := range []int{0, 1, 2, 3, 4, 5, 60, 255, 256, a.MaxPayload() - 1, a.MaxPayload()} {
		want := make([]byte, n)
		fill(want, n)
		a.to(b, want, 7)
		m := b.next()
		if !bytes.Equal(m.Payload, want) {
			t.Fatalf("%d bytes arrived as %d", n, len(m.Payload))
		}
		if m.Peer != f.AddrA || m.QPN != a.QPN() || m.Multicast {
			t.Fatalf("datagram came from %s, queue pair %d, multicast %t; want %s, %d, false", m.Peer, m.QPN, m.Multicast, f.AddrA, a.QPN())
		}
		b.to(a, m.Payload, 7)
		if m := a.next(); !bytes.Equal(m.Payload, want) {
			t.Fatalf("%d bytes came back as %d", n, len(m.Payload))
		}
	}
}

func datagramKeys(t *testing.T, f Datagrams) {
	a := openEnd(t, f.A, verbs.DatagramConfig{Local: f.AddrA, QKey: 7, PKey: 0x8001})
	stranger := openEnd(t, f.A, verbs.DatagramConfig{Local: f.AddrA, QKey: 7, PKey: 0x8002})
	b := openEnd(t, f.B, verbs.DatagramConfig{Local: f.AddrB, QKey: 7, PKey: 0x8001})
	stranger.to(b, []byte("partition"), 7)
	b.settle(a, 7)
	a.to(b, []byte("key"), 8)
	b.settle(a, 7)
	b.SetQKey(8)
	a.to(b, []byte("old key"), 7)
	b.settle(a, 8)
	if d := b.Dropped(); d.PKey != 1 || d.QKey != 2 {
		t.Errorf("dropped %+v, want 1 of another partition and 2 with another queue key", d)
	}
}

func datagramMulticast(t *testing.T, f Datagrams) {
	mgid := [16]byte{0xff, 0x12, 0x40, 0x1b, 0xff, 0xff, 15: 1}
	a := openEnd(t, f.A, verbs.DatagramConfig{Local: f.AddrA, QKey: 7})
	b1 := openEnd(t, f.B, verbs.DatagramConfig{Local: f.AddrB, QKey: 7})
	b2 := openEnd(t, f.B, verbs.DatagramConfig{Local: f.AddrB, QKey: 7})
	send := func(s string) {
		if _, err := a.Send([]verbs.Datagram{{Payload: []byte(s), Peer: f.AddrB, QPN: verbs.MulticastQPN, QKey: 7}}); err != nil {
			t.Fatal(err)
		}
	}
	send("to nobody")
	b1.settle(a, 7)
	for _, e := range []*datagramEnd{b1, b2} {
		if err := e.Attach(mgid); err != nil {
			t.Fatal(err)
		}
	}
	send("to both")
	for _, e := range []*datagramEnd{b1, b2} {
		if m := e.next(); string(m.Payload) != "to both" || !m.Multicast || m.QPN != a.QPN() {
			t.Errorf("received %+v", m)
		}
	}
	if err := b1.Detach(mgid); err != nil {
		t.Fatal(err)
	}
	if err := b1.Detach(mgid); err == nil {
		t.Error("Detach of a group that is not attached returned no error")
	}
	send("to one")
	if m := b2.next(); string(m.Payload) != "to one" {
		t.Errorf("received %q", m.Payload)
	}
	b1.settle(a, 7)
}

func datagramFull(t *testing.T, f Datagrams) {
	a := openEnd(t, f.A, verbs.DatagramConfig{Local: f.AddrA, QKey: 7})
	b, err := f.B.OpenDatagrams(verbs.DatagramConfig{Local: f.AddrB, QKey: 7, RecvQueue: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for i := range 6 {
		if _, err := a.Send([]verbs.Datagram{{Payload: make([]byte, i+1), Peer: f.AddrB, QPN: b.QPN(), QKey: 7}}); err != nil {
			t.Fatal(err)
		}
	}
	for end := time.Now().Add(10 * time.Second); b.Dropped().Full < 2; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("dropped %+v, want 2 for want of room", b.Dropped())
		}
	}
	msgs := make([]verbs.Datagram, 8)
	for i := range msgs {
		msgs[i].Payload = make([]byte, 3)
	}
	if n, err := b.Receive(msgs); n != 3 || err != nil {
		t.Errorf("Receive: %d, %v; want the 3 datagrams that fit", n, err)
	}
	if d := b.Dropped(); d.Length != 1 {
		t.Errorf("dropped %+v, want 1 for its length", d)
	}
}

func datagramRefused(t *testing.T, f Datagrams) {
	a := openEnd(t, f.A, verbs.DatagramConfig{Local: f.AddrA, QKey: 7})
	good := verbs.Datagram{Payload: []byte("good"), Peer: f.AddrB, QPN: 77, QKey: 7}
	for name, bad := range map[string]verbs.Datagram{
		"too long":   {Payload: make([]byte, a.MaxPayload()+1), Peer: f.AddrB},
		"no address": {Payload: []byte("x")},
		"a group":    {Payload: []byte("x"), Peer: netip.MustParseAddr("224.0.0.1")},
	} {
		if n, err := a.Send([]verbs.Datagram{good, bad, good}); n != 1 || err == nil {
			t.Errorf("Send of a datagram that is bad (%s) behind a good one: %d, %v; want 1 and an error", name, n, err)
		}
	}
	if _, err := f.A.OpenDatagrams(verbs.DatagramConfig{Local: f.AddrA, PKey: 0x8000}); err == nil {
		t.Error("the P_Key 0x8000 names no partition, but was taken")
	}
}

func datagramClose(t *testing.T, f Datagrams) {
	q, err := f.A.OpenDatagrams(verbs.DatagramConfig{Local: f.AddrA})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := q.Receive([]verbs.Datagram{{Payload: make([]byte, 10)}})
		ended <- err
	}()
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("Receive returned %v", err)
	}
	if _, err := q.Send([]verbs.Datagram{{Peer: f.AddrB}}); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("Send returned %v", err)
	}
	if err := q.Close(); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("the second Close returned %v", err)
	}
}

func datagramMembership(t *testing.T, f Datagrams) {
	full := openEnd(t, f.A, verbs.DatagramConfig{Local: f.AddrA, QKey: 7, PKey: 0x8001})
	limited := openEnd(t, f.A, verbs.DatagramConfig{Local: f.AddrA, QKey: 7, PKey: 0x0001})
	b := openEnd(t, f.B, verbs.DatagramConfig{Local: f.AddrB, QKey: 7, PKey: 0x0001})
	limited.to(b, []byte("from a limited member"), 7)
	b.settle(full, 7)
}
