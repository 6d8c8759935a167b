package rtrs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// openScripted opens a one-path session to a scripted server.
func openScripted(t testing.TB, edit func(*scriptedServer)) (*cltClient, *scriptedServer, *loopback.Network) {
	t.Helper()
	net := loopback.New()
	s := startScripted(t, net, srvA, edit)
	return cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, nil), s, net
}

func clientWork(e loopback.Event) bool {
	return e.Kind == loopback.KindWork && (e.From.Addr() == cltA || e.From.Addr() == cltB)
}

func TestR050_R052_R054_WriteOnTheWire(t *testing.T) {
	c, s, net := openScripted(t, nil)
	tap := tapNet(net, clientWork)
	copy(c.region.Bytes()[100:], "the data")
	if err := c.write(1, 7, 100, 8, "user message"); err != nil {
		t.Fatal(err)
	}
	c.finished(7, 0)
	events := tap.all()
	if len(events) != 1 {
		t.Fatalf("R-052: %d messages for one WRITE", len(events))
	}
	e := events[0]
	buf, off := rtrswire.Imm(e.Imm).IOReq(rtrswire.BufShift(8))
	if e.Op != verbs.OpWriteImm || off != 8+12 || rtrswire.Imm(e.Imm).Type() != rtrswire.ImmIOReq {
		t.Errorf("R-054: %v with offset %d, want WRITE WITH IMM and 20", e.Op, off)
	}
	if want := uint32(buf<<25 | 20); e.Imm != want {
		t.Errorf("R-050: immediate %#x, want %#x", e.Imm, want)
	}
	if want := "the datauser message\x02\x00\x0c\x00"; string(e.Data) != want {
		t.Errorf("R-052: payload %q, want %q", e.Data, want)
	}
	if want := s.mrs[0].Addr() + uint64(buf*s.chunk); e.RemoteAddr != want || e.RKey != s.mrs[0].RKey() {
		t.Errorf("R-052: written to %#x, want the start of chunk %d, %#x", e.RemoteAddr, buf, want)
	}
}

func TestR053_R054_R055_ReadOnTheWire(t *testing.T) {
	c, s, net := openScripted(t, func(s *scriptedServer) {
		s.onRequest = func(r *scriptedRequest) {
			copy(r.data, "reply...")
			r.respond(0)
		}
	})
	tap := tapNet(net, clientWork)
	if err := c.read(0, 9, 200, 8, "user"); err != nil {
		t.Fatal(err)
	}
	c.finished(9, 0)
	if got := c.region.Bytes()[199:209]; string(got) != "\x00reply...\x00" {
		t.Errorf("read %q", got)
	}
	e := tap.all()[0]
	buf, off := rtrswire.Imm(e.Imm).IOReq(rtrswire.BufShift(8))
	if off != 8+4 {
		t.Errorf("R-054: offset %d, want 12", off)
	}
	if want := s.mrs[0].Addr() + uint64(buf*s.chunk) + 8; e.RemoteAddr != want {
		t.Errorf("R-053: written to %#x, want behind the room for the reply, %#x", e.RemoteAddr, want)
	}
	req, err := rtrswire.ParseRequest(e.Data[4:])
	key := (*c.region.keys.Load())[0]
	want := rtrswire.Request{Type: rtrswire.MsgRead, HasDesc: true, UsrLen: 4, Desc: rtrswire.Desc{Addr: key.addr + 200, Key: key.rkey, Len: 8}}
	if err != nil || req != want || len(e.Data) != 4+8+16 {
		t.Errorf("R-055: header %+v (%v) in %d bytes, want %+v in 28", req, err, len(e.Data), want)
	}
}

func TestR053_ReadWithoutDataHasNoDescriptor(t *testing.T) {
	c, _, net := openScripted(t, nil)
	tap := tapNet(net, clientWork)
	if err := c.on(0, func(q *Queue) error { return q.Read(1, Data{}, []byte("flush")) }); err != nil {
		t.Fatal(err)
	}
	c.finished(1, 0)
	if got := string(tap.all()[0].Data); got != "flush\x03\x00\x05\x00\x00\x00\x00\x00" {
		t.Errorf("payload %q", got)
	}
}

func TestWriteWithoutData(t *testing.T) {
	c, _, net := openScripted(t, nil)
	tap := tapNet(net, clientWork)
	if err := c.on(0, func(q *Queue) error { return q.Write(1, Data{}, []byte("close")) }); err != nil {
		t.Fatal(err)
	}
	c.finished(1, 0)
	if got := string(tap.all()[0].Data); got != "close\x02\x00\x05\x00" {
		t.Errorf("payload %q", got)
	}
}

func TestR058_RequestsThatDoNotFit(t *testing.T) {
	c, _, _ := openScripted(t, nil) // chunks of 8192 bytes
	tests := []struct {
		name string
		call func(q *Queue) error
		want error
	}{
		{"a WRITE that ends with its chunk", func(q *Queue) error { return q.Write(1, Data{c.region, 0, 8192 - 36}, make([]byte, 32)) }, nil},
		{"a WRITE that is a byte longer", func(q *Queue) error { return q.Write(1, Data{c.region, 0, 8192 - 35}, make([]byte, 32)) }, ErrTooLarge},
		{"a READ that ends with its chunk", func(q *Queue) error { return q.Read(1, Data{c.region, 0, 8192 - 56}, make([]byte, 32)) }, nil},
		{"a READ that is a byte longer", func(q *Queue) error { return q.Read(1, Data{c.region, 0, 8192 - 55}, make([]byte, 32)) }, ErrTooLarge},
		{"the longest user message", func(q *Queue) error { return q.Write(1, Data{}, make([]byte, MaxUserLen)) }, nil},
		{"a longer one", func(q *Queue) error { return q.Write(1, Data{}, make([]byte, MaxUserLen+1)) }, ErrTooLarge},
		{"data before the region", func(q *Queue) error { return q.Write(1, Data{c.region, -1, 8}, nil) }, ErrBadData},
		{"data behind the region", func(q *Queue) error { return q.Read(1, Data{c.region, 1<<20 - 7, 8}, nil) }, ErrBadData},
		{"data of negative length", func(q *Queue) error { return q.Read(1, Data{c.region, 8, -8}, nil) }, ErrBadData},
		{"data of overflowing length", func(q *Queue) error { return q.Read(1, Data{c.region, 8, int(^uint(0) >> 1)}, nil) }, ErrBadData},
		{"data without region", func(q *Queue) error { return q.Write(1, Data{Len: 8}, nil) }, ErrBadData},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if err := c.on(0, tt.call); err != tt.want {
				t.Fatalf("error %v, want %v", err, tt.want)
			}
			if tt.want == nil {
				c.finished(1, 0)
			}
		})
	}
	if n := c.slots.permits.inUse(); n != 0 {
		t.Errorf("%d permits leaked", n)
	}
}

func TestR056_R057_NeverMoreThanQueueDepth(t *testing.T) {
	var held []*scriptedRequest
	busy := map[int]bool{}
	c, s, _ := openScripted(t, func(s *scriptedServer) {
		s.onRequest = func(r *scriptedRequest) {
			if busy[r.buf] {
				s.t.Errorf("R-056: buffer %d is used twice", r.buf)
			}
			busy[r.buf] = true
			held = append(held, r)
		}
	})
	for tag := range uint64(8) {
		if err := c.write(int(tag%2), tag, 0, 16, "u"); err != nil {
			t.Fatalf("request %d: %v", tag, err)
		}
	}
	for queue := range 2 {
		if err := c.write(queue, 99, 0, 16, "u"); err != ErrNoPermit {
			t.Fatalf("R-057: request beyond the queue depth: %v", err)
		}
	}
	eventually(t, "all requests have arrived", func() (ok bool) {
		s.do(func() { ok = len(held) == 8 })
		return ok
	})
	s.do(func() {
		busy[held[0].buf] = false
		held[0].respond(0)
	})
	c.next()
	woken := map[int]bool{<-c.permit: true, <-c.permit: true}
	if !woken[0] || !woken[1] {
		t.Errorf("queues told of the permit: %v", woken)
	}
	if err := c.write(0, 8, 0, 16, "u"); err != nil {
		t.Errorf("after a completion: %v", err)
	}
}

func TestR081_AnswersInAnyOrder(t *testing.T) {
	var held []*scriptedRequest
	c, s, _ := openScripted(t, func(s *scriptedServer) {
		s.onRequest = func(r *scriptedRequest) { held = append(held, r) }
	})
	for tag := range uint64(8) {
		if err := c.read(0, tag, int(tag), 1, "u"); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "all requests have arrived", func() (ok bool) {
		s.do(func() { ok = len(held) == 8 })
		return ok
	})
	s.do(func() {
		for i := range held { // 3, 6, 1, 4, 7, 2, 5, 0
			r := held[(i+1)*3%8]
			r.data[0] = byte('0' + (i+1)*3%8)
			r.respond((i + 1) * 3 % 8)
		}
	})
	for i := range 8 {
		tag := uint64((i + 1) * 3 % 8)
		c.finished(tag, int(tag))
	}
	if got := c.region.Bytes()[0]; got != '0' {
		t.Errorf("read %q", got)
	}
}

func TestR051_R075_ErrnoOfAnAnswer(t *testing.T) {
	c, _, _ := openScripted(t, func(s *scriptedServer) {
		s.onRequest = func(r *scriptedRequest) { r.respond(int(r.user[0])) }
	})
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.ENOSPC, syscall.EOPNOTSUPP} {
		if err := c.write(0, 1, 0, 8, string([]byte{byte(errno)})); err != nil {
			t.Fatal(err)
		}
		c.finished(1, int(errno))
	}
}

func TestR073_FinalOfType2IsAccepted(t *testing.T) {
	c, _, _ := openScripted(t, func(s *scriptedServer) {
		s.onRequest = func(r *scriptedRequest) { r.conn.imm(rtrswire.IORspImm(true, 0, r.buf)) }
	})
	// More often than there are receives: none may be lost.
	for tag := range uint64(40) {
		if err := c.write(0, tag, 0, 8, "u"); err != nil {
			t.Fatal(err)
		}
		c.finished(tag, 0)
	}
}

func TestR080_UnknownImmediatesAndStrayAnswersAreIgnored(t *testing.T) {
	for _, newRkey := range []bool{false, true} {
		t.Run(fmt.Sprintf("NEW_RKEY %v", newRkey), func(t *testing.T) {
			c, s, _ := openScripted(t, func(s *scriptedServer) { s.newRkey = newRkey })
			// More than all receives of the connections, so they must come back.
			for range 200 {
				s.do(func() {
					for cid := range 3 {
						peer := s.last(cid)
						for _, imm := range []rtrswire.Imm{
							5 << 28, 15<<28 | 7, 3<<28 | 1<<27,
							rtrswire.IORspImm(false, 0, 3),     // nothing in flight
							rtrswire.IORspImm(false, 0, 8),     // no such buffer
							rtrswire.IORspImm(true, 1, 524287), // nor this
						} {
							peer.imm(imm)
						}
					}
				})
			}
			if err := c.write(0, 1, 0, 8, "u"); err != nil {
				t.Fatal(err)
			}
			c.finished(1, 0)
			if len(c.done) != 0 {
				t.Errorf("stray completion %+v", <-c.done)
			}
			if p := c.Paths()[0]; p.State != PathConnected || p.Stats.Reconnects != 0 {
				t.Errorf("path is %v after %d reconnects", p.State, p.Stats.Reconnects)
			}
		})
	}
}

func TestAnswerOnAnotherConnectionIsIgnored(t *testing.T) {
	var held *scriptedRequest
	c, s, _ := openScripted(t, func(s *scriptedServer) {
		s.onRequest = func(r *scriptedRequest) { held = r }
	})
	if err := c.write(0, 1, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the request has arrived", func() (ok bool) {
		s.do(func() { ok = held != nil })
		return ok
	})
	s.do(func() { s.last(2).imm(rtrswire.IORspImm(false, 5, held.buf)) })
	// Any later answer on the same connection shows that it was processed.
	s.do(func() { s.onRequest = func(r *scriptedRequest) { r.respond(0) } })
	if err := c.write(1, 2, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	c.finished(2, 0)
	s.do(func() { held.respond(0) })
	c.finished(1, 0)
}

func TestAnswerOnAnotherPathIsIgnored(t *testing.T) {
	held := make(heldRequests, 64)
	c, a, b, _ := cltTwoPaths(t, held.hold(false), nil)
	if err := c.write(0, 1, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	first := held.next(t)
	if first.conn.srv != a {
		t.Fatal("the request did not take the first path")
	}
	b.do(func() { b.last(1).imm(rtrswire.IORspImm(false, 5, first.buf)) })
	// Any later answer on the same connection shows that it was processed.
	if err := c.write(0, 2, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	second := held.next(t)
	if second.conn.srv != b {
		t.Fatal("the request did not take the second path")
	}
	second.answer(0)
	c.finished(2, 0)
	first.answer(0)
	c.finished(1, 0)
}

func TestR077_R078_RkeysOfAnswersAreUsed(t *testing.T) {
	// Chunks are one region each; the server gives a new key with each answer.
	keys := map[int]uint32{}
	c, _, net := openScripted(t, func(s *scriptedServer) {
		s.newRkey, s.regions = true, 8
		s.onRequest = func(r *scriptedRequest) {
			old, ok := keys[r.buf]
			if !ok {
				old = s.rkey(r.buf)
			}
			if r.user[0] == 'k' { // keep it
				r.conn.rkeyRsp(rtrswire.IORspImm(false, 0, r.buf), r.buf, old)
				return
			}
			keys[r.buf] = verbs.NextKey(old)
			r.conn.post(verbs.SendWR{Op: verbs.OpLocalInv, RKey: old}, nil)
			r.conn.post(verbs.SendWR{Op: verbs.OpRegMR, RKey: keys[r.buf]}, nil)
			r.conn.rkeyRsp(rtrswire.IORspImm(false, 0, r.buf), r.buf, keys[r.buf])
		}
	})
	tap := tapNet(net, clientWork)
	for tag := range uint64(300) { // the low byte of the key wraps
		user := "new"
		if tag%5 == 0 {
			user = "keep"
		}
		if err := c.write(0, tag, 0, 8, user); err != nil {
			t.Fatal(err)
		}
		c.finished(tag, 0)
	}
	seen := map[uint32]bool{}
	for _, e := range tap.all() {
		seen[e.RKey] = true
	}
	if len(seen) < 200 {
		t.Errorf("only %d keys were used", len(seen))
	}
}

func TestR079_MalformedRkeyRspEndsThePath(t *testing.T) {
	send := func(imm rtrswire.Imm, payload []byte) func(r *scriptedRequest) {
		return func(r *scriptedRequest) {
			r.conn.post(verbs.SendWR{Op: verbs.OpSendImm, Imm: uint32(imm | rtrswire.Imm(r.buf))}, payload)
		}
	}
	rsp := func(buf int, typ byte) []byte {
		b := make([]byte, 8)
		rtrswire.RkeyRsp(b).Put(buf, 1)
		b[0] = typ
		return b
	}
	const io = 1 << 28
	tests := []struct {
		name   string
		answer func(r *scriptedRequest)
	}{
		{"7 bytes", send(io, rsp(0, 4)[:7])},
		{"no bytes", send(io, nil)},
		{"wrong type", send(io, rsp(0, 3))},
		{"another buffer than the immediate's", send(io, rsp(7, 4))},
		{"no such buffer", send(io, rsp(8, 4))},
		{"no such buffer with another immediate", send(5<<28, rsp(8, 4))},
		{"longer than the receive", send(io, make([]byte, 9))},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, _, _ := openScripted(t, func(s *scriptedServer) {
				s.newRkey = true
				first := true
				s.onRequest = func(r *scriptedRequest) {
					if first {
						first = false
						tt.answer(r)
						return
					}
					r.respond(0)
				}
			})
			if err := c.write(0, 1, 0, 8, "u"); err != nil {
				t.Fatal(err)
			}
			c.finished(1, Lost)
			c.awaitState(1, PathReconnecting)
			c.awaitState(1, PathConnected)
		})
	}
	t.Run("an immediate that is no answer is ignored", func(t *testing.T) {
		c, _, _ := openScripted(t, func(s *scriptedServer) {
			s.newRkey = true
			s.onRequest = func(r *scriptedRequest) {
				send(5<<28, rsp(r.buf, 4))(r)
				r.respond(0)
			}
		})
		if err := c.write(0, 1, 0, 8, "u"); err != nil {
			t.Fatal(err)
		}
		c.finished(1, 0)
	})
}

func TestPayloadWithoutNewRkeyEndsThePath(t *testing.T) {
	c, s, _ := openScripted(t, nil)
	s.do(func() { s.last(1).post(verbs.SendWR{Op: verbs.OpSend}, []byte("payload")) })
	c.awaitState(1, PathReconnecting)
	c.awaitState(1, PathConnected)
}

// spyDevice counts the receives of its queue pairs until they send a request.
type spyDevice struct {
	verbs.Device
	mu    sync.Mutex
	recvs []int // in the order of making, without the one for INFO_RSP
}

type spyQP struct {
	verbs.QP
	dev  *spyDevice
	n    int
	busy bool
}

func (d *spyDevice) CreateQP(pd verbs.PD, cfg verbs.QPConfig) (verbs.QP, error) {
	qp, err := d.Device.CreateQP(pd, cfg)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.recvs = append(d.recvs, 0)
	return &spyQP{QP: qp, dev: d, n: len(d.recvs) - 1}, err
}

func (d *spyDevice) Connect(ctx context.Context, qp verbs.QP, p verbs.ConnectParams) ([]byte, error) {
	return d.Device.Connect(ctx, qp.(*spyQP).QP, p)
}

func (q *spyQP) PostRecv(wrs []verbs.RecvWR) (int, error) {
	q.dev.mu.Lock()
	defer q.dev.mu.Unlock()
	for _, wr := range wrs {
		if !q.busy && wr.ID != infoRecv {
			q.dev.recvs[q.n]++
		}
	}
	return q.QP.PostRecv(wrs)
}

func (q *spyQP) PostSend(wrs []verbs.SendWR) (int, error) {
	q.dev.mu.Lock()
	defer q.dev.mu.Unlock()
	q.busy = q.busy || wrs[0].Op == verbs.OpWriteImm
	return q.QP.PostSend(wrs)
}

func TestR038_ReceivesBeforeTheFirstRequest(t *testing.T) {
	for _, newRkey := range []bool{false, true} {
		net := loopback.New()
		startScripted(t, net, srvA, func(s *scriptedServer) { s.newRkey = newRkey })
		dev := &spyDevice{Device: net.Device("client")}
		c := cltOpen(t, []PathAddr{pathTo(dev, cltA, srvA)}, func(cfg *ClientConfig) { cfg.Timing.Heartbeat = time.Hour })
		if err := c.AdminWrite(cltContext(t), []byte("u")); err != nil {
			t.Fatal(err)
		}
		for queue := range 2 {
			if err := c.write(queue, 1, 0, 8, "u"); err != nil {
				t.Fatal(err)
			}
			c.finished(1, 0)
		}
		dev.mu.Lock()
		if got, want := fmt.Sprint(dev.recvs), "[1024 16 16]"; got != want {
			t.Errorf("NEW_RKEY %v: receives posted %v, want %v", newRkey, got, want)
		}
		dev.mu.Unlock()
	}
}

func TestR090_R091_R092_Heartbeats(t *testing.T) {
	net := loopback.New()
	s := startScripted(t, net, srvA, nil)
	tap := tapNet(net, func(e loopback.Event) bool { return clientWork(e) && e.Op == verbs.OpWriteImm })
	c := cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, func(cfg *ClientConfig) {
		cfg.Timing.Heartbeat, cfg.Timing.HeartbeatMisses = 10*time.Millisecond, 200 // a busy machine is no loss
	})
	eventually(t, "5 heartbeats were sent", func() bool { return s.count(&s.hbs) >= 5 })
	for _, e := range tap.all() {
		if e.Imm != 0x80000000 || e.Len != 0 || e.SGEs != 0 || e.To != netip.MustParseAddrPort(srvA) {
			t.Errorf("R-090: heartbeat %+v", e)
		}
	}
	s.do(func() { s.last(0).imm(rtrswire.HeartbeatImm) })
	eventually(t, "R-091: the server's heartbeat is answered", func() bool { return s.count(&s.acks) == 1 })
	eventually(t, "latency is measured", func() bool { return c.Paths()[0].Stats.Latency > 0 })
	if p := c.Paths()[0]; p.State != PathConnected || p.Stats.Reconnects != 0 {
		t.Errorf("path is %v", p.State)
	}
}

func TestR093_SilentServerIsDead(t *testing.T) {
	net := loopback.New()
	silent := make(chan struct{})
	s := startScripted(t, net, srvA, func(s *scriptedServer) {
		s.onHB = func(*scriptedConn) bool {
			select {
			case <-silent:
				return false
			default:
				return true
			}
		}
	})
	c := cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, func(cfg *ClientConfig) {
		cfg.Timing.Heartbeat, cfg.Timing.HeartbeatMisses = 10*time.Millisecond, 2
	})
	eventually(t, "heartbeats go round", func() bool { return s.count(&s.hbs) >= 3 })
	close(silent)
	if e := c.awaitState(1, PathReconnecting); !errors.Is(e.Err, ErrHeartbeat) {
		t.Errorf("cause %v, want the heartbeat", e.Err)
	}
}

func TestR092_AnyArrivalKeepsTheClientsPathAlive(t *testing.T) {
	net := loopback.New()
	s := startScripted(t, net, srvA, func(s *scriptedServer) {
		s.onHB = func(*scriptedConn) bool { return false }
	})
	c := cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, func(cfg *ClientConfig) {
		cfg.Timing.Heartbeat, cfg.Timing.HeartbeatMisses = 100*time.Millisecond, 9 // silence ends it after 1.1 s at least
	})
	for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		s.do(func() { s.last(2).imm(5 << 28) })
	}
	if p := c.Paths()[0]; p.State != PathConnected || p.Stats.Reconnects != 0 {
		t.Fatalf("path is %v after %d reconnects", p.State, p.Stats.Reconnects)
	}
	c.awaitState(1, PathReconnecting) // silence now
}

func TestAdminReadAndWrite(t *testing.T) {
	c, _, net := openScripted(t, func(s *scriptedServer) {
		s.onRequest = func(r *scriptedRequest) {
			if r.conn.req.CID != 0 {
				s.t.Errorf("admin request on connection %d", r.conn.req.CID)
			}
			copy(r.data, bytes.ToUpper(r.user))
			r.respond(int(r.user[0]) % 2)
		}
	})
	tap := tapNet(net, clientWork)
	reply := make([]byte, 56)
	if err := c.AdminRead(cltContext(t), []byte("hello"), reply); err != nil || string(reply[:6]) != "HELLO\x00" {
		t.Errorf("AdminRead: %v, %q", err, reply)
	}
	e := tap.all()[0]
	if req, err := rtrswire.ParseRequest(e.Data[5:]); err != nil || req.Desc.Len != 56 || req.NeedInval {
		t.Errorf("request %+v, %v", req, err)
	}
	if err := c.AdminWrite(cltContext(t), []byte("hello")); err != nil {
		t.Errorf("AdminWrite: %v", err)
	}
	if err := c.AdminWrite(cltContext(t), []byte("gello")); !errors.Is(err, syscall.EPERM) {
		t.Errorf("AdminWrite: %v, want errno 1", err)
	}
	if err := c.AdminRead(cltContext(t), make([]byte, 4089), nil); !errors.Is(err, syscall.EMSGSIZE) {
		t.Errorf("user message larger than max_hdr_size: %v", err)
	}
	if n := c.slots.permits.inUse(); n != 0 {
		t.Errorf("%d permits leaked", n)
	}
}

func TestAdminWaitsForAPermit(t *testing.T) {
	var held []*scriptedRequest
	c, s, _ := openScripted(t, func(s *scriptedServer) {
		s.onRequest = func(r *scriptedRequest) {
			if r.conn.req.CID == 0 {
				r.respond(0)
				return
			}
			held = append(held, r)
		}
	})
	for tag := range uint64(8) {
		if err := c.write(0, tag, 0, 16, "u"); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "all requests have arrived", func() (ok bool) {
		s.do(func() { ok = len(held) == 8 })
		return ok
	})
	result := make(chan error)
	write := func(ctx context.Context, waiting int) {
		go func() { result <- c.AdminWrite(ctx, []byte("u")) }()
		eventually(t, "the admin request waits", func() (ok bool) {
			_ = c.Queue(0).poller.Call(cltContext(t), func() { ok = len(c.queues[0].waiting) == waiting })
			return ok
		})
	}
	short, cancel := context.WithCancel(cltContext(t))
	write(short, 1)
	cancel()
	if err := <-result; !errors.Is(err, context.Canceled) {
		t.Fatalf("AdminWrite that is given up: %v", err)
	}
	write(cltContext(t), 2)
	s.do(func() { held[3].respond(0) })
	if err := <-result; err != nil {
		t.Errorf("AdminWrite: %v", err)
	}
}

func TestRegisteredMemoryIsOnAllDevices(t *testing.T) {
	net := loopback.New()
	startScripted(t, net, srvA, nil)
	startScripted(t, net, srvB, nil)
	c := cltOpen(t, []PathAddr{pathTo(net.Device("one"), cltA, srvA)}, func(cfg *ClientConfig) { cfg.Policy = RoundRobin })
	before, err := c.Register(make([]byte, 4096))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.AddPath(cltContext(t), pathTo(net.Device("two"), cltB, srvB)); err != nil {
		t.Fatal(err)
	}
	after, err := c.Register(make([]byte, 4096))
	if err != nil {
		t.Fatal(err)
	}
	for tag, r := range []*Region{before, before, after, after} {
		if err := c.on(0, func(q *Queue) error { return q.Read(uint64(tag), Data{r, 0, 4096}, []byte("u")) }); err != nil {
			t.Fatal(err)
		}
		c.finished(uint64(tag), 0)
	}
	for _, p := range c.Paths() {
		if p.Stats.ReadCount != 2 || p.Stats.ReadBytes != 2*(4096+1) {
			t.Errorf("path %d: %+v", p.ID, p.Stats)
		}
	}
	for _, r := range []*Region{before, after} {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if err := r.Close(); err != nil {
			t.Errorf("second close: %v", err)
		}
	}
	if _, err := c.Register(nil); err == nil {
		t.Error("registered no bytes")
	}
}
