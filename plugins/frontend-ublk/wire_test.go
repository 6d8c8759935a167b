package main

import (
	"bytes"
	"encoding/hex"
	"math"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

func skipBigEndian(t *testing.T) {
	t.Helper()
	if native.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the goldens are little-endian")
	}
}

func wantBytes(t *testing.T, got []byte, want string) {
	t.Helper()
	w, err := hex.DecodeString(strings.Join(strings.Fields(want), ""))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, w) {
		t.Errorf("got\n%s\nwant\n%s", hex.Dump(got), hex.Dump(w))
	}
}

// The numbers were printed by a C program with the header of Linux 6.12, that of
// UPDATE_SIZE with the one of Linux 7.3.
func TestCommandNumbers(t *testing.T) {
	for nr, want := range map[uint32]uint32{
		cmdGetDevInfo: 0x80207502, cmdAddDev: 0xc0207504, cmdDelDev: 0xc0207505, cmdStartDev: 0xc0207506,
		cmdStopDev: 0xc0207507, cmdSetParams: 0xc0207508, cmdGetParams: 0x80207509,
		cmdStartUserRecovery: 0xc0207510, cmdEndUserRecovery: 0xc0207511, cmdGetFeatures: 0x80207513, cmdUpdateSize: 0xc0207515,
	} {
		if got := encodedCommand(nr); got != want {
			t.Errorf("command %#x is %#x, want %#x", nr, got, want)
		}
	}
	if f, a := ioEncoded(ioFetch), ioEncoded(ioCommitAndFetch); f != 0xc0107520 || a != 0xc0107521 {
		t.Errorf("I/O commands %#x, %#x", f, a)
	}
	c := ctrlDevice{}
	if f, a := c.ioCommands(); f != 0x20 || a != 0x21 {
		t.Errorf("I/O commands before Linux 6.4: %#x, %#x", f, a)
	}
}

func TestControlCommand(t *testing.T) {
	skipBigEndian(t)
	b := bytes.Repeat([]byte{0xff}, ctrlCmdSize)
	putCtrl(b, 7, 0x1122334455667788, devInfoSize, 99)
	wantBytes(t, b, `07000000 ffff 4000 8877665544332211 6300000000000000 0000000000000000`)
}

func TestIOCommand(t *testing.T) {
	skipBigEndian(t)
	b := make([]byte, ioCmdSize)
	putIO(b, 3, 258, -5, 0x7f0000001000)
	wantBytes(t, b, `0300 0201 fbffffff 00100000007f0000`)
}

func TestDeviceInfo(t *testing.T) {
	skipBigEndian(t)
	in := devInfo{queues: 2, depth: 64, maxIO: 0x1f000, id: 5, pid: 1234, flags: 0x5a, private: 0x0102030405060708}
	b := bytes.Repeat([]byte{0xff}, devInfoSize)
	in.encodeInto(b)
	wantBytes(t, b, `0200 4000 0000 0000 00f00100 05000000 d2040000 00000000 5a00000000000000 0807060504030201
		0000000000000000 0000000000000000 0000000000000000`)
	b[4] = stateQuiesced // the driver fills it in
	var out devInfo
	out.decodeFrom(b)
	in.state = stateQuiesced
	if out != in {
		t.Errorf("read back %+v, want %+v", out, in)
	}
}

func TestRequestDescriptor(t *testing.T) {
	d := make(ioDesc, ioDescSize)
	native.PutUint32(d[0:], opWrite|flagFUA|1<<16)
	native.PutUint32(d[4:], 8)
	native.PutUint64(d[8:], 1<<40)
	var tg requestTag
	if errno := tg.readDescriptor(d); errno != blk.OK || tg.entry.Op != blk.Write || tg.entry.Flags != blk.FUA ||
		tg.entry.Offset != 1<<49 || tg.entry.Len != 4096 || tg.n != 4096 {
		t.Errorf("write with FUA: %+v, %v", tg.entry, errno)
	}
	for _, v := range []struct {
		name    string
		opFlags uint32
		want    blk.Op
		flags   blk.Flags
		errno   blk.Errno
	}{
		{"read", opRead, blk.Read, 0, blk.OK},
		{"read with FUA, which means nothing", opRead | flagFUA, blk.Read, 0, blk.OK},
		{"flush", opFlush, blk.Flush, 0, blk.OK},
		{"discard", opDiscard, blk.Discard, 0, blk.OK},
		{"write zeroes", opWriteZeroes, blk.WriteZeroes, 0, blk.OK},
		{"write zeroes that stay allocated", opWriteZeroes | flagNoUnmap | flagFUA, blk.WriteZeroes, blk.NoUnmap | blk.FUA, blk.OK},
		{"write same", 4, 0, 0, blk.EOPNOTSUPP},
		{"zone append", 13, 0, 0, blk.EOPNOTSUPP},
	} {
		native.PutUint32(d[0:], v.opFlags)
		errno := tg.readDescriptor(d)
		if errno != v.errno || errno == blk.OK && (tg.entry.Op != v.want || tg.entry.Flags != v.flags) {
			t.Errorf("%s: %+v, %v", v.name, tg.entry, errno)
		}
		if tg.entry.Op == blk.Flush && errno == blk.OK && (tg.entry.Offset != 0 || tg.entry.Len != 0) {
			t.Errorf("flush has a range: %+v", tg.entry)
		}
	}
}

func TestDescriptorsOfQueues(t *testing.T) {
	if pageSize != 4096 {
		t.Skip("numbers are for pages of 4096 bytes")
	}
	if descOffset(0) != 0 || descOffset(3) != 3*98304 || descSize(64) != 4096 || descSize(171) != 8192 {
		t.Error(descOffset(3), descSize(64), descSize(171))
	}
}

func limits() blk.Limits {
	return blk.Limits{Size: 1 << 30, LogicalBlockSize: 512, PhysicalBlockSize: 4096, MaxIOSize: 126976}
}

func TestParams(t *testing.T) {
	skipBigEndian(t)
	full := limits()
	full.LogicalBlockSize, full.WriteCache, full.FUA, full.Rotational = 4096, true, true, true
	full.MaxDiscard, full.DiscardGranularity, full.DiscardAlignment, full.MaxWriteZeroes = 1<<41, 65536, 4096, 1<<20
	for _, v := range []struct {
		name   string
		limits blk.Limits
		want   string
	}{
		{"plain", limits(), `3c000000 01000000  00000000 09 0c 0c 0c f8000000 00000000 0000200000000000 0000000000000000
			00000000 00000000 00000000 00000000 0000 0000`},
		{"everything", full, `3c000000 03000000  0e000000 0c 0c 0c 0c f8000000 00000000 0000200000000000 0000000000000000
			00100000 00000100 00004000 00080000 0100 0000`},
	} {
		t.Run(v.name, func(t *testing.T) {
			p := paramsOf(&v.limits, 126976)
			b := bytes.Repeat([]byte{0xff}, paramsSize)
			p.encodeInto(b)
			wantBytes(t, b, v.want)
			if sizeIn(b) != v.limits.Size {
				t.Errorf("size %d", sizeIn(b))
			}
		})
	}
}

func TestParams_Corners(t *testing.T) {
	for _, v := range []struct {
		name   string
		change func(*blk.Limits)
		check  func(ublkParams) bool
	}{
		{"read-only has no discard", func(l *blk.Limits) { l.ReadOnly, l.MaxDiscard, l.WriteCache = true, 1<<20, false },
			func(p ublkParams) bool { return p.attrs == attrReadOnly && !p.discard }},
		{"write cache without FUA", func(l *blk.Limits) { l.WriteCache = true }, func(p ublkParams) bool { return p.attrs == attrWriteCache }},
		{"FUA without write cache is none", func(l *blk.Limits) { l.FUA = true }, func(p ublkParams) bool { return p.attrs == 0 }},
		{"write zeroes alone want a granularity too", func(l *blk.Limits) { l.MaxWriteZeroes = 1 << 20 },
			func(p ublkParams) bool {
				return p.discard && p.discardGranule == 512 && p.maxDiscardSectors == 0 && p.maxZeroesSectors == 2048
			}},
		{"a discard is whole granules", func(l *blk.Limits) { l.MaxDiscard, l.DiscardGranularity = 100<<10, 64<<10 },
			func(p ublkParams) bool { return p.maxDiscardSectors == 128 }},
		{"less than a granule is left", func(l *blk.Limits) { l.MaxDiscard, l.DiscardGranularity = 32<<10, 64<<10 },
			func(p ublkParams) bool { return p.maxDiscardSectors == 64 }},
		{"physical block below the logical one", func(l *blk.Limits) { l.LogicalBlockSize, l.PhysicalBlockSize = 4096, 512 },
			func(p ublkParams) bool { return p.logicalShift == 12 && p.physicalShift == 12 }},
		{"largest request by the server", func(l *blk.Limits) { l.MaxIOSize = 5000 }, func(p ublkParams) bool { return p.maxSectors == 9 }},
		{"largest request by the slots", func(l *blk.Limits) { l.MaxIOSize = 1 << 30 }, func(p ublkParams) bool { return p.maxSectors == 248 }},
	} {
		l := limits()
		v.change(&l)
		if p := paramsOf(&l, 126976); !v.check(p) {
			t.Errorf("%s: %+v", v.name, p)
		}
	}
}

func TestCheckSpec(t *testing.T) {
	good := plugin.DeviceSpec{Name: "x", Limits: limits(), Slots: 4, SlotSize: 64 << 10, Arena: make([]byte, 256<<10)}
	for _, v := range []struct {
		name   string
		change func(*plugin.DeviceSpec)
		words  string // of the error; empty: none
	}{
		{"good", func(*plugin.DeviceSpec) {}, ""},
		{"size within a block", func(s *plugin.DeviceSpec) { s.Limits.LogicalBlockSize = 4096; s.Limits.Size += 512 }, "no multiple"},
		{"no size", func(s *plugin.DeviceSpec) { s.Limits.Size = 0 }, "no size"},
		{"block size 1000", func(s *plugin.DeviceSpec) { s.Limits.LogicalBlockSize = 1000 }, "no power of two"},
		{"block size 256", func(s *plugin.DeviceSpec) { s.Limits.LogicalBlockSize = 256 }, "from 512 up"},
		{"block larger than a page", func(s *plugin.DeviceSpec) { s.Limits.LogicalBlockSize = 1 << 20 }, "larger than a page"},
		{"no slots", func(s *plugin.DeviceSpec) { s.Slots = 0 }, "0 slots"},
		{"part of a page per slot", func(s *plugin.DeviceSpec) { s.SlotSize = 5000 }, "whole pages"},
		{"arena too small", func(s *plugin.DeviceSpec) { s.Slots = 5 }, "arena"},
	} {
		s := good
		v.change(&s)
		err := checkSpec(&s)
		if (err == nil) != (v.words == "") || err != nil && (!strings.Contains(err.Error(), v.words) || blk.ToErrno(err) != blk.EINVAL) {
			t.Errorf("%s: %v", v.name, err)
		}
	}
}

func TestResult(t *testing.T) {
	for errno, want := range map[blk.Errno]int32{
		blk.OK: 4096, blk.EIO: -5, blk.ENOSPC: -28, blk.EOPNOTSUPP: -95, blk.ETIMEDOUT: -110,
		blk.EAGAIN: -5, blk.ENOMEM: -5, blk.EINVAL: -5, blk.EROFS: -5, blk.ENODEV: -5, 511: -5,
	} {
		if got := commitResult(errno, 4096); got != want {
			t.Errorf("%v is committed as %d, want %d", errno, got, want)
		}
	}
}

func TestNumbers(t *testing.T) {
	for path, want := range map[string]int{
		"/dev/ublkb0": 0, "/dev/ublkb17": 17, "/dev/ublkb": -1, "/dev/ublkc0": -1, "nbd+unix:///x?socket=/y": -1,
		"/dev/ublkb-1": -1, "/dev/ublkb0p1": -1, "/dev/ublkb99999999999": -1,
	} {
		if id, ok := idOf(path); ok != (want >= 0) || ok && int(id) != want {
			t.Errorf("%q is number %d, %v", path, id, ok)
		}
	}
	if s, err := parseSettings(map[string]string{"number": "5", "queues": "1", "zero_copy": "yes"}); s != (deviceSettings{5, 1, true}) || err != nil {
		t.Errorf("number 5, one queue, zero copy: %+v, %v", s, err)
	}
	for _, words := range []map[string]string{nil, {"zero_copy": "no"}} {
		if s, err := parseSettings(words); s != (deviceSettings{anyDevice, math.MaxInt, false}) || err != nil {
			t.Errorf("settings %v: %+v, %v", words, s, err)
		}
	}
	for _, bad := range []map[string]string{{"number": "x"}, {"number": "-1"}, {"number": "1048577"}, {"colour": "1"}, {"queues": "0"}, {"queues": "all"}, {"zero_copy": "1"}} {
		if _, err := parseSettings(bad); blk.ToErrno(err) != blk.EINVAL {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if a, again, b := identityToken("a"), identityToken("a"), identityToken("b"); a == b || a != again || a == 0 {
		t.Errorf("tokens of a, a and b: %d, %d and %d", a, again, b)
	}
}
