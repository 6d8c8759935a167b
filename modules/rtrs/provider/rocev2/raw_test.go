package rocev2

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// raw is a peer made by hand: it sends any packet, and sees every answer.
type raw struct {
	t    testing.TB
	conn *net.UDPConn
	addr netip.Addr
	dev  netip.Addr // of the device under test

	heard map[string]bool // messages of the connection manager
}

var addrRaw = testAddr(3)

func newRaw(t testing.TB, at, dev netip.Addr) *raw {
	t.Helper()
	c := must(net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, roceUDPPort))))(t)
	t.Cleanup(func() { c.Close() })
	return &raw{t: t, conn: c, addr: at, dev: dev, heard: map[string]bool{}}
}

// send sends b, from the base transport header on, with a right ICRC.
func (r *raw) send(b []byte) {
	r.t.Helper()
	r.sendAsIs(r.sealed(b))
}

// sealed is b with a right ICRC.
func (r *raw) sealed(b []byte) []byte {
	b = append(bytes.Clone(b), make([]byte, icrcLen)...)
	p := newPseudo(r.addr, r.dev, roceUDPPort)
	p.sealPacket(b, 0)
	return b
}

func (r *raw) sendAsIs(b []byte) {
	r.t.Helper()
	if _, err := r.conn.WriteToUDPAddrPort(b, netip.AddrPortFrom(r.dev, roceUDPPort)); err != nil {
		r.t.Fatal(err)
	}
}

// receive returns the next packet without its ICRC, nil when none comes.
func (r *raw) receive(wait time.Duration) []byte {
	r.t.Helper()
	r.conn.SetReadDeadline(time.Now().Add(wait))
	b := make([]byte, maxPacket)
	n, from, err := r.conn.ReadFromUDPAddrPort(b)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	if err != nil {
		r.t.Fatal(err)
	}
	p := newPseudo(r.dev, r.addr, from.Port())
	if from.Addr() != r.dev || from.Port() != roceUDPPort || !p.checkPacket(b[:n], nil, 0) {
		r.t.Fatalf("packet from %s, or its ICRC is wrong: %x", from, b[:n])
	}
	b[4] = 0 // check has changed it
	return b[:n-icrcLen]
}

const (
	soon   = 10 * time.Second      // for messages that have to come
	silent = 30 * time.Millisecond // for messages that must not
)

// say sends a message of the connection manager.
func (r *raw) say(m mad) {
	r.t.Helper()
	b := make([]byte, cmPacketLen)
	putDatagram(b, m, 0)
	r.send(b[:cmPacketLen-icrcLen])
}

// hear returns the next message. It has to come. Data packets are skipped,
// and other messages that were heard before: the device repeats them in time.
func (r *raw) hear(kind madAttribute) mad {
	r.t.Helper()
	for {
		b := r.receive(soon)
		if b == nil {
			r.t.Fatalf("no message %#x came", kind)
		}
		if bth(b).qpn() != cmQPN {
			continue
		}
		m, why := parseDatagram(append(b, 0, 0, 0, 0))
		if why == dropNone && m.attribute() != kind && r.heard[string(m)] {
			continue
		}
		if why != dropNone || m.attribute() != kind {
			r.t.Fatalf("message %#x came, want %#x: %s", m.attribute(), kind, DropReason(int(why)))
		}
		r.heard[string(m)] = true
		return m
	}
}

func (r *raw) hearNothing() {
	r.t.Helper()
	if b := r.receive(silent); b != nil {
		r.t.Fatalf("answer came: %x", b[:min(len(b), 60)])
	}
}

const (
	rawID   = 0x1111
	rawQPN  = 0x123456
	rawGUID = 0x0102030405060708
	rawPSN  = 0xfffff0 // the sequence numbers of a short test go round
	rawTID  = 0x77
)

// request is a REQ without fault.
func (r *raw) request(to netip.AddrPort) reqFields {
	return reqFields{
		id: rawID, service: servicePortSpace | uint64(to.Port()), guid: rawGUID, qpn: rawQPN, psn: rawPSN, respRes: 4, initDepth: 4,
		mtu: 3, ackTimeout: 14, srcGID: r.addr.As16(), dstGID: to.Addr().As16(), sourcePort: 40000, source: r.addr, dest: to.Addr(),
		private: []byte("question"),
	}
}

// rawConn is a connection between a device and a raw peer, made by the latter.
type rawConn struct {
	*raw
	end    *end
	asked  reqFields
	qpn    uint32 // of the device
	id     uint32 // of the device
	psn    uint32 // next of the raw peer
	expect uint32 // next of the device
	mem    []byte
	mr     verbs.MR
}

// newRawConn connects. With rtu false the passive side is left in the dark.
// Nothing is sent again for want of an answer, unless cfg says when to give up.
func newRawConn(t testing.TB, cfg Config, rtu bool) *rawConn {
	t.Helper()
	c := &rawConn{raw: newRaw(t, addrRaw, addrB), end: newEnd(t, cfg, addrB), expect: rawPSN}
	l := must(c.end.dev.Listen(netip.AddrPortFrom(addrB, 0)))(t)
	f := c.request(l.Addr())
	c.say(f.encode(rawTID))
	c.asked = f
	req := must(l.Accept())(t)
	if err := req.Accept(c.end.qp, []byte("answer")); err != nil {
		t.Fatal(err)
	}
	l.Close()
	rep := c.hear(attrREP)
	g := decodeREP(rep)
	c.qpn, c.psn, c.id = g.qpn, g.psn, rep.sender()
	if rtu {
		c.say(newMAD(attrRTU, rawTID, rawID, c.id))
		c.end.until("the RTU to arrive", func() bool { return !c.end.qp.req.hold })
	}
	if r := &c.end.qp.req; cfg.RetryTimeout == 0 {
		r.timeout, r.floor = int64(time.Minute), int64(time.Minute)
	}
	c.mem, c.mr = c.end.region(1<<16, verbs.AccessRemoteRead|verbs.AccessRemoteWrite)
	return c
}

// packet builds a request packet with the next sequence number.
func (c *rawConn) packet(op opcode, ext, payload []byte) []byte {
	b := make([]byte, bthLen, 2048)
	putBTH(b, op, padLen(len(payload)), c.qpn, c.psn, shapes[op].last)
	b = append(append(b, ext...), payload...)
	c.psn = psnAdd(c.psn, 1)
	return append(b, make([]byte, padLen(len(payload)))...)
}

func (c *rawConn) reth(off int, n uint32) []byte {
	b := make([]byte, rethLen)
	putRETH(b, c.mr.Addr()+uint64(off), c.mr.RKey(), n)
	return b
}

// data returns the next data packet of the device. It has to come.
func (c *rawConn) data() bth {
	c.t.Helper()
	for stop := time.Now().Add(soon); time.Now().Before(stop); {
		c.end.poll()
		if b := c.receive(time.Millisecond); b != nil && bth(b).qpn() == rawQPN {
			return b
		}
	}
	c.t.Fatal("no packet came")
	return nil
}

// noData fails when the device sends a data packet.
func (c *rawConn) noData() {
	c.t.Helper()
	for range 10 {
		c.end.poll()
		if b := c.receive(2 * time.Millisecond); b != nil && bth(b).qpn() == rawQPN {
			c.t.Fatalf("packet came: %x", b)
		}
	}
}

// wantAck expects an answer with the given syndrome for the packet at psn.
func (c *rawConn) wantAck(syndrome byte, psn uint32) {
	c.t.Helper()
	b := c.data()
	if b.opcode() != opAck || aeth(b[bthLen:]).syndrome() != syndrome || b.psn() != psn&psnMask {
		c.t.Fatalf("opcode %#x, syndrome %#x for %#x, want syndrome %#x for %#x", b.opcode(), b[bthLen], b.psn(), syndrome, psn&psnMask)
	}
}

// ack answers the device.
func (c *rawConn) ack(syndrome byte, psn uint32) {
	b := make([]byte, bthLen+aethLen)
	putBTH(b, opAck, 0, c.qpn, psn, false)
	putAETH(b[bthLen:], syndrome, 1)
	c.send(b)
}

// wantEnd expects that the connection ends with a status.
func (c *rawConn) wantEnd(status verbs.Status) {
	c.t.Helper()
	for {
		if wc := c.end.next(); wc.Op == verbs.OpDisconnected {
			if wc.Status != status {
				c.t.Errorf("connection ended with status %d, want %d", wc.Status, status)
			}
			return
		}
	}
}

// patient is a context that ends with the test's patience.
func patient(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testLimit)
	t.Cleanup(cancel)
	return ctx
}
