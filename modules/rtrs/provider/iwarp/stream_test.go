package iwarp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// twoOffline are the ends of one connection, without a socket.
func twoOffline(t testing.TB, tm connTerms) (a, b *offline) {
	a = newOffline(t, tm)
	b = newOffline(t, tm)
	return a, b
}

// everything sends one message of each kind from a, prepares b to receive
// them, and returns a function that checks b and its answers.
func everything(t *testing.T, a, b *offline) (wire []byte, check func(name string)) {
	src, lr := a.region(150001, 0)
	dst, rr := b.region(150001, verbs.AccessRemoteWrite|verbs.AccessRemoteRead)
	inv, ir := b.region(64, verbs.AccessRemoteWrite)
	fill(src, 42)
	clear(inv)
	b.recv(5, 70000)
	sge := func(from, to int) []verbs.SGE { return []verbs.SGE{{Buf: src[from:to], LKey: lr.LKey()}} }
	a.send(
		verbs.SendWR{Op: verbs.OpSend, SGEs: sge(0, 13)},
		verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: rr.Addr(), RKey: rr.LKey(), SGEs: sge(0, 140000)},
		verbs.SendWR{Op: verbs.OpWriteImm, Imm: 5},
		verbs.SendWR{Op: verbs.OpWriteImm, Imm: 6, RemoteAddr: rr.Addr() + 140000, RKey: rr.LKey(), SGEs: sge(140000, 150001)},
		verbs.SendWR{Op: verbs.OpSendInv, RKey: ir.LKey(), SGEs: sge(5, 8)},
		verbs.SendWR{Op: verbs.OpRead, RemoteAddr: rr.Addr(), RKey: rr.LKey(), SGEs: sge(0, 0)},
		verbs.SendWR{Op: verbs.OpSendImm, Imm: 7, SGEs: sge(0, 70000)},
	)
	return a.take(), func(name string) {
		t.Helper()
		want := []verbs.WC{
			{QP: 1, ID: 0, Op: verbs.OpRecv, ByteLen: 13},
			{QP: 1, ID: 1, Op: verbs.OpRecvImm, HasImm: true, Imm: 5},
			{QP: 1, ID: 2, Op: verbs.OpRecvImm, HasImm: true, Imm: 6, ByteLen: 10001},
			{QP: 1, ID: 3, Op: verbs.OpRecv, HasInv: true, InvKey: ir.LKey(), ByteLen: 3},
			{QP: 1, ID: 4, Op: verbs.OpRecv, HasImm: true, Imm: 7, ByteLen: 70000},
		}
		if !slices.Equal(b.wcs, want) {
			t.Errorf("%s: completions\n got %+v\nwant %+v", name, b.wcs, want)
		}
		if b.code() != 0 || !bytes.Equal(src, dst) || !bytes.Equal(b.q.RQ.At(uint64(4)).Buf, src[:70000]) || !ir.Valid(0) {
			t.Errorf("%s: data differ, or terminated: %s", name, b.code())
		}
		if b.q.serveTail != 1 {
			t.Errorf("%s: %d reads to answer", name, b.q.serveTail)
		}
	}
}

func TestI003_FramesSurviveAnyChunking(t *testing.T) {
	for _, chunk := range []int{1, 2, 3, 5, 7, 16, 17, 19, 21, 23, 64, 1447, 1448, 4096, 65535, 1 << 20} {
		a, b := twoOffline(t, bothTerms())
		wire, check := everything(t, a, b)
		b.feed(wire, chunk)
		check(fmt.Sprintf("chunks of %d bytes", chunk))
	}
}

// resegment cuts the messages of a stream into segments of n payload bytes.
func resegment(t *testing.T, wire []byte, n int, crc bool) []byte {
	var out []byte
	for _, f := range splitFPDUs(t, wire) {
		h := fpduHeader(f)
		if h.payload() == 0 || h.op() == opReadRequest || h.op() == opImmediate {
			out = append(out, f...)
			continue
		}
		for off := 0; off < h.payload(); off += n {
			m := min(n, h.payload()-off)
			s := segment{op: h.op(), more: off+m < h.payload() || !h.last(), payload: f[h.size()+off:][:m]}
			if s.stag = h.stag(); h.tagged() {
				s.to = h.to() + uint64(off)
			} else {
				s.msn, s.mo = h.msn(), h.mo()+uint32(off)
			}
			out = append(out, s.bytes(crc)...)
		}
	}
	return out
}

func TestI003_SegmentsOfEightBytes(t *testing.T) {
	for _, n := range []int{8, 4, 1428} {
		a, b := twoOffline(t, bothTerms())
		wire, check := everything(t, a, b)
		b.feed(resegment(t, wire, n, true), 1000)
		check("small segments")
	}
}

func TestI003_LongestFrame(t *testing.T) {
	b := newOffline(t, bothTerms())
	dst, r := b.region(65535, verbs.AccessRemoteWrite)
	payload := make([]byte, 65535-taggedHeaderLen)
	fill(payload, 1)
	f := segment{op: opWrite, stag: r.LKey(), to: r.Addr(), payload: payload}.bytes(true)
	if fpduHeader(f).length() != 65535 {
		t.Fatalf("frame says %d", fpduHeader(f).length())
	}
	b.feed(f, 30000)
	if b.code() != 0 || !bytes.Equal(dst[:len(payload)], payload) || b.q.rx.lastWrite != uint32(len(payload)) {
		t.Errorf("terminated %s, last Write %d", b.code(), b.q.rx.lastWrite)
	}
}

// rule is one way to break the protocol and the Terminate it must bring.
type rule struct {
	name string
	want termCode
	prep func(o *offline)
	make func(o *offline, r *softverbs.Region) []segment
}

func one(s segment) func(*offline, *softverbs.Region) []segment {
	return func(*offline, *softverbs.Region) []segment { return []segment{s} }
}

func readPayload(size, stag uint32, to uint64) []byte {
	b := make([]byte, readRequestLen)
	putReadRequest(b, 0x100, 0, size, stag, to)
	return b
}

func length(n uint16) func([]byte) { return func(b []byte) { binary.BigEndian.PutUint16(b, n) } }

var some = []byte("payload!")

func onQueue(n uint32) *uint32 { return &n }

// The rows of docs/extend/protocol/iwarp.md, Receiving, by number.
var rules = []rule{
	{"row 3, DDP version of a tagged segment", termTaggedVersion, nil, one(segment{op: opWrite, edit: func(b []byte) { b[2] ^= 1 }})},
	{"row 3, DDP version of an untagged segment", termVersion, nil, one(segment{op: opSend, msn: 1, edit: func(b []byte) { b[2] |= 2 }})},
	{"row 4, RDMAP version", termRDMAPVersion, nil, one(segment{op: opSend, msn: 1, edit: func(b []byte) { b[3] &= 0x0f }})},
	{"row 5, opcode that does not exist", termOpcode, nil, one(segment{op: 0xc, msn: 1})},
	{"row 5, atomic request", termOpcode, nil, one(segment{op: 0xa, msn: 1})},
	{"row 5, Write in an untagged segment", termOpcode, nil, one(segment{op: opSend, msn: 1, edit: func(b []byte) { b[3] = rdmapVersion }})},
	{"row 5, Send in a tagged segment", termOpcode, nil, one(segment{op: opWrite, edit: func(b []byte) { b[3] = rdmapVersion | byte(opSend) }})},
	{"row 5, Immediate Data without the extension", termOpcode, func(o *offline) { o.q.terms.features = 0 }, one(segment{op: opImmediate, msn: 1, payload: some})},
	{"row 5, Send with immediate without the extension", termOpcode, func(o *offline) { o.q.terms.features = featureImmediate }, one(segment{op: opSendImm, msn: 1})},
	{"row 6, Send on queue 3", termQN, nil, one(segment{op: opSend, qn: onQueue(3), msn: 1})},
	{"row 6, Send on the queue of reads", termQN, nil, one(segment{op: opSend, qn: onQueue(1), msn: 1})},
	{"row 6, Read Request on the queue of Sends", termQN, nil, one(segment{op: opReadRequest, qn: onQueue(0), msn: 1, payload: readPayload(0, 0, 0)})},
	{"row 7, first Send has MSN 6", termMSN, nil, one(segment{op: opSend, msn: 6})},
	{"row 7, first Send has MSN 0", termMSN, nil, one(segment{op: opSend, msn: 0})},
	{"row 7, Send repeated", termMSN, nil, func(*offline, *softverbs.Region) []segment {
		return []segment{{op: opSend, msn: 1}, {op: opSend, msn: 1}}
	}},
	{"row 7, Read Request with MSN 2", termMSN, nil, one(segment{op: opReadRequest, msn: 2, payload: readPayload(0, 0, 0)})},
	{"row 7, Terminate with MSN 2", termMSN, nil, one(segment{op: opTerminate, msn: 2, payload: some})},
	{"row 9, Send starts behind its start", termMO, nil, one(segment{op: opSend, msn: 1, mo: 4, payload: some})},
	{"row 9, second segment leaves a hole", termMO, nil, func(*offline, *softverbs.Region) []segment {
		return []segment{{op: opSend, msn: 1, more: true, payload: some}, {op: opSend, msn: 1, mo: 12, payload: some}}
	}},
	{"row 9, second segment overlaps", termMO, nil, func(*offline, *softverbs.Region) []segment {
		return []segment{{op: opSend, msn: 1, more: true, payload: some}, {op: opSend, msn: 1, mo: 4, payload: some}}
	}},
	{"row 10, Send longer than its receive", termTooLong, nil, one(segment{op: opSend, msn: 1, payload: make([]byte, 65)})},
	{"row 10, Send grows longer than its receive", termTooLong, nil, func(*offline, *softverbs.Region) []segment {
		return []segment{{op: opSend, msn: 1, more: true, payload: make([]byte, 60)}, {op: opSend, msn: 1, mo: 60, payload: make([]byte, 8)}}
	}},
	{"row 11, Immediate Data of 4 bytes", termUnspecified, nil, one(segment{op: opImmediate, msn: 1, payload: some[:4]})},
	{"row 11, Immediate Data of 12 bytes", termUnspecified, nil, one(segment{op: opImmediateSE, msn: 1, payload: make([]byte, 12)})},
	{"row 11, Immediate Data in two segments", termUnspecified, nil, one(segment{op: opImmediate, more: true, msn: 1, payload: some})},
	{"row 12, Read Request with bytes behind it", termUnspecified, nil, one(segment{op: opReadRequest, msn: 1, payload: make([]byte, 32)})},
	{"row 12, Read Request that is not the last segment", termUnspecified, nil, one(segment{op: opReadRequest, more: true, msn: 1, payload: readPayload(0, 0, 0)})},
	{"row 13, a read more than IRD", termStream, nil, func(*offline, *softverbs.Region) (s []segment) {
		for i := range 5 { // IRD is 4
			s = append(s, segment{op: opReadRequest, msn: uint32(i + 1), payload: readPayload(0, 0, 0)})
		}
		return s
	}},
	{"row 14, read of an unknown STag", termReadSTag, nil, func(o *offline, r *softverbs.Region) []segment { return readOf(8, r.LKey()+1<<8, r.Addr()) }},
	{"row 14, read with a stale key", termReadSTag, nil, func(o *offline, r *softverbs.Region) []segment {
		return readOf(8, verbs.NextKey(r.LKey()), r.Addr())
	}},
	{"row 14, read of an invalidated region", termReadSTag, nil, func(o *offline, r *softverbs.Region) []segment {
		r.Domain.Invalidate(r.LKey())
		return readOf(8, r.LKey(), r.Addr())
	}},
	{"row 14, read of another protection domain", termReadPD, nil, func(o *offline, r *softverbs.Region) []segment {
		r.Domain = softverbs.NewDomain(&o.q.dev.keys)
		return readOf(8, r.LKey(), r.Addr())
	}},
	{"row 14, read without the right", termReadAccess, nil, func(o *offline, r *softverbs.Region) []segment {
		r.Access = verbs.AccessRemoteWrite
		return readOf(8, r.LKey(), r.Addr())
	}},
	{"row 14, read behind the end", termReadBounds, nil, func(o *offline, r *softverbs.Region) []segment { return readOf(9, r.LKey(), r.Addr()+56) }},
	{"row 14, read before the start", termReadBounds, nil, func(o *offline, r *softverbs.Region) []segment { return readOf(1, r.LKey(), r.Addr()-1) }},
	{"row 14, read of 4 GiB", termReadBounds, nil, func(o *offline, r *softverbs.Region) []segment { return readOf(math.MaxUint32, r.LKey(), r.Addr()) }},
	{"row 14, read that wraps", termReadWrap, nil, func(o *offline, r *softverbs.Region) []segment { return readOf(8, r.LKey(), math.MaxUint64-3) }},
	{"row 15, Write to an unknown STag", termSTag, nil, func(o *offline, r *softverbs.Region) []segment { return writeTo(r.LKey()+1<<8, r.Addr()) }},
	{"row 15, Write with a stale key", termSTag, nil, func(o *offline, r *softverbs.Region) []segment { return writeTo(verbs.NextKey(r.LKey()), r.Addr()) }},
	{"row 15, Write to STag 0", termSTag, nil, func(o *offline, r *softverbs.Region) []segment { return writeTo(0, r.Addr()) }},
	{"row 15, Write to an invalidated region", termSTag, nil, func(o *offline, r *softverbs.Region) []segment {
		r.Domain.Invalidate(r.LKey())
		return writeTo(r.LKey(), r.Addr())
	}},
	{"row 15, Write to another protection domain", termSTagStream, nil, func(o *offline, r *softverbs.Region) []segment {
		r.Domain = softverbs.NewDomain(&o.q.dev.keys)
		return writeTo(r.LKey(), r.Addr())
	}},
	{"row 15, Write without the right", termSTag, nil, func(o *offline, r *softverbs.Region) []segment {
		r.Access = verbs.AccessRemoteRead
		return writeTo(r.LKey(), r.Addr())
	}},
	{"row 15, Write behind the end", termBounds, nil, func(o *offline, r *softverbs.Region) []segment { return writeTo(r.LKey(), r.Addr()+57) }},
	{"row 15, Write far behind the end", termBounds, nil, func(o *offline, r *softverbs.Region) []segment { return writeTo(r.LKey(), r.Addr()+1<<40) }},
	{"row 15, Write before the start", termBounds, nil, func(o *offline, r *softverbs.Region) []segment { return writeTo(r.LKey(), r.Addr()-1) }},
	{"row 15, Write that wraps", termWrap, nil, func(o *offline, r *softverbs.Region) []segment { return writeTo(r.LKey(), math.MaxUint64-7) }},
	{"row 16, Write changes its STag", termSTag, nil, func(o *offline, r *softverbs.Region) []segment {
		_, other := o.region(64, verbs.AccessRemoteWrite)
		return []segment{{op: opWrite, more: true, stag: r.LKey(), to: r.Addr(), payload: some}, {op: opWrite, stag: other.LKey(), to: other.Addr(), payload: some}}
	}},
	{"row 16, Write leaves a hole", termBounds, nil, func(o *offline, r *softverbs.Region) []segment {
		return []segment{{op: opWrite, more: true, stag: r.LKey(), to: r.Addr(), payload: some}, {op: opWrite, stag: r.LKey(), to: r.Addr() + 16, payload: some}}
	}},
	{"row 16, Write grows beyond 4 GiB", termBounds, nil, func(o *offline, r *softverbs.Region) []segment {
		o.q.rx.tagged = taggedMessage{open: true, op: opWrite, stag: r.LKey(), next: r.Addr(), length: math.MaxUint32 - 7}
		return writeTo(r.LKey(), r.Addr())
	}},
	{"row 15, region is invalidated between two segments", termSTag, nil, func(o *offline, r *softverbs.Region) []segment {
		first := segment{op: opWrite, more: true, stag: r.LKey(), to: r.Addr(), payload: some}
		first.after = func([]byte) {}
		inv := segment{op: opSendInv, stag: r.LKey(), msn: 1}
		return []segment{first, inv, {op: opWrite, stag: r.LKey(), to: r.Addr() + 8, payload: some}}
	}},
	{"row 17, Read Response nobody asked for", termDDPFatal, nil, one(segment{op: opReadResponse, stag: 1})},
	{"row 17, Read Response to another STag", termSTag, outstandingRead, one(segment{op: opReadResponse, stag: 0x999, payload: some})},
	{"row 17, Read Response to another place", termBounds, outstandingRead, one(segment{op: opReadResponse, stag: 0x100, to: 8, payload: some})},
	{"row 17, Read Response too long", termBounds, outstandingRead, one(segment{op: opReadResponse, stag: 0x100, payload: make([]byte, 20)})},
	{"row 17, Read Response too short", termBounds, outstandingRead, one(segment{op: opReadResponse, stag: 0x100, payload: some})},
	{"row 18, Read Response inside a Write", termDDPFatal, outstandingRead, func(o *offline, r *softverbs.Region) []segment {
		return []segment{{op: opWrite, more: true, stag: r.LKey(), to: r.Addr(), payload: some}, {op: opReadResponse, stag: 0x100, payload: make([]byte, 16)}}
	}},
	{"row 18, Write inside a Read Response", termDDPFatal, outstandingRead, func(o *offline, r *softverbs.Region) []segment {
		return []segment{{op: opReadResponse, more: true, stag: 0x100, payload: some}, {op: opWrite, stag: r.LKey(), to: r.Addr(), payload: some}}
	}},
	{"row 18, Read Request inside a Send", termDDPFatal, nil, func(*offline, *softverbs.Region) []segment {
		return []segment{{op: opSend, more: true, msn: 1, payload: some}, {op: opReadRequest, msn: 1, payload: readPayload(0, 0, 0)}}
	}},
	{"row 18, Send changes its kind", termDDPFatal, nil, func(*offline, *softverbs.Region) []segment {
		return []segment{{op: opSend, more: true, msn: 1, payload: some}, {op: opSendSE, msn: 1, mo: 8, payload: some}}
	}},
	{"row 19, Send invalidates an unknown STag", termInvSTag, nil, func(o *offline, r *softverbs.Region) []segment {
		return []segment{{op: opSendInv, stag: r.LKey() + 1<<8, msn: 1}}
	}},
	{"row 19, Send invalidates with a stale key", termInvSTag, nil, func(o *offline, r *softverbs.Region) []segment {
		return []segment{{op: opSendSEInv, stag: verbs.NextKey(r.LKey()), msn: 1}}
	}},
	{"row 19, Send invalidates in another protection domain", termInvPD, nil, func(o *offline, r *softverbs.Region) []segment {
		r.Domain = softverbs.NewDomain(&o.q.dev.keys)
		return []segment{{op: opSendInv, stag: r.LKey(), msn: 1}}
	}},
}

func readOf(size, stag uint32, to uint64) []segment {
	return []segment{{op: opReadRequest, msn: 1, payload: readPayload(size, stag, to)}}
}

func writeTo(stag uint32, to uint64) []segment {
	return []segment{{op: opWrite, stag: stag, to: to, payload: some}}
}

// outstandingRead posts a read of 16 bytes with the sink STag 0x100.
func outstandingRead(o *offline) {
	buf, r := o.region(16, 0)
	o.send(verbs.SendWR{ID: 3, Op: verbs.OpRead, RemoteAddr: 1, RKey: 1, SGEs: []verbs.SGE{{Buf: buf, LKey: r.LKey()}}})
	o.take()
}

func TestI004_EveryRuleHasItsTerminate(t *testing.T) {
	for _, rule := range rules {
		for _, crc := range []bool{true, false} {
			for _, chunk := range []int{1 << 20, 1} {
				t.Run(rule.name, func(t *testing.T) { rule.run(t, crc, chunk) })
			}
		}
	}
}

func (rule rule) run(t *testing.T, crc bool, chunk int) {
	tm := bothTerms()
	tm.crc = crc
	o := newOffline(t, tm)
	buf, r := o.region(64, verbs.AccessRemoteWrite|verbs.AccessRemoteRead)
	o.recv(4, 64)
	if rule.prep != nil {
		rule.prep(o)
	}
	for _, s := range rule.make(o, r) {
		o.feed(s.bytes(crc), chunk)
	}
	if o.code() != rule.want {
		t.Fatalf("terminated %s, want %s", o.code(), rule.want)
	}
	wire := o.take()
	frames := splitFPDUs(t, wire)
	last := frames[len(frames)-1]
	h := fpduHeader(last)
	if c, ok := parseTerminate(last[h.size():][:h.payload()]); h.op() != opTerminate || !ok || c != rule.want {
		t.Errorf("sent %x, want a Terminate %s", last, rule.want)
	}
	if !bytes.Contains(buf, some) && bytes.Count(buf, []byte{0}) != len(buf) {
		t.Errorf("region has %q", buf)
	}
	if more := o.take(); len(more) != 0 {
		t.Errorf("sent %x behind the Terminate", more)
	}
}

func TestI004_Row1_LengthShorterThanItsHeader(t *testing.T) {
	for name, s := range map[string]segment{
		"empty":                           {op: opSend, msn: 1, edit: length(0)},
		"tagged, 13 bytes":                {op: opWrite, edit: length(13)},
		"untagged, 17 bytes":              {op: opSend, msn: 1, edit: length(17)},
		"Read Request without its header": {op: opReadRequest, msn: 1, edit: length(18)},
		"Read Request of 45 bytes":        {op: opReadRequest, msn: 1, payload: readPayload(0, 0, 0), edit: length(45)},
	} {
		o := newOffline(t, bothTerms())
		b := make([]byte, 64)
		copy(b, s.bytes(false))
		if o.feed(b, len(b)); o.code() != termFraming {
			t.Errorf("%s: terminated %s", name, o.code())
		}
	}
}

func TestI004_Row2_CRCGoesBeforeAllOtherRules(t *testing.T) {
	for _, rule := range rules {
		spare := newOffline(t, bothTerms())
		if _, r := spare.region(64, 0); len(rule.make(spare, r)) != 1 {
			continue
		}
		o := newOffline(t, bothTerms())
		_, r := o.region(64, verbs.AccessRemoteWrite|verbs.AccessRemoteRead)
		o.recv(4, 64)
		if rule.prep != nil {
			rule.prep(o)
		}
		b := rule.make(o, r)[0].bytes(true)
		b[len(b)-1] ^= 1
		if o.feed(b, 9); o.code() != termCRC {
			t.Errorf("%s, and the CRC is wrong: terminated %s", rule.name, o.code())
		}
	}
}

func TestI004_Row8_MessageWaitsForItsReceive(t *testing.T) {
	for _, op := range []opcode{opSend, opSendSE, opSendImm, opImmediate} {
		o := newOffline(t, bothTerms())
		b := segment{op: op, msn: 1, payload: some}.bytes(true)
		o.feed(b, len(b))
		if o.code() != 0 || len(o.wcs) != 0 || o.q.rnrSince == 0 {
			t.Fatalf("opcode %d without a receive: %+v, terminated %s", op, o.wcs, o.code())
		}
		o.recv(1, 8)
		if o.parse(); len(o.wcs) != 1 || o.q.rnrSince != 0 || o.q.Deadline != 0 {
			t.Errorf("opcode %d after the receive: %+v", op, o.wcs)
		}
	}
}

func TestI004_ZeroLengthIsNotChecked(t *testing.T) {
	o := newOffline(t, bothTerms())
	o.feed(segment{op: opWrite, stag: 0xbad, to: math.MaxUint64}.bytes(true), 100)
	o.feed(segment{op: opReadRequest, msn: 1, payload: readPayload(0, 0xbad, math.MaxUint64)}.bytes(true), 100)
	if o.code() != 0 {
		t.Fatalf("terminated %s", o.code())
	}
	want := segment{op: opReadResponse, stag: 0x100}.bytes(true)
	if got := o.take(); !bytes.Equal(got, want) {
		t.Errorf("answer %x, want %x", got, want)
	}
}

func TestI004_SendInsideAWriteIsAccepted(t *testing.T) {
	o := newOffline(t, bothTerms())
	buf, r := o.region(16, verbs.AccessRemoteWrite)
	o.recv(1, 8)
	for _, s := range []segment{
		{op: opWrite, more: true, stag: r.LKey(), to: r.Addr(), payload: some},
		{op: opSend, msn: 1, payload: some},
		{op: opWrite, stag: r.LKey(), to: r.Addr() + 8, payload: some},
	} {
		o.feed(s.bytes(true), 100)
	}
	if o.code() != 0 || len(o.wcs) != 1 || string(buf) != "payload!payload!" {
		t.Errorf("terminated %s, %+v, %q", o.code(), o.wcs, buf)
	}
}

func TestI007_MSNsWrap(t *testing.T) {
	a, b := twoOffline(t, bothTerms())
	a.q.tx.msn = [2]uint32{math.MaxUint32 - 1, math.MaxUint32}
	b.q.rx.msn = [3]uint32{math.MaxUint32 - 1, math.MaxUint32, 1}
	b.recv(4, 8)
	for i := range 4 {
		a.send(verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(i)}, verbs.SendWR{Op: verbs.OpRead})
	}
	b.feed(a.take(), 100)
	if b.code() != 0 || len(b.wcs) != 4 || b.q.serveTail != 4 || b.q.rx.msn != [3]uint32{2, 3, 1} {
		t.Errorf("terminated %s, %d completions, %d reads, next MSNs %d", b.code(), len(b.wcs), b.q.serveTail, b.q.rx.msn)
	}
}

func TestI008_ReadsWaitForAFreeSlot(t *testing.T) {
	tm := bothTerms()
	tm.ord = 2
	a, b := twoOffline(t, tm)
	buf, lr := a.region(64, 0)
	src, rr := b.region(64, verbs.AccessRemoteRead)
	fill(src, 9)
	for i := range 5 {
		a.send(verbs.SendWR{ID: uint64(i), Op: verbs.OpRead, Signaled: true, RemoteAddr: rr.Addr() + uint64(i), RKey: rr.LKey(), SGEs: []verbs.SGE{{Buf: buf[i : i+1], LKey: lr.LKey()}}})
	}
	a.send(verbs.SendWR{ID: 5, Op: verbs.OpSend, Signaled: true})
	b.recv(1, 0)
	var done []verbs.WC
	wcs := make([]verbs.WC, 16)
	for round := 0; len(done) < 6; round++ {
		wire := a.take()
		reads := 0
		for _, f := range splitFPDUs(t, wire) {
			if fpduHeader(f).op() == opReadRequest {
				reads++
			}
		}
		if reads > 2 || round > 5 {
			t.Fatalf("round %d: %d reads at once", round, reads)
		}
		if len(done) == 0 && len(b.wcs) > 0 {
			t.Error("Send overtook a read that waits")
		}
		b.feed(wire, 1000)
		a.feed(b.take(), 1000)
		done = append(done, wcs[:a.q.Reap(wcs, a.q.oldestRequest())]...)
	}
	for i, wc := range done {
		if wc.ID != uint64(i) || wc.Status != verbs.StatusOK {
			t.Errorf("completion %d is %+v", i, wc)
		}
	}
	if !bytes.Equal(buf[:5], src[:5]) || len(b.wcs) != 1 {
		t.Errorf("read %x, want %x; %d messages", buf[:5], src[:5], len(b.wcs))
	}
}

func TestReadOfARegionInvalidatedWhileServed(t *testing.T) {
	tm := bothTerms()
	a, b := twoOffline(t, tm)
	sink, lr := a.region(4<<20, 0)
	_, rr := b.region(4<<20, verbs.AccessRemoteRead)
	a.send(verbs.SendWR{ID: 1, Op: verbs.OpRead, Signaled: true, RemoteAddr: rr.Addr(), RKey: rr.LKey(), SGEs: []verbs.SGE{{Buf: sink, LKey: lr.LKey()}}})
	b.feed(a.take(), 1000)
	b.q.buildList() // one list: less than the whole answer
	rr.Domain.Invalidate(rr.LKey())
	wire := b.take()
	frames := splitFPDUs(t, wire)
	last := fpduHeader(frames[len(frames)-1])
	if last.op() != opTerminate || b.code() != termReadSTag {
		t.Fatalf("terminated %s, last frame %x", b.code(), frames[len(frames)-1])
	}
	body := frames[len(frames)-1][fpduUntagged:]
	if r := readRequest(body[6+untaggedHeaderLen:]); r.size() >= 4<<20 || r.sourceTO() <= rr.Addr() {
		t.Errorf("Terminate quotes a read of %d bytes at %#x: not advanced", r.size(), r.sourceTO())
	}
}

func TestImmediateReportsTheWriteRightBefore(t *testing.T) {
	a, b := twoOffline(t, bothTerms())
	src, lr := a.region(100, 0)
	_, rr := b.region(100, verbs.AccessRemoteWrite)
	b.recv(8, 16)
	write := verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: rr.Addr(), RKey: rr.LKey(), SGEs: []verbs.SGE{{Buf: src, LKey: lr.LKey()}}}
	writeImm := write
	writeImm.Op = verbs.OpWriteImm
	bare := verbs.SendWR{Op: verbs.OpWriteImm}
	a.send(bare, writeImm, bare, write, bare, write, verbs.SendWR{Op: verbs.OpSend}, bare)
	b.feed(a.take(), 33)
	var got []uint32
	for _, wc := range b.wcs {
		if wc.Op == verbs.OpRecvImm {
			got = append(got, wc.ByteLen)
		}
	}
	if want := []uint32{0, 100, 0, 0, 0}; !slices.Equal(got, want) {
		t.Errorf("lengths with immediates: %d, want %d", got, want)
	}
}

func TestPayloadIsNotPlacedAfterTheKeyIsGone(t *testing.T) {
	o := newOffline(t, bothTerms())
	buf, r := o.region(64, verbs.AccessRemoteWrite)
	b := segment{op: opWrite, stag: r.LKey(), to: r.Addr(), payload: bytes.Repeat([]byte{1}, 64)}.bytes(true)
	o.feed(b[:fpduTagged+10], 1000)
	r.Domain.Invalidate(r.LKey())
	o.feed(b[fpduTagged+10:], 1000)
	if o.code() != termSTag || !bytes.Equal(buf[10:], make([]byte, 54)) || buf[9] != 1 {
		t.Errorf("terminated %s, region %x", o.code(), buf)
	}
}
