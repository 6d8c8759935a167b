package client

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// newsTarget is a target that announces news.
func newsTarget(t *testing.T) *target {
	s := newTarget(t, 1<<20)
	s.features = rnbdwire.FeatureEvents
	return s
}

func TestE006_OneEventWaitsAndCountsAsNothing(t *testing.T) {
	s := newsTarget(t)
	c := s.newClient()
	d, io := s.device(c)
	eventually(t, "the client listens", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.events) == 1 })
	s.set(func() {
		if want := "type 32768 read true message 16 data 32 reply 32"; !slices.Contains(s.shapes, want) {
			t.Errorf("E-002: no message %q in %q", want, s.shapes)
		}
	})
	if n := d.session.transport.Stats().Inflight; n != 0 {
		t.Errorf("E-006: %d requests in flight on an idle session", n)
	}
	if errno := do(t, io, Request{Op: blk.Read, Len: 512}); errno != blk.OK {
		t.Errorf("read: errno %d", errno)
	}
	must(t, c.Unmap(t.Context(), "rnbd0", false)) // and does not wait for news
}

func TestNothingIsAskedOfAServerThatAnnouncesNothing(t *testing.T) {
	s := newTarget(t, 1<<20)
	s.device(s.newClient())
	time.Sleep(20 * time.Millisecond)
	if m := s.messages(); slices.Contains(m, "event") {
		t.Errorf("messages %q", m)
	}
}

func TestE008_E011_ResizeByTheServer(t *testing.T) {
	s := newsTarget(t)
	d, io := s.device(s.newClient())
	size := func(want uint64) {
		t.Helper()
		eventually(t, "the new size", func() bool { return d.Limits().Size == want })
	}
	s.tell(rnbdwire.EventRspFields{DeviceID: d.id.Load(), Number: 4, Sectors: 1024, Kind: rnbdwire.EventResize})
	size(512 << 10)
	if errno := do(t, io, Request{Op: blk.Read, Off: 512 << 10, Len: 512}); errno != blk.EIO {
		t.Errorf("E-008: a read behind the new end: errno %d, want EIO", errno)
	}
	s.tell(rnbdwire.EventRspFields{Number: 5, Kind: 77}) // of a later server
	s.tell(rnbdwire.EventRspFields{DeviceID: 9, Number: 6, Sectors: 8, Kind: rnbdwire.EventResize})
	s.tell(rnbdwire.EventRspFields{Number: 7, Kind: rnbdwire.EventDrain})
	s.tell(rnbdwire.EventRspFields{DeviceID: d.id.Load(), Number: 9, Sectors: 2048, Kind: rnbdwire.EventResize})
	size(1 << 20)
	eventually(t, "it listens on", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.seen) == 6 })
	s.set(func() {
		if want := []uint64{0, 4, 5, 6, 7, 9}; !slices.Equal(s.seen, want) {
			t.Errorf("E-004: told as seen %v, want %v", s.seen, want)
		}
	})
}

func TestE009_RemovalByTheServer(t *testing.T) {
	s := newsTarget(t)
	c := s.newClient()
	d, io := s.device(c, lossQueue(30*time.Second))
	s.tell(rnbdwire.EventRspFields{DeviceID: d.id.Load(), Number: 1, Kind: rnbdwire.EventRemoved})
	eventually(t, "closed", func() bool { return d.State() == Closed })
	if errno := do(t, io, Request{Op: blk.Read, Len: 512}); errno != blk.EIO {
		t.Errorf("E-009: errno %d, want EIO at once", errno)
	}
	if e := d.describeNow(t.Context()).LastError; !strings.Contains(e, "closed on the server") {
		t.Errorf("last error %q", e)
	}
	if _, err := c.Remap(t.Context(), "rnbd0"); err != nil {
		t.Fatalf("remap: %v", err)
	}
	if errno := do(t, io, Request{Op: blk.Read, Len: 512}); errno != blk.OK {
		t.Errorf("after the remap: errno %d", errno)
	}
}

func TestE007_ListensAgainAfterAReconnect(t *testing.T) {
	s := newsTarget(t)
	d, _ := s.device(s.newClient(), lossQueue(30*time.Second))
	s.tell(rnbdwire.EventRspFields{DeviceID: d.id.Load(), Number: 1, Sectors: 4096, Kind: rnbdwire.EventResize})
	eventually(t, "the new size", func() bool { return d.Limits().Size == 2<<20 })
	s.kill()
	eventually(t, "closed", func() bool { return d.State() == Closed })
	s.set(func() { s.seen, s.rsp.Sectors = nil, 8192 })
	s.start()
	eventually(t, "open", func() bool { return d.State() == Open })
	if got := d.Limits().Size; got != 4<<20 {
		t.Errorf("size %d, want what OPEN says", got)
	}
	s.tell(rnbdwire.EventRspFields{DeviceID: d.id.Load(), Number: 1, Sectors: 2048, Kind: rnbdwire.EventResize})
	eventually(t, "the new size", func() bool { return d.Limits().Size == 1<<20 })
	s.set(func() {
		if len(s.seen) == 0 || s.seen[0] != 0 {
			t.Errorf("E-007: told as seen %v in a new session", s.seen)
		}
	})
}

func TestE013_NewsWhileADeviceIsBeingOpened(t *testing.T) {
	s := newsTarget(t)
	s.holdOpen = true
	c := s.newClient()
	mapped := make(chan *Device, 1)
	go func() {
		d, err := c.Map(t.Context(), MapRequest{Path: "vol", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Frontend: "none"})
		if err != nil {
			t.Error(err)
		}
		mapped <- d
	}()
	eventually(t, "OPEN is there", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.heldOpen != nil })
	s.tell(rnbdwire.EventRspFields{DeviceID: 0, Number: 1, Sectors: 4096, Kind: rnbdwire.EventResize})
	time.Sleep(10 * time.Millisecond) // the client has the news, and must not drop it
	must(t, s.pollers[0].Call(t.Context(), func() { s.heldOpen.Respond(0) }))
	d := <-mapped
	eventually(t, "the new size", func() bool { return d.Limits().Size == 2<<20 })
}

func TestNewsThatIsNone(t *testing.T) {
	for name, f := range map[string]rnbdwire.EventRspFields{
		"a number that does not grow": {Number: 0, Kind: rnbdwire.EventResize, Sectors: 8},
		"a size beyond all":           {Number: 1, Kind: rnbdwire.EventResize, Sectors: 1 << 60},
	} {
		t.Run(name, func(t *testing.T) {
			s := newsTarget(t)
			d, io := s.device(s.newClient())
			s.tell(f)
			time.Sleep(10 * time.Millisecond)
			if d.Limits().Size != 1<<20 || do(t, io, Request{Op: blk.Read, Len: 512}) != blk.OK {
				t.Error("it was believed")
			}
		})
	}
}
