package iwarp

import (
	"os"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

var _ verbs.CounterSource = (*Device)(nil)

func TestCountersAreTheStats(t *testing.T) {
	d := openDevice(t, DefaultConfig())
	c := &queueCounters{}
	d.stats.Open(c)
	c.sent.Add(1)
	c.received.Add(2)
	c.placed.Add(3)
	c.direct.Add(4)
	c.crcErrors.Add(5)
	c.silent.Add(6)
	d.countHandshake(errGaveWay)
	d.countHandshake(os.ErrDeadlineExceeded)
	d.countHandshake(errMPA)
	want := map[verbs.Counter]bool{
		{Name: "sent", Bytes: true, Value: 1}: true, {Name: "received", Bytes: true, Value: 2}: true,
		{Name: "placed_by_copy", Bytes: true, Value: 3}: true, {Name: "placed_by_socket", Bytes: true, Value: 4}: true,
		{Name: "closed", Reason: "crc", Value: 5}:                  true,
		{Name: "closed", Reason: "silent", Value: 6}:               true,
		{Name: "refused_handshakes", Reason: "gave way", Value: 1}: true, {Name: "refused_handshakes", Reason: "late", Value: 1}: true,
		{Name: "refused_handshakes", Reason: "bad", Value: 1}: true,
	}
	got := d.Counters()
	for _, c := range got {
		if !want[c] {
			t.Errorf("unexpected %+v", c)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d counters, want %d", len(got), len(want))
	}
}

func TestClosedQueueIsFreed(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	s.recv(verbs.RecvWR{ID: 1})
	c.send(verbs.SendWR{Op: verbs.OpWriteImm})
	s.next(c)
	before := c.dev.Stats()
	c.qp.Destroy()
	if err := c.cq.Close(); err != nil {
		t.Fatal(err)
	}
	if n := c.poll(); n != 0 || c.cq.FD() != -1 {
		t.Errorf("a closed queue has %d completions and descriptor %d", n, c.cq.FD())
	}
	for range 100 {
		q, err := c.dev.CreateCQ(1)
		if err != nil {
			t.Fatal(err)
		}
		q.Close()
	}
	if n := c.dev.stats.Len(); n != 0 {
		t.Errorf("the device still knows %d closed queues", n)
	}
	if after := c.dev.Stats(); after.SentBytes < before.SentBytes || before.SentBytes == 0 {
		t.Errorf("%d bytes sent, %d before the queue was closed", after.SentBytes, before.SentBytes)
	}
	if err := c.cq.Close(); err == nil {
		t.Error("closed twice")
	}
}
