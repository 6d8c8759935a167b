package iwarp

import (
	"bytes"
	"encoding/binary"
	"path/filepath"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// FuzzMPAFrame: a frame that is read is the frame that was sent, byte for
// byte, and neither side of a start-up falls over it.
func FuzzMPAFrame(f *testing.F) {
	cfg := DefaultConfig()
	req := cfg.mpaRequest([]byte("private data"))
	f.Add(req.encode(mpaKeyRequest))
	f.Add(req.encode(mpaKeyReply))
	f.Add((&mpaFrame{rev: 1, private: make([]byte, 56)}).encode(mpaKeyRequest))
	f.Add((&mpaFrame{rev: 2, flags: mpaEnhanced | mpaReject, private: []byte{1, 2}}).encode(mpaKeyReply))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, key := range []string{mpaKeyRequest, mpaKeyReply} {
			r := bytes.NewReader(b)
			frame, err := readMPA(r, key)
			if err != nil {
				continue
			}
			if got := frame.encode(key); !bytes.Equal(got, b[:len(b)-r.Len()]) {
				t.Errorf("read %x, which encodes as %x", b, got)
			}
			for _, cfg := range []Config{DefaultConfig(), Config{Foreign: true}.withDefaults()} {
				judgeFrame(t, &cfg, &frame)
			}
		}
	})
}

func judgeFrame(t *testing.T, cfg *Config, frame *mpaFrame) {
	tm, private, d, err := cfg.checkRequest(frame)
	if err == nil {
		rep := cfg.mpaReply(frame, tm, d, false, nil)
		back := rep.encode(mpaKeyReply)
		if _, err := readMPA(bytes.NewReader(back), mpaKeyReply); err != nil || rep.hasFlag(mpaMarkers) {
			t.Errorf("reply %x to %+v: %v", back, frame, err)
		}
		if tm.ird > maxServedReads || tm.ord > cfg.ORD || tm.features&^ourFeatures != 0 || !bytes.HasSuffix(frame.private, private) {
			t.Errorf("terms %+v from %+v", tm, frame)
		}
	}
	req := cfg.mpaRequest(nil)
	tm, private, err = cfg.checkReply(&req, frame)
	if err == nil && (tm.ord > cfg.ORD || frame.hasFlag(mpaReject) || !bytes.HasSuffix(frame.private, private)) {
		t.Errorf("terms %+v from reply %+v", tm, frame)
	}
}

const guard = 64

// fuzzEnd is a queue pair with two regions. The bytes around them are watched.
type fuzzEnd struct {
	*offline
	arena  []byte // guard, region, guard, receives, guard
	region *softverbs.Region
}

// The regions get STags and addresses that the corpus can name.
const (
	fuzzSTag = 0x00112200
	fuzzBase = 0x1000
	fuzzSize = 256
)

func newFuzzEnd(t testing.TB, crc bool) *fuzzEnd {
	d, err := Open(quiet(DefaultConfig()))
	if err != nil {
		t.Fatal(err)
	}
	dev := d.(*Device)
	tm := bothTerms()
	tm.crc = crc
	e := &fuzzEnd{offline: newOfflineOn(t, dev, tm), arena: make([]byte, 3*guard+2*fuzzSize)}
	for i := range e.arena {
		e.arena[i] = 0xee
	}
	e.region = e.pd.Plant(e.arena[guard:guard+fuzzSize:guard+fuzzSize], fuzzBase, fuzzSTag, verbs.AccessRemoteWrite|verbs.AccessRemoteRead)
	for i := range 4 {
		at := 2*guard + fuzzSize + i*64
		mr, err := e.pd.RegMR(e.arena[at:at+64], 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := e.q.PostRecv([]verbs.RecvWR{{ID: uint64(i), Buf: e.arena[at : at+64], LKey: mr.LKey()}}); err != nil {
			t.Fatal(err)
		}
	}
	return e
}

func (e *fuzzEnd) intact() bool {
	for _, at := range []int{0, guard + fuzzSize, 2*guard + 2*fuzzSize} {
		for _, b := range e.arena[at : at+guard] {
			if b != 0xee {
				return false
			}
		}
	}
	return true
}

// FuzzFPDUStream feeds bytes as they are, in chunks of a size from the input,
// with CRC off so that the input gets past it, and the same bytes with CRCs
// put right where they are whole frames.
func FuzzFPDUStream(f *testing.F) {
	a := newOffline(f, bothTerms())
	a.q.terms.crc, a.q.tx.crc = false, false
	buf, r := a.region(200, 0)
	sge := []verbs.SGE{{Buf: buf, LKey: r.LKey()}}
	a.send(
		verbs.SendWR{Op: verbs.OpWriteImm, RemoteAddr: fuzzBase, RKey: fuzzSTag, SGEs: sge},
		verbs.SendWR{Op: verbs.OpSend, SGEs: []verbs.SGE{{Buf: buf[:60], LKey: r.LKey()}}},
		verbs.SendWR{Op: verbs.OpSendImm},
		verbs.SendWR{Op: verbs.OpRead, RemoteAddr: fuzzBase, RKey: fuzzSTag, SGEs: sge},
		verbs.SendWR{Op: verbs.OpSendInv, RKey: fuzzSTag})
	wire := a.take()
	f.Add(wire, byte(0))
	for _, frame := range splitFPDUs(f, wire) {
		f.Add(frame, byte(1))
	}
	for _, s := range []segment{
		{op: opWrite, stag: fuzzSTag, to: fuzzBase + fuzzSize - 8, payload: some},
		{op: opWrite, stag: fuzzSTag, to: fuzzBase + fuzzSize - 7, payload: some},
		{op: opSend, more: true, msn: 1, payload: make([]byte, 64)},
		{op: opReadResponse, stag: 1},
		terminateOf(termSTag),
	} {
		f.Add(s.bytes(false), byte(7))
	}
	f.Fuzz(func(t *testing.T, b []byte, chunk byte) {
		size := int(chunk)
		if size == 0 {
			size = len(b) + 1
		}
		plain := newFuzzEnd(t, false)
		checkFuzzed(t, plain, plain.feed(b, size), len(b))
		whole := newFuzzEnd(t, true)
		sealed := resealed(b)
		checkFuzzed(t, whole, whole.feed(sealed, size), len(sealed))
		// How bytes are cut by TCP makes no difference.
		again := newFuzzEnd(t, true)
		again.feed(sealed, 1+size/2)
		if again.code() != whole.code() || len(again.wcs) != len(whole.wcs) || !bytes.Equal(again.arena, whole.arena) {
			t.Errorf("other chunks, other result: %s, %s", again.code(), whole.code())
		}
		for _, e := range []*fuzzEnd{plain, whole, again} {
			splitFPDUs(t, e.take()) // answers, or the Terminate
		}
	})
}

// resealed puts right CRCs on the whole frames at the front of b.
func resealed(b []byte) []byte {
	out := bytes.Clone(b)
	for _, f := range frames(out) {
		end := len(f) - crcLen
		binary.LittleEndian.PutUint32(f[end:], crcUpdate(0, f[:end]))
	}
	return out
}

// checkFuzzed: nothing was written beside the regions; the stream ended with a
// reason, or waits for a receive, or took every byte and is ready for more.
func checkFuzzed(t *testing.T, e *fuzzEnd, fed, n int) {
	t.Helper()
	if !e.intact() {
		t.Fatal("memory outside the registered regions was written")
	}
	x := &e.q.rx
	ended, waits := e.q.End.State != softverbs.EndNone, e.q.rnrSince != 0
	if ended && e.q.End.Cause == nil {
		t.Error("ended without a cause")
	}
	if !ended && !waits && fed != n {
		t.Errorf("took %d of %d bytes and neither ended nor waits", fed, n)
	}
	if !ended && !waits && x.w-x.r >= fpduUntagged {
		t.Errorf("%d bytes were left lying", x.w-x.r)
	}
	if len(e.wcs) != int(e.q.RQ.Head) || e.q.RQ.Head > e.q.RQ.Tail {
		t.Errorf("%d completions for %d receives", len(e.wcs), e.q.RQ.Head)
	}
	for _, wc := range e.wcs {
		if wc.Op == verbs.OpRecv && wc.ByteLen > 64 {
			t.Errorf("receive of 64 bytes completed with %d", wc.ByteLen)
		}
	}
}

// FuzzTerminate: any Terminate is read without a panic, and our own are read
// as written.
func FuzzTerminate(f *testing.F) {
	f.Add(unhex("11000300000dc140ac58eb000000557ccdcfd000"))
	f.Add(unhex("20020000"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, ok := parseTerminate(b)
		if ok != (len(b) >= 4) {
			t.Fatalf("%x: %v", b, ok)
		}
		if termNames[c] == "" || c == termSetup || c == termIRD {
			return
		}
		var out [maxTerminateLen]byte
		if back, _ := parseTerminate(out[:putTerminate(out[:], c, &faultySegment{})]); back != c {
			t.Errorf("%s reads back as %s", c, back)
		}
	})
}

// TestCaptureReaderFindsAllStreams keeps the pcap reader honest: no file is
// silently empty.
func TestCaptureReaderFindsAllStreams(t *testing.T) {
	files, _ := filepath.Glob(capturePath("*.pcap"))
	for _, file := range files {
		c := readCapture(t, file)
		if len(c.streams) == 0 {
			t.Errorf("%s has no TCP stream", file)
		}
	}
}
