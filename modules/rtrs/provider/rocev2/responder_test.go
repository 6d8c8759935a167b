package rocev2

import (
	"bytes"
	"math"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The responder's reaction to packets made by hand. The path MTU is 1024.

func word(v uint32) []byte { return be.AppendUint32(nil, v) }

func pattern(n, seed int) []byte {
	b := make([]byte, n)
	fill(b, seed)
	return b
}

func TestC031_MessagesAreAssembled(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	want := pattern(2500, 1)
	c.end.recv(verbs.RecvWR{ID: 1, Buf: c.mem[:2500], LKey: c.mr.LKey()}, verbs.RecvWR{ID: 2}, verbs.RecvWR{ID: 3, Buf: c.mem[9000:9010], LKey: c.mr.LKey()})
	c.send(c.packet(opSendFirst, nil, want[:1024]))
	c.send(c.packet(opSendMiddle, nil, want[1024:2048]))
	c.noData() // nothing was asked for
	c.send(c.packet(opSendLastImm, word(0xdeadbeef), want[2048:]))
	c.wantAck(ackCreditsInvalid, c.psn-1)
	if wc := c.end.next(); wc != (verbs.WC{ID: 1, QP: 1, Op: verbs.OpRecv, HasImm: true, Imm: 0xdeadbeef, ByteLen: 2500}) || !bytes.Equal(c.mem[:2500], want) {
		t.Errorf("SEND arrived as %+v", wc)
	}
	want = pattern(2049, 2)
	c.send(c.packet(opWriteFirst, c.reth(4000, 2049), want[:1024]))
	c.send(c.packet(opWriteMiddle, nil, want[1024:2048]))
	c.send(c.packet(opWriteLastImm, word(5), want[2048:]))
	c.wantAck(ackCreditsInvalid, c.psn-1)
	if wc := c.end.next(); wc != (verbs.WC{ID: 2, QP: 1, Op: verbs.OpRecvImm, HasImm: true, Imm: 5, ByteLen: 2049}) || !bytes.Equal(c.mem[4000:6049], want) {
		t.Errorf("WRITE arrived as %+v", wc)
	}
	key := must(c.end.pd.RegMR(make([]byte, 8), verbs.AccessRemoteWrite))(t).RKey()
	c.send(c.packet(opSendOnlyInv, word(key), want[:10]))
	c.wantAck(ackCreditsInvalid, c.psn-1)
	if wc := c.end.next(); wc != (verbs.WC{ID: 3, QP: 1, Op: verbs.OpRecv, HasInv: true, InvKey: key, ByteLen: 10}) {
		t.Errorf("SEND WITH INVALIDATE arrived as %+v", wc)
	}
}

func TestC037_OneAnswerForAllThatCameTogether(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	for range 20 {
		c.send(c.packet(opWriteOnly, c.reth(0, 4), []byte{1, 2, 3, 4}))
	}
	b := c.data()
	if b.psn() != psnAdd(c.psn, psnMask) || aeth(b[bthLen:]).msn() != 20 {
		t.Errorf("ACK for %#x with %d messages, want %#x with 20", b.psn(), aeth(b[bthLen:]).msn(), psnAdd(c.psn, psnMask))
	}
	c.noData()
}

func TestC032_GapIsReportedOnce(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	c.end.recv(verbs.RecvWR{ID: 1}, verbs.RecvWR{ID: 2})
	lost := c.packet(opSendOnly, nil, nil)
	after := c.packet(opSendOnly, nil, nil)
	for range 3 {
		c.send(after)
		c.end.poll()
	}
	c.wantAck(nakSequence, bth(lost).psn())
	c.noData()
	c.send(lost)
	c.send(after)
	c.wantAck(ackCreditsInvalid, bth(after).psn())
	if a, b := c.end.next(), c.end.next(); a.ID != 1 || b.ID != 2 {
		t.Errorf("completions %+v, %+v", a, b)
	}
}

func TestC033_RepeatedPacketsAreAnsweredAndNotExecuted(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	c.end.recv(verbs.RecvWR{ID: 1}, verbs.RecvWR{ID: 2})
	fill(c.mem[5000:8000], 4)
	send := c.packet(opSendOnly, nil, nil)
	write := c.packet(opWriteOnly, c.reth(0, 4), []byte{1, 2, 3, 4})
	read := c.packet(opReadRequest, c.reth(5000, 3000), nil)
	first := bth(read).psn()
	c.psn = psnAdd(c.psn, 2) // three responses
	for _, b := range [][]byte{send, write, read} {
		c.send(b)
	}
	c.wantRead(first, 0, 3)
	clear(c.mem[:4])
	c.send(send)
	c.send(write)
	c.wantAck(ackCreditsInvalid, c.psn-1)
	if len(c.end.wcs) != 1 || !bytes.Equal(c.mem[:4], make([]byte, 4)) {
		t.Errorf("executed twice: %+v, %x", c.end.wcs, c.mem[:4])
	}
	c.send(read)
	c.wantRead(first, 0, 3)
	tail := bytes.Clone(read) // from the second response on
	be.PutUint32(tail[8:], psnAdd(first, 1)|0x80<<24)
	copy(tail[bthLen:], c.reth(5000+1024, 3000-1024))
	c.send(tail)
	c.wantRead(first, 1, 3)
	be.PutUint32(tail[8:], psnAdd(first, 2)|0x80<<24) // longer than it was
	c.send(tail)
	c.noData()
}

// wantRead expects responses from..to of a READ of 3000 bytes at 5000.
func (c *rawConn) wantRead(psn uint32, from, to int) {
	c.t.Helper()
	for i := from; i < to; i++ {
		b := c.data()
		want := map[[2]bool]opcode{{true, false}: opReadRespFirst, {false, false}: opReadRespMiddle, {false, true}: opReadRespLast, {true, true}: opReadRespOnly}[[2]bool{i == from, i == to-1}]
		payload := b[shapes[want].size : len(b)-b.pad()]
		if b.opcode() != want || b.psn() != psnAdd(psn, uint32(i)) || !bytes.Equal(payload, c.mem[5000+1024*i:min(8000, 5000+1024*(i+1))]) {
			c.t.Fatalf("response %d: opcode %#x, number %#x, %d bytes", i, b.opcode(), b.psn(), len(payload))
		}
	}
}

func TestC034_ReceiverIsNotReady(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	send := c.packet(opSendOnly, nil, nil)
	behind := c.packet(opWriteOnlyImm, append(c.reth(0, 4), 0, 0, 0, 9), []byte{1, 2, 3, 4})
	c.send(send)
	c.send(behind)
	c.wantAck(syndromeRNR|rnrCode, bth(send).psn())
	c.noData() // one answer, although the second came too early
	c.end.recv(verbs.RecvWR{ID: 1})
	c.send(send)
	c.send(behind)
	c.wantAck(syndromeRNR|rnrCode, bth(behind).psn())
	if !bytes.Equal(c.mem[:4], make([]byte, 4)) {
		t.Error("payload was placed before there was a receive for its immediate")
	}
	c.end.recv(verbs.RecvWR{ID: 2})
	c.send(behind)
	c.wantAck(ackCreditsInvalid, bth(behind).psn())
	if a, b := c.end.next(), c.end.next(); a.ID != 1 || b.ID != 2 || b.Imm != 9 {
		t.Errorf("completions %+v, %+v", a, b)
	}
}

// Each of these ends the connection with a NAK, and changes no memory.
func TestC036_WrongRequestsEndTheConnection(t *testing.T) {
	full, some := pattern(1024, 1), pattern(100, 1)
	type step struct {
		op      opcode
		ext     []byte
		payload []byte
	}
	rkey := func(c *rawConn, change uint32) []byte {
		b := c.reth(0, 100)
		be.PutUint32(b[8:], c.mr.RKey()^change)
		return b
	}
	at := func(c *rawConn, addr uint64, n uint32) []byte {
		b := c.reth(0, n)
		be.PutUint64(b, addr)
		return b
	}
	tests := []struct {
		name  string
		nak   byte
		steps func(c *rawConn) []step
	}{
		{"middle without first", nakInvalid, func(c *rawConn) []step { return []step{{opSendMiddle, nil, full}} }},
		{"last without first", nakInvalid, func(c *rawConn) []step { return []step{{opWriteLast, nil, some}} }},
		{"first inside a message", nakInvalid, func(c *rawConn) []step {
			return []step{{opSendFirst, nil, full}, {opSendFirst, nil, full}}
		}},
		{"WRITE inside a SEND", nakInvalid, func(c *rawConn) []step {
			return []step{{opSendFirst, nil, full}, {opWriteMiddle, nil, full}}
		}},
		{"READ inside a SEND", nakInvalid, func(c *rawConn) []step {
			return []step{{opSendFirst, nil, full}, {opReadRequest, c.reth(0, 4), nil}}
		}},
		{"C-031 first is shorter than the path MTU", nakInvalid, func(c *rawConn) []step { return []step{{opSendFirst, nil, some}} }},
		{"C-031 only is longer than the path MTU", nakInvalid, func(c *rawConn) []step { return []step{{opSendOnly, nil, pattern(1028, 1)}} }},
		{"C-031 last is empty", nakInvalid, func(c *rawConn) []step { return []step{{opSendFirst, nil, full}, {opSendLast, nil, nil}} }},
		{"C-031 WRITE is shorter than announced", nakInvalid, func(c *rawConn) []step { return []step{{opWriteOnly, c.reth(0, 101), some}} }},
		{"C-031 WRITE is longer than announced", nakInvalid, func(c *rawConn) []step {
			return []step{{opWriteFirst, c.reth(0, 1100), full}, {opWriteLast, nil, some}}
		}},
		{"C-031 WRITE goes on where it should end", nakInvalid, func(c *rawConn) []step {
			return []step{{opWriteFirst, c.reth(0, 1100), full}, {opWriteMiddle, nil, full}}
		}},
		{"C-031 WRITE of more than 2 GiB", nakInvalid, func(c *rawConn) []step { return []step{{opWriteFirst, c.reth(0, 1<<31+1), full}} }},
		{"READ with payload", nakInvalid, func(c *rawConn) []step { return []step{{opReadRequest, c.reth(0, 4), some}} }},
		{"SEND is longer than its receive", nakInvalid, func(c *rawConn) []step { return []step{{opSendFirst, nil, full}, {opSendLast, nil, full}} }},
		{"C-035 unknown key", nakAccess, func(c *rawConn) []step { return []step{{opWriteOnly, rkey(c, 0xffff00), some}} }},
		{"C-035 another variant of the key", nakAccess, func(c *rawConn) []step { return []step{{opWriteOnly, rkey(c, 1), some}} }},
		{"C-035 key 0", nakAccess, func(c *rawConn) []step { return []step{{opWriteOnly, rkey(c, c.mr.RKey()), some}} }},
		{"C-035 before the region", nakAccess, func(c *rawConn) []step { return []step{{opWriteOnly, c.reth(-1, 100), some}} }},
		{"C-035 over the end", nakAccess, func(c *rawConn) []step { return []step{{opWriteOnly, c.reth(len(c.mem)-99, 100), some}} }},
		{"C-035 long WRITE whose end is outside", nakAccess, func(c *rawConn) []step { return []step{{opWriteFirst, c.reth(len(c.mem)-2000, 2001), full}} }},
		{"C-035 around the address space", nakAccess, func(c *rawConn) []step { return []step{{opWriteOnly, at(c, math.MaxUint64-50, 100), some}} }},
		{"C-035 at the end of the address space", nakAccess, func(c *rawConn) []step { return []step{{opWriteOnly, at(c, math.MaxUint64, 100), some}} }},
		{"C-035 READ over the end", nakAccess, func(c *rawConn) []step { return []step{{opReadRequest, c.reth(len(c.mem)-99, 100), nil}} }},
		{"C-035 READ of 2 GiB", nakAccess, func(c *rawConn) []step { return []step{{opReadRequest, c.reth(0, 1<<31), nil}} }},
		{"C-035 key to invalidate is unknown", nakAccess, func(c *rawConn) []step { return []step{{opSendOnlyInv, word(c.mr.RKey() ^ 1), nil}} }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := newRawConn(t, Config{}, true)
			scratch, smr := c.end.region(1500, 0)
			c.end.recv(verbs.RecvWR{ID: 1, Buf: scratch, LKey: smr.LKey()}, verbs.RecvWR{ID: 2, Buf: scratch[:0]})
			steps := tt.steps(c)
			for i, s := range steps {
				if i == len(steps)-1 {
					c.end.poll()
					clear(c.mem)
				}
				c.send(c.packet(s.op, s.ext, s.payload))
			}
			c.wantAck(tt.nak, c.psn-1)
			c.wantEnd(verbs.StatusFatal)
			if len(bytes.Trim(c.mem, "\x00")) > 0 {
				t.Error("memory was written")
			}
		})
	}
}

func TestC039_ReadsBeyondTheDepthAreRefused(t *testing.T) {
	c := newRawConn(t, Config{IRD: -1}, true)
	c.send(c.packet(opReadRequest, c.reth(0, 4), nil))
	c.wantAck(nakInvalid, c.psn-1)
	c.wantEnd(verbs.StatusFatal)
}

// Each of these is dropped without a word and counted, and the connection
// does not notice.
func TestC004_ForgedPacketsAreDropped(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	c.end.recv(verbs.RecvWR{ID: 1})
	forger := newRaw(t, testAddr(4), addrB)
	tests := []struct {
		name string
		why  dropReason
		from *raw
		edit func(b []byte) []byte
	}{
		{"from another address", dropAddress, forger, nil},
		{"to another queue pair", dropQPN, c.raw, func(b []byte) []byte { b[5]++; return b }},
		{"of another partition", dropPKey, c.raw, func(b []byte) []byte { b[3] = 0xfe; return b }},
		{"of another version", dropHeader, c.raw, func(b []byte) []byte { b[1] |= 1; return b }},
		{"with an unknown opcode", dropHeader, c.raw, func(b []byte) []byte { b[0] = 0x15; return b }},
		{"of an unreliable connection", dropHeader, c.raw, func(b []byte) []byte { b[0] = 0x24; return b }},
		{"cut off", dropLength, c.raw, func(b []byte) []byte { return b[:20] }},
		{"with a pad longer than itself", dropLength, c.raw, func(b []byte) []byte { b[1] = 3 << 4; return b[:bthLen+rethLen+2] }},
		{"shorter than a header", dropLength, c.raw, func(b []byte) []byte { return b[:bthLen] }},
	}
	good := c.packet(opWriteOnly, c.reth(0, 4), []byte{1, 2, 3, 4})
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := bytes.Clone(good)
			if tt.edit != nil {
				b = tt.edit(b)
			}
			tt.from.send(b)
			c.dropped(tt.why)
			tt.from.hearNothing()
		})
	}
	t.Run("with a wrong ICRC", func(t *testing.T) {
		b := c.sealed(good)
		b[len(b)-1] ^= 1
		c.sendAsIs(b)
		c.dropped(dropICRC)
	})
	t.Run("too short to be one", func(t *testing.T) {
		c.sendAsIs([]byte{0, 0, 0, 0, 0, good[5], good[6], good[7]})
		c.dropped(dropLength)
	})
	t.Run("an answer to nothing", func(t *testing.T) {
		c.ack(ackCreditsInvalid, rawPSN)
		c.dropped(dropGhost)
		c.ack(nakAccess, rawPSN)
		c.dropped(dropGhost)
	})
	if len(bytes.Trim(c.mem, "\x00")) > 0 {
		t.Error("memory was written")
	}
	c.send(good)
	c.wantAck(ackCreditsInvalid, bth(good).psn())
}

// dropped waits until one more packet was dropped for the reason.
func (c *rawConn) dropped(why dropReason) {
	c.t.Helper()
	seen := func() uint64 { return c.end.dev.Stats().Dropped[why] }
	c.end.until("a dropped packet: "+DropReason(int(why)), func() bool { return seen() > 0 })
	if seen() != 1 {
		c.t.Errorf("%d packets were dropped: %s", seen(), DropReason(int(why)))
	}
	for _, n := range [...]*queueCounters{c.end.cq.(*compQueue).stats, &c.end.dev.cm.stats} {
		n.dropped[why].Store(0)
	}
}

func TestC004_ForgedDatagramsAreDropped(t *testing.T) {
	r, e, l := listening(t, Config{})
	f := r.request(l.Addr())
	tests := []struct {
		name string
		why  dropReason
		edit func(b []byte)
	}{
		{"with a wrong queue key", dropKey, func(b []byte) { b[15]++ }},
		{"of another partition", dropPKey, func(b []byte) { b[2] = 0 }},
		{"of another version", dropHeader, func(b []byte) { b[1] = 1 }},
		{"of another class", dropMAD, func(b []byte) { b[21]++ }},
		{"of another class version", dropMAD, func(b []byte) { b[22]++ }},
		{"with another method", dropMAD, func(b []byte) { b[23]++ }},
		{"about an unknown connection", dropState, func(b []byte) { b[20+17] = byte(attrRTU) }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := make([]byte, cmPacketLen)
			putDatagram(b, f.encode(rawTID), 0)
			tt.edit(b)
			r.send(b[:cmPacketLen-icrcLen])
			e.until("it to be counted", func() bool { return e.dev.Stats().Dropped[tt.why] > 0 })
			r.hearNothing()
			e.dev.cm.stats.dropped[tt.why].Store(0)
		})
	}
}

// Another owner may take the key of a region away between the look at a packet
// and its placement: the packet is placed, or not, and nobody falls.
func TestKeyGoesWhileAPacketIsTaken(t *testing.T) {
	for name, op := range map[string]opcode{"only": opWriteOnly, "first": opWriteFirst} {
		t.Run(name, func(t *testing.T) {
			c := newRawConn(t, Config{}, true)
			q, payload := c.end.qp, make([]byte, 1024)
			n := uint32(len(payload))
			if op == opWriteFirst {
				n *= 2
			}
			fill(payload, 5)
			b, shape := bth(c.packet(op, c.reth(0, n), payload)), &shapes[op]
			if nak := q.checkExpected(b, shape, payload); nak != 0 {
				t.Fatalf("NAK %#x", nak)
			}
			q.Domain.Invalidate(c.mr.RKey())
			var wc verbs.WC
			q.deliverPayload(b, shape, payload, &wc)
			if op == opWriteFirst {
				b = c.packet(opWriteLast, nil, payload)
				if nak := q.checkExpected(b, &shapes[opWriteLast], payload); nak != nakAccess {
					t.Errorf("the next packet: %#x, want %#x", nak, nakAccess)
				}
			}
		})
	}
}
