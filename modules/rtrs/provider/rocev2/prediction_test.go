package rocev2

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// train sends packets of one size as one segmented send, so that the device
// receives them as one datagram. edit may change them behind the ICRC.
func (c *rawConn) train(from *raw, packets [][]byte, edit func(i int, b []byte)) {
	c.t.Helper()
	ps := newPseudo(from.addr, c.dev, roceUDPPort)
	var all []byte
	for i, b := range packets {
		b = append(bytes.Clone(b), make([]byte, icrcLen)...)
		ps.sealPacket(b, uint16(i))
		if edit != nil {
			edit(i, b)
		}
		all = append(all, b...)
	}
	oob := make([]byte, unix.CmsgSpace(2))
	h := (*unix.Cmsghdr)(unsafe.Pointer(&oob[0]))
	h.Level, h.Type = unix.SOL_UDP, unix.UDP_SEGMENT
	h.SetLen(unix.CmsgLen(2))
	binary.NativeEndian.PutUint16(oob[unix.CmsgLen(0):], uint16(len(packets[0])+icrcLen))
	if _, _, err := from.conn.WriteMsgUDPAddrPort(all, oob, netip.AddrPortFrom(c.dev, roceUDPPort)); err != nil {
		c.t.Fatal(err)
	}
}

// longWrite is a WRITE of the raw peer in packets of 1024 bytes.
type longWrite struct {
	*rawConn
	data    []byte
	packets [][]byte
}

const (
	longAt, longMTU = 512, 1024
	longLen         = 12*longMTU + 100
)

func newLongWrite(t *testing.T) *longWrite {
	w := &longWrite{rawConn: newRawConn(t, Config{}, true), data: make([]byte, longLen)}
	if !w.end.cq.(*compQueue).outs[0].port.gro.Load() {
		t.Skip("this kernel does not merge datagrams")
	}
	fill(w.data, 7)
	fill(w.mem, 3)
	for at := 0; at < longLen; at += longMTU {
		switch {
		case at == 0:
			w.packets = append(w.packets, w.packet(opWriteFirst, w.reth(longAt, longLen), w.data[:longMTU]))
		case longLen-at <= longMTU:
			w.packets = append(w.packets, w.packet(opWriteLast, nil, w.data[at:]))
		default:
			w.packets = append(w.packets, w.packet(opWriteMiddle, nil, w.data[at:at+longMTU]))
		}
	}
	w.send(w.packets[0])
	w.arrived(1)
	return w
}

// arrived waits until n packets have been placed.
func (w *longWrite) arrived(n int) {
	w.t.Helper()
	w.end.until("packets", func() bool { return w.end.qp.resp.msg.got == uint32(n*longMTU) })
}

// finish sends the packets from n on and checks the memory.
func (w *longWrite) finish(n int) {
	w.t.Helper()
	for _, b := range w.packets[n:] {
		w.send(b)
	}
	w.end.until("the last packet", func() bool { return w.end.qp.resp.msg.class == classNone })
	want := make([]byte, len(w.mem))
	fill(want, 3)
	copy(want[longAt:], w.data)
	if at := differs(w.mem, want); at >= 0 {
		w.t.Errorf("memory differs at %d, the WRITE is at %d to %d", at, longAt, longAt+longLen)
	}
}

func (w *longWrite) copied() int { return int(w.end.dev.Stats().PlacedCopyBytes) }

func TestC046_PayloadOfALongWriteIsReceivedAtItsPlace(t *testing.T) {
	w := newLongWrite(t)
	w.train(w.raw, w.packets[1:12], nil)
	w.arrived(12)
	if n := w.copied(); n != longMTU {
		t.Errorf("%d bytes were copied, want those of the first packet", n)
	}
	w.finish(12)
	w.wantAck(ackCreditsInvalid, w.psn-1)
}

func TestC046_WrongForesightLeavesNoTrace(t *testing.T) {
	join := func(ps ...[][]byte) (all [][]byte) {
		for _, p := range ps {
			all = append(all, p...)
		}
		return all
	}
	tests := []struct {
		name  string
		train func(w *longWrite) [][]byte
		edit  func(i int, b []byte)
		taken int  // packets of the WRITE that are placed then
		nak   bool // a gap is reported
		drop  dropReason
	}{
		{name: "a packet is lost", train: func(w *longWrite) [][]byte { return join(w.packets[1:4], w.packets[5:12]) }, taken: 4, nak: true},
		{name: "the first packet is lost", train: func(w *longWrite) [][]byte { return w.packets[2:12] }, taken: 1, nak: true},
		{name: "packets come twice", train: func(w *longWrite) [][]byte { return join(w.packets[1:4], w.packets[2:8]) }, taken: 8},
		{name: "packets change places", train: func(w *longWrite) [][]byte {
			return join(w.packets[1:3], w.packets[4:5], w.packets[3:4], w.packets[4:8])
		}, taken: 8, nak: true},
		{name: "payload is changed", train: func(w *longWrite) [][]byte { return w.packets[1:12] }, edit: func(i int, b []byte) {
			if i == 3 {
				b[bthLen+500] ^= 1
			}
		}, taken: 4, nak: true, drop: dropICRC},
		{name: "the ICRC is changed", train: func(w *longWrite) [][]byte { return w.packets[1:12] }, edit: func(i int, b []byte) {
			if i == 3 {
				b[len(b)-1] ^= 1
			}
		}, taken: 4, nak: true, drop: dropICRC},
		{name: "a header is that of another queue pair", train: func(w *longWrite) [][]byte { return w.packets[1:12] }, edit: func(i int, b []byte) {
			if i == 3 {
				b[5] ^= 1
			}
		}, taken: 4, nak: true, drop: dropQPN},
		{name: "packets are shorter", train: func(w *longWrite) [][]byte {
			b := w.packet(opSendOnly, nil, make([]byte, 100))
			return [][]byte{b, bytes.Clone(b)}
		}, taken: 1, nak: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newLongWrite(t)
			w.train(w.raw, tt.train(w), tt.edit)
			w.arrived(tt.taken)
			if tt.nak {
				w.wantAck(nakSequence, bth(w.packets[tt.taken]).psn())
			}
			if n := w.end.dev.Stats().Dropped[tt.drop]; tt.drop != dropNone && n == 0 {
				t.Errorf("no packet was dropped for its %s", DropReason(int(tt.drop)))
			}
			w.finish(tt.taken)
		})
	}
}

func TestC046_PacketsOfStrangersAreNotTaken(t *testing.T) {
	w := newLongWrite(t)
	stranger := newRaw(t, testAddr(4), addrB)
	var forged [][]byte
	for _, b := range w.packets[1:12] {
		f := bytes.Clone(b)
		clear(f[bthLen:])
		forged = append(forged, f)
	}
	w.train(stranger, forged, nil)
	w.end.until("the forged packets", func() bool { return w.end.dev.Stats().Dropped[dropAddress] == 11 })
	w.finish(1)
}

func TestC046_KeyThatIsGoneEndsForesight(t *testing.T) {
	w := newLongWrite(t)
	if w.end.qp.Domain.Invalidate(w.mr.RKey()) != softverbs.KeyOK {
		t.Fatal("the key was not taken away")
	}
	before := bytes.Clone(w.mem)
	w.train(w.raw, w.packets[1:12], nil)
	w.wantAck(nakAccess, bth(w.packets[1]).psn())
	if at := differs(w.mem, before); at >= 0 {
		t.Errorf("byte %d was written", at)
	}
}

// Bytes of one peer must not be seen in the memory of another.
func TestC046_NothingIsForeseenAmongSeveralPeers(t *testing.T) {
	o := newOffline(t)
	defer o.finish()
	if o.cq.updateOnePeer(); !o.cq.onePeer {
		t.Error("one connection has several peers")
	}
	other := must(o.dev.CreateQP(o.q.Domain, verbs.QPConfig{CQ: o.cq}))(t).(*qp)
	other.conn = o.q.conn
	other.peer = addrRaw.As16()
	o.cq.attachConn(other)
	if o.cq.onePeer {
		t.Error("two peers are taken for one")
	}
	buf := make([]byte, 16<<10)
	mr := must(o.q.Domain.RegMR(buf, verbs.AccessRemoteWrite))(t)
	o.q.mtu, o.cq.writing = aheadMTU, o.q
	o.q.resp.msg = partialMessage{class: classWrite, addr: mr.Addr(), key: mr.RKey(), total: uint32(len(buf)), got: aheadMTU}
	if o.cq.predictNext(o.q.out); o.cq.stage.ahead.places != nil {
		t.Error("something was predicted")
	}
	o.cq.detachConn(other)
	if o.cq.predictNext(o.q.out); len(o.cq.stage.ahead.places) != 14*aheadMTU {
		t.Errorf("%d bytes were predicted for the only peer, want all but the first and the last packet", len(o.cq.stage.ahead.places))
	}
}

// Whatever the lengths of datagram and packets are, the packets are those that
// were sent.
func TestC046_PiecesMakeTheSamePackets(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	const qpn, stride = 0x1234, bthLen + longMTU + icrcLen
	rnd := rand.New(rand.NewPCG(1, 2))
	s := newStage(&queueCounters{})
	places, sent := make([]byte, 20*longMTU), make([]byte, 40*stride)
	direct := 0
	for range 500 {
		total := 1 + rnd.IntN(len(sent))
		size := []int{stride, stride, stride - 1, stride + 1, 1 + rnd.IntN(total), total}[rnd.IntN(6)]
		for at := range sent {
			sent[at] = byte(rnd.Uint32())
		}
		for at := 0; at+bthLen <= len(sent); at += size {
			if size >= bthLen && rnd.IntN(20) > 0 {
				putBTH(sent[at:], opWriteMiddle, 0, qpn, 0, false)
			}
		}
		s.layOut(places[:(1+rnd.IntN(20))*longMTU], longMTU, qpn)
		if _, err := unix.Write(fds[1], sent[:total]); err != nil {
			t.Fatal(err)
		}
		if s.fillFrom(&sendBatch{fd: fds[0]}) != 1 {
			t.Fatal("the datagram was not received")
		}
		h := (*unix.Cmsghdr)(unsafe.Pointer(&s.ctl[0]))
		h.Level, h.Type = unix.SOL_UDP, unix.UDP_GRO
		binary.NativeEndian.PutUint32(s.ctl[0].bytes()[unix.CmsgLen(0):], uint32(size))
		s.msgs[0].hdr.SetControllen(unix.CmsgLen(4))
		for at := 0; !s.empty(); at += size {
			p := s.nextPacket()
			b := bytes.Clone(p.b)
			if p.place != nil {
				direct++
				copy(b[bthLen:], p.place)
			}
			if want := sent[at:min(at+size, total)]; !bytes.Equal(b, want) {
				t.Fatalf("%d bytes in packets of %d: packet at %d differs", total, size, at)
			}
		}
	}
	if direct < 500 {
		t.Errorf("%d packets were received at their places", direct)
	}
}

// Memory that is read meanwhile gets no byte before it is verified: another write would bring
// it to a disk.
func TestC046_NothingIsForeseenInGuardedMemory(t *testing.T) {
	for _, guarded := range []bool{true, false} {
		t.Run(map[bool]string{true: "guarded", false: "not guarded"}[guarded], func(t *testing.T) {
			w := newLongWrite(t)
			var readers atomic.Int32
			w.mr.(verbs.Guarded).Guard(&readers)
			if guarded {
				readers.Store(1)
			}
			want := bytes.Clone(w.mem)
			copy(want[longAt+longMTU:], w.data[longMTU:3*longMTU])
			w.train(w.raw, w.packets[1:12], func(i int, b []byte) {
				if i == 2 {
					b[bthLen+500] ^= 1
				}
			})
			w.arrived(3)
			if at := differs(w.mem, want); (at < 0) != guarded {
				t.Errorf("guarded %t: first byte that is placed unverified: %d", guarded, at)
			}
			w.finish(3)
		})
	}
}
