package faults

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
	"github.com/rnbd-go/rnbd/test/lab"
)

// villain is a server that speaks verbs itself, so that it can send wrong things. It
// accepts every connection and answers no request. One goroutine owns its queues.
type villain struct {
	t   *testing.T
	dev verbs.Device
	pd  verbs.PD
	cq  verbs.CQ
	mr  verbs.MR
	mem []byte // chunks, then attackSend bytes to send from, then receives

	mu     sync.Mutex
	conns  map[uint64]*villainConn // by context
	before bool                    // trick is played before INFO_RSP, else after the first request
	trick  func(c *villainConn)
	played int
}

type villainConn struct {
	*villain
	qp   verbs.QP
	cid  int
	path rtrswire.UUID
	desc rtrswire.Desc // where the client wants its answer
}

const villainChunks = attackDepth * attackChunk

func startVillain(t *testing.T, dev verbs.Device, addr netip.AddrPort) (*villain, netip.AddrPort) {
	t.Helper()
	v := &villain{t: t, dev: dev, mem: make([]byte, villainChunks+attackSend+attackRecv), conns: map[uint64]*villainConn{}}
	var err error
	if v.pd, err = dev.AllocPD(); err != nil {
		t.Fatal(err)
	}
	if v.cq, err = dev.CreateCQ(4096); err != nil {
		t.Fatal(err)
	}
	if v.mr, err = v.pd.RegMR(v.mem, verbs.AccessRemoteWrite); err != nil {
		t.Fatal(err)
	}
	l, err := dev.Listen(addr)
	if err != nil {
		t.Fatal(err)
	}
	var work sync.WaitGroup
	var quit atomic.Bool
	work.Go(func() { v.accept(l) })
	work.Go(func() {
		for !quit.Load() {
			if v.poll() == 0 {
				time.Sleep(200 * time.Microsecond)
			}
		}
	})
	t.Cleanup(func() {
		l.Close()
		quit.Store(true)
		work.Wait()
		for _, c := range v.conns {
			c.qp.Disconnect()
			c.qp.Destroy()
		}
		v.poll()
		v.mr.Close()
		v.cq.Close()
		v.pd.Close()
	})
	return v, l.Addr()
}

func (v *villain) accept(l verbs.Listener) {
	for serial := uint64(0); ; serial++ {
		req, err := l.Accept()
		if err != nil {
			return
		}
		f := rtrswire.ConnReq(req.Private()).Fields()
		qp, err := v.dev.CreateQP(v.pd, verbs.QPConfig{CQ: v.cq, Context: serial, SendQueue: 64, RecvQueue: 64, MaxSGE: 1})
		if err != nil {
			v.t.Errorf("queue pair of the hostile server: %v", err)
			return
		}
		for range 32 {
			wr := verbs.RecvWR{Buf: v.mem[villainChunks+attackSend:], LKey: v.mr.LKey()}
			if _, err := qp.PostRecv([]verbs.RecvWR{wr}); err != nil {
				v.t.Errorf("receive of the hostile server: %v", err)
			}
		}
		v.mu.Lock()
		v.conns[serial] = &villainConn{villain: v, qp: qp, cid: int(f.CID), path: f.SessUUID}
		v.mu.Unlock()
		rsp := make([]byte, rtrswire.ConnRspLen)
		rtrswire.ConnRsp(rsp).Put(&rtrswire.ConnRspFields{QueueDepth: attackDepth, MaxIOSize: attackChunk - 4096, MaxHdrSize: 4096})
		if err := req.Accept(qp, rsp); err != nil {
			v.t.Logf("accept: %v", err)
		}
	}
}

func (v *villain) poll() int {
	var wcs [16]verbs.WC
	n := v.cq.Poll(wcs[:])
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, wc := range wcs[:n] {
		c := v.conns[wc.QP]
		switch {
		case c == nil:
		case wc.Op == verbs.OpDisconnected:
			c.qp.Destroy()
			delete(v.conns, wc.QP)
		case wc.Status != verbs.StatusOK:
		case wc.Op == verbs.OpRecv && c.cid == 0:
			c.onInfo()
		case wc.Op == verbs.OpRecvImm && rtrswire.Imm(wc.Imm).Type() == rtrswire.ImmIOReq:
			c.onRequest(rtrswire.Imm(wc.Imm))
		}
	}
	v.cq.Flush()
	return n
}

// play does the trick on every connection of c's path, twice.
func (c *villainConn) play() {
	if c.trick == nil {
		return
	}
	c.played++
	for range 2 {
		for _, other := range c.conns {
			if other.path == c.path {
				other.desc = c.desc
				c.trick(other)
			}
		}
	}
}

func (c *villainConn) onInfo() {
	if c.before {
		c.play()
	}
	b := make([]byte, rtrswire.InfoRspLen(1))
	rtrswire.InfoRsp(b).PutHeader(1)
	rtrswire.InfoRsp(b).PutDesc(0, rtrswire.Desc{Addr: c.mr.Addr(), Key: c.mr.RKey(), Len: villainChunks})
	c.post(verbs.SendWR{Op: verbs.OpSend}, b)
}

func (c *villainConn) onRequest(imm rtrswire.Imm) {
	buf, off := imm.IOReq(rtrswire.BufShift(attackDepth))
	if buf < attackDepth && off < attackChunk {
		if r, err := rtrswire.ParseRequest(c.mem[buf*attackChunk+off : (buf+1)*attackChunk]); err == nil && r.HasDesc {
			c.desc = r.Desc
		}
	}
	if !c.before {
		c.play()
	}
}

// post sends b, on a connection that may have ended.
func (c *villainConn) post(wr verbs.SendWR, b []byte) {
	from := c.mem[villainChunks:][:len(b)]
	copy(from, b)
	if wr.SGEs = []verbs.SGE{{Buf: from, LKey: c.mr.LKey()}}; len(b) == 0 {
		wr.SGEs = nil
	}
	wr.Signaled = true
	c.qp.PostSend([]verbs.SendWR{wr})
}

// serverTrick is something that no honest server does.
type serverTrick struct {
	name string
	do   func(c *villainConn)
}

func serverTricks() (list []serverTrick) {
	for _, n := range []int{0, 7, 8, 9, 4096, 8192} {
		for _, op := range []verbs.Opcode{verbs.OpSend, verbs.OpSendImm, verbs.OpSendInv} {
			list = append(list, serverTrick{fmt.Sprintf("opcode %d of %d bytes", op, n), func(c *villainConn) {
				c.post(verbs.SendWR{Op: op, Imm: uint32(rtrswire.IORspImm(false, 0, 1)), RKey: c.desc.Key}, make([]byte, n))
			}})
		}
	}
	for _, imm := range []uint32{0, 0x0fffffff, 0x10000000, 0x1fffffff, 0x20000000, 0x2fffffff, 0x80000000, 0x90000000, 0xffffffff,
		uint32(rtrswire.IORspImm(false, 0, attackDepth)), uint32(rtrswire.IORspImm(true, 511, 0xffff))} {
		list = append(list, serverTrick{fmt.Sprintf("immediate %#08x", imm), func(c *villainConn) {
			c.post(verbs.SendWR{Op: verbs.OpWriteImm, Imm: imm}, nil)
		}})
	}
	for _, w := range []struct {
		name  string
		place func(d rtrswire.Desc) (addr uint64, key uint32, n int)
	}{
		{"more than the answer has room for", func(d rtrswire.Desc) (uint64, uint32, int) { return d.Addr, d.Key, int(min(d.Len+1, 32<<10)) }},
		{"before the answer's memory", func(d rtrswire.Desc) (uint64, uint32, int) { return d.Addr - 8, d.Key, 8 }},
		{"far behind the answer's memory", func(d rtrswire.Desc) (uint64, uint32, int) { return d.Addr + 1<<30, d.Key, 8 }},
		{"a key that was not given", func(d rtrswire.Desc) (uint64, uint32, int) { return d.Addr, d.Key + 1<<8, 8 }},
		{"address 0", func(d rtrswire.Desc) (uint64, uint32, int) { return 0, d.Key, 8 }},
	} {
		list = append(list, serverTrick{"write to " + w.name, func(c *villainConn) {
			addr, key, n := w.place(c.desc)
			c.post(verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(rtrswire.IORspImm(false, 0, 0)), RemoteAddr: addr, RKey: key}, make([]byte, n))
		}})
	}
	return list
}

// A server that breaks RTRS, before and after INFO_RSP, on fabrics of real processes:
// the client daemon lives, a device of an honest server is used meanwhile without an
// error, and nothing is left of the attempts.
func TestHostileTransportOfARealClient(t *testing.T) {
	quiet := slog.New(slog.DiscardHandler)
	for _, fabric := range []string{"iwarp", "rocev2"} {
		t.Run(fabric, func(t *testing.T) {
			l := lab.New(t)
			s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk", 1<<20), Plugins: []string{"fileio"}})
			c := l.Client(lab.ClientOptions{Extra: []string{"--log-level", "error"}})
			victim := &nbdUser{t, mustDial(t, c, l.Map(c, "disk", s).Name), 4}
			var dev verbs.Device
			var err error
			addr, from, suffix := "127.0.0.1:0", "", ""
			if fabric == "iwarp" {
				cfg := iwarp.DefaultConfig()
				cfg.Logger = quiet
				dev, err = iwarp.Open(cfg)
			} else {
				addr, from, suffix = lab.LoopbackAddr(15)+":1234", lab.LoopbackAddr(16)+"@", "%rocev2"
				dev, err = rocev2.Open(rocev2.Config{IRD: -1, ORD: -1, Logger: quiet})
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { dev.Close() })
			v, at := startVillain(t, dev, netip.MustParseAddrPort(addr))
			attempts := 0
			attempt := func(name string) { // until the trick was played and the client has seen it
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				over := make(chan error, 1)
				attempts++
				device := fmt.Sprint("disk", attempts) // the one before may be on its way out
				go func() {
					_, err := c.API.Map(ctx, &controlpb.MapRequest{Path: device, Paths: []string{from + at.String() + suffix}, Session: "villain " + device})
					over <- err
				}()
				var err error
				ended := false
				for end := time.Now().Add(enough); ; time.Sleep(time.Millisecond) {
					select {
					case err = <-over:
						ended = true
					default:
					}
					v.mu.Lock()
					played := v.played > 0
					v.mu.Unlock()
					if played {
						break
					}
					if ended || time.Now().After(end) {
						t.Errorf("%s: the client has not come so far: %v", name, err)
						return
					}
				}
				if !ended {
					select {
					case err = <-over:
					case <-time.After(20 * time.Millisecond):
						cancel()
						err = <-over
					}
				}
				if err == nil {
					t.Errorf("%s: a server that answers nothing has a device", name)
				}
			}
			base := holding{}
			var quit atomic.Bool
			took := make(chan []time.Duration, 1)
			go func() { took <- victim.run(quit.Load) }()
			tricks := serverTricks()
			for _, before := range []bool{true, false} {
				for _, trick := range tricks {
					v.mu.Lock()
					v.before, v.trick, v.played = before, trick.do, 0
					v.mu.Unlock()
					attempt(trick.name)
					if gone, err := c.Exited(); gone {
						t.Fatalf("the client ended (%v) at %q, before INFO_RSP %v", err, trick.name, before)
					}
					if base == (holding{}) { // after the first: the client has its resources for the fabric
						base = holdingOf(t, c.PID())
					}
				}
			}
			quit.Store(true)
			t.Logf("%d tricks; the honest server's device: %s", 2*len(tricks), figures(<-took))
			eventually(t, enough, "the client holds what it held before", func() bool {
				now := holdingOf(t, c.PID())
				return now.descriptors <= base.descriptors && now.resident <= base.resident+(32<<10)
			})
		})
	}
}
