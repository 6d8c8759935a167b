package faults

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
	"github.com/rnbd-go/rnbd/test/lab"
)

// attacker is a client that speaks verbs itself, so that it can send wrong things.
// The test's goroutine owns its queues.
type attacker struct {
	t        *testing.T
	dev      verbs.Device
	pd       verbs.PD
	cq       verbs.CQ
	mr       verbs.MR
	mem      []byte // attackSend bytes to send from, then receives, then replies
	src, dst netip.AddrPort
	names    int
	heard    int // receives of all paths
}

const (
	attackSend  = 64 << 10
	attackRecv  = 64 << 10
	attackReply = 64 << 10
	attackChunk = 8192
	attackDepth = 16
	attackConns = 2
)

func newAttacker(t *testing.T, dev verbs.Device, src string, dst netip.AddrPort) *attacker {
	t.Helper()
	a := &attacker{t: t, dev: dev, dst: dst, mem: make([]byte, attackSend+attackRecv+attackReply)}
	a.src = netip.AddrPortFrom(netip.MustParseAddr(src), 0)
	var err error
	if a.pd, err = dev.AllocPD(); err != nil {
		t.Fatal(err)
	}
	if a.cq, err = dev.CreateCQ(4096); err != nil {
		t.Fatal(err)
	}
	if a.mr, err = a.pd.RegMR(a.mem, verbs.AccessRemoteWrite); err != nil {
		t.Fatal(err)
	}
	return a
}

// attack is one path of an attacker.
type attack struct {
	*attacker
	req   rtrswire.ConnReqFields
	rep   rtrswire.ConnRspFields
	qps   []verbs.QP
	info  []byte // INFO_RSP
	descs []rtrswire.Desc
	downs int
	heard int // receives
}

// connect begins a path with its connections, without INFO.
func (a *attacker) connect() *attack {
	a.t.Helper()
	p := &attack{attacker: a, req: rtrswire.ConnReqFields{CIDNum: attackConns, ReconCnt: 1, FirstConn: true}}
	rand.Read(p.req.SessUUID[:])
	rand.Read(p.req.PathsUUID[:])
	for cid := range attackConns {
		qp, err := a.dev.CreateQP(a.pd, verbs.QPConfig{CQ: a.cq, Context: uint64(cid), SendQueue: 64, RecvQueue: 64, MaxSGE: 1})
		if err != nil {
			a.t.Fatal(err)
		}
		for i := range 32 { // the first of connection 0 is for INFO_RSP
			wr := verbs.RecvWR{ID: uint64(i), Buf: a.mem[attackSend:][:attackRecv], LKey: a.mr.LKey()}
			if _, err := qp.PostRecv([]verbs.RecvWR{wr}); err != nil {
				a.t.Fatal(err)
			}
		}
		b := make([]byte, rtrswire.ConnReqLen)
		p.req.CID = uint16(cid)
		rtrswire.ConnReq(b).Put(&p.req)
		p.req.FirstConn = false
		ctx, cancel := context.WithTimeout(a.t.Context(), enough)
		rsp, err := a.dev.Connect(ctx, qp, verbs.ConnectParams{Src: a.src.Addr(), Dst: a.dst, Private: b})
		cancel()
		if err != nil {
			qp.Destroy()
			a.t.Fatalf("connect: %v", err)
		}
		p.rep = rtrswire.ConnRsp(rsp).Fields()
		p.qps = append(p.qps, qp)
	}
	return p
}

// join sends INFO_REQ and takes the chunks from the answer.
func (p *attack) join() *attack {
	p.t.Helper()
	p.names++
	b := make([]byte, rtrswire.InfoReqLen)
	rtrswire.InfoReq(b).Put(fmt.Sprintf("hostile%d", p.names))
	p.post(0, verbs.SendWR{Op: verbs.OpSend}, b)
	eventually(p.t, enough, "INFO_RSP", func() bool { p.poll(); return p.info != nil })
	m := rtrswire.InfoRsp(p.info)
	if err := m.Check(int(p.rep.QueueDepth), attackChunk); err != nil {
		p.t.Fatal(err)
	}
	for i := range m.Count() {
		p.descs = append(p.descs, m.Desc(i))
	}
	return p
}

func (p *attack) poll() {
	var wcs [64]verbs.WC
	for _, wc := range wcs[:p.cq.Poll(wcs[:])] {
		switch {
		case wc.Op == verbs.OpDisconnected:
			p.downs++
		case wc.Status == verbs.StatusOK && (wc.Op == verbs.OpRecv || wc.Op == verbs.OpRecvImm):
			p.attacker.heard++
			if p.heard++; p.info == nil && wc.QP == 0 {
				p.info = bytes.Clone(p.mem[attackSend:][:wc.ByteLen])
			}
		}
	}
}

// post sends b by wr, on a connection that may have ended.
func (p *attack) post(cid int, wr verbs.SendWR, b []byte) {
	p.t.Helper()
	copy(p.mem[:attackSend], b)
	if wr.SGEs = []verbs.SGE{{Buf: p.mem[:len(b)], LKey: p.mr.LKey()}}; len(b) == 0 {
		wr.SGEs = nil
	}
	wr.Signaled = true
	eventually(p.t, enough, "room in the send queue", func() bool {
		_, err := p.qps[cid].PostSend([]verbs.SendWR{wr})
		if err != nil && !errors.Is(err, verbs.ErrNotConnected) && !errors.Is(err, verbs.ErrQueueFull) {
			p.t.Fatalf("post: %v", err)
		}
		p.cq.Flush()
		p.poll()
		return !errors.Is(err, verbs.ErrQueueFull)
	})
}

// place returns address and key of a chunk.
func (p *attack) place(chunk int) (addr uint64, key uint32) {
	if len(p.descs) > chunk {
		return p.descs[chunk].Addr, p.descs[chunk].Key
	}
	return p.descs[0].Addr + uint64(chunk*attackChunk), p.descs[0].Key
}

// put writes b to the beginning of a chunk and says with imm that it is there.
func (p *attack) put(cid, chunk int, b []byte, imm rtrswire.Imm) {
	p.t.Helper()
	addr, key := p.place(chunk)
	p.post(cid, verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(imm), RemoteAddr: addr, RKey: key}, b)
}

// request sends a READ or WRITE of n bytes with a message, of RNBD or not.
func (p *attack) request(cid, chunk int, read bool, n int, usr []byte) {
	p.t.Helper()
	b := append(make([]byte, n), usr...)
	off := len(b)
	b = append(b, make([]byte, rtrswire.MaxReqHdrLen)...)
	if read {
		d := rtrswire.Desc{Addr: p.mr.Addr() + attackSend + attackRecv, Key: p.mr.RKey(), Len: uint32(n)}
		b = b[:off+rtrswire.PutReadDescHdr(b[off:], len(usr), false, d)]
	} else {
		b = b[:off+rtrswire.PutWriteHdr(b[off:], len(usr))]
	}
	p.put(cid, chunk, b, rtrswire.IOReqImm(rtrswire.BufShift(int(p.rep.QueueDepth)), chunk, off))
}

// settle gives the server the time to answer or to hang up.
func (p *attack) settle() {
	before := p.heard
	for end := time.Now().Add(2 * time.Millisecond); time.Now().Before(end) && p.heard == before && p.downs == 0; {
		p.poll()
	}
}

// leave ends the path.
func (p *attack) leave() {
	for _, qp := range p.qps {
		qp.Disconnect()
	}
	for end := time.Now().Add(100 * time.Millisecond); p.downs < len(p.qps) && time.Now().Before(end); {
		p.poll()
	}
	for _, qp := range p.qps {
		qp.Destroy()
	}
	p.poll()
}

// trick is something that no honest client does.
type trick struct {
	name string
	do   func(p *attack, cid int)
}

// transportTricks are messages and immediates of RTRS, before or after INFO.
func transportTricks() (list []trick) {
	for _, n := range []int{0, 1, rtrswire.InfoReqLen - 1, rtrswire.InfoReqLen, rtrswire.InfoReqLen + 1, 8192} {
		for _, op := range []verbs.Opcode{verbs.OpSend, verbs.OpSendImm, verbs.OpSendInv} {
			list = append(list, trick{fmt.Sprintf("opcode %d of %d bytes", op, n), func(p *attack, cid int) {
				p.post(cid, verbs.SendWR{Op: op, Imm: 0x10000001, RKey: 0x1234}, make([]byte, n))
			}})
		}
	}
	for _, kind := range []uint32{0, 1, 2, 8, 9, 15} {
		for _, v := range []uint32{0, 1, 15<<24 | 8191, 1<<28 - 1} {
			list = append(list, trick{fmt.Sprintf("immediate %#08x", kind<<28|v), func(p *attack, cid int) {
				p.post(cid, verbs.SendWR{Op: verbs.OpWriteImm, Imm: kind<<28 | v}, nil)
			}})
		}
	}
	return list
}

// placeTricks are RDMA WRITEs beside the chunks, and requests with headers that
// say more than there is.
func placeTricks() (list []trick) {
	for _, w := range []struct {
		off, n   int
		keyDelta uint32
	}{{0, 8193, 0}, {attackChunk, 8, 0}, {-8, 8, 0}, {0, 8, 1}, {0, 8, 1 << 8}} {
		list = append(list, trick{fmt.Sprintf("write of %d bytes at %d, key +%d", w.n, w.off, w.keyDelta), func(p *attack, cid int) {
			addr, key := p.place(attackDepth - 1)
			p.post(cid, verbs.SendWR{Op: verbs.OpWriteImm, RemoteAddr: addr + uint64(int64(w.off)), RKey: key + w.keyDelta}, make([]byte, w.n))
		}})
	}
	for _, kind := range []byte{0, 1, 2, 3, 4, 5, 6, 0xff} {
		for _, size := range []byte{0, 1, 0xff} {
			list = append(list, trick{fmt.Sprintf("request of type %d with a message of %#x%02[2]x bytes", kind, size), func(p *attack, cid int) {
				header := append([]byte{kind, 0, size, size}, bytes.Repeat([]byte{size}, 24)...)
				p.put(cid, 1, header, rtrswire.IOReqImm(rtrswire.BufShift(attackDepth), 1, 0))
			}})
		}
	}
	return append(list, trick{"two requests in one chunk", func(p *attack, cid int) {
		msg := make([]byte, rnbdwire.SessInfoSize)
		rnbdwire.SessInfoFields{Version: rnbdwire.Version}.Put(msg)
		p.request(0, 0, true, 64, msg)
		p.request(1, 0, true, 64, msg)
	}})
}

// messageTricks are messages of RNBD: each type in every length, then
// well-formed messages that ask for the impossible, or arrive in states that do
// not allow them.
func messageTricks() (list []trick) {
	for _, kind := range []uint16{0, 1, 2, 3, 4, 5, 6, 0x8000, 0x8001, 0x8002, 0x8003, 0xffff} {
		for _, n := range []int{0, 1, 3, 4, 7, 8, 15, 16, 31, 32, 36, 56, 263, 264, 296, 1000} {
			for _, fill := range []byte{0, 0xff} {
				list = append(list, trick{fmt.Sprintf("message %#x of %d bytes of %#x", kind, n, fill), func(p *attack, cid int) {
					msg := bytes.Repeat([]byte{fill}, n)
					copy(msg, []byte{byte(kind), byte(kind >> 8), 0, 0}[:min(n, 4)])
					p.request(cid, 0, true, 512, msg)
					p.request(cid, 1, false, 512, msg)
				}})
			}
		}
	}
	open := func(name string, mode byte) []byte {
		msg := make([]byte, rnbdwire.OpenSize)
		rnbdwire.OpenFields{AccessMode: mode, Name: name}.Put(msg)
		return msg
	}
	sess := make([]byte, rnbdwire.SessInfoSize)
	rnbdwire.SessInfoFields{Version: rnbdwire.Version}.Put(sess)
	for _, name := range []string{"victim", "../victim", "/", "no/such", "../../../../etc/passwd", "/proc/self/mem"} {
		for _, mode := range []byte{0, 1, 2, 3, 255} {
			list = append(list, trick{fmt.Sprintf("open %s, mode %d", name, mode), func(p *attack, cid int) {
				p.request(cid, 0, true, 512, open(name, mode)) // before SESS_INFO
				p.request(cid, 1, true, 512, sess)
				p.request(cid, 2, true, 512, open(name, mode))
			}})
		}
	}
	for _, f := range []rnbdwire.IOFields{
		{RW: 0, BISize: 512}, {RW: 1, BISize: 512}, {RW: 1, Sector: 1 << 63, BISize: 512}, {RW: 0, Sector: 1<<64 - 1, BISize: 1 << 31},
		{RW: 200, BISize: 512}, {RW: 3, BISize: 1<<32 - 1}, {RW: 5, Sector: 2047, BISize: 8192}, {RW: 1, BISize: 7}, {RW: 2, Sector: 1<<64 - 1},
	} {
		for _, id := range []uint32{0, 1, 1<<32 - 1} {
			f.DeviceID = id
			list = append(list, trick{fmt.Sprintf("I/O %+v", f), func(p *attack, cid int) {
				p.request(0, 0, true, 512, sess)
				p.request(0, 1, true, 512, open("own", 1))
				p.settle()
				msg := make([]byte, rnbdwire.IOSize)
				f.Put(msg)
				p.request(cid, 2, f.RW != 1, 512, msg)
				p.request(cid, 3, f.RW == 1, 0, msg)
				shut := make([]byte, rnbdwire.CloseSize)
				rnbdwire.CloseFields{DeviceID: id}.Put(shut)
				p.request(cid, 4, false, 0, shut)
				p.request(cid, 5, true, 512, shut)
			}})
		}
	}
	return list
}

// underAttack returns a real server, an honest user of it, and an attacker on a
// fabric.
func underAttack(t *testing.T, fabric string) (s *lab.Server, victim *user, a *attacker) {
	quiet := slog.New(slog.DiscardHandler)
	roceServer, roceClient := lab.LoopbackAddr(11), lab.LoopbackAddr(12)
	l := lab.New(t)
	l.Image("victim", 1<<20)
	dir := l.Image("own", 1<<20)
	s = l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"},
		Listen: []string{"rocev2://" + roceServer + ":1234"}, Addrs: []string{"127.0.0.1"},
		Extra: []string{"--queue-depth", fmt.Sprint(attackDepth), "--chunk-size", fmt.Sprint(attackChunk), "--log-level", "error"}})
	s.Addrs = s.Addrs[1:] // of the honest client
	victim = newUser(t, s, "victim", 4)
	var dev verbs.Device
	var err error
	src, dst := "127.0.0.2", netip.MustParseAddrPort(s.Addrs[0])
	if fabric == "iwarp" {
		cfg := iwarp.DefaultConfig()
		cfg.Logger = quiet
		dev, err = iwarp.Open(cfg)
	} else {
		src, dst = roceClient, netip.MustParseAddrPort(roceServer+":1234")
		dev, err = rocev2.Open(rocev2.Config{IRD: -1, ORD: -1, Logger: quiet})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	a = newAttacker(t, dev, src, dst)
	t.Cleanup(func() { a.mr.Close(); a.cq.Close(); a.pd.Close() })
	return s, victim, a
}

// A client that sends whatever it likes, on fabrics of real processes: the server
// lives, an honest client of another session is served meanwhile without an error,
// and the server holds as much as before when the attacker has gone.
func TestHostileClientOfARealServer(t *testing.T) {
	for _, fabric := range []string{"iwarp", "rocev2"} {
		t.Run(fabric, func(t *testing.T) {
			s, victim, a := underAttack(t, fabric)
			alone := victim.run(after(200 * time.Millisecond))
			first := a.connect().join() // the server now has its resources for the fabric
			first.leave()
			base, pid := holdingOf(t, s.PID()), s.PID()

			var quit atomic.Bool
			beside := make(chan []time.Duration, 1)
			var running sync.WaitGroup
			running.Go(func() { beside <- victim.run(quit.Load) })
			defer running.Wait() // also when an assertion ends the test: its devices are closed then
			defer quit.Store(true)
			before := victim.ended.Load()
			for _, stage := range []struct {
				name   string
				begin  func() *attack
				tricks []trick
			}{
				{"before INFO", a.connect, transportTricks()},
				{"after INFO", func() *attack { return a.connect().join() }, append(append(transportTricks(), placeTricks()...), messageTricks()...)},
			} {
				p := stage.begin()
				for i, trick := range stage.tricks {
					if gone, err := s.Exited(); gone {
						t.Fatalf("the server ended (%v) at or before %q %s", err, trick.name, stage.name)
					}
					if p.downs > 0 || i%20 == 19 { // receives are used up, too
						p.leave()
						p = stage.begin()
					}
					for _, cid := range []int{1, 0, 0} { // and again
						trick.do(p, cid)
					}
					p.settle()
				}
				p.leave()
			}
			quit.Store(true)
			took := <-beside
			if n := victim.ended.Load() - before; n < 100 {
				t.Errorf("the honest client had %d answers", n)
			}
			if a.heard < 100 {
				t.Errorf("the attacker had %d answers: the server does not listen to it", a.heard)
			}
			t.Logf("the honest client alone: %s; beside the attack: %s", figures(alone), figures(took))
			// A path that its peer has left halfway goes with the InfoTimeout of 30 s at the latest.
			var now holding
			defer func() { t.Logf("the server held %+v, and now %+v", base, now) }()
			eventually(t, 30*time.Second+enough, "the server holds what it held before", func() bool {
				var wcs [64]verbs.WC
				a.cq.Poll(wcs[:])
				now = holdingOf(t, s.PID())
				return now.descriptors <= base.descriptors && now.resident <= base.resident+(32<<10)
			})
			if s.PID() != pid {
				t.Error("the server is another process")
			}
		})
	}
}
