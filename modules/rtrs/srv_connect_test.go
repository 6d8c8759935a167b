package rtrs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func TestConnectRequestsThatAreRefused(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	good := newSession(t, net, 2, "good")
	set16 := func(off int, v uint16) func(*rawPath, []byte) []byte {
		return func(_ *rawPath, b []byte) []byte { binary.LittleEndian.PutUint16(b[off:], v); return b }
	}
	for _, c := range []struct {
		name  string
		edit  func(*rawPath, []byte) []byte
		errno syscall.Errno
	}{
		{"R-007 wrong magic", set16(2, 0x1BBE), syscall.ECONNRESET},
		{"R-008 major 1", set16(4, 0x0100), syscall.ECONNRESET},
		{"R-008 major 3", set16(4, 0x0300), syscall.ECONNRESET},
		{"R-009 cid_num 4097", set16(8, 4097), syscall.ECONNRESET},
		{"R-009 cid equals cid_num", set16(6, 2), syscall.ECONNRESET},
		{"R-009 cid_num 0", set16(8, 0), syscall.ECONNRESET},
		{"private data of 55 bytes", func(_ *rawPath, b []byte) []byte { return b[:55] }, syscall.ECONNRESET},
		{"no private data", func(*rawPath, []byte) []byte { return nil }, syscall.ECONNRESET},
		{"R-010 unknown session, not first", func(_ *rawPath, b []byte) []byte { b[44] = 0; return b }, syscall.ENXIO},
		{"R-010 R-014 unknown session, other flag bits", func(_ *rawPath, b []byte) []byte { b[44] = 0xfe; return b }, syscall.ENXIO},
		{"R-011 path is connected", func(_ *rawPath, b []byte) []byte { return good.private(1) }, syscall.ECONNRESET},
		{"R-013 same addresses in the session", func(_ *rawPath, b []byte) []byte {
			copy(b[28:44], good.req.PathsUUID[:])
			return b
		}, syscall.EEXIST},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newRawPath(t, net, 2)
			if got := p.refused(0, c.edit(p, p.private(0))); got != -int(c.errno) {
				t.Errorf("R-006: refused with %d, want %d", got, -int(c.errno))
			}
		})
	}
	good.stillWorks()
}

func TestR008_MinorVersionDoesNotMatter(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	p := newRawPath(t, net, 1)
	b := p.private(0)
	b[4] = 0xff
	if _, err := p.dial(0, b); err != nil {
		t.Error(err)
	}
}

func TestR009_CIDNum4096IsAccepted(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	p := newRawPath(t, net, 4096)
	if _, err := p.dial(0, p.private(0)); err != nil {
		t.Error(err)
	}
}

func TestR012_PathsMustFitTogether(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	p := newRawPath(t, net, 3).connect(1)
	if got := p.refused(1, p.private(1)); got != -int(syscall.ECONNRESET) {
		t.Errorf("duplicate cid: %d", got)
	}
	p.req.CIDNum = 4
	if got := p.refused(2, p.private(2)); got != -int(syscall.ECONNRESET) {
		t.Errorf("other cid_num: %d", got)
	}
	p.req.CIDNum = 3
	p.connect(0, 2).info("still").stillWorks()
}

func TestR005_R024_R025_EveryConnectionGetsTheSameAnswer(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, newRkey bool) {
		net := loopback.New()
		startServer(t, net, serve, mode, depth(100), func(c *ServerConfig) { c.ChunkSize = 69632 })
		want := rtrswire.ConnRspFields{QueueDepth: 100, MaxIOSize: 65536, MaxHdrSize: 4096, Features: rtrswire.FeatureFence | rtrswire.FeatureIncarnation | rtrswire.FeatureBeats | rtrswire.FeatureReason}
		if newRkey {
			want.Flags = rtrswire.FlagNewRkey
		}
		p := newRawPath(t, net, 3)
		for cid := range 3 {
			rep, err := p.dial(cid, p.private(cid))
			if err != nil {
				t.Fatal(err)
			}
			if err := rtrswire.ConnRsp(rep).Check(); err != nil {
				t.Error(err)
			}
			got := rtrswire.ConnRsp(rep).Fields()
			if cid == 0 {
				want.Incarnation = got.Incarnation
			}
			if got.Incarnation == (rtrswire.UUID{}) || got != want {
				t.Errorf("cid %d: %+v, want %+v", cid, got, want)
			}
		}
	})
}

func TestR015_KnownSessionIsJoinedWhateverFirstConnSays(t *testing.T) {
	for _, first := range []bool{false, true} {
		net := loopback.New()
		s := startServer(t, net, serve)
		a := newSession(t, net, 2, "s")
		b := a.second(net, otherAddr)
		b.req.FirstConn = first
		b.connect().info("s").stillWorks()
		a.stillWorks()
		sessions := s.Sessions()
		if len(sessions) != 1 || len(sessions[0].Paths()) != 2 {
			t.Errorf("first_conn %v: %d sessions", first, len(sessions))
		}
		if ups, _, alive := s.handler.counts(); ups != 1 || alive != 1 {
			t.Errorf("first_conn %v: %d up, %d memories", first, ups, alive)
		}
	}
}

func TestR026_IPv4AndIPv6PathsMix(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	a := newSession(t, net, 1, "s")
	b := a.second(net, netip.MustParseAddr("fd00::1"))
	b.connect().info("s").stillWorks()
}

func TestSessionHasAtMost128Paths(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve, plainKeys)
	a := newRawPath(t, net, 1).connect()
	src := clientAddr
	for i := 1; i <= rtrswire.MaxPaths; i++ {
		src = src.Next()
		p := a.second(net, src)
		if i < rtrswire.MaxPaths {
			p.connect()
		} else if got := p.refused(0, p.private(0)); got != -int(syscall.ECONNRESET) {
			t.Errorf("path 129: %d", got)
		}
	}
}

func TestR027_R063_AnyNumberAndOrderOfConnections(t *testing.T) {
	for _, order := range [][]int{{0}, {2, 1, 0}, {1, 0, 2, 3}} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			net := loopback.New()
			startServer(t, net, serve)
			p := newRawPath(t, net, len(order)).connect(order...).info("s")
			for cid := range order { // any connection, answered on the same
				p.write(cid, cid, []byte("data"), []byte("usr"))
				p.expect(answer{cid, cid, 0, false})
			}
		})
	}
}

func TestR031_R032_InfoRequestsThatCloseThePath(t *testing.T) {
	for _, c := range []struct {
		name string
		send func(p *rawPath)
	}{
		{"too short", func(p *rawPath) { p.sendInfo(infoReq("x")[:271]) }},
		{"too long", func(p *rawPath) { p.sendInfo(append(infoReq("x"), 0)) }},
		{"wrong type", func(p *rawPath) { b := infoReq("x"); b[0] = 1; p.sendInfo(b) }},
		{"slash", func(p *rawPath) { p.sendInfo(infoReq("a/b")) }},
		{"dot", func(p *rawPath) { p.sendInfo(infoReq("a.b")) }},
		{"name without end", func(p *rawPath) {
			b := infoReq(strings.Repeat("x", 254))
			b[256] = 'x'
			p.sendInfo(b)
		}},
		{"R-033 name of another session", func(p *rawPath) { p.sendInfo(infoReq("taken")) }},
		{"a request instead", func(p *rawPath) { p.imm(0, rtrswire.IOReqImm(p.shift, 0, 0)) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			net := loopback.New()
			s := startServer(t, net, serve)
			other := newSession(t, net, 2, "taken")
			p := newRawPath(t, net, 2).connect()
			c.send(p)
			p.waitDown()
			if len(p.got) != 0 {
				t.Errorf("the server answered: %+v", p.got)
			}
			other.stillWorks()
			if ups, _, _ := s.handler.counts(); ups != 1 {
				t.Errorf("%d sessions came up", ups)
			}
		})
	}
}

// A client that closes a session and opens one of the same name at once is here
// before the server has done with the old one, or has even seen its end.
func TestR033_NameOfASessionThatEndsIsWaitedFor(t *testing.T) {
	for _, seen := range []bool{true, false} {
		t.Run(fmt.Sprintf("end seen %t", seen), func(t *testing.T) {
			net := loopback.New()
			s := startServer(t, net, serve)
			s.nameGrace = 10 * time.Second
			s.handler.downBlocked = make(chan struct{})
			old := newSession(t, net, 2, "s")
			if seen {
				old.hangUp()
				eventually(t, "the path to close", func() bool { return s.Sessions()[0].Paths()[0].State == SrvPathClosing })
			}
			p := newRawPath(t, net, 2).connect()
			p.sendInfo(infoReq("s"))
			time.Sleep(20 * time.Millisecond)
			if p.pump(); p.downs > 0 {
				t.Fatal("refused at once")
			}
			old.hangUp()
			close(s.handler.downBlocked)
			p.takeInfo().stillWorks()
			if ups, downs, _ := s.handler.counts(); ups != 2 || downs != 1 {
				t.Errorf("%d sessions up, %d down", ups, downs)
			}
		})
	}
}

func TestR032_InfoBeforeAllConnectionsClosesThePath(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	p := newRawPath(t, net, 3).connect(0, 1)
	p.sendInfo(infoReq("x"))
	eventually(t, "two connections to be closed", func() bool { p.pump(); return p.downs == 2 })
}

func TestSecondPathWithAnotherNameIsClosed(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	a := newSession(t, net, 1, "a")
	b := a.second(net, otherAddr).connect()
	b.sendInfo(infoReq("b"))
	b.waitDown()
	a.stillWorks()
}

// sparePosts counts the receives that c's queue still takes. Owner of c.
func sparePosts(c *srvConn) (n int) {
	for {
		if _, err := c.qp.PostRecv([]verbs.RecvWR{{}}); err != nil {
			return n
		}
		n++
	}
}

func TestR034_ReceivesArePostedBeforeInfoRsp(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		net := loopback.New()
		s := startServer(t, net, serve, mode, depth(32))
		p := newRawPath(t, net, 3).connect()
		conns := s.sessions[p.req.PathsUUID].paths[0].conns
		spare := -1
		net.Tap(func(e loopback.Event) { // INFO_RSP leaves: on the owner of cid 0
			if e.Op == verbs.OpSend && e.From.Addr() == serverAddr.Addr() && spare < 0 {
				_ = s.cfg.Pollers[1].Call(t.Context(), func() { spare = sparePosts(conns[2]) })
			}
		})
		p.info("s")
		if spare != 1 {
			t.Errorf("cid 2: queue depth + 1 receives, %d of them not posted", spare)
		}
		_ = s.cfg.Pollers[0].Call(t.Context(), func() { spare = sparePosts(conns[0]) })
		if want := 2*rtrswire.ServiceDepth + 2 - rtrswire.ServiceDepth; spare != want {
			t.Errorf("cid 0: %d not posted, want %d", spare, want)
		}
	})
}

func TestR035_InfoRspDescribesTheChunks(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, newRkey bool) {
		net := loopback.New()
		startServer(t, net, serve, mode)
		wire := tapServer(net)
		p := newSession(t, net, 1, "s")
		events := wire.take()
		if len(events) != 1 || events[0].Op != verbs.OpSend {
			t.Fatalf("sent %+v", events)
		}
		n := 1
		if newRkey {
			n = 8
		}
		if events[0].Len != rtrswire.InfoRspLen(n) || le32(events[0].Data) != uint32(n)<<16|1 {
			t.Errorf("INFO_RSP %d bytes, header %x", events[0].Len, events[0].Data[:8])
		}
		for chunk := range 8 { // buffers are numbered in order: each reaches its chunk
			p.write(0, chunk, []byte{byte(chunk)}, nil)
			p.expect(answer{0, chunk, 0, false})
		}
	})
}

func TestHandlerMayRefuseASession(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve)
	s.handler.upErr = errors.New("no room")
	p := newRawPath(t, net, 2).connect()
	p.sendInfo(infoReq("x"))
	p.waitDown()
	eventually(t, "the memory to be freed", func() bool { _, _, alive := s.handler.counts(); return alive == 0 })
}

func TestAdmitDecidesAboutClients(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve, func(c *ServerConfig) {
		c.Admit = func(a netip.AddrPort) bool { return a.Addr() == clientAddr }
	})
	newSession(t, net, 1, "s").stillWorks()
	p := newRawPath(t, net, 1)
	p.src = otherAddr
	if got := p.refused(0, p.private(0)); got != -int(syscall.EACCES) {
		t.Errorf("refused with %d", got)
	}
}

func TestAllocFailureIsENOMEM(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve, func(c *ServerConfig) {
		c.Alloc = func(int) (Memory, error) { return nil, errors.New("none left") }
	})
	p := newRawPath(t, net, 1)
	if got := p.refused(0, p.private(0)); got != -int(syscall.ENOMEM) {
		t.Errorf("refused with %d", got)
	}
	if len(s.sessions) != 0 {
		t.Error("the session stays")
	}
}

func TestServerAdaptsToTheFabric(t *testing.T) {
	const base = verbs.CapWriteImm
	for _, c := range []struct {
		name    string
		caps    verbs.Cap
		newRkey bool
		inv     bool
	}{
		{"everything", loopback.AllCaps, true, true},
		{"no key rotation", base | verbs.CapSendInv | verbs.CapSendImm, false, true},
		{"no SEND WITH IMM", base | verbs.CapSendInv | verbs.CapKeyRotation, false, true},
		{"no SEND WITH INVALIDATE", loopback.AllCaps &^ verbs.CapSendInv, true, false},
		{"immediates only", base, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			net := loopback.New(loopback.WithCaps(c.caps))
			srv := startServer(t, net, serve)
			p := newSession(t, net, 1, "s")
			if got := p.rep.Flags&rtrswire.FlagNewRkey != 0; got != c.newRkey {
				t.Errorf("new rkeys: %v", got)
			}
			if got := srv.Sessions()[0].Paths()[0].ChangingKeys; got != c.newRkey {
				t.Errorf("the path says that its keys change: %v", got)
			}
			p.read(0, 1, 16, []byte("usr"), true)
			p.expect(answer{0, 1, 0, c.inv})
		})
	}
}

func TestListenRefusesAFabricWithoutImmediates(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve)
	dev := loopback.New(loopback.WithCaps(verbs.CapSendInv)).Device("old")
	if _, err := s.Listen(dev, serverAddr); !errors.Is(err, verbs.ErrUnsupported) {
		t.Errorf("Listen: %v", err)
	}
}

func TestServerConfigIsChecked(t *testing.T) {
	for _, c := range []struct {
		name string
		edit serverOption
		ok   bool
	}{
		{"defaults", func(*ServerConfig) {}, true},
		{"depth 0", depth(0), false},
		{"depth 65536", func(c *ServerConfig) { c.QueueDepth, c.ChunkSize = 65536, 8192 }, false},
		{"largest depth that fits", func(c *ServerConfig) { c.QueueDepth, c.ChunkSize = 32768, 8192 }, true},
		{"chunk below 8192", func(c *ServerConfig) { c.ChunkSize = 4096 }, false},
		{"chunk not a multiple of 4096", func(c *ServerConfig) { c.ChunkSize = 8192 + 512 }, false},
		{"too large for the immediate", func(c *ServerConfig) { c.QueueDepth, c.ChunkSize = 513, 512<<10 }, false},
		{"just not too large", func(c *ServerConfig) { c.QueueDepth, c.ChunkSize = 512, 512<<10 }, true},
		{"no pollers", func(c *ServerConfig) { c.Pollers = nil }, false},
		{"no handler", func(c *ServerConfig) { c.Handler = nil }, false},
		{"no heartbeat", func(c *ServerConfig) { c.Timing.Heartbeat = 0 }, false},
	} {
		cfg := DefaultServerConfig()
		cfg.Pollers, cfg.Handler = []*Poller{nil}, &testHandler{}
		cfg.Alloc = func(int) (Memory, error) { return nil, nil }
		c.edit(&cfg)
		if err := cfg.checkValues(); (err == nil) != c.ok {
			t.Errorf("%s: %v, want ok %v", c.name, err, c.ok)
		}
	}
}

// removable is a device with requests that came to no device.
type removable struct{ verbs.Device }

type removableListener struct{ verbs.Listener }

type homeless struct{ verbs.ConnRequest }

func (d removable) Listen(addr netip.AddrPort) (verbs.Listener, error) {
	l, err := d.Device.Listen(addr)
	return removableListener{l}, err
}

func (l removableListener) Accept() (verbs.ConnRequest, error) {
	r, err := l.Listener.Accept()
	return homeless{r}, err
}

func (homeless) Device() verbs.Device { return nil }

func TestRequestToADeviceThatWasRemovedIsRefused(t *testing.T) {
	net := loopback.New()
	s := startServer(t, net, serve)
	other := netip.AddrPortFrom(serverAddr.Addr(), 99)
	if _, err := s.Listen(removable{net.Device("removed")}, other); err != nil {
		t.Fatal(err)
	}
	p := newRawPath(t, net, 1)
	qp, err := p.dev.CreateQP(p.pd, verbs.QPConfig{CQ: p.cq, SendQueue: 1, RecvQueue: 1, MaxSGE: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer qp.Destroy()
	var rej *verbs.RejectError
	if _, err := p.dev.Connect(t.Context(), qp, verbs.ConnectParams{Dst: other, Private: p.private(0)}); !errors.As(err, &rej) {
		t.Fatalf("connect: %v", err)
	}
	if got := rtrswire.ConnRsp(rej.Private).Errno(); got != -int16(syscall.ENODEV) {
		t.Errorf("refused with %d", got)
	}
}
