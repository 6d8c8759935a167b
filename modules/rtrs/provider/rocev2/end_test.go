package rocev2

import (
	"bytes"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A connection that is given up sends nothing any more but its DREQ: its
// consumer may have sent the same another way.
func TestC048_NothingIsSentAfterDisconnect(t *testing.T) {
	for _, tt := range []struct {
		name string
		list bool // before Disconnect, in a full socket
	}{{"requests that were not started", false}, {"packets that wait for room in the socket", true}} {
		t.Run(tt.name, func(t *testing.T) {
			c := newRawConn(t, Config{}, true)
			fd := c.end.qp.out.fd
			if tt.list {
				c.end.qp.out.fd = blockedSocket(t)
			}
			for i := range 3 {
				c.end.send(verbs.SendWR{ID: uint64(i), Op: verbs.OpSend, Signaled: true})
			}
			if tt.list {
				c.end.poll()
				if !c.end.qp.out.blocked {
					t.Fatal("the socket is not full")
				}
			}
			c.end.qp.out.fd = fd
			c.end.qp.Disconnect()
			c.wantEnd(verbs.StatusOK)
			for b := c.receive(silent); b != nil; b = c.receive(silent) {
				if bth(b).qpn() == rawQPN {
					t.Errorf("packet %x was sent after the end", b)
				}
			}
		})
	}
}

// Connections that share the way out lose nothing when one of them ends.
func TestC048_PacketsOfOthersAreNotTakenBack(t *testing.T) {
	for _, tt := range []struct {
		name string
		full bool // the socket, when the other connection ends
	}{{"listed", false}, {"refused by a full socket", true}} {
		t.Run(tt.name, func(t *testing.T) {
			c, s := pairOf(t, Config{})
			ends, peer := c.qp, s.qp
			c.qp, s.qp = c.newQP(2), s.newQP(2)
			t.Cleanup(func() { ends.Destroy(); peer.Destroy() })
			join(t, c, s)
			o, fd := c.qp.out, c.qp.out.fd
			if tt.full {
				o.fd = blockedSocket(t)
			}
			mem, mr := c.region(64, 0)
			dst, rmr := s.region(64, 0)
			fill(mem, 1)
			message := func(i int) verbs.SendWR {
				return verbs.SendWR{ID: uint64(i), Op: verbs.OpSend, Signaled: true, SGEs: []verbs.SGE{{Buf: mem[16*i:][:16], LKey: mr.LKey()}}}
			}
			for i := range 3 {
				s.recv(verbs.RecvWR{ID: uint64(i), Buf: dst[16*i:][:16], LKey: rmr.LKey()})
			}
			c.send(message(0))
			c.qp.sendRequests()
			for range 2 {
				must(ends.PostSend([]verbs.SendWR{message(3)}))(t)
			}
			ends.sendRequests()
			c.send(message(1))
			c.qp.sendRequests()
			if tt.full {
				o.flushPackets()
			}
			ends.hangUp(verbs.StatusOK, nil)
			o.fd = fd
			c.send(message(2))
			c.qp.sendRequests()
			for i := range 3 {
				wc := s.next(c)
				for wc.QP != 2 { // the other connection ends
					wc = s.next(c)
				}
				if wc.ID != uint64(i) || wc.Status != verbs.StatusOK {
					t.Errorf("message %d came as %+v", i, wc)
				}
			}
			if d := c.dev.Stats(); !bytes.Equal(dst[:48], mem[:48]) || d.Resent > 0 {
				t.Errorf("first difference at %d, %d packets sent again", differs(dst[:48], mem[:48]), d.Resent)
			}
		})
	}
}
