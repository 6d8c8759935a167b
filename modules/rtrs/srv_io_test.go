package rtrs

import (
	"bytes"
	"fmt"
	"sync"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// parking keeps ops until the test answers them.
type parking struct {
	s  *testServer
	ch chan *Op
}

func startParking(t testing.TB, net *loopback.Network, opts ...serverOption) *parking {
	p := &parking{ch: make(chan *Op, 64)}
	p.s = startServer(t, net, func(op *Op) { p.ch <- op }, opts...)
	return p
}

// take waits for an op to arrive at the consumer, while paths poll.
func (p *parking) take(paths ...*rawPath) *Op {
	p.s.t.Helper()
	var op *Op
	eventually(p.s.t, "a request at the consumer", func() bool {
		for _, c := range paths {
			c.pump()
		}
		select {
		case op = <-p.ch:
		default:
		}
		return op != nil
	})
	return op
}

// empty checks that no op arrives for a while.
func (p *parking) empty(paths ...*rawPath) {
	p.s.t.Helper()
	for range 20 {
		for _, c := range paths {
			c.pump()
		}
		for _, poller := range p.s.cfg.Pollers {
			_ = poller.Call(p.s.t.Context(), func() {})
		}
	}
	select {
	case op := <-p.ch:
		p.s.t.Fatalf("the consumer got a request for chunk %d", op.Chunk())
	default:
	}
}

// respond answers op on its owner.
func (p *parking) respond(op *Op, errno int) {
	_ = p.s.cfg.Pollers[op.Poller()].Call(p.s.t.Context(), func() { op.Respond(errno) })
}

func TestR059_WhatTheConsumerSees(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		net := loopback.New()
		park := startParking(t, net, mode)
		p := newSession(t, net, 3, "name")
		data := bytes.Repeat([]byte("w"), 3000)
		for _, c := range []struct {
			name                    string
			send                    func()
			read                    bool
			chunk, dataLen, replyTo int
			user                    string
			poller                  int
		}{
			{"WRITE", func() { p.write(1, 3, data, []byte("hello")) }, false, 3, 3000, 0, "hello", 0},
			{"WRITE without data", func() { p.write(2, 4, nil, []byte("hello")) }, false, 4, 0, 0, "hello", 1},
			{"WRITE without anything", func() { p.write(0, 4, nil, nil) }, false, 4, 0, 0, "", 0},
			{"READ", func() { p.read(2, 5, 512, []byte("usr"), true) }, true, 5, 512, 512, "usr", 1},
			{"READ without descriptor", func() { p.read(1, 5, 0, []byte("usr"), false) }, true, 5, 0, 0, "usr", 0},
			{"longest user message", func() { p.write(1, 5, nil, bytes.Repeat([]byte("u"), 4092)) }, false, 5, 0, 0, string(bytes.Repeat([]byte("u"), 4092)), 0},
			{"short again", func() { p.write(1, 5, nil, []byte("hello")) }, false, 5, 0, 0, "hello", 0},
		} {
			c.send()
			op := park.take(p)
			if op.IsRead() != c.read || op.Chunk() != c.chunk || op.DataLen() != c.dataLen || len(op.Data()) != c.dataLen ||
				op.ReplyLen() != c.replyTo || string(op.User()) != c.user || op.Poller() != c.poller || op.Session().Name() != "name" {
				t.Errorf("%s: read %v chunk %d data %d/%d reply %d user %q poller %d", c.name, op.IsRead(), op.Chunk(), op.DataLen(), len(op.Data()), op.ReplyLen(), op.User(), op.Poller())
			}
			if !c.read && !bytes.Equal(op.Data(), data[:c.dataLen]) {
				t.Errorf("%s: data differ", c.name)
			}
			if c.dataLen > 0 && &op.Data()[0] != &op.Session().Memory().Bytes()[c.chunk*8192] {
				t.Errorf("%s: data are not in the session's memory", c.name)
			}
			park.respond(op, 0)
			if a := p.answer(); a.chunk != c.chunk || a.errno != 0 {
				t.Errorf("%s: answer %+v", c.name, a)
			}
		}
	})
}

// The client can write to the chunk of a request that is under way; the message
// that was checked does not change any more.
func TestUserMessageIsAPrivateCopy(t *testing.T) {
	net := loopback.New()
	park := startParking(t, net, plainKeys)
	p := newSession(t, net, 3, "s")
	p.write(1, 4, []byte("data"), []byte("hello"))
	op := park.take(p)
	clear(op.Session().Memory().Bytes()[4*8192:][:8192])
	if got := string(op.User()); got != "hello" {
		t.Errorf("the message now says %q", got)
	}
	park.respond(op, 0)
}

// sent describes the server's messages, one word per work request.
func sent(events []loopback.Event) (s string) {
	names := map[verbs.Opcode]string{
		verbs.OpWrite: "write", verbs.OpRegMR: "reg", verbs.OpSendInv: "inv", verbs.OpLocalInv: "localinv",
		verbs.OpWriteImm: "writeimm", verbs.OpSendImm: "sendimm", verbs.OpSend: "send",
	}
	for i, e := range events {
		if i > 0 {
			s += " "
		}
		s += names[e.Op]
	}
	return s
}

func TestR070_R071_R072_R074_R076_AnswersOnTheWire(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, newRkey bool) {
		for _, c := range []struct {
			name         string
			send         func(p *rawPath)
			errno        int
			plain, rkeys string
			imm          uint32
		}{
			{"WRITE", func(p *rawPath) { p.write(1, 2, []byte("data"), []byte("u")) }, 0,
				"writeimm", "localinv reg sendimm", 0x10000002},
			{"WRITE that fails", func(p *rawPath) { p.write(1, 2, []byte("data"), []byte("u")) }, int(syscall.EIO),
				"writeimm", "localinv reg sendimm", 0x10280002},
			{"READ with invalidate", func(p *rawPath) { p.read(1, 2, 100, []byte("u"), true) }, 0,
				"write inv writeimm", "localinv write reg inv sendimm", 0x20000002},
			{"R-071 READ with invalidate that fails", func(p *rawPath) { p.read(1, 2, 100, []byte("u"), true) }, int(syscall.ENOENT),
				"inv writeimm", "localinv reg inv sendimm", 0x20100002},
			{"R-072 READ without invalidate", func(p *rawPath) { p.read(1, 2, 100, []byte("u"), false) }, 0,
				"write writeimm", "localinv write reg sendimm", 0x10000002},
			{"READ without descriptor", func(p *rawPath) { p.read(1, 2, 0, []byte("u"), false) }, 0,
				"writeimm", "localinv reg sendimm", 0x10000002},
			{"READ without descriptor that wants invalidation", func(p *rawPath) {
				b := make([]byte, 8)
				rtrswire.PutReadHdr(b, 0)
				b[4] = rtrswire.NeedInval
				p.put(1, 2, 0, b, rtrswire.IOReqImm(p.shift, 2, 0))
			}, 0, "writeimm", "localinv reg sendimm", 0x10000002},
			{"admin request on cid 0", func(p *rawPath) { p.read(0, 2, 36, []byte("u"), true) }, 0,
				"write inv writeimm", "localinv write reg inv sendimm", 0x20000002},
		} {
			t.Run(c.name, func(t *testing.T) {
				net := loopback.New()
				startServer(t, net, func(op *Op) {
					for i := range op.Data() {
						op.Data()[i] = 'r'
					}
					op.Respond(c.errno)
				}, mode)
				p := newSession(t, net, 2, "s")
				old := p.bufs[2].rkey
				wire := tapServer(net)
				c.send(p)
				a := p.answer()
				if a.chunk != 2 || a.errno != c.errno {
					t.Errorf("answer %+v", a)
				}
				events, want := wire.take(), c.plain
				if newRkey {
					want = c.rkeys
				}
				if got := sent(events); got != want {
					t.Fatalf("sent %q, want %q", got, want)
				}
				checkAnswer(t, p, events, old, c.imm)
			})
		}
	})
}

// checkAnswer checks the fields of the work requests of an answer about chunk 2.
func checkAnswer(t *testing.T, p *rawPath, events []loopback.Event, old, imm uint32) {
	for _, e := range events {
		switch e.Op {
		case verbs.OpLocalInv:
			if e.RKey != old {
				t.Errorf("invalidates %#x, want %#x", e.RKey, old)
			}
		case verbs.OpRegMR:
			if want := verbs.NextKey(old); e.RKey != want {
				t.Errorf("registers %#x, want %#x", e.RKey, want)
			}
		case verbs.OpWrite:
			mr := p.replies[2]
			if e.RemoteAddr != mr.Addr() || e.RKey != mr.RKey() || !bytes.Equal(e.Data, bytes.Repeat([]byte("r"), e.Len)) {
				t.Errorf("writes %d bytes %x to %#x, key %#x", e.Len, e.Data, e.RemoteAddr, e.RKey)
			}
			if !bytes.Equal(p.reply[2*p.chunk:][:e.Len], e.Data) || p.reply[2*p.chunk+e.Len] != 0 {
				t.Error("the reply's memory differs")
			}
		case verbs.OpSendInv:
			if e.RKey != p.replies[2].RKey() || e.Len != 0 {
				t.Errorf("invalidates key %#x with %d bytes", e.RKey, e.Len)
			}
		case verbs.OpWriteImm:
			if e.Imm != imm || e.Len != 0 {
				t.Errorf("final %#08x with %d bytes, want %#08x", e.Imm, e.Len, imm)
			}
		case verbs.OpSendImm:
			want := make(rtrswire.RkeyRsp, rtrswire.RkeyRspLen)
			want.Put(2, verbs.NextKey(old))
			if e.Imm != imm || !bytes.Equal(e.Data, want) {
				t.Errorf("final %#08x with %x, want %#08x with %x", e.Imm, e.Data, imm, []byte(want))
			}
		}
	}
}

func TestR076_KeysRotateWithEachUseAndOldOnesAreDead(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	p := newSession(t, net, 1, "s")
	first := p.bufs[3].rkey
	for i := range 300 { // past the wrap of the low byte
		old := p.bufs[3].rkey
		p.write(0, 3, []byte("x"), nil)
		p.expect(answer{0, 3, 0, false})
		if got := p.bufs[3].rkey; got != verbs.NextKey(old) || got>>8 != first>>8 {
			t.Fatalf("use %d: key %#x after %#x", i, got, old)
		}
	}
	p.bufs[3].rkey--
	p.write(0, 3, []byte("x"), nil)
	p.waitDown() // refused by the fabric
}

func TestR070_ReplyLenIsTheDescriptorsNotDataLen(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		net := loopback.New()
		startServer(t, net, func(op *Op) {
			copy(op.Session().Memory().Bytes()[op.Chunk()*8192:][:op.ReplyLen()], bytes.Repeat([]byte("z"), op.ReplyLen()))
			op.Respond(0)
		}, mode)
		p := newSession(t, net, 1, "s")
		b := make([]byte, rtrswire.MaxReqHdrLen)
		rtrswire.PutReadDescHdr(b, 0, false, p.desc(1, 4096))
		p.put(0, 1, 512, b, rtrswire.IOReqImm(p.shift, 1, 512))
		p.expect(answer{0, 1, 0, false})
		if got := bytes.Count(p.reply[p.chunk:2*p.chunk], []byte("z")); got != 4096 {
			t.Errorf("%d bytes arrived, want 4096", got)
		}
	})
}

func TestRequestsThatCloseThePath(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		for _, c := range []struct {
			name string
			send func(p *rawPath)
		}{
			{"R-060 buffer id equals queue depth", func(p *rawPath) { p.imm(1, rtrswire.IOReqImm(p.shift, 6, 0)) }},
			{"R-060 offset equals chunk size", func(p *rawPath) { p.imm(1, rtrswire.IOReqImm(p.shift, 0, 8192)) }},
			{"R-061 header type 9", func(p *rawPath) { p.put(1, 0, 0, []byte{9, 0, 0, 0}, 0) }},
			{"R-061 header type 0", func(p *rawPath) { p.put(1, 0, 0, []byte{0, 0, 0, 0}, 0) }},
			{"header cut off by the end of the chunk", func(p *rawPath) {
				p.put(1, 0, 8190, []byte{2, 0}, rtrswire.IOReqImm(p.shift, 0, 8190))
			}},
			{"READ header cut off by the end of the chunk", func(p *rawPath) {
				p.put(1, 0, 8176, []byte{3, 0, 0, 0, 1, 0, 1, 0}, rtrswire.IOReqImm(p.shift, 0, 8176))
			}},
			{"R-062 usr_len above offset", func(p *rawPath) { p.put(1, 0, 0, []byte{2, 0, 1, 0}, 0) }},
			{"R-062 two descriptors", func(p *rawPath) {
				p.put(1, 0, 0, []byte{3, 0, 0, 0, 0, 0, 2, 0}, 0)
			}},
			{"user message longer than headers may be", func(p *rawPath) {
				p.put(1, 0, 6000, []byte{2, 0, 0xfd, 0x0f}, rtrswire.IOReqImm(p.shift, 0, 6000))
			}},
			{"descriptor of length 0", func(p *rawPath) {
				b := make([]byte, 24)
				rtrswire.PutReadDescHdr(b, 0, true, p.desc(0, 0))
				p.put(1, 0, 0, b, 0)
			}},
			{"descriptor longer than a chunk", func(p *rawPath) {
				b := make([]byte, 24)
				rtrswire.PutReadDescHdr(b, 0, true, p.desc(0, 8193))
				p.put(1, 0, 0, b, 0)
			}},
			{"descriptor of length 2^32-1", func(p *rawPath) {
				b := make([]byte, 24)
				rtrswire.PutReadDescHdr(b, 0, true, rtrswire.Desc{Addr: 1, Key: 2, Len: 1<<32 - 1})
				p.put(1, 0, 0, b, 0)
			}},
			{"descriptor with a key the client does not have", func(p *rawPath) {
				b := make([]byte, 24)
				rtrswire.PutReadDescHdr(b, 0, true, rtrswire.Desc{Addr: 1, Key: 2, Len: 16})
				p.put(1, 0, 0, b, 0)
			}},
			{"SEND with payload", func(p *rawPath) { p.sendInfo(infoReq("again")) }},
			{"WRITE with a wrong key", func(p *rawPath) { p.bufs[0].rkey ^= 1; p.write(1, 0, nil, nil) }},
			{"WRITE beyond the chunks", func(p *rawPath) { p.bufs[0].addr += 8 * 8192; p.write(1, 0, []byte("x"), nil) }},
		} {
			t.Run(c.name, func(t *testing.T) {
				net := loopback.New()
				startServer(t, net, serve, mode, depth(6))
				other := newRawPath(t, net, 2)
				other.src = otherAddr
				other.connect().info("other")
				p := newSession(t, net, 2, "bad")
				c.send(p)
				p.waitDown()
				other.stillWorks()
			})
		}
	})
}

func TestR080_UnknownImmediatesAreIgnored(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		net := loopback.New()
		startServer(t, net, serve, mode)
		p := newSession(t, net, 2, "s")
		for range 50 { // more than there are receives: each is posted again
			for _, typ := range []rtrswire.Imm{1, 2, 3, 5, 7, 10, 15} {
				p.imm(1, typ<<28|77)
			}
		}
		p.write(1, 1, nil, []byte("u"))
		p.expect(answer{1, 1, 0, false})
	})
}

func TestHeartbeatIsAnsweredOnEveryConnection(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	p := newSession(t, net, 3, "s")
	for cid := range 3 {
		p.imm(cid, rtrswire.HeartbeatImm)
		if m := p.recv(); int(m.QP) != cid || rtrswire.Imm(m.Imm) != rtrswire.HeartbeatAckImm {
			t.Errorf("on connection %d: %#08x on connection %d", cid, m.Imm, m.QP)
		}
	}
}

func TestEmptySendIsIgnored(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	p := newSession(t, net, 2, "s")
	for range 20 {
		p.post(1, verbs.SendWR{Op: verbs.OpSend})
	}
	p.write(1, 1, nil, []byte("u"))
	p.expect(answer{1, 1, 0, false})
}

func TestR064_ReceiveIsPostedAgainBeforeProcessing(t *testing.T) {
	net := loopback.New()
	spare := -1
	startServer(t, net, func(op *Op) {
		spare = sparePosts(op.conn) // of depth + 1
		op.Respond(0)
	})
	p := newSession(t, net, 2, "s")
	p.write(1, 0, nil, []byte("u"))
	p.expect(answer{1, 0, 0, false})
	if spare != 1 {
		t.Errorf("%d receives are not posted during the request, want 1", spare)
	}
}

func TestAnswersInAnyOrderOnTheConnectionOfTheRequest(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		net := loopback.New()
		park := startParking(t, net, mode)
		p := newSession(t, net, 3, "s")
		var ops []*Op
		for chunk := range 8 {
			p.write(chunk%3, chunk, nil, []byte{byte(chunk)})
			ops = append(ops, park.take(p))
		}
		for i := range ops {
			op := ops[len(ops)-1-i]
			chunk := op.Chunk()
			park.respond(op, chunk)
			p.expect(answer{chunk % 3, chunk, chunk, false})
		}
	})
}

func TestSecondRequestOnABusyChunkClosesThePath(t *testing.T) {
	for _, cid := range []int{1, 2} {
		t.Run(fmt.Sprintf("on cid %d", cid), func(t *testing.T) {
			net := loopback.New()
			park := startParking(t, net, plainKeys)
			p := newSession(t, net, 3, "s")
			p.write(1, 4, nil, []byte("first"))
			op := park.take(p)
			p.write(cid, 4, nil, []byte("again"))
			p.waitDown()
			if string(op.User()) != "first" {
				t.Errorf("the first request now says %q", op.User())
			}
			park.respond(op, 0)
		})
	}
}

// Requests and answers wait for room in the send queue; all are served in the
// end.
func TestRequestsAndAnswersWaitForSendCredit(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, newRkey bool) {
		net := loopback.New()
		park := startParking(t, net, mode)
		p := newSession(t, net, 2, "s")
		c := park.s.sessions[p.req.PathsUUID].paths[0].conns[1]
		onOwner := func(f func()) { _ = c.poller.Call(t.Context(), f) }
		onOwner(func() { c.depth = 20 }) // as if the queue were that small
		for round := range 20 {
			net.Hold(serverAddr.Addr(), clientAddr) // nothing completes at the server
			served := 0
			serve := func() bool {
				p.pump()
				select {
				case op := <-park.ch:
					park.respond(op, 0)
					served++
				default:
				}
				return served == 8
			}
			waits := func(stage opStage) func() bool {
				return func() (found bool) {
					serve()
					onOwner(func() {
						for op := c.head; op != nil; op = op.next {
							found = found || op.stage == stage
						}
					})
					return found
				}
			}
			for chunk := range 6 {
				p.read(1, chunk, 64, []byte{byte(round)}, true)
			}
			eventually(t, "an answer to wait", waits(opAnswering))
			p.read(1, 6, 64, []byte{byte(round)}, true)
			p.read(1, 7, 64, []byte{byte(round)}, true)
			if newRkey {
				eventually(t, "a request to wait", waits(opSubmitting))
			}
			net.Release(serverAddr.Addr(), clientAddr)
			eventually(t, "all to be served", serve)
			seen := map[int]bool{}
			for range 8 {
				a := p.answer()
				if a.errno != 0 || !a.inv || seen[a.chunk] {
					t.Fatalf("round %d: answer %+v, had %v", round, a, seen)
				}
				seen[a.chunk] = true
			}
		}
	})
}

// A path that dies while answers wait for room is closed all the same.
func TestPathDiesWhileAnswersWaitForSendCredit(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		net := loopback.New()
		park := startParking(t, net, mode)
		p := newSession(t, net, 2, "s")
		c := park.s.sessions[p.req.PathsUUID].paths[0].conns[1]
		_ = c.poller.Call(t.Context(), func() { c.depth = 20 })
		net.Hold(serverAddr.Addr(), clientAddr)
		for chunk := range 8 {
			p.read(1, chunk, 64, nil, true)
		}
		eventually(t, "something to wait", func() (stuck bool) {
			p.pump()
			select {
			case op := <-park.ch:
				park.respond(op, 0)
			default:
			}
			_ = c.poller.Call(t.Context(), func() { stuck = c.head != nil })
			return stuck
		})
		p.hangUp()
		for {
			select {
			case op := <-park.ch:
				park.respond(op, 0)
				continue
			default:
			}
			if len(park.s.Sessions()) == 0 {
				return
			}
			_ = c.poller.Call(t.Context(), func() {})
		}
	})
}

func TestStatsCountRequestsByDirection(t *testing.T) {
	net := loopback.New()
	park := startParking(t, net)
	p := newSession(t, net, 3, "s")
	p.write(1, 0, make([]byte, 1000), []byte("u"))
	p.write(2, 1, make([]byte, 500), []byte("u"))
	p.read(1, 2, 300, []byte("u"), false)
	p.read(2, 3, 300, []byte("u"), false)
	ops := []*Op{park.take(p), park.take(p), park.take(p), park.take(p)}
	info := park.s.Sessions()[0].Paths()[0]
	if info.Stats.Inflight != 4 {
		t.Errorf("in flight: %d", info.Stats.Inflight)
	}
	for _, op := range ops {
		errno := 0
		if op.Chunk() == 3 {
			errno = 5
		}
		park.respond(op, errno)
		p.answer()
	}
	info = park.s.Sessions()[0].Paths()[0]
	want := PathStats{ReadCount: 2, ReadBytes: 602, WriteCount: 2, WriteBytes: 1502} // with the user messages
	info.Stats.Latency = 0
	if info.Stats != want {
		t.Errorf("%+v, want %+v", info.Stats, want)
	}
	if info.State != SrvPathConnected || info.Conns != 3 || info.Fabric != "loopback" || info.Client.Addr() != clientAddr || info.Server != serverAddr {
		t.Errorf("info %+v", info)
	}
}

func TestSessionContext(t *testing.T) {
	var mu sync.Mutex
	seen := any(nil)
	net := loopback.New()
	s := startServer(t, net, func(op *Op) {
		mu.Lock()
		defer mu.Unlock()
		seen = op.Session().Context()
		op.Respond(0)
	})
	p := newSession(t, net, 1, "s")
	if s.Sessions()[0].Context() != nil {
		t.Error("a context out of nothing")
	}
	s.Sessions()[0].SetContext("mine")
	p.stillWorks()
	mu.Lock()
	defer mu.Unlock()
	if seen != "mine" {
		t.Errorf("context %v", seen)
	}
}
