package client

import (
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

func statsOf(t *testing.T, c *Client, device string) *controlpb.DeviceStats {
	t.Helper()
	l, err := c.Control("test").DeviceStats(t.Context(), &controlpb.DeviceRequest{Device: device})
	must(t, err)
	return l.Devices[0]
}

// Requests without an answer are reported with their stage and their path, as
// long as they hang.
func TestWatchdogFindsHungRequests(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient(noHeartbeats, func(cfg *Config) { cfg.HungAfter = 100 * time.Millisecond })
	d, _ := s.device(c)
	r := ringOf(t, d)
	got := map[uint32]int{}
	s.set(func() { s.hold = true })
	for slot := range 20 { // more than there are permits
		r.submit(d, slot)
	}
	var wire, queue *controlpb.HungRequests
	eventually(t, "requests are found that hang on the wire and in the queue", func() bool {
		wire, queue = nil, nil
		for _, h := range statsOf(t, c, d.name).Hung {
			switch h.Stage {
			case "wire":
				wire = h
			case "queue":
				queue = h
			}
		}
		return wire != nil && queue != nil
	})
	if wire.Count+queue.Count != 20 || !strings.HasPrefix(wire.Path, "10.0.0.1:1234%") || wire.OldestNs < 1e8 || wire.Op == "" {
		t.Errorf("wire %v, queue %v", wire, queue)
	}
	if queue.Path != "" {
		t.Errorf("what waits here is on path %q", queue.Path)
	}
	s.releaseAll(blk.OK)
	eventually(t, "their answers", func() bool { r.reap(got); return got[d.index] == 20 })
	eventually(t, "nothing hangs", func() bool { return len(statsOf(t, c, d.name).Hung) == 0 })
	for _, p := range c.pumps {
		if p.busy() {
			t.Errorf("a pump has a request in flight: %d have begun, %d ended", p.begun.Load(), p.ended.Load())
		}
	}
}

// Failed requests are counted by the stage that failed them.
func TestFailedRequestsAreCounted(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient(noHeartbeats)
	d, io := s.device(c)
	count := func(stage, errno string) (n uint64) {
		for _, f := range statsOf(t, c, d.name).Failed {
			if f.Stage == stage && f.Errno == errno {
				n += f.Count
			}
		}
		return n
	}
	do(t, io, Request{Op: blk.Read, Len: 512})
	if n := len(statsOf(t, c, d.name).Failed); n != 0 {
		t.Fatalf("%d failures before one", n)
	}
	do(t, io, Request{Op: blk.Read, Len: 512, Off: 1 << 30})
	s.set(func() { s.ioErr = blk.ENOSPC })
	do(t, io, Request{Op: blk.Write, Len: 512})
	do(t, io, Request{Op: blk.Write, Len: 512})
	if n, m := count("check", "EIO")+count("check", "EINVAL")+count("check", "ENOSPC"), count("server", "ENOSPC"); n != 1 || m != 2 {
		t.Errorf("%d refused here, %d by the server, want 1 and 2: %v", n, m, statsOf(t, c, d.name).Failed)
	}
	s.kill()
	eventually(t, "the device is closed", func() bool { return d.State() == Closed })
	do(t, io, Request{Op: blk.Read, Len: 512})
	if n := count("queue", "EIO"); n != 1 {
		t.Errorf("%d failed while there was no path: %v", n, statsOf(t, c, d.name).Failed)
	}
}

// A device that waits for its server says until when, unless it is for ever.
func TestCountdownOfRequestsThatWait(t *testing.T) {
	for _, tt := range []struct {
		loss string
		ends bool
	}{{"queue:1h", true}, {"queue:forever", false}} {
		s := newTarget(t, 1<<20)
		c := s.newClient()
		loss, err := ParseLoss(tt.loss)
		must(t, err)
		if loss.String() != tt.loss && loss.String() != "queue:1h0m0s" {
			t.Errorf("%s became %s", tt.loss, loss)
		}
		d, _ := s.device(c, func(r *MapRequest) { r.Loss = loss })
		if at := d.describeNow(t.Context()).FailsUnixMs; at != 0 {
			t.Errorf("%s: an open device fails at %d", tt.loss, at)
		}
		s.kill()
		eventually(t, "the device is closed", func() bool { return d.State() == Closed })
		m := d.describeNow(t.Context())
		left := time.Until(time.UnixMilli(m.FailsUnixMs))
		if tt.ends && (left < 50*time.Minute || left > time.Hour) || !tt.ends && m.FailsUnixMs != 0 || !m.OpensAgain {
			t.Errorf("%s: fails at %d, opens again: %v", tt.loss, m.FailsUnixMs, m.OpensAgain)
		}
	}
}
