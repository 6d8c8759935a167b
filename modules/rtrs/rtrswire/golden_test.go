package rtrswire

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"os"
	"strings"
	"testing"
)

// golden returns the bytes of testdata/name.hex. Its first line is a comment.
func golden(t testing.TB, name string) []byte {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name + ".hex")
	if err != nil {
		t.Fatal(err)
	}
	_, digits, _ := strings.Cut(string(text), "\n")
	b, err := hex.DecodeString(strings.ReplaceAll(digits, "\n", ""))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return b
}

// goldenImm splits an immediate in network order from the bytes behind it.
func goldenImm(t testing.TB, name string) (Imm, []byte) {
	b := golden(t, name)
	return Imm(binary.BigEndian.Uint32(b)), b[4:]
}

func uuid(s string) UUID {
	b, err := hex.DecodeString(s)
	if err != nil {
		panic(err)
	}
	return UUID(b)
}

func TestR001_R002_ConnReqAsCaptured(t *testing.T) {
	a := ConnReqFields{CIDNum: 3, ReconCnt: 1, FirstConn: true,
		SessUUID: uuid("bf10813d3e364fbfa918d88767066ee8"), PathsUUID: uuid("c52fb8d3166d4f3ab7deccb427f3c73e")}
	c := ConnReqFields{CIDNum: 3, ReconCnt: 1,
		SessUUID: uuid("8d5a4524c6904b39a14834e8e20fd7e5"), PathsUUID: uuid("abfc0399ffff4704a92affd74c6b8ed3")}
	with := func(f ConnReqFields, cid, recon uint16, first bool) ConnReqFields {
		f.CID, f.ReconCnt, f.FirstConn = cid, recon, first
		return f
	}
	for name, want := range map[string]ConnReqFields{
		"req_first_path_cid0":  a,
		"req_first_path_cid2":  with(a, 2, 1, true),
		"req_second_path_cid0": with(c, 0, 1, false),
		"req_second_path_cid1": with(c, 1, 1, true),
		"req_reconnect_cid0":   with(c, 0, 2, true),
	} {
		wire := ConnReq(golden(t, name))
		if err := wire.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := wire.Fields(); got != want {
			t.Errorf("%s: fields %+v, want %+v", name, got, want)
		}
		put := bytes.Repeat([]byte{0xff}, ConnReqLen)
		ConnReq(put).Put(&want)
		if !bytes.Equal(put, wire) {
			t.Errorf("%s: encoded\n%x, captured\n%x", name, put, []byte(wire))
		}
	}
}

func TestConnReqCheck(t *testing.T) {
	change := func(off int, v uint16) func([]byte) []byte {
		return func(b []byte) []byte { le.PutUint16(b[off:], v); return b }
	}
	for _, c := range []struct {
		name string
		edit func([]byte) []byte
		ok   bool
	}{
		{"as captured", func(b []byte) []byte { return b }, true},
		{"longer than needed", func(b []byte) []byte { return append(b, 1, 2, 3) }, true},
		{"one byte short", func(b []byte) []byte { return b[:ConnReqLen-1] }, false},
		{"empty", func(b []byte) []byte { return nil }, false},
		{"R-007 wrong magic", change(2, 0x1BBE), false},
		{"R-008 major 3", change(4, 0x0300), false},
		{"R-008 major 1", change(4, 0x01ff), false},
		{"R-008 any minor", change(4, 0x02ff), true},
		{"R-009 cid equals cid_num", change(6, 3), false},
		{"R-009 cid_num 0", change(8, 0), false},
		{"R-009 cid_num 4096", change(8, 4096), true},
		{"R-009 cid_num 4097", change(8, 4097), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := ConnReq(c.edit(golden(t, "req_first_path_cid0"))).Check()
			if (err == nil) != c.ok {
				t.Errorf("Check() = %v, want ok %v", err, c.ok)
			}
		})
	}
}

func TestR014_FirstConnIsBitZero(t *testing.T) {
	m := ConnReq(golden(t, "req_first_path_cid0"))
	for v := range 256 {
		m[44] = byte(v)
		if m.FirstConn() != (v&1 == 1) {
			t.Errorf("byte 44 = %#x: FirstConn %v", v, m.FirstConn())
		}
	}
}

func TestR005_R006_ConnRspAsCaptured(t *testing.T) {
	for name, want := range map[string]ConnRspFields{
		"rep_new_rkey": {QueueDepth: 512, MaxIOSize: 126976, MaxHdrSize: 4096, Flags: FlagNewRkey},
		"rep_plain":    {QueueDepth: 512, MaxIOSize: 126976, MaxHdrSize: 4096},
		"rep_depth100": {QueueDepth: 100, MaxIOSize: 61440, MaxHdrSize: 4096},
		"rej_eexist":   {Errno: -17},
	} {
		wire := ConnRsp(golden(t, name))
		if err := wire.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := wire.Fields(); got != want {
			t.Errorf("%s: fields %+v, want %+v", name, got, want)
		}
		put := make([]byte, len(wire))
		ConnRsp(put).Put(&want)
		if !bytes.Equal(put, wire) {
			t.Errorf("%s: encoded\n%x, captured\n%x", name, put, []byte(wire))
		}
	}
}

func TestConnRspNamesTheIncarnation(t *testing.T) {
	want := ConnRspFields{QueueDepth: 1, Features: FeatureFence | FeatureIncarnation, Incarnation: uuid("bf10813d3e364fbfa918d88767066ee8")}
	m := make(ConnRsp, ConnRspLen)
	m.Put(&want)
	if got, want := hex.EncodeToString(m[20:56]), "524e425801000300"+"bf10813d3e364fbfa918d88767066ee8"+"000000000000000000000000"; got != want {
		t.Errorf("bytes 20..55 are %s, want %s", got, want)
	}
	if got := m.Fields(); got != want {
		t.Errorf("%+v becomes %+v", want, got)
	}
	if i := ConnRsp(golden(t, "rep_new_rkey")).Incarnation(); i != (UUID{}) {
		t.Errorf("a kernel's answer has incarnation %x", i)
	}
}

func TestR020_ConnRspCheck(t *testing.T) {
	for _, c := range []struct {
		name string
		off  int
		v    uint16
		ok   bool
	}{
		{"magic", 0, 0x1BBC, false}, {"major 1", 2, 0x0100, false}, {"major 3", 2, 0x0300, false}, {"minor 7", 2, 0x0207, true},
	} {
		m := ConnRsp(golden(t, "rep_plain"))
		le.PutUint16(m[c.off:], c.v)
		if err := m.Check(); (err == nil) != c.ok {
			t.Errorf("%s: Check() = %v, want ok %v", c.name, err, c.ok)
		}
	}
	if ConnRsp(golden(t, "rep_plain")[:55]).Check() == nil {
		t.Error("55 bytes pass")
	}
}

func TestFeaturesAreAnnouncedInReservedBytes(t *testing.T) {
	m := make(ConnRsp, ConnRspLen)
	m.Put(&ConnRspFields{QueueDepth: 1, Features: FeatureFence})
	if got, want := hex.EncodeToString(m[20:28]), "524e425801000100"; got != want {
		t.Errorf("bytes 20..27 are %s, want %s", got, want)
	}
	if m.Features() != FeatureFence {
		t.Errorf("Features() = %#x", m.Features())
	}
	if f := ConnRsp(golden(t, "rep_new_rkey")).Features(); f != 0 {
		t.Errorf("a kernel server announces %#x", f)
	}
}

func TestR030_InfoReqAsCaptured(t *testing.T) {
	wire := golden(t, "info_req")
	if len(wire) != InfoReqLen {
		t.Fatalf("%d bytes", len(wire))
	}
	if err := InfoReq(wire).Check(); err != nil {
		t.Fatal(err)
	}
	if n := InfoReq(wire).Name(); n != "clt-srv" {
		t.Errorf("name %q", n)
	}
	put := bytes.Repeat([]byte{0xff}, InfoReqLen)
	InfoReq(put).Put("clt-srv")
	if !bytes.Equal(put, wire) {
		t.Errorf("encoded %x", put)
	}
}

func TestR032_InfoReqCheck(t *testing.T) {
	long := strings.Repeat("x", MaxNameLen)
	for _, c := range []struct {
		name string
		make func() []byte
		ok   bool
	}{
		{"longest name", func() []byte { return infoReq(long) }, true},
		{"no NUL", func() []byte { b := infoReq(long); b[2+nameField-1] = 'x'; return b }, false},
		{"slash", func() []byte { return infoReq("a/b") }, false},
		{"dot", func() []byte { return infoReq("a.b") }, false},
		{"dot after the NUL", func() []byte { b := infoReq("a"); b[10] = '.'; return b }, true},
		{"type 1", func() []byte { b := infoReq("a"); b[0] = 1; return b }, false},
		{"271 bytes", func() []byte { return infoReq("a")[:271] }, false},
	} {
		if err := InfoReq(c.make()).Check(); (err == nil) != c.ok {
			t.Errorf("%s: Check() = %v, want ok %v", c.name, err, c.ok)
		}
	}
}

func infoReq(name string) []byte {
	b := make([]byte, InfoReqLen)
	InfoReq(b).Put(name)
	return b
}

func TestR035_InfoRspAsCaptured(t *testing.T) {
	for _, c := range []struct {
		name        string
		n           int
		first, last Desc
	}{
		{"info_rsp_512", 512, Desc{0xff1b61ed05840000, 0x3c7, 131072}, Desc{}},
		{"info_rsp_1", 1, Desc{0xff11ff5e03da0000, 0x377, 67108864}, Desc{}},
	} {
		wire := InfoRsp(golden(t, c.name))
		if err := wire.Check(512, 131072); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if wire.Count() != c.n || wire.Desc(0) != c.first {
			t.Errorf("%s: %d descriptors, first %#x", c.name, wire.Count(), wire.Desc(0))
		}
		put := make(InfoRsp, InfoRspLen(c.n))
		put.PutHeader(c.n)
		for i := range c.n {
			put.PutDesc(i, wire.Desc(i))
		}
		if !bytes.Equal(put, wire) {
			t.Errorf("%s: encoding differs", c.name)
		}
	}
}

func TestR036_InfoRspCheck(t *testing.T) {
	rsp := func(lens ...uint32) InfoRsp {
		m := make(InfoRsp, InfoRspLen(len(lens)))
		m.PutHeader(len(lens))
		for i, l := range lens {
			m.PutDesc(i, Desc{uint64(i) << 32, uint32(i), l})
		}
		return m
	}
	edit := func(m InfoRsp, f func(InfoRsp)) InfoRsp { f(m); return m }
	for _, c := range []struct {
		name      string
		m         InfoRsp
		qd, chunk int
		ok        bool
	}{
		{"two halves", rsp(2*8192, 2*8192), 4, 8192, true},
		{"chunk not a power of two", rsp(50*69632, 50*69632), 100, 69632, true},
		{"unequal regions that fit", rsp(3*8192, 8192), 4, 8192, true},
		{"no descriptors", rsp(), 4, 8192, false},
		{"depth is no multiple of the count", rsp(8192, 8192, 2*8192), 4, 8192, false},
		{"a region of length 0", rsp(4*8192, 0), 4, 8192, false},
		{"half a chunk", rsp(4*8192+4096, 4096*3), 4, 8192, false},
		{"one chunk too few", rsp(8192, 2*8192), 4, 8192, false},
		{"one chunk too many", rsp(3*8192, 2*8192), 4, 8192, false},
		{"wrong type", edit(rsp(4*8192), func(m InfoRsp) { m[0] = 4 }), 4, 8192, false},
		{"seven bytes", rsp(4 * 8192)[:7], 4, 8192, false},
		{"cut in a descriptor", rsp(2*8192, 2*8192)[:39], 4, 8192, false},
		{"chunk too large for the immediate", rsp(1 << 29), 1, 1 << 29, false},
		{"chunk size 0", rsp(8192), 1, 0, false},
	} {
		if err := c.m.Check(c.qd, c.chunk); (err == nil) != c.ok {
			t.Errorf("%s: Check() = %v, want ok %v", c.name, err, c.ok)
		}
	}
}

func TestR050_R054_RequestsAsCaptured(t *testing.T) {
	for _, c := range []struct {
		name                  string
		depth, buf, data, usr int
		want                  Request
	}{
		{"read_sess_info", 512, 0, 0x48 - 36, 36, Request{Type: MsgRead, NeedInval: true, HasDesc: true, Desc: Desc{0xff1d6258dfd21f00, 0x380, 36}}},
		{"read_open", 512, 0, 56, 264, Request{Type: MsgRead, NeedInval: true, HasDesc: true, Desc: Desc{0xff1d6258dfd21b00, 0x381, 56}}},
		{"read_4k", 512, 1, 4096, 32, Request{Type: MsgRead, NeedInval: true, HasDesc: true, Desc: Desc{0xff1d62588590b000, 0x462, 4096}}},
		{"read_flush", 512, 0, 0, 32, Request{Type: MsgRead}},
		{"write_4k", 512, 0, 4096, 32, Request{Type: MsgWrite}},
		{"write_512", 512, 0, 512, 32, Request{Type: MsgWrite}},
		{"write_discard", 512, 0, 0, 32, Request{Type: MsgWrite}},
		{"write_close", 512, 0, 0, 8, Request{Type: MsgWrite}},
		{"write_depth100", 100, 1, 61440, 32, Request{Type: MsgWrite}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.want.UsrLen = c.usr
			imm, wire := goldenImm(t, c.name)
			shift := BufShift(c.depth)
			if got := IOReqImm(shift, c.buf, c.data+c.usr); got != imm {
				t.Errorf("R-050: imm %#08x, captured %#08x", got, imm)
			}
			if buf, off := imm.IOReq(shift); imm.Type() != ImmIOReq || buf != c.buf || off != c.data+c.usr {
				t.Errorf("R-054: imm %#08x is type %d, buffer %d, offset %d", imm, imm.Type(), buf, off)
			}
			got, err := ParseRequest(wire[c.usr:])
			if err != nil || got != c.want {
				t.Errorf("parsed %+v, %v; want %+v", got, err, c.want)
			}
			b := bytes.Repeat([]byte{0xff}, MaxReqHdrLen)
			if b = b[:putRequest(b, c.want)]; !bytes.Equal(b, wire[c.usr:]) {
				t.Errorf("R-052/R-053: encoded %x, captured %x", b, wire[c.usr:])
			}
		})
	}
}

// putRequest encodes r.
func putRequest(b []byte, r Request) int {
	switch {
	case r.Type == MsgWrite:
		return PutWriteHdr(b, r.UsrLen)
	case r.Type == MsgFence:
		return PutFenceHdr(b, r.UsrLen)
	case r.HasDesc:
		return PutReadDescHdr(b, r.UsrLen, r.NeedInval, r.Desc)
	}
	return PutReadHdr(b, r.UsrLen)
}

func TestParseRequestRefuses(t *testing.T) {
	read := make([]byte, MaxReqHdrLen)
	PutReadDescHdr(read, 8, true, Desc{1, 2, 3})
	two := bytes.Clone(read)
	two[6] = 2
	for _, c := range []struct {
		name string
		b    []byte
		want error
	}{
		{"three bytes", read[:3], ErrShort},
		{"READ cut before sg_cnt", read[:7], ErrShort},
		{"READ cut in its descriptor", read[:23], ErrShort},
		{"R-062 two descriptors", two, ErrSGCount},
		{"R-061 type 9", []byte{9, 0, 0, 0}, ErrMsgType},
		{"R-061 type of RKEY_RSP", []byte{4, 0, 0, 0}, ErrMsgType},
	} {
		if _, err := ParseRequest(c.b); err != c.want {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

func TestNeedInvalWithoutDescriptorMeansNothing(t *testing.T) {
	b := make([]byte, ReadHdrLen)
	PutReadHdr(b, 8)
	b[4] = NeedInval
	if r, err := ParseRequest(b); err != nil || r.NeedInval {
		t.Errorf("parsed %+v, %v", r, err)
	}
}

func TestR051_R076_ResponsesAsCaptured(t *testing.T) {
	for _, c := range []struct {
		name       string
		inv        bool
		errno, buf int
		rkey       uint32 // 0: no payload
	}{
		{"rsp_read_ok", true, 0, 1, 0x4b6},
		{"rsp_write_ok", false, 0, 0, 0x3ca},
		{"rsp_enoent", true, 2, 0, 0x393},
		{"rsp_enotconn", true, 107, 0, 0x204f5},
		{"rsp_plain", false, 0, 0, 0},
	} {
		imm, payload := goldenImm(t, c.name)
		if got := IORspImm(c.inv, c.errno, c.buf); got != imm {
			t.Errorf("%s: imm %#08x, captured %#08x", c.name, got, imm)
		}
		if errno, buf := imm.IORsp(); errno != c.errno || buf != c.buf || (imm.Type() == ImmIORspInv) != c.inv {
			t.Errorf("%s: %#08x splits into type %d errno %d buffer %d", c.name, imm, imm.Type(), errno, buf)
		}
		if c.rkey == 0 {
			if len(payload) != 0 {
				t.Errorf("%s: payload %x", c.name, payload)
			}
			continue
		}
		put := make(RkeyRsp, RkeyRspLen)
		put.Put(c.buf, c.rkey)
		if !bytes.Equal(put, payload) || !put.Valid(c.buf) || put.Rkey() != c.rkey {
			t.Errorf("%s: RKEY_RSP %x, captured %x", c.name, []byte(put), payload)
		}
	}
}

func TestR079_RkeyRspValid(t *testing.T) {
	m := make(RkeyRsp, RkeyRspLen)
	m.Put(3, 7)
	if m.Valid(4) || m[:7].Valid(3) {
		t.Error("wrong buffer or length passes")
	}
	m[0] = 5
	if m.Valid(3) {
		t.Error("wrong type passes")
	}
}

func TestR090_R091_HeartbeatAsCaptured(t *testing.T) {
	for name, want := range map[string]Imm{"heartbeat": HeartbeatImm, "heartbeat_ack": HeartbeatAckImm} {
		if imm, payload := goldenImm(t, name); imm != want || len(payload) != 0 {
			t.Errorf("%s: %#08x with payload %x, want %#08x", name, imm, payload, want)
		}
	}
}

func TestR050_ImmLayout(t *testing.T) {
	for _, c := range []struct {
		depth int
		shift uint
	}{{1, 28}, {2, 27}, {100, 21}, {512, 19}, {513, 18}, {65535, 12}} {
		if got := BufShift(c.depth); got != c.shift {
			t.Errorf("BufShift(%d) = %d, want %d", c.depth, got, c.shift)
		}
	}
}

func TestR051_ErrnoThatDoesNotFitBecomesEIO(t *testing.T) {
	for errno, want := range map[int]int{511: 511, 512: 5, 529: 5, -1: 5} {
		if got, buf := IORspImm(false, errno, 9).IORsp(); got != want || buf != 9 {
			t.Errorf("errno %d arrives as %d on buffer %d", errno, got, buf)
		}
	}
}
