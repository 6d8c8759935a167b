package client

import (
	"context"
	"errors"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// A server that does not know an open device any more answers ENOTCONN: the device
// is opened again. With loss=queue its users notice nothing.
func TestDeviceThatTheServerDoesNotKnowIsOpenedAgain(t *testing.T) {
	for _, loss := range []time.Duration{0, time.Minute} {
		t.Run(Loss{loss}.String(), func(t *testing.T) {
			s := newTarget(t, 1<<20)
			d, io := s.device(s.newClient(), lossQueue(loss))
			s.set(func() { s.forgot = s.nextID })
			errno := do(t, io, Request{Op: blk.Write, Len: 512})
			if want := map[bool]blk.Errno{true: blk.OK, false: blk.EIO}[loss > 0]; errno != want {
				t.Errorf("errno %d, want %d", errno, want)
			}
			eventually(t, "open", func() bool { return d.State() == Open && s.count("open vol") == 2 })
			if errno := do(t, io, Request{Op: blk.Write, Len: 512}); errno != blk.OK {
				t.Errorf("then: errno %d", errno)
			}
			if why := d.describe(plugin.DeviceStatus{}).LastError; why != "" {
				t.Errorf("last error %q of an open device", why)
			}
		})
	}
}

// While it does not open, the device is closed and says why, and its requests do not
// wait for ever.
func TestDeviceThatTheServerDoesNotKnowAndDoesNotOpen(t *testing.T) {
	s := newTarget(t, 1<<20)
	d, io := s.device(s.newClient(), lossQueue(time.Second))
	s.set(func() { s.forgot, s.openErr = s.nextID, blk.EBUSY })
	if errno := do(t, io, Request{Op: blk.Write, Len: 512}); errno != blk.EIO {
		t.Errorf("errno %d, want EIO", errno)
	}
	if why := d.describe(plugin.DeviceStatus{}).LastError; d.State() != Closed || why == "" {
		t.Errorf("state %s, last error %q", d.State(), why)
	}
}

// A device that somebody has closed on the server, as its news say, stays closed,
// also where a request was answered before the news came.
func TestDeviceThatWasClosedOnTheServerStaysSo(t *testing.T) {
	s := newTarget(t, 1<<20)
	s.features = rnbdwire.FeatureEvents
	d, io := s.device(s.newClient())
	s.set(func() { s.forgot = s.nextID })
	if errno := do(t, io, Request{Op: blk.Write, Len: 512}); errno != blk.EIO {
		t.Errorf("errno %d, want EIO", errno)
	}
	if s.count("open vol") == 2 {
		t.Skip("the machine stalls: it is open again before the news")
	}
	s.tell(rnbdwire.EventRspFields{Kind: rnbdwire.EventRemoved, Number: 1, DeviceID: d.id.Load()})
	eventually(t, "the reason", func() bool {
		return s.count("open vol") == 2 || strings.Contains(d.describe(plugin.DeviceStatus{}).LastError, "closed on the server")
	})
	time.Sleep(2 * eventDelay)
	if s.count("open vol") == 1 && d.State() != Closed {
		t.Errorf("state %s", d.State())
	}
}

// An OPEN that hangs after the return of a server does not keep the other devices.
func TestReopenBesideAnOpenThatHangs(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient(func(cfg *Config) { cfg.MapTimeout = 2 * time.Minute })
	var devices []*Device
	for _, path := range []string{"slow", "a", "b", "c"} {
		d, err := s.mapIn(c, path, "")
		must(t, err)
		devices = append(devices, d)
	}
	s.set(func() { s.slow = "slow" })
	s.kill()
	eventually(t, "closed", func() bool { return devices[3].State() == Closed })
	s.start()
	for _, d := range devices[1:] {
		eventually(t, "open", func() bool { return d.State() == Open })
	}
	eventually(t, "OPEN hangs", s.hasOpen)
	if devices[0].State() != Closed {
		t.Errorf("state %s", devices[0].State())
	}
	s.answerOpen()
	eventually(t, "open", func() bool { return devices[0].State() == Open })
}

// An OPEN that is given up is closed on the server when it is answered after all,
// unless the path is mapped again by then.
func TestOpen_GivenUpIsClosedWhenItIsAnswered(t *testing.T) {
	for name, again := range map[string]bool{"nobody maps it again": false, "it is mapped again": true} {
		t.Run(name, func(t *testing.T) {
			s := newTarget(t, 1<<20)
			c := s.newClient()
			_, err := s.mapIn(c, "other", "") // keeps the session
			must(t, err)
			s.set(func() { s.slow = "vol" })
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			mapped := async(func() error {
				_, err := c.Map(ctx, MapRequest{Path: "vol", Session: "one", Mode: blk.ReadWrite, Frontend: "none"})
				return err
			})
			eventually(t, "OPEN is there", s.hasOpen)
			cancel()
			if err := soon(t, "the map", mapped); !errors.Is(err, context.Canceled) {
				t.Errorf("map: %v", err)
			}
			if again {
				s.set(func() { s.slow = "" })
				_, err := s.mapIn(c, "vol", "")
				must(t, err)
			}
			s.answerOpen()
			if again {
				time.Sleep(50 * time.Millisecond)
				if s.count("close") != 0 {
					t.Error("CLOSE of a device that is mapped")
				}
				return
			}
			eventually(t, "CLOSE", func() bool { return s.count("close") == 1 })
		})
	}
}

// A device that has failed on the server says so while it lasts. A remap opens it
// again if the server has it under another id then.
func TestDeviceThatFailsOnTheServer(t *testing.T) {
	s := newTarget(t, 1<<20)
	s.features = rnbdwire.FeatureEvents
	c := s.newClient()
	d, io := s.device(c)
	s.tell(rnbdwire.EventRspFields{Kind: rnbdwire.EventFailed, Number: 1, DeviceID: d.id.Load()})
	eventually(t, "the reason", func() bool { return d.describe(plugin.DeviceStatus{}).LastError != "" })
	remapFails := func(when string) {
		t.Helper()
		_, err := c.Remap(t.Context(), d.name)
		if !errors.Is(err, syscall.EIO) || !strings.Contains(err.Error(), "has failed on the server") || d.State() != Open {
			t.Errorf("remap, %s: %v, want EIO and the reason; state %s", when, err, d.State())
		}
	}
	s.set(func() { s.openErr = blk.EIO })
	remapFails("refused")
	s.set(func() { s.openErr, s.nextID = 0, d.id.Load() })
	remapFails("under the same id")
	s.tell(rnbdwire.EventRspFields{Kind: rnbdwire.EventBack, Number: 2, DeviceID: d.id.Load(), Sectors: 4096})
	eventually(t, "it is back", func() bool {
		return d.describe(plugin.DeviceStatus{}).LastError == "" && d.Limits().Size == 4096*512
	})
	if _, err := c.Remap(t.Context(), d.name); !errors.Is(err, syscall.EALREADY) {
		t.Errorf("remap: %v, want EALREADY", err)
	}
	old := d.id.Load()
	s.tell(rnbdwire.EventRspFields{Kind: rnbdwire.EventFailed, Number: 3, DeviceID: old})
	eventually(t, "the reason", func() bool { return d.describe(plugin.DeviceStatus{}).LastError != "" })
	_, err := c.Remap(t.Context(), d.name)
	must(t, err)
	if now := d.describe(plugin.DeviceStatus{}); now.DeviceId == old || now.LastError != "" || now.State != "open" {
		t.Errorf("remapped: %v", now)
	}
	if errno := do(t, io, Request{Op: blk.Read, Len: 512}); errno != blk.OK {
		t.Errorf("a read then: errno %d", errno)
	}
}

// The end of a session that its last device takes along is no loss.
func TestUnmapLogsNoLoss(t *testing.T) {
	s := newTarget(t, 1<<20)
	var mu sync.Mutex
	var text strings.Builder
	c := s.newClient(logTo(func(b []byte) { mu.Lock(); defer mu.Unlock(); text.Write(b) }))
	d, err := s.mapIn(c, "vol", "")
	must(t, err)
	must(t, c.Unmap(t.Context(), d.name, false))
	mu.Lock()
	defer mu.Unlock()
	if strings.Contains(text.String(), "lost its last path") || !strings.Contains(text.String(), "device unmapped") {
		t.Errorf("log: %s", text.String())
	}
}
