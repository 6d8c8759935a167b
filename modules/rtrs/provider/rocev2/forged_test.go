package rocev2

import (
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Messages with the peer's address but without the peer's knowledge change
// nothing.

func TestC049_ForgedMessagesToAConnection(t *testing.T) {
	rej := func(f rejFields, tid uint64, sender uint32) func(c *rawConn) mad {
		return func(c *rawConn) mad { return f.encode(tid, sender, c.id) }
	}
	stale := rejFields{about: aboutREP, reason: reasonStale}
	for _, tt := range []struct {
		name   string
		rtu    bool
		forged func(c *rawConn) mad
	}{
		{"REJ with another sender's id", true, rej(stale, rawTID, rawID+1)},
		{"REJ with no sender's id", true, rej(stale, rawTID, 0)},
		{"REJ of another transaction", true, rej(stale, rawTID+1, rawID)},
		{"REJ of the REQ that the peer sent itself", true, rej(rejFields{about: aboutREQ, reason: reasonStale}, rawTID, rawID)},
		{"REJ by the consumer, who has accepted", true, rej(rejFields{about: aboutREP, reason: reasonConsumer}, rawTID, rawID)},
		{"REJ for want of time, which was not short", true, rej(rejFields{about: aboutOther, reason: reasonTimeout}, rawTID, rawID)},
		{"REJ with another sender's id, before the RTU", false, rej(stale, rawTID, rawID+1)},
		{"REJ of another transaction, before the RTU", false, rej(stale, rawTID+1, rawID)},
		{"RTU of another transaction", false, func(c *rawConn) mad { return newMAD(attrRTU, rawTID+1, rawID, c.id) }},
		{"RTU with another sender's id", false, func(c *rawConn) mad { return newMAD(attrRTU, rawTID, rawID+1, c.id) }},
		{"DREQ with another sender's id", true, func(c *rawConn) mad { return newDREQ(9, rawID+1, c.id, c.qpn) }},
		{"DREQ for another queue pair", true, func(c *rawConn) mad { return newDREQ(9, rawID, c.id, c.qpn+256) }},
		{"DREP of nothing", true, func(c *rawConn) mad { return newMAD(attrDREP, rawTID, rawID, c.id) }},
		{"REP of nothing", true, func(c *rawConn) mad { return (&repFields{qpn: 99}).encode(rawTID, rawID, c.id) }},
		{"MRA of nothing", true, func(c *rawConn) mad { return newMRA(rawTID, rawID, c.id, 31) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newRawConn(t, Config{}, tt.rtu)
			c.inVain(c.end, func() { c.say(tt.forged(c)) })
			if c.end.poll(); len(c.end.wcs) > 0 || c.end.qp.req.hold == tt.rtu {
				t.Fatalf("it was believed: %+v, the peer knows of the connection: %t", c.end.wcs, !c.end.qp.req.hold)
			}
			c.end.recv(verbs.RecvWR{ID: 1})
			c.send(c.packet(opSendOnly, nil, nil))
			c.wantAck(ackCreditsInvalid, c.psn-1) // it lives
		})
	}
}

// inVain says something that e must drop as not fitting.
func (r *raw) inVain(e *end, say func()) {
	r.t.Helper()
	before := e.dev.Stats().Dropped[dropState]
	say()
	e.until("a message to be dropped", func() bool { return e.dev.Stats().Dropped[dropState] > before })
}

func TestC049_ForgedAnswersToARequest(t *testing.T) {
	for _, tt := range []struct {
		name   string
		forged func(req mad) mad
	}{
		{"REP of another transaction", func(req mad) mad {
			return (&repFields{guid: 1, qpn: 99}).encode(req.tid()+1, rawID, req.sender())
		}},
		{"REJ of another transaction", func(req mad) mad {
			return (&rejFields{reason: reasonInvalidService}).encode(req.tid()+1, 0, req.sender())
		}},
		{"REJ of an answer of ours", func(req mad) mad {
			return (&rejFields{about: aboutREP, reason: reasonStale}).encode(req.tid(), 0, req.sender())
		}},
		{"MRA of another transaction", func(req mad) mad { return newMRA(req.tid()+1, rawID, req.sender(), 31) }},
		{"MRA of an answer of ours", func(req mad) mad {
			m := newMRA(req.tid(), rawID, req.sender(), 31)
			m.body()[8] = aboutREP << 6
			return m
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, e, req, done := active(t, Config{})
			r.inVain(e, func() { r.say(tt.forged(req)) })
			if again := r.hear(attrREQ); again.tid() != req.tid() {
				t.Error("another request was made")
			}
			f := repFields{guid: rawGUID, qpn: rawQPN, psn: 5}
			r.say(f.encode(req.tid(), rawID, req.sender()))
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

func TestC049_ForgedDREPDoesNotEndTheRepetition(t *testing.T) {
	c := newRawConn(t, Config{}, true)
	c.end.qp.Disconnect()
	c.wantEnd(verbs.StatusOK)
	dreq := c.hear(attrDREQ)
	c.inVain(c.end, func() { c.say(newMAD(attrDREP, dreq.tid()+1, rawID, c.id)) })
	c.inVain(c.end, func() { c.say(newMAD(attrDREP, dreq.tid(), rawID+1, c.id)) })
	c.hear(attrDREQ)
}

// A host that has not seen one of our messages cannot know the numbers in the
// next.
func TestC049_NumbersCannotBeGuessed(t *testing.T) {
	d := openDevice(t, Config{})
	d.cm.mu.Lock()
	defer d.cm.mu.Unlock()
	const n = 100
	near := 0
	last := d.cm.newConn(nil, addrA, connTimeWait).local
	for range n {
		id := d.cm.newConn(nil, addrA, connTimeWait).local
		if diff := id - last; diff+1<<16 < 1<<17 {
			near++
		}
		last = id
	}
	if near > n/10 {
		t.Errorf("%d of %d ids are close to the one before", near, n)
	}
	clear(d.cm.conns)
}

// A peer that has not shown that it got our REP gets no DREQ: its address may be
// forged. When it has, it is told.
func TestC022_DisconnectBeforeThePeerIsKnown(t *testing.T) {
	t.Run("a peer that says nothing hears nothing", func(t *testing.T) {
		c := newRawConn(t, Config{ConnectTimeout: 300 * time.Millisecond}, false)
		c.end.qp.Disconnect()
		c.wantEnd(verbs.StatusOK)
		if b := c.receive(3 * firstRepeat); b != nil {
			t.Errorf("sent without being asked: %x", b[:60])
		}
		c.forgotten()
	})
	t.Run("its RTU is answered by the DREQ", func(t *testing.T) {
		c := newRawConn(t, Config{}, false)
		c.end.qp.Disconnect()
		c.wantEnd(verbs.StatusOK)
		c.hearNothing()
		c.say(newMAD(attrRTU, rawTID, rawID, c.id))
		dreq := c.hear(attrDREQ)
		if dreq.receiver() != rawID || dreq.dreqQPN() != rawQPN {
			t.Errorf("DREQ %x", dreq[:40])
		}
		c.hear(attrDREQ) // until it is answered
	})
	t.Run("its DREQ is answered by the DREP", func(t *testing.T) {
		c := newRawConn(t, Config{}, false)
		c.end.qp.Disconnect()
		c.wantEnd(verbs.StatusOK)
		c.say(newDREQ(9, rawID, c.id, c.qpn))
		c.hear(attrDREP)
	})
	t.Run("its REQ is refused", func(t *testing.T) {
		c := newRawConn(t, Config{}, false)
		c.end.qp.Disconnect()
		c.wantEnd(verbs.StatusOK)
		c.say(c.asked.encode(rawTID))
		if f := decodeREJ(c.hear(attrREJ)); f.reason != reasonConsumer || f.about != aboutREQ {
			t.Errorf("REJ %+v", f)
		}
		c.hearNothing()
	})
	t.Run("a peer that was heard is told at once", func(t *testing.T) {
		c := newRawConn(t, Config{}, false)
		c.end.recv(verbs.RecvWR{ID: 1})
		c.send(c.packet(opSendOnly, nil, nil))
		c.wantAck(ackCreditsInvalid, c.psn-1)
		c.end.qp.Disconnect()
		c.wantEnd(verbs.StatusOK)
		c.hear(attrDREQ)
	})
}

// forgotten waits until the device has nothing left of the connection.
func (c *rawConn) forgotten() {
	c.t.Helper()
	m := &c.end.dev.cm
	c.end.until("the connection to be forgotten", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return len(m.conns) == 0 && len(m.byPeer) == 0 && len(m.byQPN) == 0
	})
}
