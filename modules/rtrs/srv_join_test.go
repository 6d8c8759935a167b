package rtrs

import (
	"bytes"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
)

// rejoin makes a session again on the path like a, until the server lets it.
func (c *rawPath) rejoin(net *loopback.Network, like *rawPath) *rawPath {
	c.t.Helper()
	var p *rawPath
	eventually(c.t, "the session to be made again", func() bool {
		p = newRawPath(c.t, net, len(like.qps))
		p.req, p.src = like.req, like.src
		p.req.FirstConn = true
		for cid := range p.qps {
			rep, err := p.dial(cid, p.private(cid))
			if err != nil {
				p.hangUp()
				return false
			}
			p.takeRep(rep)
		}
		p.sendInfo(infoReq("s"))
		eventually(c.t, "an answer or the end", func() bool { p.pump(); return len(p.got) > 0 || p.downs > 0 })
		if p.downs > 0 {
			p.hangUp()
			return false
		}
		return true
	})
	return p.takeInfo()
}

// A client that has lost all paths gives the chunk of a request that still runs
// to another one, on the next path that it connects: as the kernel's does, at
// once. The operation that runs neither sees the bytes of the new request nor
// changes them.
func TestAChunkInUseIsGivenToNobody(t *testing.T) {
	for _, retired := range []bool{false, true} {
		for _, read := range []bool{false, true} {
			t.Run(fmt.Sprintf("retired %v, read %v", retired, read), func(t *testing.T) {
				both(t, func(t *testing.T, mode serverOption, _ bool) {
					net := loopback.New()
					limit := time.Hour
					if retired {
						limit = 50 * time.Millisecond
					}
					park := startParking(t, net, mode, retireAfter(limit))
					a := newSession(t, net, 2, "s")
					if read {
						a.read(1, 1, 5, []byte("disk 1"), false)
					} else {
						a.write(1, 1, []byte("disk1"), []byte("disk 1"))
					}
					op := park.take(a)
					a.hangUp()

					b := a.second(net, otherAddr).connect()
					b.sendInfo(infoReq("s"))
					if !retired {
						b.silent("while the operation runs")
						finish(op, read)
						park.respond(op, 0)
					}
					b.waitDown() // the session has ended
					b = a.rejoin(net, b)
					b.write(1, 1, []byte("DISK2"), []byte("disk 2"))
					other := park.take(b)
					if retired {
						finish(op, read)
						if !read && !bytes.Equal(op.Data(), []byte("disk1")) {
							t.Errorf("the retired WRITE brings %q to its disk", op.Data())
						}
						park.respond(op, 0)
					}
					if !bytes.Equal(other.Data(), []byte("DISK2")) {
						t.Errorf("the new WRITE brings %q", other.Data())
					}
					park.respond(other, 0)
					b.expect(answer{1, 1, 0, false})
					eventually(t, "the old memory to be freed", func() bool { _, _, alive := park.s.handler.counts(); return alive == 1 })
				})
			})
		}
	}
}

// finish is the effect of a disk on the chunk at the end of an operation.
func finish(op *Op, read bool) {
	if read {
		copy(op.mem, "disk1")
	}
}

// While another path is connected and answers, the client has lost nothing: a
// new path joins beside operations that run.
func TestAPathJoinsBesideOneThatAnswers(t *testing.T) {
	net := loopback.New()
	park := startParking(t, net)
	a := newSession(t, net, 2, "s")
	a.write(1, 1, nil, []byte("slow"))
	op := park.take(a)
	b := a.second(net, otherAddr).connect()
	b.sendInfo(infoReq("s"))
	b.silent("while the other path does not answer")
	eventually(t, "the path to join", func() bool { a.answerBeats(); b.pump(); return len(b.got) > 0 })
	b.takeInfo().stillWorksWith(park)

	// The requests that the client sends again on the new path wait, and a
	// third path does not wait for the first as long as one answers.
	a.hangUp()
	b.write(1, 1, nil, []byte("slow"))
	park.empty(b)
	c := a.second(net, otherAddr.Next()).connect()
	c.sendInfo(infoReq("s"))
	eventually(t, "the third path to join", func() bool { b.answerBeats(); c.pump(); return len(c.got) > 0 })
	c.takeInfo()
	park.respond(op, 0)
	again := park.take(b)
	park.respond(again, 0)
	b.expect(answer{1, 1, 0, false})
}

// An answer to an earlier heartbeat proves nothing about now.
func TestAnOldAnswerDoesNotVouch(t *testing.T) {
	net := loopback.New()
	park := startParking(t, net)
	a := newSession(t, net, 2, "s")
	path := park.s.Sessions()[0].paths[0]
	beat := func() {
		_ = path.conns[0].poller.Call(t.Context(), func() { path.hb.sendOn(path.conns[0].conn) })
	}
	beat()
	a.write(1, 1, nil, []byte("slow"))
	op := park.take(a)
	b := a.second(net, otherAddr).connect()
	b.sendInfo(infoReq("s"))
	eventually(t, "both heartbeats", func() bool { a.pump(); return len(a.got) == 2 })
	a.imm(0, 0x90000000)
	b.silent("after the answer to a heartbeat from before")
	a.imm(0, 0x90000000)
	b.takeInfo()
	a.got = nil
	park.respond(op, 0)
	a.expect(answer{1, 1, 0, false})
}

// The path that vouches may end before the other is connected: then it waits
// again, for the operations or for the end.
func TestAPathThatWaitsEndsWithTheLastOne(t *testing.T) {
	net := loopback.New()
	park := startParking(t, net, retireAfter(20*time.Millisecond), func(c *ServerConfig) { c.InfoTimeout = time.Hour })
	a := newSession(t, net, 2, "s")
	a.write(1, 1, nil, []byte("stuck"))
	op := park.take(a)
	b := a.second(net, otherAddr).connect()
	b.sendInfo(infoReq("s"))
	b.silent("while the other path does not answer")
	a.hangUp()
	b.waitDown()
	eventually(t, "the session to go", func() bool { return len(park.s.Sessions()) == 0 })
	park.respond(op, 0)
	eventually(t, "its memory to be freed", func() bool { _, _, alive := park.s.handler.counts(); return alive == 0 })
}

// A path that its client has lost without the server's notice holds up the next
// one for one interval, not until it is noticed by itself.
func TestAPathThatDoesNotVouchEnds(t *testing.T) {
	net := loopback.New()
	park := startParking(t, net, func(c *ServerConfig) { c.Timing.Heartbeat, c.Timing.HeartbeatMisses = 20*time.Millisecond, 1<<30 })
	a := newSession(t, net, 2, "s")
	a.write(1, 1, nil, []byte("slow"))
	op := park.take(a)
	b := a.second(net, otherAddr).connect()
	b.sendInfo(infoReq("s"))
	a.waitDown()
	park.respond(op, 0)
	b.waitDown() // the session has ended with the other path
	a.rejoin(net, b)
}

// A FENCE is not answered with 0 as long as an operation of the path runs.
func TestFence_OfAPathWithRetiredChunksIsEBUSY(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		net := loopback.New()
		park := startParking(t, net, mode, retireAfter(20*time.Millisecond))
		a, b := twoPaths(t, net)
		a.write(1, 3, nil, []byte("stuck"))
		op := park.take(a)
		for range 2 {
			b.fence(0, 7, a.req.SessUUID)
			b.expect(answer{0, 7, int(syscall.EBUSY), false})
		}
		b.write(1, 3, nil, []byte("stuck")) // the repetition waits
		park.empty(b)
		park.respond(op, 0)
		park.respond(park.take(b), 0)
		b.expect(answer{1, 3, 0, false})
		b.fence(0, 7, a.req.SessUUID)
		b.expect(answer{0, 7, 0, false})
	})
}
