package rtrs

import (
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func retireAfter(d time.Duration) serverOption { return func(c *ServerConfig) { c.RetireAfter = d } }

// A disk that does not answer holds up neither the path nor the session, and
// its chunk takes no other request.
func TestARequestThatDoesNotEndIsRetired(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		net := loopback.New()
		park := startParking(t, net, mode, retireAfter(20*time.Millisecond))
		a := newSession(t, net, 2, "s")
		b := a.second(net, otherAddr).connect().info("s")
		a.write(1, 1, nil, []byte("stuck"))
		op := park.take(a)
		a.hangUp()
		sess := park.s.Sessions()[0]
		eventually(t, "the path to go", func() bool { b.pump(); return len(sess.Paths()) == 1 })
		if n := sess.Retired(); n != 1 {
			t.Errorf("%d chunks are retired, want 1", n)
		}
		if sess.readers.Load() != 1 {
			t.Error("what is written to chunks is placed before it is verified")
		}

		b.write(1, 1, nil, []byte("again"))
		park.empty(b)
		b.write(1, 2, nil, []byte("other")) // another chunk
		other := park.take(b)
		park.respond(other, 0)

		park.respond(op, 0)
		again := park.take(b)
		if again.Chunk() != 1 || string(again.User()) != "again" {
			t.Errorf("chunk %d brings %q", again.Chunk(), again.User())
		}
		if n := sess.Retired(); n != 0 {
			t.Errorf("%d chunks are retired at the end", n)
		}
		if sess.readers.Load() != 0 {
			t.Error("what is written to chunks is verified first at the end, too")
		}
		park.respond(again, 0)
	})
}

// A path with retired chunks does not come back under its name, and a new one
// joins if another path proves that the client has not lost all of them.
func TestPathsThatJoinASessionWithRetiredChunks(t *testing.T) {
	net := loopback.New()
	park := startParking(t, net, retireAfter(20*time.Millisecond))
	a := newSession(t, net, 2, "s")
	b := a.second(net, otherAddr).connect().info("s")
	a.write(1, 1, nil, []byte("stuck"))
	op := park.take(a)
	a.hangUp()
	sess := park.s.Sessions()[0]
	eventually(t, "the path to go", func() bool { b.pump(); return len(sess.Paths()) == 1 })
	again := newRawPath(t, net, 2)
	again.req = a.req
	if got := again.refused(0, again.private(0)); got != -int(syscall.EBUSY) {
		t.Errorf("the path comes back: refused with %d", got)
	}
	c := a.second(net, clientAddr).connect()
	c.sendInfo(infoReq("s"))
	c.silent("while no other path has answered a heartbeat")
	eventually(t, "the path to join", func() bool { b.answerBeats(); c.pump(); return len(c.got) > 0 })
	c.takeInfo().stillWorksWith(park)
	c.hangUp()

	park.respond(op, 0)
	eventually(t, "nothing is retired", func() bool { b.pump(); return sess.Retired() == 0 })
	eventually(t, "the path to go", func() bool { return len(sess.Paths()) == 1 })
	again.connect().info("s")
}

// The last path may go too: the memory stays until the request has ended, and a
// new session of the client does not wait for that.
func TestASessionEndsWithoutItsRetiredRequests(t *testing.T) {
	net := loopback.New()
	park := startParking(t, net, retireAfter(20*time.Millisecond))
	a := newSession(t, net, 2, "s")
	a.write(1, 1, nil, []byte("stuck"))
	op := park.take(a)
	a.hangUp()
	eventually(t, "the session to go", func() bool { _, downs, _ := park.s.handler.counts(); return downs == 1 && len(park.s.Sessions()) == 0 })
	again := newSession(t, net, 2, "s")
	again.write(1, 1, nil, []byte("fresh"))
	fresh := park.take(again)
	if &fresh.mem[0] == &op.mem[0] {
		t.Error("the new session has the memory of the request that has not ended")
	}
	copy(op.Data(), "late") // late write of a disk
	if _, _, alive := park.s.handler.counts(); alive != 2 {
		t.Errorf("%d memories, want that of the old session too", alive)
	}
	park.respond(op, 0)
	eventually(t, "the old memory to be freed", func() bool { _, _, alive := park.s.handler.counts(); return alive == 1 })
	park.respond(fresh, 0)
}

// guardedMR is a region that tells what guards it.
type guardedMR struct {
	verbs.MR
	readers *atomic.Int32
}

func (m *guardedMR) Guard(readers *atomic.Int32) { m.readers = readers }

func TestRetiredRequestsGuardTheRegionsOfASession(t *testing.T) {
	var s SrvSession
	mr := &guardedMR{}
	if s.guard(mr); mr.readers != &s.readers {
		t.Error("the region has another guard")
	}
}
