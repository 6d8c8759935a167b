package rocev2

import (
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// forget makes the device of e what a new process at its address is: it knows no
// connection, and has told no peer.
func (e *end) forget() {
	m := &e.dev.cm
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.conns {
		c.removeTraces()
	}
	table := e.cq.(*compQueue).table
	clear(table)
}

// A peer that was killed and started again is noticed by its answer, long before
// its silence is a failure.
func TestC057_PeerThatHasForgottenTheConnectionSaysSo(t *testing.T) {
	for name, active := range map[string]bool{"at the active end": true, "at the passive end": false} {
		t.Run(name, func(t *testing.T) {
			a, b := pairOf(t, Config{RetryTimeout: time.Hour})
			lost, other := a, b
			if !active {
				lost, other = b, a
			}
			mem, mr := lost.region(8, 0)
			lost.recv(verbs.RecvWR{ID: 2, Buf: mem, LKey: mr.LKey()})
			other.send(verbs.SendWR{ID: 1, Op: verbs.OpSend})
			lost.next(other) // both ends know that they are connected
			lost.wcs = nil
			other.forget()
			begun := time.Now()
			lost.send(verbs.SendWR{ID: 3, Op: verbs.OpSend, Signaled: true})
			lost.within(time.Minute, "the end of the connection", func() bool {
				for _, wc := range lost.wcs {
					if wc.Op == verbs.OpDisconnected {
						return true
					}
				}
				return false
			}, other)
			t.Logf("noticed after %v", time.Since(begun).Round(time.Millisecond))
		})
	}
}

// A peer that knows the connection takes no notice of being asked.
func TestC057_ConnectionThatIsKnownOutlivesTheQuestion(t *testing.T) {
	a, b := pairOf(t, Config{})
	b.until("the RTU to arrive", func() bool {
		b.dev.cm.mu.Lock()
		defer b.dev.cm.mu.Unlock()
		return b.qp.conn.state == connEstablished
	})
	for _, e := range []*end{a, b} {
		e.dev.cm.probePeer(e.qp.conn)
	}
	for _, e := range []*end{a, b} {
		e.until("the question to be dropped", func() bool { return e.dev.Stats().Dropped[dropState] > 0 })
	}
	mem, mr := b.region(8, 0)
	b.recv(verbs.RecvWR{ID: 2, Buf: mem, LKey: mr.LKey()})
	a.send(verbs.SendWR{ID: 1, Op: verbs.OpSend, Signaled: true})
	if wc := b.next(a); wc.Op != verbs.OpRecv || wc.Status != verbs.StatusOK {
		t.Errorf("completion %+v", wc)
	}
}

// An unknown connection is answered once for each question of an end of ours, with
// the ids of the question, and not for those of Linux.
func TestC057_QuestionOfLinuxIsNotAnswered(t *testing.T) {
	r, e, _ := listening(t, Config{})
	b := make([]byte, cmPacketLen)
	putDatagram(b, newMAD(attrRTU, rawTID, rawID, 0x4321), 0)
	r.send(b[:cmPacketLen-icrcLen])
	e.until("it to be counted", func() bool { return e.dev.Stats().Dropped[dropState] > 0 })
	r.hearNothing()
	b[8] |= cmFixedID
	r.send(b[:cmPacketLen-icrcLen])
	rej := r.hear(attrREJ)
	if f := decodeREJ(rej); rej.tid() != rawTID || rej.sender() != 0x4321 || rej.receiver() != rawID || f.reason != reasonStale {
		t.Errorf("transaction %#x from %#x to %#x: %+v", rej.tid(), rej.sender(), rej.receiver(), f)
	}
	r.hearNothing()
}
