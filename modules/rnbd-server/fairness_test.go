package server

import (
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// crowd is a queue with a ring that nobody empties, and sessions that use it, each
// with a device of its own unless a test adds more.
type crowd struct {
	q     *ioQueue
	flows []*mappingFlow
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
		c.addDevice(&sessionLane{})
	}
	return c
}

// addDevice gives a session one more device, and returns its number.
func (c *crowd) addDevice(l *sessionLane) int {
	c.flows = append(c.flows, &mappingFlow{lane: l, load: &pumpLoad{}, head: -1, tail: -1})
	return len(c.flows) - 1
}

// submit tries n requests of a device and returns how many go to the ring.
func (c *crowd) submit(device, n int) (sent int) {
	f := c.flows[device]
	for range n {
		c.q.noteLane(f.lane)
		if c.q.roomFor(f) && c.q.sendToRing(f, &request{}) {
			sent++
		}
	}
	return sent
}

// answer ends n requests of a device. The ring stays as full as it was.
func (c *crowd) answer(device, n int) {
	for range n {
		c.flows[device].onReturned()
	}
}

func TestASessionAloneMayFillTheRing(t *testing.T) {
	c := newCrowd(t, 2)
	if n := c.submit(0, 100); n != 100 {
		t.Errorf("%d of 100 requests were sent", n)
	}
}

func TestDeepSessionsShareTheRing(t *testing.T) {
	c := newCrowd(t, 2)
	c.submit(0, 100)
	if n := c.submit(1, 100); n != contendedWindow {
		t.Errorf("%d requests were sent beside a deep session, want %d", n, contendedWindow)
	}
}

func TestASessionWhoseRequestsHangKeepsNobodySmall(t *testing.T) {
	c := newCrowd(t, 2)
	c.submit(0, 100)
	c.q.now += 2 * modestFor // no answer since
	if n := c.submit(1, 100); n != 100 {
		t.Errorf("%d of 100 requests were sent", n)
	}
}

// The devices of a session share its window, and none has to wait for another.
func TestADeviceThatHangsLeavesRoom(t *testing.T) {
	for _, tt := range []struct {
		name       string
		hung       int // devices with as many requests as they get
		sessions   int // 2: another session is deep
		want, most int // requests in the ring of one more device
	}{
		{"one device alone may have a quarter of the ring", 0, 1, 256, 256},
		{"beside one that hangs it has half of that", 1, 1, 128, 128},
		{"beside fifteen there is room", 15, 1, 4, 64},
		{"beside a hundred there is room", 100, 1, 4, 4},
		{"in a window it gets half", 1, 2, contendedWindow / 2, contendedWindow / 2},
		{"in a window it gets a quarter beside many", 15, 2, contendedWindow / windowShare, contendedWindow / windowShare},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCrowd(t, tt.sessions)
			l := c.flows[0].lane
			if tt.sessions == 2 {
				c.submit(0, modestDepth)
				c.submit(1, modestDepth)
			}
			for range tt.hung {
				c.submit(c.addDevice(l), 1000)
			}
			if tt.sessions == 2 {
				c.answer(0, modestDepth)
				c.q.sharedUntil, c.q.modestUntil = c.q.now+sharedFor, 0
			}
			if n := c.submit(c.addDevice(l), 1000); n < tt.want || n > tt.most {
				t.Errorf("%d requests were sent, want %d to %d", n, tt.want, tt.most)
			}
		})
	}
}

func TestAModestSessionIsRemembered(t *testing.T) {
	c := newCrowd(t, 2)
	c.submit(0, 100)
	c.submit(1, 1)
	c.answer(1, 1)
	c.answer(0, 100)
	c.q.now += modestFor / 2 // it thinks
	if n := c.submit(0, 100); n != modestWindow {
		t.Errorf("beside a modest session %d requests were sent, want %d", n, modestWindow)
	}
	if n := c.submit(1, 1); n != 1 {
		t.Error("the modest session had to wait")
	}
	c.answer(1, 1)
	c.answer(0, modestWindow)
	c.q.now += 2 * modestFor
	if n := c.submit(0, 100); n != 100 {
		t.Errorf("alone again %d of 100 requests were sent", n)
	}
}
