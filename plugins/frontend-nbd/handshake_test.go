package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// script is a client that has said everything before it listens.
type script struct {
	in  *bytes.Reader
	out bytes.Buffer
}

func (s *script) Read(p []byte) (int, error)  { return s.in.Read(p) }
func (s *script) Write(p []byte) (int, error) { return s.out.Write(p) }

// twoExports has "a" (1 MiB, writable) and "b" (read-only, rotational).
func twoExports(t testing.TB) *frontend {
	f := newFrontend(quiet)
	a := testLimits(1 << 20)
	b := blk.Limits{Size: 1<<20 + 700, LogicalBlockSize: 4096, ReadOnly: true, Rotational: true}
	for i, l := range []blk.Limits{a, b} {
		err := f.AddDevice(t.Context(), plugin.DeviceSpec{
			Index: uint32(i), Name: string(rune('a' + i)), Limits: l,
			Arena: make([]byte, 4096), SlotSize: 4096, Slots: 1,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return f
}

var greeting = []byte("NBDMAGICIHAVEOPT\x00\x03")

// cat joins pieces: bytes, strings, and numbers by their size.
func cat(parts ...any) []byte {
	var b []byte
	for _, p := range parts {
		switch v := p.(type) {
		case []byte:
			b = append(b, v...)
		case string:
			b = append(b, v...)
		case uint16:
			b = binary.BigEndian.AppendUint16(b, v)
		case uint32:
			b = binary.BigEndian.AppendUint32(b, v)
		case uint64:
			b = binary.BigEndian.AppendUint64(b, v)
		default:
			panic(fmt.Sprintf("%T", p))
		}
	}
	return b
}

func optReply(opt, kind uint32, data ...any) []byte {
	d := cat(data...)
	return cat(uint64(0x0003e889045565a9), opt, kind, uint32(len(d)), d)
}

// goData is the data of INFO and GO.
func goData(name string, infos ...uint16) []byte {
	b := cat(uint32(len(name)), name, uint16(len(infos)))
	for _, i := range infos {
		b = cat(b, i)
	}
	return b
}

const (
	flagsA = uint16(0x16d)   // has-flags flush fua trim zeroes multi-conn
	flagsB = uint16(0x11f)   // has-flags read-only flush fua rotational multi-conn
	sizeB  = uint64(1 << 20) // whole blocks
	unsup  = uint32(0x80000001)
	bad    = uint32(0x80000003)
	absent = uint32(0x80000006)
	tooBig = uint32(0x80000009)
)

func exportInfoA(opt uint32) []byte {
	return cat(
		optReply(opt, 3, uint16(0), uint64(1<<20), flagsA),
		optReply(opt, 3, uint16(3), uint32(1), uint32(4096), uint32(32<<20)),
		optReply(opt, 1))
}

func TestNegotiation(t *testing.T) {
	plain, fixed, both := uint32(0), uint32(1), uint32(3)
	for _, v := range []struct {
		name   string
		client []byte
		server []byte // after the greeting
		export string // opened; empty: the negotiation fails
		err    string // part of its error
	}{
		{"GO", cat(both, option(7, goData("a"))), exportInfoA(7), "a", ""},
		{"GO asks for block sizes and the name", cat(both, option(7, goData("a", 3, 1))),
			cat(optReply(7, 3, uint16(0), uint64(1<<20), flagsA), optReply(7, 3, uint16(1), "a"),
				optReply(7, 3, uint16(3), uint32(1), uint32(4096), uint32(32<<20)), optReply(7, 1)), "a", ""},
		{"a slot without room beside the block asks for whole blocks", cat(both, option(7, goData("b"))),
			cat(optReply(7, 3, uint16(0), sizeB, flagsB),
				optReply(7, 3, uint16(3), uint32(4096), uint32(4096), uint32(32<<20)), optReply(7, 1)), "b", ""},
		{"INFO, then GO", cat(both, option(6, goData("a")), option(7, goData("a"))), cat(exportInfoA(6), exportInfoA(7)), "a", ""},
		{"GO of an unknown export, then of a known one", cat(both, option(7, goData("zz")), option(7, goData("a"))),
			cat(optReply(7, absent, `no export "zz"`), exportInfoA(7)), "a", ""},
		{"INFO of an unknown export", cat(both, option(6, goData("zz")), option(2, nil)),
			cat(optReply(6, absent, `no export "zz"`), optReply(2, 1)), "", "aborted"},
		{"empty name with two exports", cat(both, option(7, goData("")), option(2, nil)),
			cat(optReply(7, absent, `no export ""`), optReply(2, 1)), "", "aborted"},
		{"EXPORT_NAME without zeroes", cat(both, option(1, []byte("a"))), cat(uint64(1<<20), flagsA), "a", ""},
		{"EXPORT_NAME with zeroes", cat(fixed, option(1, []byte("a"))), cat(uint64(1<<20), flagsA, make([]byte, 124)), "a", ""},
		{"EXPORT_NAME from a client of the old newstyle", cat(plain, option(1, []byte("a"))),
			cat(uint64(1<<20), flagsA, make([]byte, 124)), "a", ""},
		{"EXPORT_NAME of an unknown export", cat(both, option(1, []byte("zz"))), nil, "", "no export"},
		{"EXPORT_NAME of 5000 bytes", cat(both, option(1, make([]byte, 5000))), nil, "", "name of 5000 bytes"},
		{"LIST", cat(both, option(3, nil), option(2, nil)),
			cat(optReply(3, 2, uint32(1), "a"), optReply(3, 2, uint32(1), "b"), optReply(3, 1), optReply(2, 1)), "", "aborted"},
		{"LIST with data", cat(both, option(3, []byte("x")), option(2, nil)), cat(optReply(3, bad), optReply(2, 1)), "", "aborted"},
		{"STRUCTURED_REPLY", cat(both, option(8, nil), option(7, goData("a"))), cat(optReply(8, 1), exportInfoA(7)), "a", ""},
		{"STRUCTURED_REPLY with data", cat(both, option(8, []byte{0}), option(2, nil)), cat(optReply(8, bad), optReply(2, 1)), "", "aborted"},
		{"options that are not served", cat(both, option(5, nil), option(4, nil), option(11, nil), option(77, []byte("?")), option(2, nil)),
			cat(optReply(5, unsup), optReply(4, unsup), optReply(11, unsup), optReply(77, unsup), optReply(2, 1)), "", "aborted"},
		{"GO shorter than its fields", cat(both, option(7, []byte{0, 0, 0, 0, 0}), option(2, nil)), cat(optReply(7, bad), optReply(2, 1)), "", "aborted"},
		{"GO with a name longer than the option", cat(both, option(7, cat(uint32(100), "a", uint16(0))), option(2, nil)),
			cat(optReply(7, bad), optReply(2, 1)), "", "aborted"},
		{"GO with a name length that wraps", cat(both, option(7, cat(uint32(1<<32-1), "a", uint16(0))), option(2, nil)),
			cat(optReply(7, bad), optReply(2, 1)), "", "aborted"},
		{"GO with fewer items than it says", cat(both, option(7, cat(uint32(1), "a", uint16(2), uint16(3))), option(2, nil)),
			cat(optReply(7, bad), optReply(2, 1)), "", "aborted"},
		{"GO with bytes behind its items", cat(both, option(7, cat(goData("a"), "x")), option(2, nil)),
			cat(optReply(7, bad), optReply(2, 1)), "", "aborted"},
		{"GO with a name of 5000 bytes", cat(both, option(7, goData(strings.Repeat("n", 5000))), option(2, nil)),
			cat(optReply(7, tooBig), optReply(2, 1)), "", "aborted"},
		{"an option of more than 64 KiB", cat(both, uint64(nbdwire.MagicOption), uint32(7), uint32(1<<16+1)), nil, "", "65537 bytes of data"},
		{"an option of 4 GiB", cat(both, uint64(nbdwire.MagicOption), uint32(1), uint32(1<<32-1)), nil, "", "bytes of data"},
		{"wrong option magic", cat(both, uint64(nbdwire.MagicOption+1), uint32(7), uint32(0)), nil, "", "wrong option magic"},
		{"unknown client flags", cat(uint32(4), option(7, goData("a"))), nil, "", "unknown client flags 0x4"},
		{"GO without fixed newstyle", cat(plain, option(7, goData("a"))), nil, "", "does not speak fixed newstyle"},
		{"ABORT without fixed newstyle", cat(plain, option(2, nil)), nil, "", "does not speak fixed newstyle"},
		{"nothing at all", nil, nil, "", "read client flags"},
		{"half of the client flags", []byte{0, 0}, nil, "", "unexpected EOF"},
		{"no option", cat(both), nil, "", "read option"},
		{"half of an option", cat(both, option(7, nil)[:9]), nil, "", "unexpected EOF"},
		{"an option without its data", cat(both, uint64(nbdwire.MagicOption), uint32(7), uint32(8), "half"), nil, "", "unexpected EOF"},
	} {
		t.Run(v.name, func(t *testing.T) {
			f := twoExports(t)
			s := &script{in: bytes.NewReader(v.client)}
			n, err := runHandshake(s, f, nil)
			if got, want := s.out.Bytes(), cat(greeting, v.server); !bytes.Equal(got, want) {
				t.Errorf("server says\n% x, want\n% x", got, want)
			}
			checkOutcome(t, f, n, err, v.export, v.err)
		})
	}
}

func checkOutcome(t *testing.T, f *frontend, n handshakeResult, err error, export, want string) {
	t.Helper()
	if export == "" {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
		if f.Openers(0)+f.Openers(1) != 0 {
			t.Error("an export stays open")
		}
		return
	}
	if err != nil || n.exp.name != export || n.exp.openerCount() != 1 {
		t.Errorf("opened %+v, error %v, want %q", n, err, export)
	}
}

func TestEmptyNameIsTheOnlyExport(t *testing.T) {
	f := twoExports(t)
	if err := f.RemoveDevice(t.Context(), 1, false); err != nil {
		t.Fatal(err)
	}
	n, err := runHandshake(&script{in: bytes.NewReader(cat(uint32(3), option(7, goData(""))))}, f, nil)
	if err != nil || n.exp.name != "a" {
		t.Error(n, err)
	}
}

func TestOptionFloodEnds(t *testing.T) {
	flood := cat(uint32(3), bytes.Repeat(option(99, nil), maxOptions+5))
	s := &script{in: bytes.NewReader(flood)}
	if _, err := runHandshake(s, twoExports(t), nil); !errors.Is(err, errManyOptions) {
		t.Errorf("error %v", err)
	}
	if left := s.in.Len(); left != 5*nbdwire.OptionSize {
		t.Errorf("%d bytes are left", left)
	}
}

// The client goes away between GO and its answer: the export must not stay
// open.
func TestExportIsReleasedWhenTheAnswerCannotBeSent(t *testing.T) {
	f := twoExports(t)
	for _, opt := range [][]byte{option(7, goData("a")), option(1, []byte("a"))} {
		ours, theirs := net.Pipe()
		go func() {
			io.ReadFull(theirs, make([]byte, len(greeting)))
			theirs.Write(cat(uint32(3), opt))
			theirs.Close()
		}()
		if _, err := runHandshake(ours, f, nil); err == nil {
			t.Error("no error")
		}
		if f.Openers(0) != 0 {
			t.Error("export stays open")
		}
	}
}

// A client that says nothing costs a bounded time, and does not keep others
// out.
func TestSilentClientsDoNotKeepOthersOut(t *testing.T) {
	r := newRig(t, rigConfig{})
	for range maxHandshakes / 2 {
		conn, err := net.Dial("unix", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	if code := r.connect(true).read(0, make([]byte, 512)); code != 0 {
		t.Error(code)
	}
}

func TestHandshakeHasADeadline(t *testing.T) {
	f := twoExports(t)
	ours, theirs := net.Pipe()
	defer theirs.Close()
	d := &deadlines{Conn: ours}
	go f.secureConn(d, "", nil)
	io.ReadFull(theirs, make([]byte, len(greeting)))
	if left := time.Until(d.at); left <= 0 || left > handshakeTime {
		t.Errorf("deadline in %v", left)
	}
}

// deadlines keeps the deadline that is set.
type deadlines struct {
	net.Conn
	at time.Time
}

func (d *deadlines) SetDeadline(t time.Time) error {
	d.at = t
	return d.Conn.SetDeadline(t)
}

func FuzzNegotiation(f *testing.F) {
	f.Add(cat(uint32(3), option(7, goData("a", 3, 1))))
	f.Add(cat(uint32(1), option(1, []byte("b"))))
	f.Add(cat(uint32(3), option(3, nil), option(8, nil), option(6, goData("a")), option(7, goData("b"))))
	f.Add(cat(uint32(3), option(10, goData("a")), option(2, nil)))
	f.Add(cat(uint32(3), option(8, nil), option(9, metaData("a")), option(10, metaData("a", nbdwire.AllocationContext)), option(7, goData("a"))))
	f.Add(cat(uint32(3), option(8, nil), option(10, metaData("", "qemu:x", "base:")), option(9, metaData("b", "base:", "")), option(1, []byte("b"))))
	f.Add(cat(uint32(3), option(8, nil), option(10, cat(uint32(1), "a", uint32(1<<32-1), uint32(1<<32-1))), option(7, goData("a"))))
	front := twoExports(f)
	f.Fuzz(func(t *testing.T, in []byte) {
		s := &script{in: bytes.NewReader(in)}
		n, err := runHandshake(s, front, nil)
		open := front.Openers(0) + front.Openers(1)
		if (err == nil) != (n.exp != nil) || (err == nil) != (open == 1) {
			t.Fatalf("error %v, export %v, %d opened", err, n.exp, open)
		}
		if n.allocation && (n.exp == nil || !n.structured) {
			t.Fatalf("a context is in force: %+v", n)
		}
		if n.exp != nil {
			n.exp.removeOpener()
		}
		checkReplies(t, s.out.Bytes(), err == nil)
	})
}

// checkReplies: the server's stream is well formed, whatever the client says.
func checkReplies(t *testing.T, b []byte, started bool) {
	if !bytes.HasPrefix(b, greeting) {
		t.Fatalf("greeting % x", b)
	}
	b = b[len(greeting):]
	for len(b) >= 20 && binary.BigEndian.Uint64(b) == nbdwire.MagicOptionReply {
		n := binary.BigEndian.Uint32(b[16:])
		if uint64(n) > uint64(len(b)-20) {
			t.Fatalf("reply of %d bytes in a stream of %d", n, len(b))
		}
		b = b[20+n:]
	}
	if len(b) != 0 && (!started || len(b) != 10 && len(b) != 134) {
		t.Fatalf("% x is no reply", b)
	}
}
