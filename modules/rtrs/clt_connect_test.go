package rtrs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

const (
	srvA = "10.0.0.1:1234"
	srvB = "10.0.0.2:1234"
)

var (
	cltA = netip.MustParseAddr("10.1.0.1")
	cltB = netip.MustParseAddr("10.1.0.2")
)

func pathTo(dev verbs.Device, src netip.Addr, dst string) PathAddr {
	return PathAddr{Device: dev, Src: src, Dst: netip.MustParseAddrPort(dst)}
}

func isConnect(e loopback.Event) bool { return e.Kind == loopback.KindConnect }

func connReqs(tap *cltTap) (reqs []rtrswire.ConnReqFields) {
	for _, e := range tap.all() {
		reqs = append(reqs, rtrswire.ConnReq(e.Data).Fields())
	}
	return reqs
}

func TestR002_R019_ConnectionRequests(t *testing.T) {
	net := loopback.New()
	startScripted(t, net, srvA, nil)
	tap := tapNet(net, func(e loopback.Event) bool {
		return e.Kind == loopback.KindConnect || e.Kind == loopback.KindAccept
	})
	cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, nil)
	events := tap.all()
	if len(events) != 6 {
		t.Fatalf("%d connection messages, want 3 requests and 3 answers", len(events))
	}
	for cid := range 3 {
		req := events[2*cid]
		if req.Kind != loopback.KindConnect || events[2*cid+1].Kind != loopback.KindAccept {
			t.Fatalf("R-019: connection %d is not made alone", cid)
		}
		if len(req.Data) != 56 || !bytes.Equal(req.Data[:6], []byte{0, 0, 0xbd, 0x1b, 0, 2}) {
			t.Errorf("R-002: request starts % x, has %d bytes", req.Data[:6], len(req.Data))
		}
		if !bytes.Equal(req.Data[45:], make([]byte, 11)) {
			t.Errorf("R-002: reserved bytes % x", req.Data[45:])
		}
		if f := rtrswire.ConnReq(req.Data).Fields(); int(f.CID) != cid || f.CIDNum != 3 {
			t.Errorf("R-019: request %d is for cid %d of %d", cid, f.CID, f.CIDNum)
		}
		if req.To != netip.MustParseAddrPort(srvA) || req.From.Addr() != cltA {
			t.Errorf("request goes from %v to %v", req.From, req.To)
		}
	}
}

func TestR016_R017_R018_IdentityAndCounters(t *testing.T) {
	net := loopback.New()
	startScripted(t, net, srvA, nil)
	startScripted(t, net, srvB, nil)
	tap := tapNet(net, isConnect)
	dev := net.Device("client")
	c := cltOpen(t, []PathAddr{pathTo(dev, cltA, srvA), pathTo(dev, cltB, srvB)}, nil)
	net.Cut(cltA, netip.MustParseAddrPort(srvA).Addr())
	c.awaitState(1, PathReconnecting)
	c.awaitState(1, PathConnected)
	net.Cut(cltB, netip.MustParseAddrPort(srvB).Addr())
	c.awaitState(2, PathReconnecting)
	c.awaitState(2, PathConnected)
	reqs := connReqs(tap)
	if len(reqs) != 12 {
		t.Fatalf("%d connection requests, want 12", len(reqs))
	}
	for i, r := range reqs {
		path := i / 3 % 2
		if want := uint16(1 + i/6); r.ReconCnt != want {
			t.Errorf("R-017: request %d has recon_cnt %d, want %d", i, r.ReconCnt, want)
		}
		if want := i != 3; r.FirstConn != want { // cid 0 of the second path
			t.Errorf("R-018: request %d has first_conn %v", i, r.FirstConn)
		}
		if r.PathsUUID != c.UUID() || r.SessUUID != reqs[3*path].SessUUID {
			t.Errorf("R-016: request %d has other uuids than its path", i)
		}
	}
	if reqs[0].SessUUID == reqs[3].SessUUID || reqs[0].SessUUID == (rtrswire.UUID{}) {
		t.Error("R-016: paths share a uuid, or have none")
	}
}

// openErrno opens a session that must fail and returns its errno.
func openErrno(t *testing.T, net *loopback.Network, dst string) syscall.Errno {
	t.Helper()
	return openErrnoWithin(t, net, dst, 5*time.Second)
}

func openErrnoWithin(t *testing.T, net *loopback.Network, dst string, timeout time.Duration) syscall.Errno {
	t.Helper()
	c, cfg := cltConfig(t, 1)
	cfg.Timing.ConnectTimeout = timeout
	s, err := Open(cltContext(t), "clt", []PathAddr{pathTo(net.Device("client"), cltA, dst)}, cfg)
	if err == nil {
		_ = s.Close(cltContext(t))
		t.Fatal("the session was opened")
	}
	if len(c.events) != 0 {
		t.Errorf("a session that was not opened has %d events", len(c.events))
	}
	eventually(t, "client's connections are gone", func() bool { return len(net.Conns()) == 0 })
	return syscall.Errno(ErrnoOf(err))
}

func TestR020_ResponsesThatAreRefused(t *testing.T) {
	put16 := func(off int, v uint16) func([]byte) []byte {
		return func(b []byte) []byte { binary.LittleEndian.PutUint16(b[off:], v); return b }
	}
	put32 := func(off int, v uint32) func([]byte) []byte {
		return func(b []byte) []byte { binary.LittleEndian.PutUint32(b[off:], v); return b }
	}
	tests := []struct {
		name string
		cid  uint16
		edit func([]byte) []byte
	}{
		{"55 bytes", 0, func(b []byte) []byte { return b[:55] }},
		{"no bytes", 0, func(b []byte) []byte { return b[:0] }},
		{"wrong magic", 0, put16(0, 0x1bbe)},
		{"wrong magic on connection 1", 1, put16(0, 0x1bbe)},
		{"major version 1", 0, put16(2, 0x0100)},
		{"major version 3", 0, put16(2, 0x0300)},
		{"an errno", 0, put16(4, 0xff98)},
		{"an errno on connection 2", 1, put16(4, 1)},
		{"queue depth 0", 0, put16(6, 0)},
		{"max_io_size 0", 0, put32(8, 0)},
		{"max_hdr_size 0", 0, put32(12, 0)},
		{"chunks larger than an immediate can tell", 0, put32(8, 1<<27)},
		{"sizes that overflow", 0, put32(8, 1<<32-1)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			net := loopback.New()
			startScripted(t, net, srvA, func(s *scriptedServer) {
				s.onConnect = func(req rtrswire.ConnReqFields, rsp []byte) ([]byte, int) {
					if req.CID == tt.cid {
						rsp = tt.edit(rsp)
					}
					return rsp, 0
				}
			})
			if got := openErrno(t, net, srvA); got != syscall.ECONNRESET {
				t.Errorf("errno %v, want ECONNRESET", got)
			}
		})
	}
}

func TestR005_MinorVersionIsAccepted(t *testing.T) {
	net := loopback.New()
	startScripted(t, net, srvA, func(s *scriptedServer) {
		s.onConnect = func(_ rtrswire.ConnReqFields, rsp []byte) ([]byte, int) {
			rsp[2] = 0x7f
			return rsp, 0
		}
	})
	cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, nil)
}

func TestR021_OnlyTheFirstResponseCounts(t *testing.T) {
	net := loopback.New()
	startScripted(t, net, srvA, func(s *scriptedServer) {
		s.onConnect = func(req rtrswire.ConnReqFields, rsp []byte) ([]byte, int) {
			if req.CID > 0 {
				clear(rsp[6:])
			}
			return rsp, 0
		}
	})
	c := cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, nil)
	if c.QueueDepth() != 8 || c.MaxIOSize() != 4096 {
		t.Errorf("queue depth %d, max I/O %d", c.QueueDepth(), c.MaxIOSize())
	}
}

func TestR023_RejectionsBecomeErrnos(t *testing.T) {
	reject := func(private []byte, errno int) func(rtrswire.ConnReqFields, []byte) ([]byte, int) {
		return func(rtrswire.ConnReqFields, []byte) ([]byte, int) { return private, errno }
	}
	tests := []struct {
		name string
		hook func(rtrswire.ConnReqFields, []byte) ([]byte, int)
		want syscall.Errno
	}{
		{"EEXIST", reject(nil, 17), syscall.EEXIST},
		{"ENXIO", reject(nil, 6), syscall.ENXIO},
		{"ENOMEM", reject(nil, 12), syscall.ENOMEM},
		{"no private data", reject(nil, 0), syscall.ECONNRESET},
		{"refused on connection 1", func(req rtrswire.ConnReqFields, rsp []byte) ([]byte, int) {
			return rsp, 17 * int(req.CID)
		}, syscall.EEXIST},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			net := loopback.New()
			startScripted(t, net, srvA, func(s *scriptedServer) { s.onConnect = tt.hook })
			if got := openErrno(t, net, srvA); got != tt.want {
				t.Errorf("errno %v, want %v", got, tt.want)
			}
		})
	}
	t.Run("nobody listens", func(t *testing.T) {
		if got := openErrno(t, loopback.New(), srvA); got != syscall.ECONNRESET {
			t.Errorf("errno %v, want ECONNRESET", got)
		}
	})
	t.Run("nobody answers", func(t *testing.T) {
		net := loopback.New()
		startScripted(t, net, srvA, nil)
		net.Stall(cltA, netip.MustParseAddrPort(srvA).Addr())
		if got := openErrnoWithin(t, net, srvA, 50*time.Millisecond); got != syscall.ETIMEDOUT {
			t.Errorf("errno %v, want ETIMEDOUT", got)
		}
	})
	t.Run("the host is unreachable", func(t *testing.T) {
		net := loopback.New()
		net.RefuseDial(netip.MustParseAddrPort(srvA), syscall.EHOSTUNREACH)
		if got := openErrno(t, net, srvA); got != syscall.EHOSTUNREACH {
			t.Errorf("errno %v, want EHOSTUNREACH", got)
		}
	})
}

func TestR030_R037_InfoRequest(t *testing.T) {
	net := loopback.New()
	s := startScripted(t, net, srvA, func(s *scriptedServer) { s.regions = 8 })
	tap := tapNet(net, func(e loopback.Event) bool {
		return e.Kind == loopback.KindWork && e.From.Addr() == cltA || e.Kind == loopback.KindAccept
	})
	cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, nil)
	if len(s.infos) != 1 || rtrswire.InfoReq(s.infos[0]).Name() != "clt" {
		t.Errorf("R-030: the server got %d INFO_REQs", len(s.infos))
	}
	events := tap.all()
	last := events[len(events)-1]
	if len(events) != 4 || last.Op != verbs.OpSend || last.Len != 272 {
		t.Fatalf("R-030: INFO_REQ is not the one message after all connections: %+v", events)
	}
	want := append([]byte{0, 0, 'c', 'l', 't'}, make([]byte, 267)...)
	if !bytes.Equal(last.Data, want) {
		t.Errorf("R-030: INFO_REQ is % x", last.Data)
	}
}

func TestR036_InfoResponsesThatAreRefused(t *testing.T) {
	// The server has 8 chunks of 8192 bytes in 4 regions.
	desc := func(i, n int) func(rtrswire.InfoRsp) []byte {
		return func(m rtrswire.InfoRsp) []byte {
			d := m.Desc(i)
			d.Len = uint32(n)
			m.PutDesc(i, d)
			return m
		}
	}
	tests := []struct {
		name string
		edit func(rtrswire.InfoRsp) []byte
	}{
		{"7 bytes", func(m rtrswire.InfoRsp) []byte { return m[:7] }},
		{"cut off descriptors", func(m rtrswire.InfoRsp) []byte { return m[:len(m)-1] }},
		{"wrong type", func(m rtrswire.InfoRsp) []byte { m[0] = 0; return m }},
		{"no descriptors", func(m rtrswire.InfoRsp) []byte { m.PutHeader(0); return m }},
		{"3 descriptors for 8 chunks", func(m rtrswire.InfoRsp) []byte { m.PutHeader(3); return m }},
		{"too few chunks", func(m rtrswire.InfoRsp) []byte { m.PutHeader(2); return m }},
		{"an empty region", desc(0, 0)},
		{"a region that is no multiple of a chunk", desc(1, 8191)},
		{"too many chunks", desc(2, 3*8192)},
		{"longer than the queue depth allows", func(rtrswire.InfoRsp) []byte { return make([]byte, 8+16*9) }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			net := loopback.New()
			startScripted(t, net, srvA, func(s *scriptedServer) {
				s.regions = 4
				s.onInfo = func(m []byte) []byte { return tt.edit(m) }
			})
			if got := openErrno(t, net, srvA); got != syscall.ECONNRESET {
				t.Errorf("errno %v, want ECONNRESET", got)
			}
		})
	}
	t.Run("no answer", func(t *testing.T) {
		net := loopback.New()
		startScripted(t, net, srvA, func(s *scriptedServer) { s.onInfo = func([]byte) []byte { return nil } })
		if got := openErrnoWithin(t, net, srvA, 50*time.Millisecond); got != syscall.ETIMEDOUT {
			t.Errorf("errno %v, want ETIMEDOUT", got)
		}
	})
	t.Run("the server closes the path", func(t *testing.T) {
		net := loopback.New()
		startScripted(t, net, srvA, func(s *scriptedServer) {
			s.onInfo = func([]byte) []byte { go s.hangUp(); return nil }
		})
		if got := openErrno(t, net, srvA); got != syscall.ECONNRESET {
			t.Errorf("errno %v, want ECONNRESET", got)
		}
	})
}

func TestR039_AnyNumberOfRegions(t *testing.T) {
	for _, regions := range []int{1, 2, 8} {
		net := loopback.New()
		startScripted(t, net, srvA, func(s *scriptedServer) { s.regions = regions })
		c := cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, nil)
		// All 8 chunks in turn: each request must reach its own.
		for tag := range uint64(8) {
			if err := c.write(0, tag, int(tag)*512, 512, "user"); err != nil {
				t.Fatal(err)
			}
		}
		for range 8 {
			if d := c.next(); d.errno != 0 {
				t.Errorf("%d regions: errno %d", regions, d.errno)
			}
		}
	}
}

func TestOpen_IsAllOrNothing(t *testing.T) {
	net := loopback.New()
	startScripted(t, net, srvA, nil)
	dev := net.Device("client")
	c, cfg := cltConfig(t, 1)
	_, err := Open(cltContext(t), "clt", []PathAddr{pathTo(dev, cltA, srvA), pathTo(dev, cltB, srvB)}, cfg)
	if !errors.Is(err, syscall.ECONNRESET) || !strings.Contains(err.Error(), srvB) {
		t.Errorf("error %v, want ECONNRESET for %s", err, srvB)
	}
	eventually(t, "the first path is closed too", func() bool { return len(net.Conns()) == 0 })
	if len(c.events) != 0 {
		t.Error("a session that was not opened has events")
	}
}

func TestOpen_CanBeCancelled(t *testing.T) {
	net := loopback.New()
	startScripted(t, net, srvA, func(s *scriptedServer) { s.onInfo = func([]byte) []byte { return nil } })
	_, cfg := cltConfig(t, 1)
	cfg.Timing.ConnectTimeout = time.Minute
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	begin := time.Now()
	if _, err := Open(ctx, "clt", []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, cfg); err == nil {
		t.Fatal("opened")
	}
	if d := time.Since(begin); d > cfg.Timing.ConnectTimeout/2 {
		t.Errorf("gave up after %v", d)
	}
}

func TestOpen_BadArguments(t *testing.T) {
	net := loopback.New()
	paths := []PathAddr{pathTo(net.Device("client"), cltA, srvA)}
	tests := []struct {
		name string
		edit func(name *string, paths *[]PathAddr, cfg *ClientConfig)
	}{
		{"no name", func(n *string, _ *[]PathAddr, _ *ClientConfig) { *n = "" }},
		{"a slash in the name", func(n *string, _ *[]PathAddr, _ *ClientConfig) { *n = "a/b" }},
		{"a dot in the name", func(n *string, _ *[]PathAddr, _ *ClientConfig) { *n = "a.b" }},
		{"a name of 255 bytes", func(n *string, _ *[]PathAddr, _ *ClientConfig) { *n = strings.Repeat("n", 255) }},
		{"no paths", func(_ *string, p *[]PathAddr, _ *ClientConfig) { *p = nil }},
		{"a path without device", func(_ *string, p *[]PathAddr, _ *ClientConfig) { *p = []PathAddr{{}} }},
		{"no pollers", func(_ *string, _ *[]PathAddr, c *ClientConfig) { c.Pollers = nil }},
		{"no OnDone", func(_ *string, _ *[]PathAddr, c *ClientConfig) { c.OnDone = nil }},
		{"4096 queues", func(_ *string, _ *[]PathAddr, c *ClientConfig) { c.Queues = 4096 }},
		{"unknown policy", func(_ *string, _ *[]PathAddr, c *ClientConfig) { c.Policy = 9 }},
		{"bad timing", func(_ *string, _ *[]PathAddr, c *ClientConfig) { c.Timing.Jitter = -1 }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, cfg := cltConfig(t, 1)
			name, p := "clt", paths
			tt.edit(&name, &p, &cfg)
			if _, err := Open(cltContext(t), name, p, cfg); err == nil {
				t.Error("accepted")
			}
		})
	}
}
