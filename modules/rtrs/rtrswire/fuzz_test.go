package rtrswire

import (
	"bytes"
	"testing"
)

// A connection request that passes Check is rebuilt from its fields, but for
// the bytes that carry no meaning.
func FuzzConnReq(f *testing.F) {
	f.Add(golden(f, "req_first_path_cid0"))
	f.Add(golden(f, "req_second_path_cid0"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if ConnReq(b).Check() != nil {
			return
		}
		want := bytes.Clone(b[:ConnReqLen])
		want[0], want[1], want[4] = 0, 0, 0 // placeholders, minor version
		want[44] &= firstConn
		got, fields := make([]byte, ConnReqLen), ConnReq(b).Fields()
		clear(want[45:])
		if fields.Features != 0 {
			putFeatures(want[46:], fields.Features)
		}
		ConnReq(got).Put(&fields)
		if !bytes.Equal(got, want) {
			t.Errorf("%x -> %+v -> %x", b, fields, got)
		}
		if fields.CID >= fields.CIDNum || fields.CIDNum > MaxCIDNum {
			t.Errorf("impossible indices %+v", fields)
		}
	})
}

func FuzzConnRsp(f *testing.F) {
	f.Add(golden(f, "rep_new_rkey"))
	f.Add(golden(f, "rej_eexist"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if ConnRsp(b).Check() != nil {
			return
		}
		fields := ConnRsp(b).Fields()
		again := make(ConnRsp, ConnRspLen)
		again.Put(&fields)
		if again.Check() != nil || again.Fields() != fields {
			t.Errorf("%+v becomes %+v", fields, again.Fields())
		}
	})
}

// An INFO_REQ that passes Check has a name that Put accepts and reproduces.
func FuzzInfoReq(f *testing.F) {
	f.Add(golden(f, "info_req"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if InfoReq(b).Check() != nil {
			return
		}
		name := InfoReq(b).Name()
		if again := InfoReq(infoReq(name)); len(name) > MaxNameLen || again.Check() != nil || again.Name() != name {
			t.Errorf("name %q becomes %q", name, again.Name())
		}
	})
}

// An INFO_RSP that passes Check can be walked buffer by buffer.
func FuzzInfoRsp(f *testing.F) {
	f.Add(golden(f, "info_rsp_1"), uint16(512), uint32(131072))
	f.Add(golden(f, "info_rsp_512"), uint16(512), uint32(131072))
	f.Fuzz(func(t *testing.T, b []byte, depth uint16, chunk uint32) {
		m := InfoRsp(b)
		if m.Check(int(depth), int(chunk)) != nil {
			return
		}
		bufs := 0
		for i := range m.Count() {
			bufs += int(m.Desc(i).Len) / int(chunk)
		}
		if bufs != int(depth) {
			t.Errorf("%d buffers for depth %d", bufs, depth)
		}
	})
}

// A header that parses is rebuilt byte for byte, but for flags without meaning.
func FuzzParseRequest(f *testing.F) {
	for _, name := range []string{"read_4k", "read_flush", "write_4k"} {
		_, wire := goldenImm(f, name)
		f.Add(wire[32:])
	}
	f.Add([]byte{0x80, 0, 16, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseRequest(b)
		if err != nil {
			return
		}
		got := make([]byte, MaxReqHdrLen)
		got = got[:putRequest(got, r)]
		want := bytes.Clone(b[:len(got)])
		if r.Type == MsgRead {
			want[4], want[5] = want[4]&NeedInval, 0
			if !r.HasDesc {
				want[4] = 0
			}
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%x -> %+v -> %x", want, r, got)
		}
	})
}

// Every immediate is exactly its type and payload, and splits without loss.
func FuzzImm(f *testing.F) {
	f.Add(uint32(0x00081020), uint16(512))
	f.Add(uint32(0x23580001), uint16(1))
	f.Fuzz(func(t *testing.T, v uint32, depth uint16) {
		if depth == 0 {
			return
		}
		i, shift := Imm(v), BufShift(int(depth))
		if Imm(i.Type())<<ImmPayloadBits|Imm(i.Payload()) != i {
			t.Errorf("%#x is not type %d and payload %#x", v, i.Type(), i.Payload())
		}
		buf, off := i.IOReq(shift)
		if again := IOReqImm(shift, buf, off); again.Payload() != i.Payload() {
			t.Errorf("%#x depth %d: buffer %d offset %d -> %#x", v, depth, buf, off, again)
		}
		errno, id := i.IORsp()
		if again := IORspImm(false, errno, id); again.Payload() != i.Payload() {
			t.Errorf("%#x: errno %d buffer %d -> %#x", v, errno, id, again)
		}
	})
}

func FuzzRkeyRsp(f *testing.F) {
	_, payload := goldenImm(f, "rsp_read_ok")
	f.Add(payload, uint16(1))
	f.Fuzz(func(t *testing.T, b []byte, buf uint16) {
		if !RkeyRsp(b).Valid(int(buf)) {
			return
		}
		again := make(RkeyRsp, RkeyRspLen)
		again.Put(int(buf), RkeyRsp(b).Rkey())
		if !bytes.Equal(again, b[:RkeyRspLen]) {
			t.Errorf("%x becomes %x", b, []byte(again))
		}
	})
}

// A message of a challenge that passes Check is rebuilt byte for byte, but for
// the bytes that carry no meaning.
func FuzzChallengeMessages(f *testing.F) {
	hello := make(Hello, HelloLen)
	hello.Put(&HelloFields{Method: ProofKey, Nonce: [NonceLen]byte{1}, KeyID: [KeyIDLen]byte{2}, Name: "name"})
	f.Add([]byte(hello))
	for _, fields := range []EvidenceFields{
		{Type: MsgChallenge, Method: ProofKey, Nonce: [NonceLen]byte{3}, Proof: []byte("proof")},
		{Type: MsgProof, Method: ProofCert, Certs: []byte("certificates"), Proof: []byte("proof")},
	} {
		m := make(Evidence, fields.Len())
		m.Put(&fields)
		f.Add([]byte(m))
	}
	refusal := make(Refusal, RefusalLen)
	refusal.Put(13)
	f.Add([]byte(refusal))
	f.Fuzz(func(t *testing.T, b []byte) {
		if Hello(b).Check() == nil {
			fields, again := Hello(b).Fields(), make(Hello, HelloLen)
			again.Put(&fields)
			if again.Check() != nil || again.Fields() != fields || len(fields.Name) > MaxNameLen {
				t.Errorf("HELLO %x becomes %x", b, []byte(again))
			}
		}
		for _, typ := range []MsgType{MsgChallenge, MsgProof} {
			if Evidence(b).Check(typ) != nil {
				continue
			}
			fields := Evidence(b).Fields()
			again := make(Evidence, fields.Len())
			again.Put(&fields)
			want := bytes.Clone(b)
			want[6], want[7] = 0, 0
			clear(want[12:16])
			if !bytes.Equal(again, want) || len(again.Claim())+len(fields.Proof) != len(b) {
				t.Errorf("message %x becomes %x", b, []byte(again))
			}
		}
		if r := Refusal(b); r.Valid() && (r.Errno() < 1 || r.Errno() > 65535) {
			t.Errorf("REFUSAL with errno %d", r.Errno())
		}
	})
}
