package nbdwire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// The bytes are those of doc/proto.md of the NBD project.
func TestHeaders(t *testing.T) {
	b := make([]byte, 64)
	for _, c := range []struct {
		name, want string
		put        func()
	}{
		{"request", "25609513 0001 0006 0102030405060708 1112131415161718 21222324", func() { PutRequest(b, CmdFlagFUA, CmdWriteZeroes, 0x0102030405060708, 0x1112131415161718, 0x21222324) }},
		{"simple reply", "67446698 0000001c 0102030405060708", func() { PutSimple(b, 0x0102030405060708, uint32(syscall.ENOSPC)) }},
		{"data", "668e33ef 0001 0001 0102030405060708 00000208 1112131415161718", func() { PutDataChunk(b, ChunkDone, 0x0102030405060708, 0x1112131415161718, 512) }},
		{"hole", "668e33ef 0000 0002 0102030405060708 0000000c 1112131415161718 00000200", func() { PutHoleChunk(b, 0, 0x0102030405060708, 0x1112131415161718, 512) }},
		{"error", "668e33ef 0001 8001 0102030405060708 00000006 00000005 0000", func() { PutErrorChunk(b, 0x0102030405060708, uint32(syscall.EIO)) }},
	} {
		clear(b)
		c.put()
		want, err := hex.DecodeString(strings.ReplaceAll(c.want, " ", ""))
		if err != nil || !bytes.Equal(b[:len(want)], want) {
			t.Errorf("%s is % x, want % x, %v", c.name, b[:len(want)], want, err)
		}
	}
}

func TestViewsReadWhatWasPut(t *testing.T) {
	b := make([]byte, 64)
	PutRequest(b, 3, 5, 7, 9, 11)
	if r := Request(b); r.Magic() != MagicRequest || r.Flags() != 3 || r.Type() != 5 || r.Cookie() != 7 || r.Offset() != 9 || r.Length() != 11 {
		t.Errorf("request % x", b)
	}
	PutSimple(b, 7, 9)
	if s := Simple(b); s.Magic() != MagicSimple || s.Cookie() != 7 || s.Errno() != 9 {
		t.Errorf("simple reply % x", b)
	}
	PutHoleChunk(b, 1, 7, 9, 11)
	if c := Chunk(b); c.Magic() != MagicChunk || c.Flags() != 1 || c.Type() != ChunkOffsetHole || c.Cookie() != 7 || c.Length() != 12 || c.Offset() != 9 || c.HoleLength() != 11 {
		t.Errorf("hole % x", b)
	}
	PutErrorChunk(b, 7, 9)
	if c := Chunk(b); c.Type() != ChunkError || c.Errno() != 9 || c.Length() != 6 {
		t.Errorf("error % x", b)
	}
	o := Option(AppendOption(nil, OptGo, []byte("abc")))
	if o.Magic() != MagicOption || o.Number() != OptGo || o.Length() != 3 || string(o[OptionSize:]) != "abc" {
		t.Errorf("option % x", []byte(o))
	}
	r := OptionReply(AppendOptionReply(nil, OptGo, RepErrUnknown, []byte("no")))
	if r.Magic() != MagicOptionReply || r.Option() != OptGo || r.Kind() != RepErrUnknown || r.Length() != 2 {
		t.Errorf("reply % x", []byte(r))
	}
}

// script is a server that says all it has to say at once.
type script struct {
	io.Reader
	heard bytes.Buffer
}

func (s *script) Write(b []byte) (int, error) { return s.heard.Write(b) }

func says(parts ...[]byte) *script {
	return &script{Reader: bytes.NewReader(slices.Concat(append([][]byte{AppendGreeting(nil, FlagFixedNewstyle)}, parts...)...))}
}

func TestNegotiate(t *testing.T) {
	reply := func(option, kind uint32, data []byte) []byte { return AppendOptionReply(nil, option, kind, data) }
	structured := reply(OptStructuredReply, RepAck, nil)
	export := reply(OptGo, RepInfo, AppendExportInfo(nil, 1<<20, HasFlags))
	ack := reply(OptGo, RepAck, nil)
	context := reply(OptSetMetaContext, RepMetaCtx, append([]byte{0, 0, 0, 5}, AllocationContext...))
	for _, c := range []struct {
		name  string
		parts [][]byte
		want  Export
		err   error
	}{
		{"all", [][]byte{structured, context, reply(OptSetMetaContext, RepAck, nil), export, reply(OptGo, RepInfo, AppendBlockSizeInfo(nil, 512, 8192, 1<<20)), ack},
			Export{Size: 1 << 20, Flags: HasFlags, Structured: true, Allocation: true, ContextID: 5, MinBlock: 512, PreferredBlock: 8192, MaxPayload: 1 << 20}, nil},
		{"nothing but the size", [][]byte{reply(OptStructuredReply, RepErrUnsup, nil), export, ack},
			Export{Size: 1 << 20, Flags: HasFlags, MinBlock: 1, PreferredBlock: 4096, MaxPayload: MaxPayload}, nil},
		{"no contexts", [][]byte{structured, reply(OptSetMetaContext, RepErrUnsup, nil), export, ack},
			Export{Size: 1 << 20, Flags: HasFlags, Structured: true, MinBlock: 1, PreferredBlock: 4096, MaxPayload: MaxPayload}, nil},
		{"no such export", [][]byte{reply(OptStructuredReply, RepErrUnsup, nil), reply(OptGo, RepErrUnknown, nil)}, Export{}, syscall.ENOENT},
		{"not for this client", [][]byte{reply(OptStructuredReply, RepErrUnsup, nil), reply(OptGo, RepErrPolicy, nil)}, Export{}, syscall.EPERM},
		{"no size", [][]byte{reply(OptStructuredReply, RepErrUnsup, nil), ack}, Export{}, syscall.EPROTO},
		{"blocks of three bytes", [][]byte{reply(OptStructuredReply, RepErrUnsup, nil), reply(OptGo, RepInfo, AppendBlockSizeInfo(nil, 3, 4, 512))}, Export{}, syscall.EPROTO},
		{"the end", [][]byte{structured}, Export{}, io.EOF},
	} {
		e, err := NegotiatePlain(says(c.parts...), Options{Export: "x", Structured: true, Allocation: true})
		if !errors.Is(err, c.err) || err == nil && e != c.want {
			t.Errorf("%s: %+v, %v", c.name, e, err)
		}
	}
}

func TestParseURI(t *testing.T) {
	for _, c := range []struct {
		uri  string
		want Address // an empty Network: refused
	}{
		{"nbd://host:1/x", Address{Network: "tcp", Address: "host:1", Export: "x", Named: true}},
		{"nbd://host", Address{Network: "tcp", Address: "host:10809"}},
		{"nbd://[::1]/a/b", Address{Network: "tcp", Address: "[::1]:10809", Export: "a/b", Named: true}},
		{"nbd+unix:///x?socket=/s", Address{Network: "unix", Address: "/s", Export: "x", Named: true}},
		{"nbd+unix:///?socket=/s", Address{Network: "unix", Address: "/s"}},
		{"nbd+unix:///x", Address{}},
		{"nbd:///x", Address{}},
		{"http://host/x", Address{}},
		{"nbd+vsock://2/x", Address{}},
		{"%", Address{}},
	} {
		a, err := ParseURI(c.uri)
		if refused := err != nil; refused != (c.want.Network == "") || !refused && a != c.want || refused && !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%s: %+v, %v", c.uri, a, err)
		}
	}
	a, err := ParseURI("nbds://host/x?tls-hostname=other")
	if err != nil || a.TLS == nil || a.TLS.ServerName != "other" || a.TLS.InsecureSkipVerify {
		t.Errorf("with TLS: %+v, %v", a, err)
	}
	if _, err := ParseURI("nbds://host/x?tls-certificates=/nonexistent"); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("without certificates: %v", err)
	}
}

// FuzzNegotiate: whatever a server says, the announcement makes sense or is refused.
func FuzzNegotiate(f *testing.F) {
	f.Add(slices.Concat(AppendOptionReply(nil, OptStructuredReply, RepAck, nil),
		AppendOptionReply(nil, OptSetMetaContext, RepMetaCtx, append(make([]byte, 4), AllocationContext...)), AppendOptionReply(nil, OptSetMetaContext, RepAck, nil),
		AppendOptionReply(nil, OptGo, RepInfo, AppendExportInfo(nil, 1<<20, HasFlags)),
		AppendOptionReply(nil, OptGo, RepInfo, AppendBlockSizeInfo(nil, 512, 4096, 1<<20)), AppendOptionReply(nil, OptGo, RepAck, nil)))
	f.Add(AppendOptionReply(nil, OptStructuredReply, RepErrUnsup, []byte("no")))
	f.Fuzz(func(t *testing.T, said []byte) {
		e, err := NegotiatePlain(says(said), Options{Export: "x", Structured: true, Allocation: true})
		if err != nil {
			return
		}
		if e.MinBlock == 0 || e.MinBlock&(e.MinBlock-1) != 0 || e.MaxPayload < e.MinBlock || e.Allocation && !e.Structured {
			t.Errorf("%+v is accepted", e)
		}
	})
}
