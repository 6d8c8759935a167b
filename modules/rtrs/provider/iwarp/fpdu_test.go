package iwarp

import (
	"bytes"
	"encoding/hex"
	"sync/atomic"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

var crcVectors = []struct{ name, frame, crc string }{
	{"RFC 5044 figure 5 with its marker", "00000000 002a4143 00000000 00000000 00000001 00000000 000000000000000000000000000000000000000000000000", "52239983"},
	{"the same without the marker", "002a4143 00000000 00000000 00000001 00000000 000000000000000000000000000000000000000000000000", "b7243ec3"},
	{"Send of 16 bytes by Linux siw", "00224143 00000000 00000000 00000001 00000000 000056196e582e60 0464f100 00000064", "fc0a24b3"},
	{"zero-length Write", "000ec140 00000001 0000000000000000", "ebd34c5f"},
	{"zero-length Read Request", "002e4141 00000000 00000001 00000001 00000000 00000000 0000000000000000 00000000 00000001 0000000000000000", "ba10e3c9"},
	{"zero-length Send", "00124143 00000000 00000000 00000001 00000000", "587be8c4"},
	{"Immediate Data", "001a4148 00000000 00000000 00000002 00000000 11223344 00000000", "6bb0b818"},
}

func TestI001_CRCVectors(t *testing.T) {
	for _, v := range crcVectors {
		frame := unhex(v.frame)
		var got [crcLen]byte
		putCRC(got[:], crcUpdate(0, frame))
		if hex.EncodeToString(got[:]) != v.crc {
			t.Errorf("%s: CRC %x, want %s", v.name, got, v.crc)
		}
		if getCRC(got[:]) != crcUpdate(0, frame) {
			t.Errorf("%s: CRC is not read as it was written", v.name)
		}
	}
}

func TestI001_EncoderMakesTheVectors(t *testing.T) {
	tm := bothTerms()
	o := newOffline(t, tm)
	buf, r := o.region(24, verbs.AccessRemoteRead)
	expect := func(name, frame string, got []byte) {
		t.Helper()
		if want := unhex(frame); !bytes.Equal(got, want) {
			t.Errorf("%s:\n got %x\nwant %x", name, got, want)
		}
	}
	o.send(verbs.SendWR{Op: verbs.OpSend, SGEs: []verbs.SGE{{Buf: buf[:11], LKey: r.LKey()}, {Buf: buf[11:], LKey: r.LKey()}}})
	expect("Send of 24 zeros", crcVectors[1].frame+crcVectors[1].crc, o.take())
	o.send(verbs.SendWR{Op: verbs.OpWriteImm, Imm: 0x11223344})
	expect("Immediate Data", crcVectors[6].frame+crcVectors[6].crc, o.take())

	tm.opening = true
	expect("opening Write", crcVectors[3].frame+crcVectors[3].crc, newOffline(t, tm).take())
	o = newOffline(t, bothTerms())
	o.send(verbs.SendWR{Op: verbs.OpSend})
	expect("zero-length Send", crcVectors[5].frame+crcVectors[5].crc, o.take())
	tm = bothTerms()
	tm.crc = false
	o = newOffline(t, tm)
	o.send(verbs.SendWR{Op: verbs.OpSend})
	expect("zero-length Send without CRC", crcVectors[5].frame+"00000000", o.take())
}

func TestI001_PadIsCoveredButNotLookedAt(t *testing.T) {
	for size := 1; size <= 8; size++ {
		o := newOffline(t, bothTerms())
		o.recv(1, 16)
		s := segment{op: opSend, msn: 1, payload: bytes.Repeat([]byte{0x5a}, size)}
		b := s.bytes(true)
		pad := padLen(fpduHeader(b).length())
		for i := range pad {
			b[len(b)-crcLen-1-i] = 0x55
		}
		bad := bytes.Clone(b)
		putCRC(b[len(b)-crcLen:], crcUpdate(0, b[:len(b)-crcLen]))
		o.feed(b, len(b))
		if len(o.wcs) != 1 || o.code() != 0 || int(o.wcs[0].ByteLen) != size {
			t.Errorf("%d bytes and junk in the pad: %+v, terminated %s", size, o.wcs, o.code())
		}
		if pad == 0 {
			continue
		}
		o = newOffline(t, bothTerms())
		o.recv(1, 16)
		if o.feed(bad, len(bad)); o.code() != termCRC || len(o.wcs) != 0 {
			t.Errorf("%d bytes, junk in the pad that the CRC does not cover: terminated %s", size, o.code())
		}
	}
}

func TestI001_CRCFieldIsIgnoredWithCRCOff(t *testing.T) {
	tm := bothTerms()
	tm.crc = false
	o := newOffline(t, tm)
	o.recv(1, 16)
	b := segment{op: opSend, msn: 1, payload: []byte("hello"), after: func(b []byte) { copy(b[len(b)-7:], "junkjun") }}.bytes(false)
	if o.feed(b, len(b)); len(o.wcs) != 1 || o.code() != 0 {
		t.Errorf("%+v, terminated %s", o.wcs, o.code())
	}
}

func TestPadMakesFramesMultiplesOfFour(t *testing.T) {
	for n := 14; n < 40; n++ {
		if pad := padLen(n); pad < 0 || pad > 3 || (2+n+pad)%4 != 0 {
			t.Errorf("ULPDU of %d bytes gets %d bytes of pad", n, pad)
		}
	}
}

// Whatever the size of a frame, it never exceeds MULPDU and only the last
// segment of a message has a payload that is no multiple of four.
func TestSegmentsKeepToTheMULPDU(t *testing.T) {
	for _, mulpdu := range []int{128, 129, 1000, 1436, 4114, 4200, defaultMULPDU, 65535} {
		o := newOffline(t, bothTerms())
		o.q.tx.init(mulpdu, &o.q.terms)
		buf, r := o.region(200001, 0)
		o.send(verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: 1 << 40, RKey: 7, SGEs: []verbs.SGE{{Buf: buf, LKey: r.LKey()}}},
			verbs.SendWR{Op: verbs.OpSend, SGEs: []verbs.SGE{{Buf: buf, LKey: r.LKey()}}})
		sum := 0
		for _, f := range splitFPDUs(t, o.take()) {
			h := fpduHeader(f)
			if h.length() > mulpdu || !h.last() && h.payload()%4 != 0 {
				t.Fatalf("MULPDU %d: segment of %d bytes, %d payload, last %v", mulpdu, h.length(), h.payload(), h.last())
			}
			sum += h.payload()
		}
		if sum != 2*len(buf) {
			t.Errorf("MULPDU %d: %d bytes of payload, want %d", mulpdu, sum, 2*len(buf))
		}
	}
}

// Memory that is read meanwhile gets the bytes of a segment when its CRC is right, and not
// before: another write would bring them to a disk.
func TestI004_GuardedMemoryGetsNoUnverifiedByte(t *testing.T) {
	for _, x := range []struct {
		guarded, damaged bool
		want             string // in the memory
	}{
		{true, false, "whole"}, {true, true, ""}, {false, false, "whole"}, {false, true, "damaged"},
	} {
		o := newOffline(t, bothTerms())
		buf, r := o.region(9000, verbs.AccessRemoteWrite)
		var readers atomic.Int32
		r.Guard(&readers)
		if x.guarded {
			readers.Store(1)
		}
		payload := bytes.Repeat([]byte{0x5a}, len(buf))
		b := segment{op: opWrite, stag: r.RKey(), to: r.Addr(), payload: payload}.bytes(true)
		if x.damaged {
			b[len(b)/2] ^= 1
		}
		o.feed(b[:len(b)-crcLen], 1000)
		if early := bytes.IndexByte(buf, 0x5a) >= 0; early == x.guarded {
			t.Errorf("%+v: bytes are placed before the CRC has come: %t", x, early)
		}
		o.feed(b[len(b)-crcLen:], crcLen)
		got := "damaged"
		if bytes.Equal(buf, payload) {
			got = "whole"
		} else if bytes.IndexByte(buf, 0x5a) < 0 {
			got = ""
		}
		if got != x.want || (o.code() == termCRC) != x.damaged {
			t.Errorf("%+v: memory %q, terminated %s", x, got, o.code())
		}
	}
}
