package rocev2

import (
	"bytes"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The requester's packets to a peer made by hand. The path MTU is 1024.

// post sends n bytes of a region from the device under test.
func (c *rawConn) post(op verbs.Opcode, id uint64, n int) []byte {
	c.t.Helper()
	src, mr := c.end.region(n+1, 0)
	fill(src, int(id))
	c.end.send(verbs.SendWR{ID: id, Op: op, Signaled: true, RemoteAddr: 0x1000, RKey: 0x99, Imm: 0x55,
		SGEs: []verbs.SGE{{Buf: src[:n/3], LKey: mr.LKey()}, {Buf: src[n/3 : n], LKey: mr.LKey()}}})
	return src[:n]
}

// wantPackets expects packets with these opcodes and consecutive numbers from
// the next expected one on, and returns their payload.
func (c *rawConn) wantPackets(ops ...opcode) (payload []byte) {
	c.t.Helper()
	for i, op := range ops {
		b := c.data()
		if b.opcode() != op || b.psn() != c.expect {
			c.t.Fatalf("packet %d: opcode %#x, number %#x, want %#x, %#x", i, b.opcode(), b.psn(), op, c.expect)
		}
		if last := shapes[op].last; last && !b.ackReq() {
			c.t.Errorf("packet %d ends a message and asks for no acknowledgement", i)
		}
		c.expect = psnAdd(c.expect, 1)
		payload = append(payload, b[shapes[op].size:len(b)-b.pad()]...)
	}
	return payload
}

func TestC031_MessagesAreSegmented(t *testing.T) {
	tests := []struct {
		name string
		op   verbs.Opcode
		n    int
		want []opcode
	}{
		{"empty SEND", verbs.OpSend, 0, []opcode{opSendOnly}},
		{"SEND of one packet", verbs.OpSend, 1024, []opcode{opSendOnly}},
		{"SEND of two", verbs.OpSend, 1025, []opcode{opSendFirst, opSendLast}},
		{"SEND of three", verbs.OpSend, 3072, []opcode{opSendFirst, opSendMiddle, opSendLast}},
		{"SEND with immediate", verbs.OpSendImm, 5, []opcode{opSendOnlyImm}},
		{"long SEND with immediate", verbs.OpSendImm, 2000, []opcode{opSendFirst, opSendLastImm}},
		{"SEND with invalidate", verbs.OpSendInv, 6, []opcode{opSendOnlyInv}},
		{"long SEND with invalidate", verbs.OpSendInv, 2001, []opcode{opSendFirst, opSendLastInv}},
		{"empty WRITE", verbs.OpWrite, 0, []opcode{opWriteOnly}},
		{"WRITE of four", verbs.OpWrite, 4093, []opcode{opWriteFirst, opWriteMiddle, opWriteMiddle, opWriteLast}},
		{"WRITE with immediate", verbs.OpWriteImm, 7, []opcode{opWriteOnlyImm}},
		{"long WRITE with immediate", verbs.OpWriteImm, 1030, []opcode{opWriteFirst, opWriteLastImm}},
	}
	c := newRawConn(t, Config{}, true)
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			want := c.post(tt.op, uint64(i), tt.n)
			if got := c.wantPackets(tt.want...); !bytes.Equal(got, want) {
				t.Errorf("payload differs at %d", differs(got, want))
			}
			c.ack(ackCreditsInvalid, c.expect-1)
			if wc := c.end.next(); wc.ID != uint64(i) || wc.Op != tt.op || wc.Status != verbs.StatusOK {
				t.Errorf("completion %+v", wc)
			}
		})
	}
}

func TestC037_LongMessagesAskForAcknowledgements(t *testing.T) {
	c := newRawConn(t, Config{NoOffload: true}, true)
	c.post(verbs.OpWrite, 1, 300*1024)
	since, asked := 0, 0
	for i := 0; i < firstWindow; i++ {
		if since++; c.data().ackReq() {
			since = 0
			asked++
		}
		if since >= ackEvery {
			t.Fatalf("%d packets without asking for an acknowledgement", since)
		}
	}
	if asked > firstWindow/ackEvery+1 {
		t.Errorf("%d acknowledgements asked for in %d packets", asked, firstWindow)
	}
	t.Run("C-041 no more than the window is on its way", func(t *testing.T) {
		c.noData()
		c.ack(ackCreditsInvalid, c.expect+firstWindow-1)
		for range firstWindow {
			c.data()
		}
	})
}

func TestC041_LargeReceiveBuffersWidenTheWindow(t *testing.T) {
	for _, tt := range []struct {
		name        string
		buffer, mtu int
		want        int32
	}{
		{"unknown buffer", 0, 4096, baseWindow},
		{"what a system allows without privilege", 425984, 4096, baseWindow},
		{"a quarter of the buffer", 8 << 20, 4096, 512},
		{"what we ask for", 2 * socketBuffer, 4096, 1024},
		{"small packets", 2 * socketBuffer, 1024, maxWindow},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := requestHalf{window: firstWindow, limit: windowLimit(tt.buffer, tt.mtu)}
			r.threshold = r.limit
			for range 100 {
				r.widenWindow(64)
			}
			if r.window != tt.want {
				t.Errorf("the window opens to %d packets, want %d", r.window, tt.want)
			}
		})
	}
}

func TestC038_GapMakesItGoBack(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	want := c.post(verbs.OpWrite, 1, 5000)
	c.wantPackets(opWriteFirst, opWriteMiddle, opWriteMiddle, opWriteMiddle, opWriteLast)
	c.expect -= 3 // from the third on
	c.ack(nakSequence, c.expect)
	if got := c.wantPackets(opWriteMiddle, opWriteMiddle, opWriteLast); !bytes.Equal(got, want[2048:]) {
		t.Errorf("payload differs at %d", differs(got, want[2048:]))
	}
	c.ack(ackCreditsInvalid, c.expect-1)
	if wc := c.end.next(); wc.ID != 1 || wc.Status != verbs.StatusOK {
		t.Errorf("completion %+v", wc)
	}
	c.ack(nakSequence, c.expect-2) // late
	c.ack(ackCreditsInvalid, c.expect-4)
	c.noData()
}

func TestC038_SilenceMakesItGoBackAndThenFail(t *testing.T) {
	c := newRawConn(t, Config{RetryTimeout: 2 * time.Second}, true)
	c.post(verbs.OpSend, 1, 10)
	c.wantPackets(opSendOnly)
	c.expect--
	c.wantPackets(opSendOnly)
	if wc := c.end.next(); wc.ID != 1 || wc.Status != verbs.StatusRetryExceeded {
		t.Errorf("completion %+v", wc)
	}
	c.wantEnd(verbs.StatusRetryExceeded)
}

// overdue makes the requester's timer run out, after long silence.
func (c *rawConn) overdue() {
	c.end.qp.setDeadline(1)
	c.end.qp.req.progressAt = -int64(c.end.dev.cfg.RetryTimeout)
}

// undisturbed fails when the timer has done something.
func (c *rawConn) undisturbed() {
	c.t.Helper()
	if s := c.end.dev.Stats(); s.Timeouts != 0 || s.Resent != 0 || c.end.qp.req.window < firstWindow || !c.end.qp.Is(softverbs.Up) {
		c.t.Errorf("window of %d packets, %+v", c.end.qp.req.window, s)
	}
}

// An owner that was away finds the answer beside a timer that has run out.
func TestC038_AnswersThatHaveComeGoBeforeTheTimer(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	c.post(verbs.OpSend, 1, 10)
	c.wantPackets(opSendOnly)
	c.ack(ackCreditsInvalid, c.expect-1)
	if !readable(c.end.qp.out.fd, testLimit) {
		t.Fatal("the answer did not come")
	}
	c.overdue()
	if c.end.poll(); len(c.end.wcs) != 1 || c.end.wcs[0].Status != verbs.StatusOK {
		t.Errorf("completions %+v", c.end.wcs)
	}
	c.undisturbed()
	t.Run("behind more than one Poll takes", func(t *testing.T) {
		const before = 3
		c.post(verbs.OpSend, 2, 10)
		c.wantPackets(opSendOnly)
		var all []receivedPacket
		c.end.dev.faults.Store(&testFaults{inject: func(p receivedPacket) []receivedPacket {
			p.b = bytes.Clone(p.b)
			if all = append(all, p); len(all) <= before {
				return nil
			}
			c.overdue()
			return all
		}})
		for range before {
			c.end.recv(verbs.RecvWR{ID: 3})
			c.send(c.packet(opSendOnly, nil, nil))
		}
		c.ack(ackCreditsInvalid, c.expect-1)
		n, wcs := 0, make([]verbs.WC, 1)
		for stop := time.Now().Add(testLimit); n <= before && time.Now().Before(stop); {
			n += c.end.cq.Poll(wcs)
		}
		if n != before+1 || wcs[0].ID != 2 || wcs[0].Status != verbs.StatusOK {
			t.Errorf("%d completions, the last is %+v", n, wcs[0])
		}
		c.undisturbed()
	})
}

func TestC038_TimerDoesNotWaitForLong(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	for name, tt := range map[string]struct {
		wcs   []verbs.WC
		polls int
	}{
		"nothing has come":                {c.end.buf[:], 1},
		"nobody knows what else has come": {nil, patience},
	} {
		c.post(verbs.OpSend, 1, 10)
		c.wantPackets(opSendOnly)
		c.expect--
		c.end.qp.setDeadline(1)
		before := c.end.dev.Stats().Timeouts
		for range tt.polls {
			if c.end.dev.Stats().Timeouts != before {
				t.Fatalf("%s: the timer ran before Poll %d", name, tt.polls)
			}
			c.end.cq.Poll(tt.wcs)
		}
		if b := bth(c.receive(soon)); b == nil || b.opcode() != opSendOnly || b.psn() != c.expect {
			t.Fatalf("%s: packet %x", name, b)
		}
		c.ack(ackCreditsInvalid, c.expect)
		c.expect++
		c.end.next()
	}
}

func TestC038_OneAnswerCompletesAllBefore(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	for id := range uint64(5) {
		c.post(verbs.OpWrite, id, 4)
	}
	c.wantPackets(opWriteOnly, opWriteOnly, opWriteOnly, opWriteOnly, opWriteOnly)
	c.ack(ackCreditsInvalid, c.expect-2)
	for id := range uint64(4) {
		if wc := c.end.next(); wc.ID != id || wc.Status != verbs.StatusOK {
			t.Errorf("completion %+v, want that of %d", wc, id)
		}
	}
	c.ack(ackCreditsInvalid, c.expect-1)
	if wc := c.end.next(); wc.ID != 4 {
		t.Errorf("completion %+v", wc)
	}
}

func TestC034_WaitsForAReceiver(t *testing.T) {
	c := newRawConn(t, Config{RNRTimeout: 300 * time.Millisecond}, true)
	c.post(verbs.OpSend, 1, 10)
	c.wantPackets(opSendOnly)
	c.expect--
	const code = 22 // 20.48 ms
	start := time.Now()
	c.ack(syndromeRNR|code, c.expect)
	c.wantPackets(opSendOnly)
	if d := time.Since(start); d < 20*time.Millisecond {
		t.Errorf("sent again after %s", d)
	}
	c.ack(ackCreditsInvalid, c.expect-1)
	if wc := c.end.next(); wc.ID != 1 || wc.Status != verbs.StatusOK {
		t.Errorf("completion %+v", wc)
	}
	t.Run("and not for ever", func(t *testing.T) {
		c.post(verbs.OpSend, 2, 10)
		for stop := time.Now().Add(soon); len(c.end.wcs) == 0 && time.Now().Before(stop); c.end.poll() {
			if b := c.receive(time.Millisecond); b != nil && bth(b).qpn() == rawQPN {
				c.ack(syndromeRNR|code, c.expect)
			}
		}
		if wc := c.end.next(); wc.ID != 2 || wc.Status != verbs.StatusRetryExceeded {
			t.Errorf("completion %+v", wc)
		}
	})
}

func TestC035_RefusalsAreTold(t *testing.T) {
	for nak, want := range map[byte]verbs.Status{nakInvalid: verbs.StatusRemoteInvalid, nakAccess: verbs.StatusRemoteAccess, nakOperation: verbs.StatusRemoteInvalid} {
		t.Run(want2name(nak), func(t *testing.T) {
			c := newRawConn(t, Config{}, true)
			for id := range uint64(3) {
				c.post(verbs.OpWrite, id, 4)
			}
			c.wantPackets(opWriteOnly, opWriteOnly, opWriteOnly)
			c.ack(nak, c.expect-2)
			for id, status := range []verbs.Status{verbs.StatusOK, want, verbs.StatusFlushed} {
				if wc := c.end.next(); wc.ID != uint64(id) || wc.Status != status {
					t.Errorf("completion %+v, want status %d of %d", wc, status, id)
				}
			}
			c.wantEnd(want)
		})
	}
}

func want2name(nak byte) string {
	return map[byte]string{nakInvalid: "invalid request", nakAccess: "remote access", nakOperation: "remote operation"}[nak]
}

// respond answers a READ with the given packet of it.
func (c *rawConn) respond(op opcode, psn uint32, payload []byte) {
	b := make([]byte, shapes[op].size)
	putBTH(b, op, padLen(len(payload)), c.qpn, psn, false)
	if shapes[op].aeth {
		putAETH(b[bthLen:], ackCreditsInvalid, 1)
	}
	b = append(append(b, payload...), make([]byte, padLen(len(payload)))...)
	c.send(b)
}

// wantReadRequest expects a READ of n bytes at addr.
func (c *rawConn) wantReadRequest(psn uint32, addr uint64, n uint32) {
	c.t.Helper()
	b := c.data()
	if r := reth(b[bthLen:]); b.opcode() != opReadRequest || b.psn() != psn&psnMask || r.addr() != addr || r.length() != n || r.key() != 0x99 {
		c.t.Fatalf("opcode %#x, number %#x, %d bytes at %#x, want a READ, %#x, %d at %#x", b.opcode(), b.psn(), r.length(), r.addr(), psn&psnMask, n, addr)
	}
}

func TestC039_ReadsAreAskedForAgainFromTheGap(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	got := c.post(verbs.OpRead, 1, 3000)
	c.post(verbs.OpSend, 2, 0)
	c.wantReadRequest(c.expect, 0x1000, 3000)
	first, want := c.expect, pattern(3000, 9)
	c.expect = psnAdd(c.expect, 3)
	c.wantPackets(opSendOnly)
	c.ack(ackCreditsInvalid, c.expect-1) // must not complete the READ
	c.wantReadRequest(first, 0x1000, 3000)
	c.respond(opReadRespFirst, first, want[:1024])
	c.respond(opReadRespLast, psnAdd(first, 2), want[2048:]) // the middle is lost
	c.expect = psnAdd(first, 3)
	for b := c.data(); b.opcode() != opReadRequest || b.psn() != psnAdd(first, 1); b = c.data() {
		if b.opcode() != opSendOnly { // of the round before
			t.Fatalf("opcode %#x, number %#x", b.opcode(), b.psn())
		}
	}
	c.respond(opReadRespFirst, psnAdd(first, 1), want[1024:2048])
	c.respond(opReadRespLast, psnAdd(first, 2), want[2048:])
	c.ack(ackCreditsInvalid, c.expect)
	for id := range uint64(2) {
		if wc := c.end.next(); wc.ID != id+1 || wc.Status != verbs.StatusOK {
			t.Errorf("completion %+v", wc)
		}
	}
	if !bytes.Equal(got, want) {
		t.Errorf("data differ at %d", differs(got, want))
	}
}

func TestC039_NoMoreReadsThanThePeerServes(t *testing.T) {
	c := newRawConn(t, Config{}, true) // it serves 4
	for id := range uint64(6) {
		c.post(verbs.OpRead, id, 4)
	}
	for i := range uint32(4) {
		c.wantReadRequest(c.expect+i, 0x1000, 4)
	}
	c.end.poll()
	if b := c.receive(5 * time.Millisecond); b != nil && psnDiff(bth(b).psn(), c.expect) >= 4 {
		t.Errorf("fifth READ %#x", bth(b).psn())
	}
	c.respond(opReadRespOnly, c.expect, []byte{1, 2, 3, 4})
	for b := c.data(); psnDiff(b.psn(), c.expect) != 4; b = c.data() {
	}
}

func TestC039_WrongResponseEndsTheConnection(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	got := c.post(verbs.OpRead, 1, 100)
	c.wantReadRequest(c.expect, 0x1000, 100)
	c.respond(opReadRespOnly, c.expect, pattern(104, 1))
	if wc := c.end.next(); wc.ID != 1 || wc.Status != verbs.StatusFatal {
		t.Errorf("completion %+v", wc)
	}
	if want := pattern(100, 1); !bytes.Equal(got, want) { // filled in by post
		t.Error("memory was written")
	}
}

func TestC030_NumbersAreOnACircle(t *testing.T) {
	for _, tt := range []struct {
		a, b uint32
		want int32
	}{{5, 3, 2}, {3, 5, -2}, {0, psnMask, 1}, {psnMask, 0, -1}, {1 << 23, 1, 1<<23 - 1}, {0, 0, 0}} {
		if got := psnDiff(tt.a, tt.b); got != tt.want {
			t.Errorf("%#x - %#x = %d, want %d", tt.a, tt.b, got, tt.want)
		}
	}
	if psnAdd(psnMask, 2) != 1 || packetCount(0, 1024) != 1 || packetCount(1024, 1024) != 1 || packetCount(1025, 1024) != 2 || packetCount(1<<31, 256) != 1<<23 {
		t.Error("sums are wrong")
	}
}

func TestC043_NumbersTellTheQueue(t *testing.T) {
	d := openDevice(t, Config{})
	dom := must(d.AllocPD())(t)
	for slot := uint32(1); slot <= 5; slot++ {
		q := must(d.CreateCQ(1))(t)
		t.Cleanup(func() { q.Close() })
		seen := map[uint32]bool{}
		for range 300 {
			v := must(d.CreateQP(dom, verbs.QPConfig{CQ: q}))(t).(*qp)
			if v.qpn&0xff != slot || !validQPN(v.qpn) || seen[v.qpn] {
				t.Fatalf("queue pair %#x of slot %d", v.qpn, slot)
			}
			seen[v.qpn] = true
			if v.Destroy(); len(seen)%2 == 0 {
				v.Destroy() // twice
			}
		}
	}
}
