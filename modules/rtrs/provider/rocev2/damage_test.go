package rocev2

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"testing"
)

// damagedPackets is how many damaged packets TestC056 tries for each kind of
// connection.
func damagedPackets() int {
	switch {
	case os.Getenv("RNBD_LONG") != "":
		return 10_000_000
	case testing.Short() || raceEnabled:
		return 20_000
	}
	return 300_000
}

// damage changes 1 to 8 bits of b, or up to 32 bytes in a row, and returns
// false if b is the same afterwards. Byte 4 is not covered by the ICRC.
func damage(rnd *rand.Rand, b []byte) bool {
	before := bytes.Clone(b)
	if kind := rnd.IntN(4); kind < 3 {
		for range 1 + rnd.IntN(1<<kind*2) {
			b[rnd.IntN(len(b))] ^= 1 << rnd.IntN(8)
		}
	} else {
		for at, n := rnd.IntN(len(b)), 1+rnd.IntN(32); n > 0 && at < len(b); at, n = at+1, n-1 {
			b[at] = byte(rnd.Uint32())
		}
	}
	b[4] = before[4]
	return !bytes.Equal(b, before)
}

// acceptedDamage returns how many of n damaged packets of p pass its check.
func acceptedDamage(p crcPrefix, n int) (accepted int) {
	rnd := rand.New(rand.NewPCG(1, 56))
	packet := make([]byte, 300)
	for i := range packet {
		packet[i] = byte(rnd.Uint32())
	}
	b := make([]byte, len(packet))
	for tried := 0; tried < n; {
		segment := uint16(rnd.IntN(maxSegments))
		packet[4] = 0
		p.sealPacket(packet, segment)
		copy(b, packet)
		if damage(rnd, b) {
			tried++
			if p.checkPacket(b, nil, segment) {
				accepted++
			}
		}
	}
	return accepted
}

func TestC056_NoDamagedPacketPassesWithAKnownIdentification(t *testing.T) {
	fixed := newPseudo(addrA, addrB, roceUDPPort)
	fixed.fixedID = true
	for name, p := range map[string]crcPrefix{"IPv4": fixed, "IPv6": newPseudo(addr6, addr6, roceUDPPort)} {
		n := damagedPackets()
		if got := acceptedDamage(p, n); got != 0 {
			t.Errorf("%s: %d of %d damaged packets passed", name, got, n)
		}
	}
}

// docs/extend/protocol/rocev2.md, ICRC, states the rate at which damaged packets pass if
// the identification is not known.
func TestC056_ErrorRateWithAnUnknownIdentificationIsTheDocumentedOne(t *testing.T) {
	n := damagedPackets()
	got := acceptedDamage(newPseudo(addrA, addrB, roceUDPPort), n)
	t.Logf("%d of %d damaged packets passed", got, n)
	if got > n/4000+10 {
		t.Errorf("%d of %d damaged packets passed, more than 1 in 4000", got, n)
	}
}

// With a fixed identification a packet passes whatever number it has within
// its segmented send.
func TestC056_FixedIdentificationIsThatOfEverySegment(t *testing.T) {
	p := newPseudo(addrA, addrB, roceUDPPort)
	p.fixedID = true
	b := make([]byte, 300)
	p.sealPacket(b, 7)
	for _, id := range []uint16{0, 7, 63, 0xffff} {
		if !p.checkPacket(bytes.Clone(b), nil, id) {
			t.Errorf("a packet is refused as segment %d", id)
		}
	}
}

func TestC056_BothEndsOfOursFixTheIdentification(t *testing.T) {
	a, b := pairOf(t, Config{})
	for name, q := range map[string]*qp{"active": a.qp, "passive": b.qp} {
		if !q.toPeer.fixedID || !q.fromPeer.fixedID {
			t.Errorf("the identification is not fixed at the %s end", name)
		}
	}
}

// A peer that does not announce a fixed identification, as Linux, gets packets
// with the ICRC of the specification.
func TestC056_IdentificationIsFixedOnlyIfThePeerAnnouncesIt(t *testing.T) {
	for _, announced := range []bool{false, true} {
		t.Run(fmt.Sprint(announced), func(t *testing.T) {
			r, e := newRaw(t, addrRaw, addrB), newEnd(t, Config{}, addrB)
			l := must(e.dev.Listen(netip.AddrPortFrom(addrB, 0)))(t)
			f := r.request(l.Addr())
			datagram := make([]byte, cmPacketLen)
			putDatagram(datagram, f.encode(rawTID), 0)
			if announced {
				datagram[8] |= cmFixedID
			}
			r.send(datagram[:cmPacketLen-icrcLen])
			if err := must(l.Accept())(t).Accept(e.qp, nil); err != nil {
				t.Fatal(err)
			}
			if rep := r.receive(soon); rep == nil || !bth(rep).fixedID() {
				t.Errorf("the REP does not announce a fixed identification: %x", rep)
			}
			if q := e.qp; q.fromPeer.fixedID != announced || q.toPeer.fixedID != announced {
				t.Errorf("fixed: %v for received packets, %v for sent ones", q.fromPeer.fixedID, q.toPeer.fixedID)
			}
		})
	}
}
