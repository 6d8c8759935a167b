package main

import (
	"io"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// tries counts the turns of n that read the socket without need.
func (b *bench) tries(n int) (tried int) {
	for range n {
		b.c.readable = false
		b.q.markReadable()
		if b.c.readable {
			tried++
		}
	}
	b.c.readable = false
	return tried
}

// A client that has all its requests under way is left alone, but not for long.
func TestLook_AtAClientThatWaits(t *testing.T) {
	b := newBench(t, 32, 4096, false)
	b.settle()
	if n := b.tries(4 * saturatedEvery); n != 4*saturatedEvery {
		t.Errorf("an idle client is looked at in %d of %d turns", n, 4*saturatedEvery)
	}
	for i := range uint64(3) { // the host answers none of them
		b.peer.Write(command(nbdwire.CmdRead, 0, i, 0, 4096))
		for range saturatedEvery {
			b.q.Poll()
		}
		if n := b.q.stats.requests.Load(); n != i+1 {
			t.Fatalf("%d of %d requests are taken", n, i+1)
		}
	}
	if n := b.tries(4 * saturatedEvery); n != 4 {
		t.Errorf("a client that waits is looked at in %d of %d turns", n, 4*saturatedEvery)
	}
	b.c.unanswered--
	if n := b.tries(4 * saturatedEvery); n != 4*saturatedEvery {
		t.Errorf("a client with an answer is looked at in %d of %d turns", n, 4*saturatedEvery)
	}
	b.c.unanswered++
}

// How many requests a client has under way is forgotten in time.
func TestLook_AppetiteFades(t *testing.T) {
	var a inFlightEstimate
	a.recordUnanswered(16)
	for i := range 2 * inFlightSpan {
		if a.recordUnanswered(1); a.atEstimate(1) != (i == 2*inFlightSpan-1) {
			t.Fatalf("after %d single requests: saturated by one is %t", i+1, a.atEstimate(1))
		}
	}
	if a.atEstimate(0) {
		t.Error("a client without requests is saturated")
	}
}

// A payload that met an empty socket is left to its sender for a turn, and
// the pump does not sleep meanwhile.
func TestLook_AtAPayloadThatComes(t *testing.T) {
	b := newBench(t, 32, 64<<10, false)
	b.peer.Write(append(command(nbdwire.CmdWrite, 0, 1, 0, 512<<10), make([]byte, 1000)...))
	b.q.Poll()
	if b.q.LargeIO() {
		t.Error("the pump sleeps while a payload comes in")
	}
	if n := b.tries(1); n != 0 {
		t.Error("the socket that was emptied right now is read again")
	}
	if n := b.tries(3); n != 3 {
		t.Errorf("the socket is looked at in %d of 3 turns", n)
	}
	rest := 512<<10 - 1000
	for rest > 0 {
		n := min(rest, 32<<10)
		b.peer.Write(make([]byte, n))
		rest -= n
		b.settle()
	}
	if _, err := io.ReadFull(b.peer, make([]byte, nbdwire.SimpleSize)); err != nil {
		t.Fatal(err)
	}
	if !b.q.LargeIO() {
		t.Error("the pump spins after a large write")
	}
}

// While several large requests are under way there is more to come; after the
// last one there is not.
func TestLook_AfterLargeReads(t *testing.T) {
	b := newBench(t, 32, 64<<10, true)
	for left := 2; left >= 0; left-- {
		b.q.large, b.c.unanswered = true, left
		if sleeps := b.q.LargeIO(); sleeps != (left < 2) {
			t.Errorf("%d large reads under way: the pump goes to sleep: %t", left, sleeps)
		}
	}
}

// join adds a connection to the bench's queue.
func (b *bench) join() (*conn, net.Conn) {
	b.exp.addOpener()
	fd, peer := pair(b.t)
	c := newConn(fd, "test", handshakeResult{exp: b.exp}, b.exp.assignShare([]*queue{b.q}))
	b.q.addConn(c)
	b.t.Cleanup(func() { peer.Close() })
	return c, peer
}

// Connections that are quiet, or many, are not tried, and heard all the same.
func TestLook_AtOthersByEpoll(t *testing.T) {
	b := newBench(t, 32, 4096, false)
	ask := func(peer net.Conn) {
		t.Helper()
		before := b.q.stats.requests.Load()
		peer.Write(command(nbdwire.CmdRead, 0, 1, 0, 512))
		for range coldEvery {
			b.q.Poll()
		}
		if b.q.stats.requests.Load() != before+1 {
			t.Fatal("a request is not seen")
		}
		b.settle()
		if _, err := io.ReadFull(peer, make([]byte, nbdwire.SimpleSize+512)); err != nil {
			t.Fatal(err)
		}
	}
	cold, peer := b.join()
	for range coldAfter + 1 {
		b.c.quiet = 0 // the other one is in use
		b.q.Poll()
	}
	if n := cold.quiet; n != coldAfter {
		t.Errorf("%d vain tries, want %d", n, coldAfter)
	}
	ask(peer)
	if cold.quiet >= coldAfter {
		t.Error("a connection in use stays cold")
	}
	for range fewConns {
		b.join()
	}
	b.settle()
	if n := b.tries(8); n != 0 {
		t.Errorf("one of many connections is tried in %d of 8 turns", n)
	}
	ask(peer)
	ask(b.peer)
}

// Bytes read by a try are no reason to stay awake, even if epoll reports them.
func TestArm_ForgetsWhatWasRead(t *testing.T) {
	b := newBench(t, 32, 4096, false)
	b.settle()
	b.peer.Write(command(nbdwire.CmdRead, 0, 1, 0, 4096))
	b.settle()
	if !b.q.Arm() {
		t.Error("an idle queue does not sleep")
	}
	b.q.Disarm()
}

// One call takes a large reply: the send buffer of a unix socket is widened.
func TestSendBufferIsWide(t *testing.T) {
	size := func(fd int) int {
		n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	fd, peer := pair(t)
	defer peer.Close()
	defer unix.Close(fd)
	usual := size(fd)
	r := newRig(t, rigConfig{})
	r.connect(false)
	got := 0
	eventually(t, "the connection is there", func() bool {
		r.onQueue(0, func(q *queue) {
			if len(q.conns) == 1 {
				got = size(q.conns[0].fd)
			}
		})
		return got > 0
	})
	if got <= usual {
		t.Errorf("%d bytes, as usual (%d)", got, usual)
	}
}
