package server

import (
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// crowd is a queue with a ring that nobody empties, and sessions that use it.
type crowd struct {
	q     *ioQueue
	lanes []*lane
}

func newCrowd(t *testing.T, sessions int) *crowd {
	t.Helper()
	r, err := shm.NewHeapRing(1024)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	c := &crowd{q: &ioQueue{sub: r.Submitter(), now: time.Hour}}
	for range sessions {
		c.lanes = append(c.lanes, &lane{head: -1, tail: -1})
	}
	return c
}

// submit lets a session try n requests and returns how many go to the ring.
func (c *crowd) submit(session, n int) (sent int) {
	l := c.lanes[session]
	for range n {
		c.q.note(l)
		if c.q.roomFor(l) && c.q.send(l, &request{}) {
			sent++
		}
	}
	return sent
}

// answer ends n requests of a session.
func (c *crowd) answer(session, n int) {
	l := c.lanes[session]
	if l.sent -= int32(n); l.sent == 0 {
		c.q.busy--
	}
}

func TestASessionAloneMayFillTheRing(t *testing.T) {
	c := newCrowd(t, 2)
	if n := c.submit(0, 200); n != 200 {
		t.Errorf("%d of 200 requests were sent", n)
	}
}

func TestDeepSessionsShareTheRing(t *testing.T) {
	c := newCrowd(t, 2)
	c.submit(0, 200)
	c.q.now += 2 * modestFor
	if n := c.submit(1, 200); n != contendedWindow {
		t.Errorf("%d requests were sent beside a deep session, want %d", n, contendedWindow)
	}
}

func TestAModestSessionIsRemembered(t *testing.T) {
	c := newCrowd(t, 2)
	c.submit(0, 200)
	c.submit(1, 1)
	c.answer(1, 1)
	c.answer(0, 200)
	c.q.now += modestFor / 2 // it thinks
	if n := c.submit(0, 200); n != modestWindow {
		t.Errorf("beside a modest session %d requests were sent, want %d", n, modestWindow)
	}
	if n := c.submit(1, 1); n != 1 {
		t.Error("the modest session had to wait")
	}
	c.answer(1, 1)
	c.answer(0, modestWindow)
	c.q.now += 2 * modestFor
	if n := c.submit(0, 200); n != 200 {
		t.Errorf("alone again %d of 200 requests were sent", n)
	}
}
