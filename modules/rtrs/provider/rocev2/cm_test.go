package rocev2

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// listening is a device with a listener, and a raw peer.
func listening(t *testing.T, cfg Config) (*raw, *end, verbs.Listener) {
	t.Helper()
	e := newEnd(t, cfg, addrB)
	l := must(e.dev.Listen(netip.AddrPortFrom(addrB, 0)))(t)
	t.Cleanup(func() { l.Close() })
	return newRaw(t, addrRaw, addrB), e, l
}

func TestC010_PrivateDataHidesTheIPHeader(t *testing.T) {
	r, e, l := listening(t, Config{})
	f := r.request(l.Addr())
	r.say(f.encode(rawTID))
	req := must(l.Accept())(t)
	if len(req.Private()) != 56 || !bytes.HasPrefix(req.Private(), []byte("question\x00")) {
		t.Errorf("request has %q", req.Private())
	}
	if req.RemoteAddr() != netip.AddrPortFrom(addrRaw, 40000) || req.LocalAddr() != l.Addr() {
		t.Errorf("request from %s to %s", req.RemoteAddr(), req.LocalAddr())
	}
	if err := req.Accept(e.qp, []byte("answer")); err != nil {
		t.Fatal(err)
	}
	rep := r.hear(attrREP)
	g := decodeREP(rep)
	if rep.tid() != rawTID || rep.receiver() != rawID || rep.sender() == 0 || g.qpn != e.qp.qpn || !bytes.HasPrefix(g.private, []byte("answer\x00")) {
		t.Errorf("REP %+v", g)
	}
	if g.respRes != 4 || g.initDepth != 4 {
		t.Errorf("reads served %d, issued %d: more than the peer's 4", g.respRes, g.initDepth)
	}
	e.poll()
	if e.qp.req.cur.psn != rawPSN || e.qp.resp.psn != g.psn {
		t.Errorf("sends from %#x and expects %#x; the peer asked for %#x and was told %#x", e.qp.req.cur.psn, e.qp.resp.psn, rawPSN, g.psn)
	}
}

func TestC016_RequestsThatCannotBeAreRefused(t *testing.T) {
	tests := []struct {
		name string
		edit func(f *reqFields, m mad)
		want rejectReason
	}{
		{"C-014 nobody listens at the port", func(f *reqFields, m mad) { m.body()[15]++ }, reasonInvalidService},
		{"C-011 another port space", func(f *reqFields, m mad) { m.body()[13] = 0x11 }, reasonInvalidService},
		{"unreliable connection", func(f *reqFields, m mad) { m.body()[43] |= 1 << 1 }, reasonInvalidTransport},
		{"C-013 path MTU is larger than ours", func(f *reqFields, m mad) { m.body()[50] = 4<<4 | 7 }, reasonInvalidMTU},
		{"path MTU code 0", func(f *reqFields, m mad) { m.body()[50] = 7 }, reasonInvalidMTU},
		{"queue pair 1", func(f *reqFields, m mad) { put24(m.body()[32:], 1) }, reasonUnsupported},
		{"GID of another sender", func(f *reqFields, m mad) { m.body()[71]++ }, reasonInvalidGID},
		{"GID of another receiver", func(f *reqFields, m mad) { m.body()[87]++ }, reasonInvalidGID},
		{"IP header of another sender", func(f *reqFields, m mad) { m.body()[reqPrivate+19]++ }, reasonConsumer},
		{"IP header of another receiver", func(f *reqFields, m mad) { m.body()[reqPrivate+35]++ }, reasonConsumer},
		{"IP header of another version", func(f *reqFields, m mad) { m.body()[reqPrivate+1] = 0x60 }, reasonConsumer},
		{"IP header of a later kind", func(f *reqFields, m mad) { m.body()[reqPrivate] = 1 }, reasonConsumer},
	}
	r, _, l := listening(t, Config{PathMTU: 1024})
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := r.request(l.Addr())
			m := f.encode(rawTID)
			tt.edit(&f, m)
			r.say(m)
			rej := r.hear(attrREJ)
			g := decodeREJ(rej)
			if g.reason != tt.want || g.about != aboutREQ || rej.receiver() != rawID || rej.sender() != 0 || rej.tid() != rawTID {
				t.Errorf("refused with %+v", g)
			}
			if tt.want == reasonInvalidMTU && !bytes.Equal(g.ari, []byte{3}) {
				t.Errorf("acceptable path MTU is told as %x", g.ari)
			}
			r.hearNothing()
		})
	}
}

func TestC015_RepeatedRequestsGetTheSameAnswer(t *testing.T) {
	r, e, l := listening(t, Config{})
	f := r.request(l.Addr())
	req := f.encode(rawTID)
	r.say(req)
	got := must(l.Accept())(t)
	r.hearNothing()
	r.say(req)
	if mra := r.hear(attrMRA); mra.receiver() != rawID || mra.sender() == 0 || mra.mraTimeout() != mraCode {
		t.Errorf("MRA %x", mra)
	}
	if err := got.Accept(e.qp, nil); err != nil {
		t.Fatal(err)
	}
	first := r.hear(attrREP)
	r.say(req)
	if again := r.hear(attrREP); !bytes.Equal(again, first) {
		t.Errorf("second REP differs at %d", differs(again, first))
	}
	f.id, f.qpn = 2, 77
	req = f.encode(1)
	r.say(req)
	if err := must(l.Accept())(t).Reject([]byte("no")); err != nil {
		t.Fatal(err)
	}
	first = r.hear(attrREJ)
	r.say(req)
	if again := r.hear(attrREJ); !bytes.Equal(again, first) || decodeREJ(again).reason != reasonConsumer {
		t.Errorf("second REJ differs at %d", differs(again, first))
	}
}

// Nothing is sent that the peer did not ask for, and never more than it sent,
// before it has shown that it receives.
func TestC022_NoAmplification(t *testing.T) {
	cfg := Config{ConnectTimeout: 300 * time.Millisecond}
	c := newRawConn(t, cfg, false) // one REQ, one REP, no RTU
	c.end.send(verbs.SendWR{ID: 1, Op: verbs.OpSend, Signaled: true})
	for stop := time.Now().Add(500 * time.Millisecond); time.Now().Before(stop); {
		c.end.poll()
		if b := c.receive(5 * time.Millisecond); b != nil {
			t.Fatalf("sent without being asked: %x", b[:30])
		}
	}
	t.Run("C-024 a peer that never confirms is given up", func(t *testing.T) { c.wantEnd(verbs.StatusFatal) })
}

// For any message of a stranger, the answer has fewer bytes than the message:
// a sender with a forged address cannot use the stack to flood another host.
func TestC022_AStrangerGetsNoMoreBytesThanHeSent(t *testing.T) {
	r, e, l := listening(t, Config{})
	sent := 0
	say := func(edit func(b []byte)) {
		f := r.request(l.Addr())
		b := make([]byte, cmPacketLen)
		putDatagram(b, f.encode(rawTID), 0)
		if edit != nil {
			edit(b)
		}
		r.send(b[:cmPacketLen-icrcLen])
		sent += cmPacketLen
	}
	say(nil)
	got := must(l.Accept())(t)
	say(nil) // MRA
	if err := got.Accept(e.qp, make([]byte, verbs.MaxPrivate)); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		say(nil)
	}
	const mad = bthLen + 8
	for attribute := byte(0x0e); attribute < 0x1c; attribute++ { // about connections that are not there
		say(func(b []byte) { b[mad+17], b[mad+27] = attribute, 9 })
	}
	say(func(b []byte) { b[mad+24+15]++ }) // another port
	for op := range 256 {
		b := make([]byte, 1200)
		putBTH(b, opcode(op), 0, rawQPN, rawPSN, true)
		r.send(b)
		sent += len(b) + icrcLen
	}
	received := 0
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
		e.poll()
		if b := r.receive(5 * time.Millisecond); b != nil {
			received += len(b) + icrcLen
		}
	}
	if received == 0 || received > sent {
		t.Errorf("%d bytes were answered by %d", sent, received)
	}
}

func TestC024_FirstPacketConfirmsTheConnection(t *testing.T) {
	c := newRawConn(t, Config{}, false)
	c.end.send(verbs.SendWR{ID: 1, Op: verbs.OpSend, Signaled: true})
	c.noData()
	c.end.recv(verbs.RecvWR{ID: 2})
	c.send(c.packet(opSendOnly, nil, nil))
	for _, want := range []opcode{opAck, opSendOnly} {
		if b := c.data(); b.opcode() != want {
			t.Errorf("opcode %#x, want %#x", b.opcode(), want)
		}
	}
}

// A peer that has started again may use the same queue pair. Its request ends the connection
// of before when the peer shows that it has received the answer: the address of a request
// may be forged, with the GUID and the queue pair of a peer that is there.
func TestC018_SuccessorEndsTheConnectionThatItsPeerHasForgotten(t *testing.T) {
	for _, shows := range []string{"RTU", "data", ""} {
		t.Run(cmp.Or(shows, "nothing"), func(t *testing.T) {
			c := newRawConn(t, Config{}, true)
			l := must(c.end.dev.Listen(netip.AddrPortFrom(addrB, 0)))(t)
			defer l.Close()
			f := c.request(l.Addr())
			f.id = 99
			c.say(f.encode(5))
			next := c.end.newQP(2)
			t.Cleanup(func() { next.Destroy() })
			if err := must(l.Accept())(t).Accept(next, nil); err != nil {
				t.Fatal(err)
			}
			rep := c.hear(attrREP)
			if rep.receiver() != 99 {
				t.Fatalf("REP %x", rep[:40])
			}
			c.end.send(verbs.SendWR{ID: 7, Op: verbs.OpSend, Signaled: true})
			if b := c.data(); b.opcode() != opSendOnly {
				t.Fatalf("the connection of before sends opcode %#x", b.opcode())
			}
			switch g := decodeREP(rep); shows {
			case "RTU":
				c.say(newMAD(attrRTU, 5, 99, rep.sender()))
			case "data":
				b := make([]byte, bthLen)
				putBTH(b, opSendOnly, 0, g.qpn, g.psn, true)
				must(next.PostRecv([]verbs.RecvWR{{ID: 1}}))(t)
				c.raw.send(b)
			default:
				c.hearNothing()
				if c.end.poll(); !c.end.qp.Is(softverbs.Up) {
					t.Error("the connection of before has ended")
				}
				return
			}
			c.wantEnd(verbs.StatusFatal)
			if !next.Is(softverbs.Up) {
				t.Error("the successor has ended")
			}
		})
	}
}

func TestC018_PeerThatForgotTheConnectionEndsIt(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	c.say((&rejFields{about: aboutREP, reason: reasonStale}).encode(rawTID, rawID, c.id))
	c.wantEnd(verbs.StatusFatal)
}

func TestC019_DREQIsAnsweredInEveryState(t *testing.T) {
	answered := func(t *testing.T, c *raw, sender, receiver, qpn uint32) {
		t.Helper()
		c.say(newDREQ(0xabc, sender, receiver, qpn))
		if m := c.hear(attrDREP); m.tid() != 0xabc || m.sender() != receiver || m.receiver() != sender {
			t.Errorf("DREP %x", m[:40])
		}
	}
	t.Run("unknown connection", func(t *testing.T) {
		r, _, _ := listening(t, Config{})
		answered(t, r, 5, 6, 7)
	})
	for _, rtu := range []bool{true, false} {
		t.Run(map[bool]string{true: "established, then time wait", false: "RTU is missing"}[rtu], func(t *testing.T) {
			c := newRawConn(t, Config{}, rtu)
			answered(t, c.raw, rawID, c.id, c.qpn)
			c.wantEnd(verbs.StatusOK)
			answered(t, c.raw, rawID, c.id, c.qpn)
		})
	}
	t.Run("both ends at once", func(t *testing.T) {
		c := newRawConn(t, Config{}, true)
		c.end.qp.Disconnect()
		c.wantEnd(verbs.StatusOK)
		if m := c.hear(attrDREQ); m.dreqQPN() != rawQPN || m.sender() != c.id || m.receiver() != rawID {
			t.Errorf("DREQ %x", m[:40])
		}
		answered(t, c.raw, rawID, c.id, c.qpn)
		c.hearNothing()
	})
}

// A connection that has ended answers late messages for a while. Its queue pair, with
// tens of kilobytes of queues, is not kept for that: peers that connect and disconnect
// in a loop made a server hold hundreds of megabytes.
func TestC019_EndedConnectionKeepsNoQueuePair(t *testing.T) {
	for name, end := range map[string]func(c *rawConn){
		"by the peer":                     func(c *rawConn) { c.say(newDREQ(0xabc, rawID, c.id, c.qpn)) },
		"by this end, DREQ is unanswered": func(c *rawConn) { c.end.qp.Disconnect() },
	} {
		t.Run(name, func(t *testing.T) {
			c := newRawConn(t, Config{}, true)
			end(c)
			c.wantEnd(verbs.StatusOK)
			m := &c.end.dev.cm
			m.mu.Lock()
			defer m.mu.Unlock()
			if len(m.conns) != 1 {
				t.Fatalf("%d connections are known, want the one that has ended", len(m.conns))
			}
			for _, ended := range m.conns {
				if ended.q != nil {
					t.Errorf("the connection in state %d keeps its queue pair", ended.state)
				}
			}
		})
	}
}

func TestC020_DREQIsRepeatedUntilItIsAnswered(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	c.end.qp.Disconnect()
	c.wantEnd(verbs.StatusOK)
	first := c.hear(attrDREQ)
	if again := c.hear(attrDREQ); !bytes.Equal(first, again) {
		t.Error("second DREQ differs")
	}
	c.say(newMAD(attrDREP, first.tid(), rawID, c.id))
	c.taken(c.end, c.id, func(k *cmConn) bool { return k.state == connTimeWait })
	if b := c.receive(2 * firstRepeat); b != nil {
		t.Errorf("packet after the DREP: %x", b[:30])
	}
}

// taken waits until the device has handled the messages about a connection
// and discards its earlier answers. The connection may be removed by then.
func (r *raw) taken(e *end, id uint32, cond func(*cmConn) bool) {
	r.t.Helper()
	m := &e.dev.cm
	e.until("a message to be taken", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		c := m.conns[id]
		return c == nil || cond(c)
	})
	for r.receive(silent) != nil {
	}
}

func TestC023_ForgedMessagesAreIgnored(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	forger := newRaw(t, testAddr(4), addrB)
	before := c.end.dev.Stats()
	forger.say(newDREQ(1, rawID, c.id, c.qpn))
	forger.say((&rejFields{about: aboutREP, reason: reasonStale}).encode(1, rawID, c.id))
	c.say(newDREQ(1, rawID, c.id, c.qpn+256)) // right address, wrong queue pair
	c.say(newDREQ(1, rawID+1, c.id, c.qpn))   // wrong sender
	dropped := func(why dropReason) uint64 { return c.end.dev.Stats().Dropped[why] - before.Dropped[why] }
	c.end.until("four to be dropped", func() bool { return dropped(dropAddress) == 2 && dropped(dropState) == 2 })
	forger.hearNothing()
	c.hearNothing()
	c.end.recv(verbs.RecvWR{ID: 1})
	c.send(c.packet(opSendOnly, nil, nil))
	c.wantAck(ackCreditsInvalid, c.psn-1) // it lives
}

// lossy makes a device lose the first n messages of a kind.
func lossy(d *Device, kind madAttribute, n int32) *atomic.Int32 {
	var lost atomic.Int32
	d.faults.Store(&testFaults{control: func(m mad) bool {
		return m.attribute() != kind || lost.Add(1) > n
	}})
	return &lost
}

func TestC017_LostMessagesAreMadeUpFor(t *testing.T) {
	tests := []struct {
		name   string
		kind   madAttribute
		active bool // it is the active side that does not get it
		n      int32
	}{
		{"lost REQ", attrREQ, false, 1},
		{"lost REP", attrREP, true, 1},
		{"lost RTU", attrRTU, false, 2},
		{"C-020 lost DREQ", attrDREQ, false, 1},
		{"lost DREP", attrDREP, true, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, s := newEnd(t, Config{}, addrA), newEnd(t, Config{}, addrB)
			d := s.dev
			if tt.active {
				d = c.dev
			}
			lost := lossy(d, tt.kind, tt.n)
			join(t, c, s)
			c.recv(verbs.RecvWR{ID: 7}) // the passive side speaks first
			s.send(verbs.SendWR{ID: 1, Op: verbs.OpSend, Signaled: true})
			if wc := c.next(s); wc.ID != 7 || wc.Status != verbs.StatusOK {
				t.Errorf("%+v", wc)
			}
			c.qp.Disconnect()
			s.until("the passive end", func() bool { return s.qp.End.State == softverbs.EndDone }, c)
			c.until("more messages than are lost", func() bool { return lost.Load() > tt.n }, s)
		})
	}
}

func TestC021_GivenUpRequestIsWithdrawn(t *testing.T) {
	c, s := newEnd(t, Config{}, addrA), newEnd(t, Config{}, addrB)
	l := must(s.dev.Listen(netip.AddrPortFrom(addrB, 0)))(t)
	defer l.Close()
	ctx, cancel := context.WithCancel(patient(t))
	done := make(chan error, 1)
	go func() {
		_, err := c.dev.Connect(ctx, c.qp, verbs.ConnectParams{Dst: l.Addr()})
		done <- err
	}()
	req := must(l.Accept())(t)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled connect: %v", err)
	}
	withdrawn := func() bool {
		s.dev.cm.mu.Lock()
		defer s.dev.cm.mu.Unlock()
		return !slices.ContainsFunc(s.dev.cm.handshakes.All(), func(c *cmConn) bool { return c.state == connReqReceived })
	}
	s.until("the request to be withdrawn", withdrawn)
	if err := req.Accept(s.qp, nil); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("accept of a withdrawn request: %v", err)
	}
}

// A timer that fires while its connection is being forgotten does nothing.
func TestC021_ForgottenRequestIsNotRepeated(t *testing.T) {
	c := newEnd(t, Config{}, addrA)
	m := &c.dev.cm
	req := m.sendRequest(c.dev.ports[addrA], c.qp, connTarget{dst: addrRaw, service: servicePortSpace | 1234}, maxMTUCode)
	m.mu.Lock()
	before := req.tries
	req.setTimer(0)
	time.Sleep(10 * time.Millisecond) // it waits for its turn
	req.removeTraces()
	m.mu.Unlock()
	time.Sleep(10 * time.Millisecond)
	m.mu.Lock()
	defer m.mu.Unlock()
	if req.tries != before {
		t.Error("it is sent again")
	}
}

func TestC021_SilentPeerIsGivenUp(t *testing.T) {
	c := newEnd(t, Config{ConnectTimeout: time.Second}, addrA)
	r := newRaw(t, addrRaw, addrA)
	_, err := c.dev.Connect(patient(t), c.qp, verbs.ConnectParams{Dst: netip.AddrPortFrom(addrRaw, 1234)})
	if !errors.Is(err, errConnectTimeout) {
		t.Errorf("connect: %v", err)
	}
	first := r.hear(attrREQ)
	if again := r.hear(attrREQ); !bytes.Equal(first, again) {
		t.Error("second REQ differs")
	}
	rej := r.hear(attrREJ)
	if f := decodeREJ(rej); f.reason != reasonTimeout || len(f.ari) != 8 || be.Uint64(f.ari) != decodeREQ(first).guid || rej.sender() != first.sender() {
		t.Errorf("withdrawn with %+v", f)
	}
}

// active is a device that connects to a raw peer.
func active(t *testing.T, cfg Config) (r *raw, e *end, req mad, done chan error) {
	t.Helper()
	e = newEnd(t, cfg, addrA)
	r = newRaw(t, addrRaw, addrA)
	done = make(chan error, 1)
	go func() {
		_, err := e.dev.Connect(patient(t), e.qp, verbs.ConnectParams{Dst: netip.AddrPortFrom(addrRaw, 1234), Private: []byte("question")})
		done <- err
	}()
	return r, e, r.hear(attrREQ), done
}

func TestC013_ActiveSideOffersWhatItsInterfaceCarries(t *testing.T) {
	for mtu, code := range map[int]uint8{0: 5, 4096: 5, 2048: 4, 1024: 3, 256: 1} {
		t.Run(strconv.Itoa(mtu), func(t *testing.T) {
			r, _, req, done := active(t, Config{PathMTU: mtu})
			f := decodeREQ(req)
			if f.mtu != code {
				t.Errorf("code %d, want %d", f.mtu, code)
			}
			if f.service != 0x10604d2 || f.source != addrA || f.dest != addrRaw || string(f.private[:8]) != "question" {
				t.Errorf("REQ %+v", f)
			}
			r.say((&rejFields{reason: reasonNoResources}).encode(req.tid(), 0, req.sender()))
			if err := <-done; err == nil || !strings.Contains(err.Error(), "no resources") {
				t.Errorf("connect: %v", err)
			}
		})
	}
	for n, want := range map[int]uint8{9000: 5, 4200: 5, 1500: 3, 1400: 3, 1119: 2, 576: 1, 65536: 5} {
		if got := mtuCode(n); got != want {
			t.Errorf("interface MTU %d: code %d, want %d", n, got, want)
		}
	}
}

func TestC015_PatienceIsGivenWhereItIsAskedFor(t *testing.T) {
	r, e, req, done := active(t, Config{})
	r.say(newMRA(req.tid(), rawID, req.sender(), 20))
	r.taken(e, req.sender(), func(k *cmConn) bool { return k.remote == rawID })
	if b := r.receive(3 * firstRepeat); b != nil {
		t.Errorf("asked again in spite of the MRA: %x", b[:30])
	}
	f := repFields{guid: rawGUID, qpn: rawQPN, psn: 5, respRes: 1, initDepth: 200, private: []byte("answer")}
	r.say(f.encode(req.tid(), rawID, req.sender()))
	if rtu := r.hear(attrRTU); rtu.sender() != req.sender() || rtu.receiver() != rawID || rtu.tid() != req.tid() {
		t.Errorf("RTU %x", rtu[:40])
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	e.poll()
	if e.qp.req.cur.psn != 5 || e.qp.ord != 1 || e.qp.ird != defaultReads || e.qp.resp.psn != decodeREQ(req).psn {
		t.Errorf("sends from %d, expects %#x; reads issued %d, served %d", e.qp.req.cur.psn, e.qp.resp.psn, e.qp.ord, e.qp.ird)
	}
	r.say(f.encode(req.tid(), rawID, req.sender()))
	r.hear(attrRTU) // again
}

func TestC018_QueuePairInUseIsNoAnswer(t *testing.T) {
	r, e, req, done := active(t, Config{})
	f := repFields{guid: rawGUID, qpn: rawQPN, psn: 5}
	r.say(f.encode(req.tid(), rawID, req.sender()))
	r.hear(attrRTU)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	second := e.newQP(2)
	go func() {
		_, err := e.dev.Connect(patient(t), second, verbs.ConnectParams{Dst: netip.AddrPortFrom(addrRaw, 1234)})
		done <- err
	}()
	var rej mad
	for rej == nil { // RTUs of the first connection come in between
		b := r.receive(soon)
		if b == nil {
			t.Fatal("nothing came")
		}
		switch m, _ := parseDatagram(append(b, 0, 0, 0, 0)); m.attribute() {
		case attrREQ:
			r.say(f.encode(m.tid(), rawID+1, m.sender()))
		case attrREJ:
			rej = m
		}
	}
	if g := decodeREJ(rej); g.reason != reasonStale || g.about != aboutREP {
		t.Errorf("answer was refused with %+v", g)
	}
	if err := <-done; err == nil {
		t.Error("connected to a queue pair that is in use")
	}
}

func TestC044_TakenPortIsNamed(t *testing.T) {
	openDevice(t, Config{Addrs: []netip.Addr{addrA}})
	_, err := Open(Config{Addrs: []netip.Addr{addrA}})
	if err == nil || !strings.Contains(err.Error(), addrA.String()) || !strings.Contains(err.Error(), "another process holds it") {
		t.Errorf("second device: %v", err)
	}
	newRaw(t, addrRaw, addrA)
	if _, err := Open(Config{Addrs: []netip.Addr{addrRaw}}); err == nil {
		t.Error("address of another socket was taken")
	}
}

func TestC044_AddressIsFreeAfterTheLastQueue(t *testing.T) {
	d := openDevice(t, Config{Addrs: []netip.Addr{addrA}})
	q := must(d.CreateCQ(1))(t)
	d.Close()
	if _, err := Open(Config{Addrs: []netip.Addr{addrA}}); err == nil {
		t.Error("address was free while a queue was open")
	}
	q.Close()
	openDevice(t, Config{Addrs: []netip.Addr{addrA}})
}
