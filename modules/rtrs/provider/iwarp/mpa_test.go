package iwarp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func TestMPAFrameLayout(t *testing.T) {
	f := mpaFrame{flags: mpaCRC | mpaEnhanced, rev: 2, private: []byte{1, 2, 3, 4, 5}}
	want := unhex("4d504120494420526571204672616d65 50 02 0005 0102030405")
	if got := f.encode(mpaKeyRequest); !bytes.Equal(got, want) {
		t.Errorf("request %x, want %x", got, want)
	}
	if got := f.encode(mpaKeyReply)[:16]; string(got) != "MPA ID Rep Frame" {
		t.Errorf("reply key %q", got)
	}
}

func TestI002_ReadMPA(t *testing.T) {
	ok := mpaFrame{rev: 1, private: bytes.Repeat([]byte{7}, maxMPAPrivate)}
	whole := ok.encode(mpaKeyRequest)
	for name, r := range map[string]io.Reader{
		"at once":               bytes.NewReader(whole),
		"byte by byte":          iotest.OneByteReader(bytes.NewReader(whole)),
		"with an early segment": bytes.NewReader(append(bytes.Clone(whole), 1, 2, 3)),
	} {
		f, err := readMPA(r, mpaKeyRequest)
		if err != nil || f.rev != 1 || !bytes.Equal(f.private, ok.private) {
			t.Errorf("%s: %v", name, err)
		}
		if b, ok := r.(*bytes.Reader); ok && name == "with an early segment" && b.Len() != 3 {
			t.Errorf("%s: %d bytes left, want 3", name, b.Len())
		}
	}
	bad := func(edit func(b []byte)) []byte {
		b := bytes.Clone(whole)
		edit(b)
		return b
	}
	for name, b := range map[string][]byte{
		"reply key":                 ok.encode(mpaKeyReply),
		"key in lower case":         bad(func(b []byte) { copy(b, "mpa") }),
		"revision 0":                bad(func(b []byte) { b[17] = 0 }),
		"revision 3":                bad(func(b []byte) { b[17] = 3 }),
		"513 bytes of private data": bad(func(b []byte) { b[18], b[19] = 2, 1 }),
	} {
		if _, err := readMPA(bytes.NewReader(b), mpaKeyRequest); !errors.Is(err, errMPA) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for n := range len(whole) {
		if _, err := readMPA(bytes.NewReader(whole[:n]), mpaKeyRequest); err == nil {
			t.Fatalf("%d bytes are a frame", n)
		}
	}
}

// foreignRequest is a request as other stacks make them.
func foreignRequest(rev byte, crc bool, d readDepths, private []byte) mpaFrame {
	f := mpaFrame{rev: rev, private: private}
	if crc {
		f.flags |= mpaCRC
	}
	if rev >= 2 {
		f.flags |= mpaEnhanced
		f.private = append(d.append(nil), private...)
	}
	return f
}

func TestI002_ResponderMatrix(t *testing.T) {
	rtrs := map[string]struct{ offer, answer readDepths }{
		"A=0":       {readDepths{}, readDepths{}},
		"A, C":      {readDepths{p2p: true, write: true}, readDepths{p2p: true, write: true}},
		"A, D":      {readDepths{p2p: true, rtr: true}, readDepths{p2p: true, rtr: true}},
		"A, C, D":   {readDepths{p2p: true, write: true, rtr: true}, readDepths{p2p: true, write: true}},
		"A, B":      {readDepths{p2p: true, send: true}, readDepths{p2p: true, write: true}},
		"no kind":   {readDepths{p2p: true}, readDepths{p2p: true, write: true}},
		"B without": {readDepths{send: true}, readDepths{}},
	}
	for name, rtr := range rtrs {
		for _, rev := range []byte{1, 2} {
			for _, crc := range []bool{true, false} {
				for _, ours := range []bool{true, false} {
					for _, size := range []int{0, 4, 56, 200, 252} {
						t.Run(fmt.Sprintf("%s rev %d crc %v/%v private %d", name, rev, crc, ours, size), func(t *testing.T) {
							cfg := Config{CRC: ours, Foreign: true, IRD: 8, ORD: 8}.withDefaults()
							d := rtr.offer
							d.ird, d.ord = 3, 20
							private := make([]byte, size)
							fill(private, 1)
							req := foreignRequest(rev, crc, d, private)
							tm, got, answer, err := cfg.checkRequest(&req)
							if err != nil || !bytes.Equal(got, private) {
								t.Fatalf("private %x, %v", got, err)
							}
							rep := cfg.mpaReply(&req, tm, answer, false, []byte("pd"))
							if tm.crc != (crc || ours) || rep.hasFlag(mpaCRC) != tm.crc || rep.rev != rev || rep.hasFlag(mpaReject) || rep.hasFlag(mpaMarkers) {
								t.Errorf("crc %v, reply %+v", tm.crc, rep)
							}
							if rev == 1 {
								if rep.enhanced() || string(rep.private) != "pd" || tm.ord != 0 {
									t.Errorf("reply %+v to revision 1", rep)
								}
								return
							}
							want := rtr.answer
							want.ird, want.ord = 20, 3
							if back := parseDepths(rep.private); back != want || string(rep.private[4:]) != "pd" || tm.ird != 20 || tm.ord != 3 {
								t.Errorf("reply %+v, want %+v; terms %+v", back, want, tm)
							}
						})
					}
				}
			}
		}
	}
}

func TestI002_ResponderRefuses(t *testing.T) {
	ours, foreign := DefaultConfig(), Config{Foreign: true}.withDefaults()
	good := foreignRequest(2, false, readDepths{ird: 1, ord: 1}, nil)
	markers := good
	markers.flags |= mpaMarkers
	old := mpaFrame{rev: 1, flags: mpaMarkers}
	short := mpaFrame{rev: 2, flags: mpaEnhanced, private: []byte{1, 2, 3}}
	for name, tt := range map[string]struct {
		cfg   Config
		req   mpaFrame
		flags byte
		rev   byte
	}{
		"markers, revision 2":          {foreign, markers, mpaReject | mpaEnhanced, 2},
		"markers, revision 1":          {foreign, old, mpaReject, 1},
		"enhanced block cut short":     {foreign, short, mpaReject, 2},
		"peer without our extension":   {ours, good, mpaReject | mpaEnhanced, 2},
		"extension of another version": {ours, foreignRequest(2, false, readDepths{}, []byte("RNBD\x00\x03\x00\x00")), mpaReject | mpaEnhanced, 2},
	} {
		_, _, _, err := tt.cfg.checkRequest(&tt.req)
		var no *mpaRefusal
		if !errors.As(err, &no) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if no.reply.flags != tt.flags || no.reply.rev != tt.rev {
			t.Errorf("%s: reply flags %#x revision %d, want %#x %d", name, no.reply.flags, no.reply.rev, tt.flags, tt.rev)
		}
		if no.reply.enhanced() && !bytes.Equal(no.reply.private, make([]byte, 4)) {
			t.Errorf("%s: reply says %x", name, no.reply.private)
		}
	}
	if _, _, _, err := ours.checkRequest(&good); !errors.Is(err, errNoExtension) || !strings.Contains(err.Error(), "speaks iWARP but not the RTRS extensions") {
		t.Errorf("peer without our extension: %v", err)
	}
}

func TestI002_ReservedFlagsAreIgnored(t *testing.T) {
	cfg := Config{Foreign: true}.withDefaults()
	req := foreignRequest(2, false, readDepths{ird: 1, ord: 1}, nil)
	req.flags |= 0x0f
	tm, _, d, err := cfg.checkRequest(&req)
	if rep := cfg.mpaReply(&req, tm, d, false, nil); err != nil || rep.flags != mpaEnhanced {
		t.Errorf("reply flags %#x, %v", rep.flags, err)
	}
}

func TestI002_InitiatorJudgesTheReply(t *testing.T) {
	reply := func(flags, rev byte, d readDepths, rest string) mpaFrame {
		return mpaFrame{flags: flags, rev: rev, private: append(d.append(nil), rest...)}
	}
	depths := readDepths{ird: 5, ord: 7, p2p: true, write: true}
	const block = "RNBD\x01\x03\x00\x00"
	tests := []struct {
		name    string
		foreign bool
		rep     mpaFrame
		private string
		err     error
		term    termCode
	}{
		{"accepted", false, reply(mpaEnhanced, 2, depths, block+"hello"), "hello", nil, 0},
		{"accepted by a foreign stack", true, reply(mpaEnhanced, 2, depths, "hello"), "hello", nil, 0},
		{"foreign data that look like the block stay", true, reply(mpaEnhanced, 2, depths, block), block, nil, 0},
		{"accepted without the extension", false, reply(mpaEnhanced, 2, depths, "hello"), "", errNoExtension, 0},
		{"another revision", true, reply(mpaEnhanced, 1, depths, ""), "", errMPA, 0},
		{"not enhanced", true, reply(0, 2, depths, ""), "", errMPA, 0},
		{"markers", true, reply(mpaEnhanced|mpaMarkers, 2, depths, ""), "", nil, termMPA},
		{"enhanced block cut short", true, mpaFrame{flags: mpaEnhanced, rev: 2, private: []byte{1, 2}}, "", nil, termMPA},
		{"peer issues more reads than we serve", true, reply(mpaEnhanced, 2, readDepths{ird: 1, ord: 17}, ""), "", nil, termIRD},
	}
	for _, tt := range tests {
		cfg := Config{Foreign: tt.foreign}.withDefaults()
		req := cfg.mpaRequest([]byte("data"))
		tm, private, err := cfg.checkReply(&req, &tt.rep)
		var te *termError
		errors.As(err, &te)
		switch {
		case tt.term != 0:
			if te == nil || te.code != tt.term {
				t.Errorf("%s: %v, want Terminate %s", tt.name, err, tt.term)
			}
		case tt.err != nil:
			if !errors.Is(err, tt.err) {
				t.Errorf("%s: %v, want %v", tt.name, err, tt.err)
			}
		case err != nil || string(private) != tt.private || tm.ord != 5 || !tm.opening || !tm.initiator:
			t.Errorf("%s: %+v, private %q, %v", tt.name, tm, private, err)
		}
	}
}

// Whatever the responder says about RTR frames was not asked for.
func TestI002_InitiatorAsksForNoPeerToPeerModel(t *testing.T) {
	for _, d := range []readDepths{
		{ird: 1}, {ird: 1, p2p: true, write: true}, {ird: 1, p2p: true, rtr: true}, {p2p: true, send: true}, {ird: 1, p2p: true},
	} {
		cfg := Config{Foreign: true}.withDefaults()
		req := cfg.mpaRequest(nil)
		if got := parseDepths(req.private); got.p2p || got != (readDepths{ird: 16, ord: 16}) {
			t.Fatalf("asked for %+v", got)
		}
		rep := mpaFrame{flags: mpaEnhanced, rev: 2, private: d.append(nil)}
		if tm, _, err := cfg.checkReply(&req, &rep); err != nil || !tm.opening {
			t.Errorf("%+v: %+v, %v", d, tm, err)
		}
	}
}

func TestI002_RejectCarriesPrivateData(t *testing.T) {
	cfg := DefaultConfig()
	req := cfg.mpaRequest(nil)
	tm, _, d, err := cfg.checkRequest(&req)
	if err != nil {
		t.Fatal(err)
	}
	for name, rep := range map[string]mpaFrame{
		"ours":                        cfg.mpaReply(&req, tm, d, true, []byte("why")),
		"without the block":           {flags: mpaReject | mpaEnhanced, rev: 2, private: []byte("\x00\x00\x00\x00why")},
		"without the enhanced words":  {flags: mpaReject, rev: 2, private: []byte("why")},
		"with markers, which are off": {flags: mpaReject | mpaMarkers, rev: 2, private: []byte("why")},
	} {
		_, _, err := cfg.checkReply(&req, &rep)
		var reject *verbs.RejectError
		if !errors.As(err, &reject) || string(reject.Private) != "why" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestExtensionBlock(t *testing.T) {
	b := appendExtension(nil)
	if want := unhex("524e4244 01 03 0000"); !bytes.Equal(b, want) {
		t.Errorf("block %x, want %x", b, want)
	}
	features, rest, ok := cutExtension(append(b, "rest"...))
	if !ok || features != ourFeatures || string(rest) != "rest" {
		t.Errorf("features %#x, rest %q, %v", features, rest, ok)
	}
	// A later version with more bits still works with the part that both know.
	cfg := DefaultConfig()
	req := foreignRequest(2, true, readDepths{}, []byte("RNBD\x09\xfdxxdata"))
	tm, private, _, err := cfg.checkRequest(&req)
	if err != nil || string(private) != "data" || tm.features != featureImmediate {
		t.Errorf("features %#x, private %q, %v", tm.features, private, err)
	}
}

func TestReadDepthWords(t *testing.T) {
	for _, tt := range []struct {
		d    readDepths
		wire string
	}{
		{readDepths{ird: 16, ord: 2}, "00100002"},
		{readDepths{ird: 1, ord: 1, p2p: true, write: true, rtr: true}, "8001c001"},
		{readDepths{ird: 1, ord: 1, p2p: true, send: true}, "c0010001"},
		{readDepths{ird: 0x3fff, ord: 0x3fff}, "3fff3fff"},
	} {
		if got := tt.d.append(nil); !bytes.Equal(got, unhex(tt.wire)) || parseDepths(got) != tt.d {
			t.Errorf("%+v: %x, want %s", tt.d, got, tt.wire)
		}
	}
}
