package rocev2

import (
	"bytes"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// offline is a connection with packets that go nowhere: the test brings the
// arriving ones. It is attached as a real one is, and runs the same code.
type offline struct {
	t     testing.TB
	dev   *Device
	cq    *compQueue
	q     *qp
	arena []byte // guard, writable, guard, readable, guard; guardLen each but the regions
	w, r  verbs.MR
	wcs   []verbs.WC
}

const (
	guardLen  = 512
	regionLen = 2048
	fuzzSends = 6
	fuzzRecvs = 4
)

func newOffline(t testing.TB) *offline {
	d := must(Open(Config{Logger: slog.New(slog.DiscardHandler)}))(t).(*Device)
	dom := must(d.AllocPD())(t)
	c := must(d.CreateCQ(1))(t).(*compQueue)
	q := must(d.CreateQP(dom, verbs.QPConfig{CQ: c, Context: 1, SendQueue: 8, RecvQueue: 8, MaxSGE: 2}))(t).(*qp)
	o := &offline{t: t, dev: d, cq: c, q: q, arena: make([]byte, 3*guardLen+2*regionLen)}
	o.w = must(dom.RegMR(o.arena[guardLen:][:regionLen], verbs.AccessRemoteWrite))(t)
	o.r = must(dom.RegMR(o.arena[2*guardLen+regionLen:][:regionLen], verbs.AccessRemoteRead))(t)
	p := &udpPort{dev: d, addr: addrA}
	q.conn = &cmConn{m: &d.cm, state: connTimeWait, port: p}
	c.outs = []*sendBatch{newOutbox(p, -1, c.stats)}
	q.Set(softverbs.Up)
	q.initHalves(&connAgreement{port: p, peer: addrB, peerQPN: rawQPN, mtu: 1, sendPSN: rawPSN, recvPSN: rawPSN, ird: 2, ord: 2})
	c.clock = c.Now()
	c.attachConn(q)
	recv, rmr := make([]byte, 600), verbs.MR(nil)
	rmr = must(dom.RegMR(recv, 0))(t)
	for i := range uint64(fuzzRecvs) {
		q.PostRecv([]verbs.RecvWR{{ID: i, Buf: recv, LKey: rmr.LKey()}})
	}
	for i := range uint64(fuzzSends) {
		wr := verbs.SendWR{ID: 100 + i, Op: verbs.OpWrite, Signaled: true, RemoteAddr: 1, RKey: 2, SGEs: []verbs.SGE{{Buf: recv, LKey: rmr.LKey()}}}
		if i%3 == 1 {
			wr.Op = verbs.OpRead
		}
		q.PostSend([]verbs.SendWR{wr})
	}
	return o
}

// arrive lets b arrive as a packet of the peer, with all that would be dropped
// at once put right: head chooses where numbers and keys point.
func (o *offline) arrive(b []byte, head byte) {
	if len(b) < bthLen {
		return
	}
	b = append(bytes.Clone(b), make([]byte, icrcLen)...)
	b[1] &= 0x30
	b[2], b[3] = 0xff, 0xff
	near := o.q.resp.psn
	if op := opcode(b[0]); op < opcodesOfRC && shapes[op].class >= classResponse {
		near = o.q.req.una.psn
	}
	be.PutUint32(b[4:], o.q.qpn)
	be.PutUint32(b[8:], psnAdd(near, uint32(int32(head&7)-3))|uint32(b[8]&0x80)<<24)
	if op := opcode(b[0]); op < opcodesOfRC && shapes[op].reth && len(b) >= bthLen+rethLen+icrcLen && head&8 != 0 {
		mr := o.w
		if head&16 != 0 {
			mr = o.r
		}
		off := uint64(int16(be.Uint16(b[bthLen+6:]))) % (2 * regionLen)
		putRETH(b[bthLen:], mr.Addr()+off-guardLen, mr.RKey(), be.Uint32(b[bthLen+12:])%(2*regionLen))
	}
	p := receivedPacket{b: b, addr: o.q.peer, sport: 7, out: o.q.out}
	from := newPseudo(addrB, addrA, 7)
	from.sealPacket(b, 0)
	var wc verbs.WC
	if o.cq.deliverCounted(&p, &wc) == 1 {
		o.wcs = append(o.wcs, wc)
	}
	var wcs [4]verbs.WC
	o.cq.transmitActive()
	o.wcs = append(o.wcs, wcs[:o.cq.serveActive(wcs[:])]...)
}

// finish ends the connection and returns how often each request completed.
func (o *offline) finish() {
	o.q.hangUp(verbs.StatusOK, nil)
	for o.q.Attached {
		var wcs [3]verbs.WC
		o.wcs = append(o.wcs, wcs[:o.cq.serveActive(wcs[:])]...)
	}
	times := map[uint64]int{}
	for i, wc := range o.wcs {
		if wc.Op == verbs.OpDisconnected {
			if i != len(o.wcs)-1 {
				o.t.Errorf("%d completions after OpDisconnected", len(o.wcs)-1-i)
			}
			continue
		}
		if times[wc.ID]++; times[wc.ID] > 1 {
			o.t.Errorf("request %d completed twice", wc.ID)
		}
	}
	if len(times) != fuzzSends+fuzzRecvs {
		o.t.Errorf("%d requests completed, %d were posted", len(times), fuzzSends+fuzzRecvs)
	}
	if err := o.cq.Close(); err != nil {
		o.t.Error(err)
	}
	o.dev.Close()
}

// records cuts fuzz input into pieces: a byte that chooses, two of length.
func records(b []byte, each func(head byte, b []byte)) {
	for n := 0; len(b) >= 3 && n < 64; n++ {
		size := min(int(be.Uint16(b[1:]))%600, len(b)-3)
		each(b[0], b[3:3+size])
		b = b[3+size:]
	}
}

func record(head byte, b []byte) []byte {
	return append([]byte{head, byte(len(b) >> 8), byte(len(b))}, b...)
}

// Whatever packets come: memory outside the granted region keeps its bytes,
// and every request completes once.
func FuzzRCPackets(f *testing.F) {
	var all []byte
	for _, c := range captures(f) {
		if c.kind[0] == 'R' && c.kind != "RTU" || len(c.b) > 600 {
			continue
		}
		b := c.b[:len(c.b)-icrcLen]
		f.Add(record(3|8, b))
		all = append(all, record(3|8, b)...)
	}
	f.Add(all)
	for _, op := range []opcode{opReadRequest, opReadRespOnly, opReadRespFirst, opAck, opWriteFirst, opSendFirst} {
		b := make([]byte, shapes[op].size+256)
		putBTH(b, op, 0, 1, 0, true)
		f.Add(append(record(3|8|16, b), append(record(3|8, b), record(2, b)...)...))
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		o := newOffline(t)
		for i := range o.arena {
			o.arena[i] = 0xa5
		}
		records(input, func(head byte, b []byte) {
			if head&0x60 == 0x60 { // time goes by
				o.cq.clock += int64(time.Second)
				o.cq.Expire(o.cq.clock)
				o.cq.transmitActive()
			}
			o.arrive(b, head)
		})
		clear(o.arena[guardLen:][:regionLen])
		for i, v := range o.arena {
			if v != 0xa5 && (i < guardLen || i >= guardLen+regionLen) {
				t.Fatalf("byte %d beside the region was written", i-guardLen)
			}
		}
		o.finish()
	})
}

// Whatever messages come: each is answered by one at most, and nothing is
// kept for more connections than were asked for.
func FuzzMAD(f *testing.F) {
	var all []byte
	for _, c := range captures(f) {
		if m, why := parseDatagram(c.b); why == dropNone {
			f.Add(record(0, m))
			all = append(append(all, record(1, m)...), record(2, m)...)
		}
	}
	f.Add(all)
	for _, m := range []mad{newMRA(1, 2, 3, 4), newDREQ(1, 2, 3, 4), (&rejFields{reason: reasonTimeout, ari: make([]byte, 8)}).encode(1, 2, 3)} {
		f.Add(append(record(1, m), record(2, m)...))
	}
	sink, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(testAddr(9), 0)))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { sink.Close() })
	f.Fuzz(func(t *testing.T, input []byte) {
		d := must(Open(Config{Logger: slog.New(slog.DiscardHandler)}))(t).(*Device)
		defer d.Close()
		dom := must(d.AllocPD())(t)
		c := must(d.CreateCQ(1))(t).(*compQueue)
		q := must(d.CreateQP(dom, verbs.QPConfig{CQ: c}))(t).(*qp)
		defer func() {
			q.Destroy()
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}()
		q.Move(softverbs.Idle, softverbs.Connecting)
		p := &udpPort{dev: d, addr: addrA, mtu: 5, control: sink}
		c.outs = []*sendBatch{newOutbox(p, -1, c.stats)}
		m := &d.cm
		l := must(m.listenOn(netip.AddrPortFrom(netip.IPv4Unspecified(), 1234)))(t)
		asked := m.sendRequest(p, q, connTarget{dst: addrB, service: servicePortSpace | 1}, maxMTUCode)
		m.mu.Lock()
		defer m.mu.Unlock()
		known := len(m.conns)
		records(input, func(head byte, b []byte) {
			if len(b) != madLen || !mad(b).valid() {
				return
			}
			b = bytes.Clone(b)
			switch head & 3 {
			case 1:
				be.PutUint32(b[28:], asked.local)
			case 2: // a request that can be right
				addrs := b[madHeaderLen+reqPrivate:]
				addrs[0], addrs[1] = 0, 0x40
				putAddr(addrs[4:20], addrB)
				putAddr(addrs[20:36], addrA)
				gids := b[madHeaderLen+56:]
				s, o := addrB.As16(), addrA.As16()
				copy(gids, s[:])
				copy(gids[16:], o[:])
			}
			sent, requests := m.psn, mad(b).attribute() == attrREQ
			why := m.handleMessage(p, addrB, b, false)
			if n := m.psn - sent; n > 1 || why != dropNone && n > 0 {
				t.Fatalf("%d messages were sent for one, dropped: %s", n, DropReason(int(why)))
			}
			if requests {
				known++
			}
			if len(m.conns) > known || len(l.queue) > m.handshakes.Len() {
				t.Fatalf("%d connections are kept, %d handshakes, %d requests wait", len(m.conns), m.handshakes.Len(), len(l.queue))
			}
		})
		for _, c := range m.conns {
			c.removeTraces()
		}
	})
}
