package iwarp

import (
	"bytes"
	"testing"
)

func TestTerminateLayout(t *testing.T) {
	var o faultySegment
	head := segment{op: opWrite, stag: 0xac58eb00, to: 0x557ccdcfd000, payload: make([]byte, 13)}.bytes(false)
	o.setHeader(head)
	var req faultySegment
	req.setHeader(segment{op: opReadRequest, msn: 1, payload: make([]byte, 28)}.bytes(false))
	req.hasRead = true
	copy(req.read[:], "twenty-eight bytes of header")
	for _, tt := range []struct {
		c    termCode
		o    *faultySegment
		wire string
	}{
		{termSTag, &o, "1100c000 001b c140ac58eb000000557ccdcfd000"},
		{termCRC, &o, "20020000"},
		{termOpcode, &o, "02060000"},
		{termRDMAPVersion, &o, "02050000"},
		{termTaggedVersion, &o, "11040000"},
		{termVersion, &o, "12060000"},
		{termLocal, &o, "00ff0000"},
		{termReadSTag, &req, "0100e000 002e 414100000000000000010000000100000000 7477656e74792d6569676874206279746573206f6620686561646572"},
		{termStream, &req, "0207c000 002e 414100000000000000010000000100000000"},
		{termFraming, &faultySegment{}, "20030000"},
	} {
		var b [maxTerminateLen]byte
		n := putTerminate(b[:], tt.c, tt.o)
		if !bytes.Equal(b[:n], unhex(tt.wire)) {
			t.Errorf("%s:\n got %x\nwant %s", tt.c, b[:n], tt.wire)
		}
		if c, ok := parseTerminate(b[:n]); !ok || c != tt.c {
			t.Errorf("%s reads back as %s", tt.c, c)
		}
	}
}

func TestI009_TerminatesOfSIW(t *testing.T) {
	for wire, want := range map[string]termCode{
		"11000300000dc140ac58eb000000557ccdcfd000": termSTag,
		"11010300000dc1408f992d00000055dffebc2ffa": termBounds,
		"100107000000414100000000000000010000000d00000000cfa30500000055959aefb0000000000d9bb6ef000000563871d57ffa": termReadBounds,
		"100007000000414100000000000000010000000d00000000b83398000000556715e5b0000000000d2f99f400000055ea0e316000": termReadSTag,
		"210203000005414300000000000000000000000100000000":                                                         termNoBuffer,
		"02020000": termCRC,
		"02030000": termFraming,
		"20060000": termOpcode,
		"20050000": termRDMAPVersion,
		"21060000": termVersion,
		"00ff0000": termLocal,
	} {
		if got, ok := parseTerminate(unhex(wire)); !ok || got != want {
			t.Errorf("%s is %s, want %s", wire, got, want)
		}
	}
	for n := range 4 {
		if _, ok := parseTerminate(make([]byte, n)); ok {
			t.Errorf("%d bytes are a Terminate", n)
		}
	}
}

func TestTermCodesHaveNames(t *testing.T) {
	for _, r := range rules {
		if termNames[r.want] == "" {
			t.Errorf("%s has no name", r.want)
		}
	}
	if s := termCRC.String(); s != "2/0/02 (CRC mismatch)" {
		t.Error(s)
	}
}
