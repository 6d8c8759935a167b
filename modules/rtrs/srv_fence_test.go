package rtrs

import (
	"bytes"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
)

// twoPaths connects a session with two paths.
func twoPaths(t *testing.T, net *loopback.Network) (a, b *rawPath) {
	a = newSession(t, net, 2, "s")
	return a, a.second(net, otherAddr).connect().info("s")
}

func TestFence_AnsweredAtOnceWhenNothingIsLeft(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		net := loopback.New()
		startServer(t, net, serve, mode)
		p := newSession(t, net, 2, "s")
		p.fence(0, 1, newUUID()) // a path that the server does not know
		p.expect(answer{0, 1, 0, false})
		p.fence(0, 1, p.req.SessUUID) // itself: its earlier life is over
		p.expect(answer{0, 1, 0, false})
		p.stillWorks()
	})
}

func TestFence_OfAWrongShapeIsEINVAL(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	p := newSession(t, net, 2, "s")
	for _, b := range [][]byte{{0x80, 0, 0, 0}, append(make([]byte, 15), 0x80, 0, 15, 0), append(make([]byte, 17), 0x80, 0, 16, 0)} {
		p.put(0, 1, 0, b, rtrswire.IOReqImm(p.shift, 1, len(b)-4))
		p.expect(answer{0, 1, int(syscall.EINVAL), false})
	}
}

func TestFence_UnreadRequestsAreDropped(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		net := loopback.New()
		park := startParking(t, net, mode)
		a, b := twoPaths(t, net)
		net.StallOneWay(clientAddr, serverAddr.Addr())
		for chunk := range 4 {
			a.write(1, chunk, nil, []byte("late"))
		}
		b.fence(0, 7, a.req.SessUUID)
		b.expect(answer{0, 7, 0, false})
		net.Resume(clientAddr, serverAddr.Addr())
		a.waitDown()
		park.empty(a, b)
		if n := len(park.s.Sessions()[0].Paths()); n != 1 {
			t.Errorf("%d paths after the fence", n)
		}
	})
}

func TestFence_WaitsForARequestInASlowConsumer(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		net := loopback.New()
		park := startParking(t, net, mode)
		a, b := twoPaths(t, net)
		a.write(1, 3, nil, []byte("slow"))
		op := park.take(a)
		b.fence(0, 7, a.req.SessUUID)
		a.waitDown()
		park.empty(a, b)
		if len(b.got) != 0 {
			t.Fatal("the fence is answered while the request is under way")
		}
		park.respond(op, 0)
		b.expect(answer{0, 7, 0, false})
		b.write(1, 3, nil, []byte("again")) // the chunk is free
		park.respond(park.take(b), 0)
		b.expect(answer{1, 3, 0, false})
	})
}

func TestFence_ThePathMayComeBack(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	a, b := twoPaths(t, net)
	b.fence(0, 7, a.req.SessUUID)
	b.expect(answer{0, 7, 0, false})
	again := newRawPath(t, net, 2)
	again.req = a.req
	again.req.ReconCnt++
	again.connect().info("s").stillWorks()
}

func TestFence_OfAPathThatIsConnecting(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	a := newSession(t, net, 2, "s")
	b := a.second(net, otherAddr).connect(0)
	a.fence(0, 1, b.req.SessUUID)
	a.expect(answer{0, 1, 0, false})
	eventually(t, "its connection to be closed", func() bool { b.pump(); return b.downs == 1 })
}

func TestFence_TwoPathsThatFenceEachOtherBothEnd(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve)
	for range 10 {
		a, b := twoPaths(t, net)
		a.fence(0, 1, b.req.SessUUID)
		b.fence(0, 2, a.req.SessUUID)
		eventually(t, "at least one of them to end", func() bool { a.pump(); b.pump(); return a.downs == 2 || b.downs == 2 })
		a.hangUp()
		b.hangUp()
		eventually(t, "the session to be gone", func() bool { return len(s.Sessions()) == 0 })
	}
}

// disk applies a request to its contents when the test asks for it.
func disk(d *[]byte, op *Op) { *d = bytes.Clone(op.User()) }

// A client without fences, such as the kernel's, sends a request again on
// another path while the first copy is still being executed. The second copy
// waits, so that the client's later data stay.
func TestR102_HeldRequest_NewerDataStay(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		net := loopback.New()
		park := startParking(t, net, mode)
		a, b := twoPaths(t, net)
		var content []byte
		a.write(1, 1, nil, []byte("old"))
		first := park.take(a)
		net.Stall(clientAddr, serverAddr.Addr()) // the path is lost, the server does not know
		b.write(1, 1, nil, []byte("old"))        // failover
		park.empty(b)
		if len(b.got) != 0 {
			t.Fatal("the copy is answered before the original has finished")
		}
		disk(&content, first)
		park.respond(first, 0)
		second := park.take(b)
		disk(&content, second)
		park.respond(second, 0)
		b.expect(answer{1, 1, 0, false})
		b.write(1, 2, nil, []byte("new"))
		third := park.take(b)
		disk(&content, third)
		park.respond(third, 0)
		b.expect(answer{1, 2, 0, false})
		park.empty(b)
		if string(content) != "new" {
			t.Errorf("the disk has %q", content)
		}
		net.Resume(clientAddr, serverAddr.Addr())
	})
}

func TestHeldRequestOfAClosedPathIsDropped(t *testing.T) {
	net := loopback.New()
	park := startParking(t, net)
	a, b := twoPaths(t, net)
	a.write(1, 1, nil, []byte("first"))
	op := park.take(a)
	b.write(1, 1, nil, []byte("second"))
	park.empty(b)
	b.hangUp()
	eventually(t, "the path to be gone", func() bool { return len(park.s.Sessions()[0].Paths()) == 1 })
	park.respond(op, 0)
	a.expect(answer{1, 1, 0, false})
	park.empty(a)
	a.write(1, 1, nil, []byte("third"))
	park.respond(park.take(a), 0)
	a.expect(answer{1, 1, 0, false})
}

func TestOnlyOneRequestIsHeldForAChunk(t *testing.T) {
	net := loopback.New()
	park := startParking(t, net)
	a, b := twoPaths(t, net)
	third := otherAddr.Next()
	c := a.second(net, third).connect().info("s")
	d := a.second(net, third.Next()).connect().info("s")
	a.write(1, 1, nil, []byte("first"))
	op := park.take(a)
	b.write(1, 1, nil, []byte("second"))
	park.empty(b)
	c.write(1, 1, nil, []byte("third")) // while one is held already
	c.waitDown()
	b.hangUp()
	eventually(t, "the path to be gone", func() bool { return len(park.s.Sessions()[0].Paths()) == 2 })
	d.write(1, 1, nil, []byte("fourth")) // takes the place of the lost one
	park.empty(d)
	park.respond(op, 0)
	a.expect(answer{1, 1, 0, false})
	held := park.take(d)
	if string(held.User()) != "fourth" {
		t.Errorf("held %q", held.User())
	}
	park.respond(held, 0)
	d.expect(answer{1, 1, 0, false})
}

// Two paths use the same chunks from two pollers at a time: all are served, one
// after the other.
func TestClaimsFromTwoPollersAtOnce(t *testing.T) {
	net := loopback.New()
	var busy [8]atomic.Int32
	startServer(t, net, func(op *Op) {
		if busy[op.Chunk()].Add(1) != 1 {
			t.Errorf("two requests have chunk %d", op.Chunk())
		}
		busy[op.Chunk()].Add(-1)
		op.Respond(0)
	})
	a := newSession(t, net, 3, "s")
	b := a.second(net, otherAddr).connect().info("s")
	for chunk := range 4 { // leaves its header there
		a.write(1, chunk, nil, []byte("a"))
		a.expect(answer{1, chunk, 0, false})
	}
	for range 300 {
		for chunk := range 4 {
			a.imm(1, rtrswire.IOReqImm(a.shift, chunk, 1))
			b.imm(2, rtrswire.IOReqImm(b.shift, chunk, 1))
		}
		for range 4 {
			if x := a.answer(); x.errno != 0 || x.cid != 1 {
				t.Fatalf("%+v", x)
			}
			if x := b.answer(); x.errno != 0 || x.cid != 2 {
				t.Fatalf("%+v", x)
			}
		}
	}
}
