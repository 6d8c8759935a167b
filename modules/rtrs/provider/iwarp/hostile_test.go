package iwarp

import (
	"bytes"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// victim is an end of ours that a hostile peer is connected to. A neighbour uses
// the same completion queue.
type victim struct {
	*end
	buf []byte // 64 bytes that the peer may write and read
	mr  verbs.MR
	rcv []byte // of 8 bytes each, four receives are posted
}

func newVictim(e *end) *victim {
	v := &victim{end: e}
	v.buf, v.mr = e.region(64, verbs.AccessRemoteWrite|verbs.AccessRemoteRead)
	var mr verbs.MR
	v.rcv, mr = e.region(32, 0)
	for i := range 4 {
		e.recv(verbs.RecvWR{ID: uint64(i), Buf: v.rcv[8*i:][:8], LKey: mr.LKey()})
	}
	return v
}

// write is a Write of n bytes at offset off of the region.
func (v *victim) write(off, n int) segment {
	return segment{op: opWrite, stag: v.mr.RKey(), to: v.mr.Addr() + uint64(off), payload: bytes.Repeat([]byte{0xaa}, n)}
}

func (v *victim) read(off, n int) segment {
	return segment{op: opReadRequest, msn: 1, payload: readPayload(uint32(n), v.mr.RKey(), v.mr.Addr()+uint64(off))}
}

func immediate(msn uint32) segment {
	return segment{op: opImmediate, msn: msn, payload: []byte{0, 0, 0, 7, 0, 0, 0, 0}}
}

// let polls v until cond holds.
func (v *victim) let(what string, cond func() bool) {
	v.t.Helper()
	for stop := time.Now().Add(testLimit); !cond(); v.poll() {
		if time.Now().After(stop) {
			v.t.Fatalf("%s: never", what)
		}
	}
}

// survives means that the connection goes on.
const survives termCode = 0xffffffff

// silentEnd means that the connection ends without a Terminate of ours.
const silentEnd termCode = 0

type attack struct {
	name string
	act  func(p *rawPeer, v *victim)
	want termCode
	// check looks at the victim's completions.
	check func(t *testing.T, v *victim)
}

func say(segs ...func(v *victim) segment) func(*rawPeer, *victim) {
	return func(p *rawPeer, v *victim) {
		for _, s := range segs {
			p.say(s(v))
		}
	}
}

func just(s segment) func(*victim) segment { return func(*victim) segment { return s } }

func untouched(t *testing.T, v *victim) {
	t.Helper()
	if bytes.Count(v.buf, []byte{0}) != len(v.buf) || bytes.Count(v.rcv, []byte{0}) != len(v.rcv) {
		t.Errorf("memory was changed: %x, receives %x", v.buf, v.rcv)
	}
}

var attacks = []attack{
	{"a write with immediate is longer than the receive", say(
		func(v *victim) segment { return v.write(0, 64) }, just(immediate(1))), survives,
		func(t *testing.T, v *victim) {
			want := verbs.WC{ID: 0, QP: 1, Op: verbs.OpRecvImm, HasImm: true, Imm: 7, ByteLen: 64}
			if len(v.wcs) != 1 || v.wcs[0] != want || bytes.Count(v.rcv, []byte{0}) != len(v.rcv) {
				t.Errorf("completions %+v, receives %x", v.wcs, v.rcv)
			}
		}},
	{"a write ends at the edge of its region", say(func(v *victim) segment { return v.write(56, 8) }, just(immediate(1))), survives,
		func(t *testing.T, v *victim) {
			if !bytes.Equal(v.buf[56:], bytes.Repeat([]byte{0xaa}, 8)) {
				t.Errorf("region has %x", v.buf)
			}
		}},
	{"a write ends one byte behind its region", say(func(v *victim) segment { return v.write(57, 8) }), termBounds, untouched},
	{"a write starts one byte before its region", say(func(v *victim) segment { return v.write(-1, 8) }), termBounds, untouched},
	{"a write starts at the end of its region", say(func(v *victim) segment { return v.write(64, 1) }), termBounds, untouched},
	{"a second segment leaves the region", say(
		func(v *victim) segment { s := v.write(0, 60); s.more = true; return s },
		func(v *victim) segment { return v.write(60, 8) }), termBounds, nil},
	{"a write to a region that is closed", func(p *rawPeer, v *victim) {
		v.mr.Close()
		p.say(v.write(0, 8))
	}, termSTag, untouched},
	{"a write to a region that is closed between its segments", func(p *rawPeer, v *victim) {
		s := v.write(0, 32)
		s.more = true
		p.say(s)
		v.let("the first segment arrives", func() bool { return v.q().rx.tagged.open })
		v.mr.Close()
		clear(v.buf)
		p.say(v.write(32, 32))
	}, termSTag, untouched},
	{"a write to a region that is closed inside a frame", func(p *rawPeer, v *victim) {
		s := v.write(0, 64)
		b := s.bytes(p.crc)
		p.conn.Write(b[:fpduTagged+32])
		v.let("half of the payload arrives", func() bool { return v.buf[31] == 0xaa })
		v.mr.Close()
		clear(v.buf)
		p.conn.Write(b[fpduTagged+32:])
	}, termSTag, untouched},
	{"a read of a region that is closed", func(p *rawPeer, v *victim) {
		v.mr.Close()
		p.say(v.read(0, 8))
	}, termReadSTag, untouched},
	{"a read of everything there is", say(func(v *victim) segment {
		return segment{op: opReadRequest, msn: 1, payload: readPayload(0xffffffff, v.mr.RKey(), v.mr.Addr())}
	}), termReadBounds, nil},
	{"a read behind the region", say(func(v *victim) segment { return v.read(60, 8) }), termReadBounds, nil},
	{"more immediates than receives", func(p *rawPeer, v *victim) {
		for i := range uint32(5) {
			p.say(immediate(i + 1))
		}
	}, termNoBuffer, nil},
	{"an immediate before anything else", say(just(immediate(1))), survives,
		func(t *testing.T, v *victim) {
			if len(v.wcs) != 1 || v.wcs[0].ByteLen != 0 || v.wcs[0].Imm != 7 {
				t.Errorf("completions %+v", v.wcs)
			}
		}},
	{"a message longer than its receive", say(just(segment{op: opSendImm, msn: 1, payload: make([]byte, 9)})), termTooLong, untouched},
	{"a message that grows longer than its receive", say(
		just(segment{op: opSend, msn: 1, more: true, payload: some}), just(segment{op: opSend, msn: 1, mo: 8, payload: some})), termTooLong, nil},
	{"everything that may be empty is empty", say(
		just(segment{op: opWrite, stag: 0xbad, to: 1 << 63}),
		just(segment{op: opWrite, more: true}), just(segment{op: opWrite}),
		just(segment{op: opSend, msn: 1}),
		just(segment{op: opSendSE, msn: 2}),
		just(segment{op: opSendImm, msn: 3, more: true}), just(segment{op: opSendImm, msn: 3}),
		just(segment{op: opReadRequest, msn: 1, payload: readPayload(0, 0, 0)})), survives,
		func(t *testing.T, v *victim) {
			if len(v.wcs) != 3 {
				t.Errorf("completions %+v", v.wcs)
			}
			untouched(t, v)
		}},
	{"a thousand empty segments of one message", func(p *rawPeer, v *victim) {
		for range 1000 {
			p.say(segment{op: opSend, msn: 1, more: true})
		}
		p.say(segment{op: opSend, msn: 1})
	}, survives, nil},
	{"a storm of Terminates", func(p *rawPeer, v *victim) {
		for i := range uint32(100) {
			p.say(segment{op: opTerminate, msn: i + 1, payload: unhex("11000000")})
		}
	}, silentEnd, nil},
	{"an empty Terminate", say(just(segment{op: opTerminate, msn: 1})), silentEnd, nil},
	{"a Terminate longer than any", say(just(segment{op: opTerminate, msn: 1, payload: make([]byte, 200)})), termUnspecified, nil},
	{"a Terminate in two segments", say(just(segment{op: opTerminate, msn: 1, more: true, payload: some})), termUnspecified, nil},
	{"half a header, then silence", func(p *rawPeer, v *victim) { p.conn.Write(v.write(0, 8).bytes(true)[:9]) }, survives, untouched},
	{"half a payload, then silence", func(p *rawPeer, v *victim) { p.conn.Write(v.write(0, 64).bytes(true)[:40]) }, survives, nil},
	{"a frame without its CRC, then silence", func(p *rawPeer, v *victim) {
		b := segment{op: opSend, msn: 1, payload: some}.bytes(true)
		p.conn.Write(b[:len(b)-4])
	}, survives, func(t *testing.T, v *victim) {
		if len(v.wcs) != 0 {
			t.Errorf("half a frame was delivered: %+v", v.wcs)
		}
	}},
	{"the longest frame, full of nothing", func(p *rawPeer, v *victim) { p.conn.Write(bytes.Repeat([]byte{0xff}, 1<<17)) }, termCRC, untouched},
	{"zeros", func(p *rawPeer, v *victim) { p.conn.Write(make([]byte, 4096)) }, termFraming, untouched},
	{"a key of the peer's choice is invalidated", say(just(segment{op: opSendInv, msn: 1, stag: 1})), termInvSTag, nil},
	{"the region's key is invalidated twice", say(
		func(v *victim) segment { return segment{op: opSendInv, msn: 1, stag: v.mr.RKey()} },
		func(v *victim) segment { return segment{op: opSendInv, msn: 2, stag: v.mr.RKey()} },
		func(v *victim) segment { return v.write(0, 8) }), termSTag, untouched},
}

// Opcodes in a segment of each kind, without payload: the allowed ones are
// taken.
func emptyOpcodes() (all []attack) {
	untagged := map[opcode]termCode{
		opReadRequest: termFraming, opSend: survives, opSendSE: survives, opSendImm: survives, opSendInv: termInvSTag, opSendSEInv: termInvSTag,
		opTerminate: silentEnd, opImmediate: termUnspecified, opImmediateSE: termUnspecified,
	}
	tagged := map[opcode]termCode{opWrite: survives, opReadResponse: termDDPFatal}
	for op := range opcode(16) {
		for kind, known := range map[string]map[opcode]termCode{"untagged": untagged, "tagged": tagged} {
			want, ok := known[op]
			if !ok {
				want = termOpcode
			}
			s := segment{op: opSend, msn: 1, edit: func(b []byte) { b[3] = rdmapVersion | byte(op); b[11] = byte(op.queueNumber()) }}
			if kind == "tagged" {
				s = segment{op: opWrite, edit: func(b []byte) { b[3] = rdmapVersion | byte(op) }}
			}
			all = append(all, attack{fmt.Sprintf("opcode %x in an empty %s segment", byte(op), kind), say(just(s)), want, nil})
		}
	}
	return all
}

func TestHostilePeerHurtsOnlyItself(t *testing.T) {
	cfg := DefaultConfig()
	cfg.RNRTimeout = 50 * time.Millisecond
	cfg.PeerTimeout = -1
	for _, a := range append(attacks, emptyOpcodes()...) {
		for _, side := range []string{"client", "server"} {
			t.Run(a.name+", by a "+side, func(t *testing.T) {
				var p *rawPeer
				var e *end
				if side == "client" {
					p, e = rawToServer(t, cfg)
				} else {
					var err error
					if p, e, err = clientToRaw(t, cfg, agree); err != nil {
						t.Fatal(err)
					}
				}
				a.run(t, p, newVictim(e))
			})
		}
	}
}

func (a *attack) run(t *testing.T, p *rawPeer, v *victim) {
	v.poll()
	near := newEnd(t, DefaultConfig())
	ours, theirs := more(t, listen(t, v.dev), near, v.end, 9)
	a.act(p, v)
	v.goesOn(near, ours, theirs, 1)
	if a.want == survives {
		v.mustBeUp(t)
	} else {
		v.mustEnd(t, p, a.want)
	}
	if a.check != nil {
		a.check(t, v)
	}
	v.goesOn(near, ours, theirs, 2)
}

// goesOn sends an immediate from the neighbour, and takes it out of the
// victim's completions.
func (v *victim) goesOn(near *end, ours, theirs verbs.QP, imm uint32) {
	v.t.Helper()
	theirs.PostRecv([]verbs.RecvWR{{ID: 100}})
	if _, err := ours.PostSend([]verbs.SendWR{{Op: verbs.OpWriteImm, Imm: imm}}); err != nil {
		v.t.Fatalf("the neighbour: %v", err)
	}
	v.let("the neighbour's message arrives", func() bool {
		near.poll()
		for i, wc := range v.wcs {
			if wc.QP == 9 {
				if wc.Imm != imm || wc.Status != verbs.StatusOK {
					v.t.Errorf("the neighbour's message is %+v", wc)
				}
				v.wcs = append(v.wcs[:i], v.wcs[i+1:]...)
				return true
			}
		}
		return false
	})
}

// mustBeUp lets everything that was sent arrive.
func (v *victim) mustBeUp(t *testing.T) {
	t.Helper()
	for stop := time.Now().Add(20 * time.Millisecond); time.Now().Before(stop); v.poll() {
	}
	for _, wc := range v.wcs {
		if wc.Status != verbs.StatusOK || wc.Op == verbs.OpDisconnected {
			t.Errorf("completion %+v", wc)
		}
	}
}

// mustEnd waits for the end with exactly one Terminate of code.
func (v *victim) mustEnd(t *testing.T, p *rawPeer, code termCode) {
	t.Helper()
	v.let("the connection ends", func() bool {
		return len(v.wcs) > 0 && v.wcs[len(v.wcs)-1].Op == verbs.OpDisconnected
	})
	seen := map[uint64]bool{}
	for _, wc := range v.wcs[:len(v.wcs)-1] {
		if seen[wc.ID] {
			t.Errorf("receive %d was returned twice: %+v", wc.ID, v.wcs)
		}
		seen[wc.ID] = true
	}
	if len(seen) != 4 {
		t.Errorf("%d of 4 receives were returned", len(seen))
	}
	for {
		f, err := p.hear()
		if err != nil {
			if code != silentEnd {
				t.Errorf("no Terminate %s: %v", code, err)
			}
			return
		}
		h := fpduHeader(f)
		if h.op() != opTerminate {
			continue
		}
		if c, _ := parseTerminate(f[h.size():][:h.payload()]); c != code {
			t.Errorf("Terminate %s, want %s", c, code)
		}
		if _, err := p.hear(); err == nil {
			t.Error("more behind the Terminate")
		}
		return
	}
}

// A server that answers a request with anything but a reply is left within the
// time limit, and without harm.
func TestHostileAnswerToARequest(t *testing.T) {
	cfg := DefaultConfig()
	cfg.ReplyTimeout = 200 * time.Millisecond
	good := func(req mpaFrame) mpaFrame {
		c := DefaultConfig()
		tm, _, d, _ := c.checkRequest(&req)
		return c.mpaReply(&req, tm, d, false, nil)
	}
	for name, answer := range map[string]func(req mpaFrame) []byte{
		"nothing":                  func(mpaFrame) []byte { return nil },
		"half a reply":             func(req mpaFrame) []byte { f := good(req); return f.encode(mpaKeyReply)[:17] },
		"a reply without its data": func(req mpaFrame) []byte { f := good(req); return f.encode(mpaKeyReply)[:mpaHeaderLen] },
		"a request":                func(req mpaFrame) []byte { return req.encode(mpaKeyRequest) },
		"a reply with 65535 bytes": func(req mpaFrame) []byte {
			f := good(req)
			f.private = make([]byte, 65535)
			return f.encode(mpaKeyReply)
		},
		"a reply of another revision":  func(req mpaFrame) []byte { f := good(req); f.rev = 1; return f.encode(mpaKeyReply) },
		"a reply that asks for marks":  func(req mpaFrame) []byte { f := good(req); f.flags |= mpaMarkers; return f.encode(mpaKeyReply) },
		"a reply without the words":    func(req mpaFrame) []byte { f := good(req); f.private = nil; return f.encode(mpaKeyReply) },
		"a reply without the block":    func(req mpaFrame) []byte { f := good(req); f.private = f.private[:4]; return f.encode(mpaKeyReply) },
		"a reject that is cut short":   func(req mpaFrame) []byte { f := good(req); f.flags |= mpaReject; return f.encode(mpaKeyReply)[:22] },
		"a frame of the data transfer": func(mpaFrame) []byte { return segment{op: opSend, msn: 1, payload: some}.bytes(true) },
		"a Terminate":                  func(mpaFrame) []byte { return segment{op: opTerminate, msn: 1, payload: unhex("11000000")}.bytes(true) },
		"zeros":                        func(mpaFrame) []byte { return make([]byte, 1<<16) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, c, err := clientToRaw(t, cfg, func(req mpaFrame, conn net.Conn) { conn.Write(answer(req)) })
			if err == nil {
				t.Error("connected")
			}
			if n, err := c.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend}}); n != 0 || err == nil {
				t.Errorf("post after that took %d, %v", n, err)
			}
		})
	}
}

// Frames in place of a request, or behind it and before the answer, close the
// connection and reach no consumer.
func TestHostileStartOfAClient(t *testing.T) {
	s := newEnd(t, Config{RequestTimeout: 200 * time.Millisecond})
	l := listen(t, s.dev)
	request := s.dev.cfg.mpaRequest(nil)
	for op := range opcode(16) {
		frame := segment{op: opSend, msn: 1, payload: make([]byte, 28), edit: func(b []byte) { b[3] = rdmapVersion | byte(op) }}.bytes(true)
		for name, b := range map[string][]byte{
			"in place of a request": frame,
			"behind the request":    append(request.encode(mpaKeyRequest), frame...),
		} {
			p := dialRaw(t, l.Addr())
			p.conn.Write(b)
			if rep, err := readMPA(p.conn, mpaKeyReply); err == nil {
				t.Errorf("opcode %x %s is answered: %+v", byte(op), name, rep)
			} else if isTimeout(err) {
				t.Errorf("opcode %x %s: still open", byte(op), name)
			}
		}
	}
	connectWithin(t, testLimit, l, s, "127.0.0.1")
}
