package rocev2

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"hash/crc32"
	"net/netip"
	"os"
	"strings"
	"testing"
)

// captured is a packet of Linux 6.12 rtrs over rxe.
type captured struct {
	name     string // capture, frame and kind
	kind     string
	src, dst netip.Addr
	sport    uint16
	id       uint16 // IPv4 identification
	b        []byte // from the base transport header to the ICRC
}

func captures(t testing.TB) (all []captured) {
	t.Helper()
	f, err := os.Open("testdata/linux-rxe.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		w := strings.Fields(scan.Text())
		if w[0] == "#" {
			continue
		}
		ip, err := hex.DecodeString(w[4])
		if err != nil {
			t.Fatal(err)
		}
		c := captured{name: strings.Join(w[:3], " ") + " IPv" + w[3], kind: w[2]}
		n := ip6Len
		if w[3] == "4" {
			n = ip4Len
			c.src, c.dst = netip.AddrFrom4([4]byte(ip[12:])), netip.AddrFrom4([4]byte(ip[16:]))
			c.id = be.Uint16(ip[4:])
		} else {
			c.src, c.dst = netip.AddrFrom16([16]byte(ip[8:])), netip.AddrFrom16([16]byte(ip[24:]))
		}
		c.sport, c.b = be.Uint16(ip[n:]), ip[n+udpLen:]
		all = append(all, c)
	}
	if scan.Err() != nil || len(all) < 30 {
		t.Fatalf("%d captured packets: %v", len(all), scan.Err())
	}
	return all
}

func (c *captured) pseudo() crcPrefix { return newPseudo(c.src, c.dst, c.sport) }

func TestC002_ICRCIsThatOfLinux(t *testing.T) {
	for _, c := range captures(t) {
		p := c.pseudo()
		own := bytes.Clone(c.b)
		clear(own[len(own)-icrcLen:])
		p.sealPacket(own, c.id)
		if !bytes.Equal(own, c.b) {
			t.Errorf("%s: ICRC %x, Linux has %x", c.name, own[len(own)-icrcLen:], c.b[len(c.b)-icrcLen:])
		}
	}
}

func TestC002_ICRCWorkedExample(t *testing.T) {
	p := newPseudo(netip.MustParseAddr("10.77.0.2"), netip.MustParseAddr("10.77.0.1"), 0xfa57)
	b := unhex("1100ffff001a43110068908e 1f000001 00000000")
	p.sealPacket(b, 0x72e4)
	if got := getICRC(b[16:]); got != 0xc0473280 {
		t.Errorf("ICRC %#x", got)
	}
}

func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}

func TestC003_ICRCIsCheckedWithoutTheIdentification(t *testing.T) {
	for _, c := range captures(t) {
		p := c.pseudo()
		for _, id := range []uint16{0, 7, c.id} {
			if !p.checkPacket(bytes.Clone(c.b), nil, id) {
				t.Errorf("%s: refused with identification %#x in place of %#x", c.name, id, c.id)
			}
		}
		fragments := p
		if !p.v6 {
			fragments.b[8+6] = 0 // sent without DF
			own := bytes.Clone(c.b)
			fragments.sealPacket(own, c.id)
			if !p.checkPacket(own, nil, 0) {
				t.Errorf("%s: refused when it is sent without DF", c.name)
			}
		}
	}
}

// Over IPv4 the identification is not known. That costs 16 of the 32 bits.
func TestC002_ICRCFindsChangedBits(t *testing.T) {
	missed := map[int]bool{} // positions: the same ones in every packet
	for _, c := range captures(t) {
		p := c.pseudo()
		for bit := range len(c.b) * 8 {
			if bit/8 == 4 {
				continue // not covered
			}
			b := bytes.Clone(c.b)
			b[bit/8] ^= 1 << (bit % 8)
			switch found := !p.checkPacket(b, nil, c.id); {
			case !found && p.v6:
				t.Errorf("%s: bit %d was missed", c.name, bit)
			case !found:
				missed[bit] = true
			}
		}
	}
	if len(missed) > 3 { // of 8500 positions; one in 32768 is to be expected
		t.Errorf("changed bits are missed at %v", missed)
	}
}

// The tables give the sum over the pseudo header.
func TestC002_SumOfThePseudoHeaderIsThatOfItsBytes(t *testing.T) {
	pseudos := []crcPrefix{newPseudo(netip.MustParseAddr("10.77.0.2"), netip.MustParseAddr("10.77.0.1"), 7), newPseudo(netip.MustParseAddr("fd00::2"), netip.MustParseAddr("fd00::1"), 7)}
	for _, p := range pseudos {
		for _, port := range []uint16{7, 7, 0xc000, roceUDPPort} {
			p.setSourcePort(port)
			for size := bthLen + icrcLen; size <= maxPacket; size += 7 {
				id := uint16(size * 61)
				b := bytes.Clone(p.b[:p.n])
				be.PutUint16(b[p.n-udpLen:], port)
				be.PutUint16(b[p.n-4:], uint16(size+udpLen))
				if p.v6 {
					be.PutUint16(b[8+4:], uint16(size+udpLen))
				} else {
					be.PutUint16(b[8+2:], uint16(size+udpLen+ip4Len))
					be.PutUint16(b[8+4:], id)
				}
				if got, want := p.startCRC(size, id), crc32.ChecksumIEEE(b); got != want {
					t.Fatalf("port %d, %d bytes, identification %#x: %#x, want %#x", port, size, id, got, want)
				}
			}
		}
	}
}

// Each captured data packet is taken apart and put together again.
func TestC001_HeadersAreThoseOfLinux(t *testing.T) {
	kinds := map[string]opcode{
		"SEND_FIRST": opSendFirst, "SEND_MIDDLE": opSendMiddle, "SEND_LAST": opSendLast, "SEND_ONLY": opSendOnly,
		"SEND_ONLY_IMM": opSendOnlyImm, "SEND_ONLY_INV": opSendOnlyInv, "WRITE_FIRST": opWriteFirst, "WRITE_MIDDLE": opWriteMiddle,
		"WRITE_LAST": opWriteLast, "WRITE_LAST_IMM": opWriteLastImm, "WRITE_ONLY": opWriteOnly, "WRITE_ONLY_IMM": opWriteOnlyImm, "ACK": opAck,
	}
	seen := map[opcode]bool{}
	for _, c := range captures(t) {
		op, ok := kinds[c.kind]
		if !ok {
			continue
		}
		seen[op] = true
		h, shape := bth(c.b), &shapes[op]
		if h.opcode() != op || h.version() != 0 || h.pkey() != defaultPKey {
			t.Errorf("%s: opcode %#x, version %d, partition %#x", c.name, h.opcode(), h.version(), h.pkey())
		}
		payload := len(c.b) - shape.size - h.pad() - icrcLen
		if payload < 0 || padLen(payload) != h.pad() || shape.class != classAck && !shape.last && payload != 1024 {
			t.Errorf("%s: %d bytes of payload, pad %d", c.name, payload, h.pad())
		}
		own := make([]byte, shape.size)
		putBTH(own, op, h.pad(), h.qpn(), h.psn(), h.ackReq())
		at := bthLen
		if shape.reth {
			r := reth(c.b[at:])
			putRETH(own[at:], r.addr(), r.key(), r.length())
			at += rethLen
		}
		if shape.aeth {
			a := aeth(c.b[at:])
			putAETH(own[at:], a.syndrome(), a.msn())
			if a.syndrome() != ackCreditsInvalid {
				t.Errorf("%s: syndrome %#x", c.name, a.syndrome())
			}
			at += aethLen
		}
		copy(own[at:], c.b[at:shape.size])
		if !bytes.Equal(own, c.b[:shape.size]) {
			t.Errorf("%s: %x, Linux has %x", c.name, own, c.b[:shape.size])
		}
	}
	if len(seen) != len(kinds) {
		t.Errorf("%d of %d kinds were captured", len(seen), len(kinds))
	}
}

// message returns the captured messages of a kind.
func messages(t *testing.T, kind string) (ms []mad, cs []captured) {
	t.Helper()
	for _, c := range captures(t) {
		if strings.HasPrefix(c.kind, kind) {
			m, why := parseDatagram(c.b)
			if why != dropNone {
				t.Fatalf("%s: %s", c.name, DropReason(int(why)))
			}
			ms, cs = append(ms, m), append(cs, c)
		}
	}
	if len(ms) == 0 {
		t.Fatalf("no %s was captured", kind)
	}
	return ms, cs
}

func TestC005_REQIsThatOfLinux(t *testing.T) {
	ms, cs := messages(t, "REQ")
	for i, m := range ms {
		f, c := decodeREQ(m), cs[i]
		if f.source != c.src || f.dest != c.dst || f.srcGID != c.src.As16() || f.dstGID != c.dst.As16() {
			t.Errorf("%s: from %s to %s, GIDs %x %x", c.name, f.source, f.dest, f.srcGID, f.dstGID)
		}
		if f.service&^0xffff != servicePortSpace || f.mtu != 3 || f.transport != 0 || f.ackTimeout != ackTimeoutCode || f.respRes != 0 || f.initDepth != 0 || f.id == 0 || !validQPN(f.qpn) {
			t.Errorf("%s: %+v", c.name, f)
		}
		if magic := f.private[2:4]; len(f.private) != 56 || !bytes.Equal(magic, []byte{0xbd, 0x1b}) {
			t.Errorf("%s: consumer has %x", c.name, f.private)
		}
		own := f.encode(m.tid())
		// Linux fills in its vendor, a flow label and its options.
		for _, skip := range [][2]int{{20, 24}, {24 + 5, 24 + 8}, {24 + 88, 24 + 91}} {
			copy(own[skip[0]:skip[1]], m[skip[0]:skip[1]])
		}
		if at := differs(own, m); at >= 0 {
			t.Errorf("%s: byte %d is %#x, Linux has %#x", c.name, at, own[at], m[at])
		}
	}
}

// differs returns the index of the first difference of a and b, or -1.
func differs(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

func TestC006_REPIsThatOfLinux(t *testing.T) {
	ms, cs := messages(t, "REP")
	for i, m := range ms {
		f := decodeREP(m)
		if !validQPN(f.qpn) || !bytes.Equal(f.private[:2], []byte{0xbd, 0x1b}) {
			t.Errorf("%s: %+v", cs[i].name, f)
		}
		own := f.encode(m.tid(), m.sender(), m.receiver())
		for _, skip := range [][2]int{{20, 24}, {24 + 15, 24 + 16}, {24 + 19, 24 + 20}, {24 + 23, 24 + 24}} {
			copy(own[skip[0]:skip[1]], m[skip[0]:skip[1]])
		}
		if at := differs(own, m); at >= 0 {
			t.Errorf("%s: byte %d is %#x, Linux has %#x", cs[i].name, at, own[at], m[at])
		}
	}
}

func TestC007_ShortMessagesAreThoseOfLinux(t *testing.T) {
	for _, kind := range []string{"RTU", "DREQ", "DREP"} {
		ms, cs := messages(t, kind)
		for i, m := range ms {
			own := newMAD(m.attribute(), m.tid(), m.sender(), m.receiver())
			if kind == "DREQ" {
				own = newDREQ(m.tid(), m.sender(), m.receiver(), m.dreqQPN())
				if !validQPN(m.dreqQPN()) {
					t.Errorf("%s: queue pair %#x", cs[i].name, m.dreqQPN())
				}
			}
			copy(own[20:24], m[20:24])
			if at := differs(own, m); at >= 0 {
				t.Errorf("%s: byte %d is %#x, Linux has %#x", cs[i].name, at, own[at], m[at])
			}
		}
	}
}

func TestC008_REJIsThatOfLinux(t *testing.T) {
	ms, cs := messages(t, "REJ")
	for i, m := range ms {
		f := decodeREJ(m)
		if f.reason != reasonInvalidService && f.reason != reasonConsumer || f.about != aboutREQ || m.sender() != 0 {
			t.Errorf("%s: %+v from %#x", cs[i].name, f, m.sender())
		}
		own := f.encode(m.tid(), m.sender(), m.receiver())
		copy(own[20:24], m[20:24])
		if at := differs(own, m); at >= 0 {
			t.Errorf("%s: byte %d is %#x, Linux has %#x", cs[i].name, at, own[at], m[at])
		}
	}
}

// The datagram around a message is that of Linux except for its own counter
// and the request for an acknowledgement. That has no meaning there.
func TestC009_DatagramHeadersAreThoseOfLinux(t *testing.T) {
	ms, cs := messages(t, "R")
	for i, m := range ms {
		own := make([]byte, cmPacketLen)
		putDatagram(own, m, bth(cs[i].b).psn())
		own[8] |= cs[i].b[8] & 0x80
		if at := differs(own[:cmPacketLen-icrcLen], cs[i].b); at >= 0 {
			t.Errorf("%s: byte %d is %#x, Linux has %#x", cs[i].name, at, own[at], cs[i].b[at])
		}
	}
}
