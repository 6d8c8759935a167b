package client

import (
	"errors"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// comeBackChanged has its target's sessions come back to a server that was changed.
func (s *target) comeBackChanged(d *Device, change func()) {
	s.t.Helper()
	s.kill()
	eventually(s.t, "closed", func() bool { return d.State() == Closed })
	s.set(change)
	s.start()
}

// A device that returns under its name must be the one that users know. If not,
// waiting requests are not sent, and the device reports the reason.
func TestE021_E022_ReopenOfAnotherDevice(t *testing.T) {
	const writeThrough, writeBack, fua = 0, rnbdwire.CacheWriteBack, rnbdwire.CacheFUA
	for _, x := range []struct {
		name   string
		before rnbdwire.OpenRspFields // only the fields that are set count
		cache  uint8
		change func(*target)
		reason string // empty: it opens
	}{
		{"another volume", rnbdwire.OpenRspFields{Volume: 1}, writeBack, func(s *target) { s.rsp.Volume = 2 }, "another volume"},
		{"the same volume", rnbdwire.OpenRspFields{Volume: 1}, writeBack, func(*target) {}, ""},
		{"a server that does not tell any more", rnbdwire.OpenRspFields{Volume: 1}, writeBack, func(s *target) { s.rsp.Volume = 0 }, ""},
		{"a server that tells now", rnbdwire.OpenRspFields{}, writeBack, func(s *target) { s.rsp.Volume = 2 }, ""},
		{"bytes that mean nothing", rnbdwire.OpenRspFields{Volume: 1}, writeBack, func(s *target) { s.features, s.rsp.Volume = 0, 2 }, ""},
		{"a write cache that users do not flush", rnbdwire.OpenRspFields{}, writeThrough, func(s *target) { s.rsp.CachePolicy = writeBack }, "write cache"},
		{"no write cache any more", rnbdwire.OpenRspFields{}, writeBack, func(s *target) { s.rsp.CachePolicy = writeThrough }, ""},
		{"no FUA any more", rnbdwire.OpenRspFields{}, writeBack | fua, func(s *target) { s.rsp.CachePolicy = writeBack }, "FUA"},
		{"FUA besides", rnbdwire.OpenRspFields{}, writeBack, func(s *target) { s.rsp.CachePolicy = writeBack | fua }, ""},
		{"larger blocks", rnbdwire.OpenRspFields{}, writeBack, func(s *target) { s.rsp.LogicalBlockSize = 4096 }, "blocks"},
		{"smaller blocks", rnbdwire.OpenRspFields{LogicalBlockSize: 4096}, writeBack, func(s *target) { s.rsp.LogicalBlockSize = 512; s.rsp.Sectors++ }, ""},
		{"smaller chunks", rnbdwire.OpenRspFields{}, writeBack, func(s *target) { s.chunk = 32768 }, "requests of"},
		{"larger chunks", rnbdwire.OpenRspFields{}, writeBack, func(s *target) { s.chunk = 131072 }, ""},
	} {
		for _, loss := range []time.Duration{0, time.Minute} {
			t.Run(x.name+" loss="+Loss{loss}.String(), func(t *testing.T) {
				s := newTarget(t, 1<<20)
				s.features = rnbdwire.FeatureIdentity
				s.rsp.Volume, s.rsp.CachePolicy = x.before.Volume, x.cache
				if n := x.before.LogicalBlockSize; n != 0 {
					s.rsp.LogicalBlockSize = n
				}
				c := s.newClient()
				d, io := s.device(c, lossQueue(loss))
				size := io.SlotSize()
				s.comeBackChanged(d, func() { x.change(s) })
				if x.reason == "" {
					eventually(t, "open", func() bool { return d.State() == Open })
					if l := d.Limits(); l.LogicalBlockSize != max(512, uint32(x.before.LogicalBlockSize)) || l.Size%uint64(l.LogicalBlockSize) != 0 {
						t.Errorf("%d bytes in blocks of %d", l.Size, l.LogicalBlockSize)
					}
					if errno := do(t, io, Request{Op: blk.Write, Len: uint32(size)}); errno != blk.OK {
						t.Errorf("errno %d", errno)
					}
					return
				}
				eventually(t, "the reason", func() bool {
					return strings.Contains(d.describe(plugin.DeviceStatus{}).LastError, x.reason)
				})
				if errno := do(t, io, Request{Op: blk.Write, Len: 4096}); errno != blk.EIO || d.State() != Closed {
					t.Errorf("errno %d, state %s", errno, d.State())
				}
				if n := s.count("io"); n != 0 {
					t.Errorf("%d requests were sent", n)
				}
				if _, err := c.Remap(t.Context(), d.name); !errors.Is(err, syscall.ESTALE) {
					t.Errorf("remap: %v, want ESTALE", err)
				}
				eventually(t, "all are closed on the server", func() bool { return s.count("open vol")-1 == s.count("close") })
				_, err := c.Control("").Remap(t.Context(), &controlpb.RemapRequest{Device: d.name, AcceptNew: true})
				if volume := x.reason == "another volume"; volume != (err == nil) {
					t.Errorf("remap that accepts another volume: %v", err)
				}
			})
		}
	}
}

// A device is flushed as before after its write cache went: the cache may come
// back.
func TestReopenKeepsTheWriteCacheThatUsersKnow(t *testing.T) {
	s := newTarget(t, 1<<20)
	d, _ := s.device(s.newClient(), lossQueue(time.Minute))
	for _, policy := range []uint8{0, rnbdwire.CacheWriteBack | rnbdwire.CacheFUA, 0} {
		s.comeBackChanged(d, func() { s.rsp.CachePolicy = policy })
		eventually(t, "open", func() bool { return d.State() == Open })
		if l := d.Limits(); !l.WriteCache || !l.FUA {
			t.Errorf("policy %d: write cache %t, FUA %t", policy, l.WriteCache, l.FUA)
		}
	}
}

// A disk of the last daemon is served only with the volume that it had.
func TestRestore_AnotherVolume(t *testing.T) {
	s := newTarget(t, 1<<20)
	s.features, s.rsp.Volume = rnbdwire.FeatureIdentity, 2
	state := filepath.Join(t.TempDir(), "client.devices")
	saved := savedSample()
	saved.Name, saved.Location, saved.Frontend, saved.Paths = "vol0", "/dev/null", "test", []string{"10.0.0.1"}
	saved.Settings = map[string]string{"dir": t.TempDir()}
	saved.Known = &deviceFacts{Volume: 1, Block: 512, MaxIO: 61440, WriteCache: true, FUA: true}
	must(t, writeState(state, &savedState{Version: stateVersion, Devices: []savedDevice{saved}}))
	c := s.newClient(withTestFront(t), func(cfg *Config) { cfg.StateFile = state })
	eventually(t, "two attempts", func() bool { return s.count("close") >= 2 })
	if _, err := c.Device("vol0"); err == nil {
		t.Fatal("it is served")
	}
	_, err := c.Control("").Remap(t.Context(), &controlpb.RemapRequest{Device: "vol0", AcceptNew: true})
	must(t, err)
	eventually(t, "it is served", func() bool { d, err := c.Device("vol0"); return err == nil && d.State() == Open })
}
