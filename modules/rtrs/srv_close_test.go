package rtrs

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func TestR104_AnyConnectionsEndClosesThePathAndTheLastPathTheSession(t *testing.T) {
	for cid := range 3 {
		t.Run(fmt.Sprintf("cid %d", cid), func(t *testing.T) {
			net := loopback.New()
			s := startServer(t, net, serve)
			a := newSession(t, net, 3, "s")
			b := a.second(net, otherAddr).connect().info("s")
			net.CutConn(b.qps[cid].LocalAddr(), b.qps[cid].RemoteAddr())
			b.waitDown()
			a.stillWorks()
			eventually(t, "the path to be gone", func() bool { return len(s.Sessions()[0].Paths()) == 1 })
			if _, downs, alive := s.handler.counts(); downs != 0 || alive != 1 {
				t.Fatalf("%d sessions down, %d memories", downs, alive)
			}
			net.CutConn(a.qps[cid].LocalAddr(), a.qps[cid].RemoteAddr())
			a.waitDown()
			eventually(t, "the session to be gone", func() bool {
				_, downs, alive := s.handler.counts()
				return downs == 1 && alive == 0 && len(s.Sessions()) == 0
			})
		})
	}
}

func TestR104_SessionDownComesAfterTheLastRequest(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		net := loopback.New()
		park := startParking(t, net, mode)
		p := newSession(t, net, 2, "s")
		p.write(1, 1, nil, []byte("u"))
		op := park.take(p)
		p.hangUp()
		eventually(t, "the path to close", func() bool { return park.s.Sessions()[0].Paths()[0].State == SrvPathClosing })
		for range 20 {
			_ = park.s.cfg.Pollers[op.Poller()].Call(t.Context(), func() {})
		}
		if _, downs, alive := park.s.handler.counts(); downs != 0 || alive != 1 {
			t.Fatalf("with a request under way: %d down, %d memories", downs, alive)
		}
		park.respond(op, 0)
		eventually(t, "the session to be gone", func() bool { _, downs, alive := park.s.handler.counts(); return downs == 1 && alive == 0 })
	})
}

func TestR011_R105_ReconnectIsRefusedUntilTheOldPathIsGone(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve)
	s.handler.downBlocked = make(chan struct{})
	p := newSession(t, net, 2, "s")
	p.hangUp()
	eventually(t, "the path to close", func() bool { return s.Sessions()[0].Paths()[0].State == SrvPathClosing })
	again := newRawPath(t, net, 2)
	again.req = p.req
	again.req.ReconCnt = 2
	if got := again.refused(0, again.private(0)); got != -int(syscall.ECONNRESET) {
		t.Errorf("same path: refused with %d", got)
	}
	other := newRawPath(t, net, 2)
	other.req.PathsUUID = p.req.PathsUUID
	if got := other.refused(0, other.private(0)); got != -int(syscall.EEXIST) {
		t.Errorf("R-013 same addresses: refused with %d", got)
	}
	close(s.handler.downBlocked)
	eventually(t, "the path to be gone", func() bool { return len(s.Sessions()) == 0 })
	again.connect().info("s").stillWorks()
	if ups, _, _ := s.handler.counts(); ups != 2 {
		t.Errorf("%d sessions up, want 2", ups)
	}
}

// A request for connection 0 of a connected path is refused. If it is of a later
// attempt, its client has lost the path: the attempt is accepted, and the path ends
// when the attempt has succeeded, and not before.
func TestR011_LaterAttemptSucceedsAConnectedPath(t *testing.T) {
	for _, attempt := range []uint16{1, 0xffff} { // the last one is followed by 0
		net := loopback.New()
		s := startServer(t, net, serve)
		p := newRawPath(t, net, 2)
		p.req.ReconCnt = attempt
		p.connect().info("s").stillWorks()
		again := newRawPath(t, net, 2)
		again.req = p.req
		for _, c := range []struct {
			name     string
			cid      int
			reconCnt uint16
		}{
			{"the same attempt", 0, attempt},
			{"an earlier attempt", 0, attempt - 1},
			{"another connection of a later attempt", 1, attempt + 1},
		} {
			again.req.ReconCnt = c.reconCnt
			if got := again.refused(c.cid, again.private(c.cid)); got != -int(syscall.ECONNRESET) {
				t.Errorf("%s: refused with %d", c.name, got)
			}
			p.stillWorks()
		}
		asks := newRawPath(t, net, 2)
		asks.req = p.req
		asks.req.ReconCnt = attempt + 1
		asks.connect()
		p.stillWorks() // whoever only asks ends no path
		asks.hangUp()
		eventually(t, "the attempt to be gone", func() bool { return len(s.Sessions()[0].Paths()) == 1 })
		p.stillWorks()
		again.req.ReconCnt = attempt + 2
		again.connect().info("s").stillWorks()
		if paths := s.Sessions()[0].Paths(); len(paths) != 1 || paths[0].State != SrvPathConnected {
			t.Errorf("the session has paths %+v", paths)
		}
		if ups, downs, _ := s.handler.counts(); ups != 1 || downs != 0 {
			t.Errorf("the session came up %d times and went down %d times", ups, downs)
		}
	}
}

func TestR011_ConnectionThatComesWhileItsPathClosesIsRefused(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve)
	p := newRawPath(t, net, 3).connect(1)
	path := func() *srvPath {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.sessions[p.req.PathsUUID].paths[0]
	}()
	held, hold := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(hold) })
	t.Cleanup(release)
	path.conns[1].poller.Do(func() { close(held); <-hold }) // its connection does not end meanwhile
	<-held
	path.close(ErrClosed)
	if got := p.refused(0, p.private(0)); got != -int(syscall.ECONNRESET) {
		t.Errorf("refused with %d", got)
	}
	release()
	eventually(t, "the path to be gone", func() bool { _, _, alive := s.handler.counts(); return alive == 0 })
}

// A path that joins while the last one is closing ends with it: its client may
// not know of that end, and would go on with state that the session has
// dropped. The next attempt brings the session up again: if no operation of the
// last one runs in its memory any more.
func TestPathThatJoinsWhileTheLastOneCloses(t *testing.T) {
	for _, c := range []struct {
		name string
		ops  bool
	}{
		{"nothing runs", false},
		{"an operation runs", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			net := loopback.New()
			park := startParking(t, net)
			s := park.s
			s.handler.downBlocked = make(chan struct{})
			a := newSession(t, net, 1, "s")
			var op *Op
			if c.ops {
				a.write(0, 1, nil, []byte("slow"))
				op = park.take(a)
			}
			b := a.second(net, otherAddr).connect()
			a.hangUp()
			if !c.ops {
				s.handler.waitGoingDown(t)
			}
			b.sendInfo(infoReq("s"))
			if c.ops {
				b.silent("while an operation of the other path runs")
				park.respond(op, 0)
			}
			s.handler.waitGoingDown(t)
			close(s.handler.downBlocked)
			b.waitDown()
			again := a.second(net, otherAddr)
			again.req.FirstConn = true
			eventually(t, "the path's last life to be over", func() bool { _, _, alive := s.handler.counts(); return alive == 0 })
			again.connect().info("s").stillWorksWith(park)
			if ups, downs, alive := s.handler.counts(); ups != 2 || downs != 1 || alive != 1 {
				t.Errorf("%d up, %d down, %d memories", ups, downs, alive)
			}
		})
	}
}

func TestR107_BothEndsMayDisconnectAtOnce(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve)
	for round := range 20 {
		p := newSession(t, net, 3, "s")
		id := s.Sessions()[0].Paths()[0].ID
		done := make(chan error)
		go func() { done <- s.DisconnectPath("s", id) }()
		for _, qp := range p.qps {
			qp.Disconnect()
		}
		if err := <-done; err != nil && !errors.Is(err, syscall.ENOENT) {
			t.Fatalf("round %d: %v", round, err)
		}
		p.waitDown()
		eventually(t, "the session to be gone", func() bool { return len(s.Sessions()) == 0 })
	}
}

func TestR107_DisconnectPathEndsEveryConnection(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve)
	a := newSession(t, net, 3, "s")
	b := a.second(net, otherAddr).connect().info("s")
	if err := s.DisconnectPath("s", 2); err != nil {
		t.Fatal(err)
	}
	b.waitDown()
	a.stillWorks()
	for name, err := range map[string]error{
		"unknown session": s.DisconnectPath("nobody", 1),
		"unknown path":    s.Sessions()[0].DisconnectPath(7),
	} {
		if !errors.Is(err, syscall.ENOENT) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSessionClose(t *testing.T) {
	net := loopback.New()
	park := startParking(t, net)
	a := newSession(t, net, 2, "s")
	b := a.second(net, otherAddr).connect().info("s")
	a.write(1, 0, nil, []byte("u"))
	op := park.take(a, b)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	sess := park.s.Sessions()[0]
	if err := sess.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with a request under way: %v", err)
	}
	park.respond(op, 0)
	if err := sess.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if _, downs, alive := park.s.handler.counts(); downs != 1 || alive != 0 {
		t.Errorf("%d down, %d memories", downs, alive)
	}
}

func TestClosedServerRefusesConnections(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve)
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Listen(s.dev, serverAddr); !errors.Is(err, ErrClosed) {
		t.Errorf("Listen: %v", err)
	}
	p := newRawPath(t, net, 1)
	if _, err := p.dial(0, p.private(0)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial: %v", err)
	}
}

func TestPathStuckInConnectingIsClosed(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve)
	p := newRawPath(t, net, 3).connect(0, 1)
	path := func() *srvPath {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.sessions[p.req.PathsUUID].paths[0]
	}()
	if st := path.State(); st != SrvPathConnecting {
		t.Fatalf("%s before the time", st)
	}
	if !path.infoTimer.Reset(time.Millisecond) {
		t.Fatal("no timer was running")
	}
	eventually(t, "both connections to be closed", func() bool { p.pump(); return p.downs == 2 })
	eventually(t, "the memory to be freed", func() bool { _, _, alive := s.handler.counts(); return alive == 0 })
}

func TestR091_HeartbeatIsAnsweredAtOnce(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	p := newSession(t, net, 2, "s")
	wire := tapServer(net)
	p.imm(0, rtrswire.HeartbeatImm)
	wc := p.recv()
	if rtrswire.Imm(wc.Imm) != rtrswire.HeartbeatAckImm || wc.QP != 0 || wc.ByteLen != 0 {
		t.Errorf("answer %+v", wc.WC)
	}
	if e := wire.take(); len(e) != 1 || e[0].Op != verbs.OpWriteImm || e[0].Imm != 0x90000000 || e[0].Len != 0 {
		t.Errorf("sent %+v", e)
	}
}

func TestR090_ServerSendsHeartbeatsOnCid0AndMeasures(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve, heartbeatEvery(20*time.Millisecond, 500))
	p := newSession(t, net, 2, "s")
	wire := tapServer(net)
	beats := 0
	eventually(t, "heartbeats", func() bool {
		p.pump()
		for _, m := range p.got {
			if m.Imm != uint32(rtrswire.HeartbeatImm) || m.QP != 0 {
				t.Fatalf("got %+v", m.WC)
			}
			beats++
			p.imm(0, rtrswire.HeartbeatAckImm)
		}
		p.got = nil
		return beats >= 3
	})
	for _, e := range wire.take() {
		if e.Op != verbs.OpWriteImm || e.Imm != 0x80000000 || e.Len != 0 || e.RemoteAddr != 0 || e.RKey != 0 {
			t.Errorf("sent %+v", e)
		}
	}
	eventually(t, "a latency", func() bool { return s.Sessions()[0].Paths()[0].Stats.Latency > 0 })
}

func TestR092_R093_SilentClientIsGivenUp(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve, heartbeatEvery(20*time.Millisecond, 50))
	start := time.Now()
	quiet := newSession(t, net, 2, "quiet")
	busy := newRawPath(t, net, 2)
	busy.src = otherAddr
	busy.connect().info("busy")
	for len(s.Sessions()) > 1 {
		if time.Since(start) > 10*time.Second {
			t.Fatal("the silent client is still there")
		}
		busy.write(1, 0, nil, []byte("u")) // never answers a heartbeat
		eventually(t, "an answer", func() bool {
			busy.pump()
			for _, m := range busy.got {
				if m.HasImm && rtrswire.Imm(m.Imm).Type() == rtrswire.ImmIORsp {
					if len(m.data) == rtrswire.RkeyRspLen {
						busy.bufs[0].rkey = rtrswire.RkeyRsp(m.data).Rkey()
					}
					busy.got = nil
					return true
				}
			}
			return false
		})
	}
	if d := time.Since(start); d < 52*20*time.Millisecond {
		t.Errorf("given up after %s: before 52 intervals", d)
	}
	quiet.waitDown()
	if s.Sessions()[0].Name() != "busy" || busy.downs != 0 {
		t.Error("the busy one is gone too")
	}
}

func TestServerTimersChangeAtRunTime(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve, heartbeatEvery(time.Second, 50))
	p := newSession(t, net, 2, "s")
	timing := s.Timing()
	timing.Heartbeat = 0
	if err := s.SetTiming(timing); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("heartbeat 0: %v", err)
	}
	timing.Heartbeat, timing.HeartbeatMisses = 5*time.Millisecond, 2
	if err := s.SetTiming(timing); err != nil {
		t.Fatal(err)
	}
	p.waitDown() // it never answers
}

// A chunk that was used on a path may not be used again for hours; meanwhile
// the path may end, and must not stay in memory.
func TestFreeChunkKeepsNoPath(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve)
	p := newSession(t, net, 2, "s")
	p.stillWorks()
	for _, sess := range s.sessions {
		for i := range sess.ops {
			op := &sess.ops[i]
			eventually(t, "the chunk to be free", func() bool { return op.owner.Load() == 0 })
			if op.conn != nil {
				t.Errorf("chunk %d is free and keeps a connection of its last path", i)
			}
		}
	}
}

// TestTheEndOfAPathHasItsCause tells a client that leaves from one that is lost.
func TestTheEndOfAPathHasItsCause(t *testing.T) {
	for name, end := range map[string]func(*loopback.Network, *rawPath){
		"left": func(_ *loopback.Network, c *rawPath) { c.hangUp() },
		"lost": func(net *loopback.Network, c *rawPath) {
			net.CutConn(c.qps[0].LocalAddr(), c.qps[0].RemoteAddr())
			c.waitDown()
		},
	} {
		t.Run(name, func(t *testing.T) {
			net := loopback.New()
			s := startServer(t, net, serve)
			c := newSession(t, net, 2, "s")
			s.mu.Lock()
			var p *srvPath
			for _, sess := range s.sessions {
				p = sess.paths[0]
			}
			s.mu.Unlock()
			end(net, c)
			<-p.closed
			if !errors.Is(p.cause, ErrConnLost) || errors.Is(p.cause, errLeft) != (name == "left") {
				t.Errorf("the cause: %v", p.cause)
			}
		})
	}
}
