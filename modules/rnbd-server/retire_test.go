package server

import (
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

func (r *rig) deviceState(name string) string {
	l, err := r.server.Control("").ListDevices(r.t.Context(), &controlpb.ListRequest{})
	must(r.t, err)
	for _, d := range l.Devices {
		if d.Name == name {
			return d.State
		}
	}
	return ""
}

// A request that does not end keeps neither its path nor its session, only its
// device: that is open for nobody until the request has ended.
func TestADiskThatDoesNotAnswerHoldsUpNothingElse(t *testing.T) {
	mem := newMemory()
	mem.add("slow", 1<<20)
	mem.add("other", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.RetireAfter = 20 * time.Millisecond })
	first := r.connect("first")
	dev, err := first.open("slow", blk.ReadWrite)
	must(t, err)
	_, err = first.open("other", blk.ReadWrite)
	must(t, err)
	mem.setHold(true)
	first.start(false, 512, ioMessage(dev.DeviceID, blk.Write, 0, 0, 512))
	eventually(t, "the plugin has the write", func() bool { return len(mem.requests()) == 1 })
	first.close()
	eventually(t, "the session is gone", func() bool { return len(r.server.front.Load().rtrs.Sessions()) == 0 })

	second := r.connect("first") // the same client again
	if _, err := second.open("slow", blk.ReadWrite); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("OPEN of the stuck device: %v, want EBUSY", err)
	}
	if _, err := second.open("slow", blk.ReadOnly); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("OPEN for reading: %v, want EBUSY", err)
	}
	if s := r.deviceState("slow"); !strings.HasPrefix(s, "stuck") {
		t.Errorf("it is shown as %q", s)
	}
	other, err := second.open("other", blk.ReadWrite) // and nobody else writes to it
	must(t, err)

	mem.setHold(false)
	eventually(t, "it opens again", func() bool { _, err := second.open("slow", blk.ReadWrite); return err == nil })
	if errno := second.rw(other.DeviceID, blk.Read, 0, make([]byte, 512)); errno != blk.OK {
		t.Errorf("read of another device: errno %d", errno)
	}
	if s := r.deviceState("slow"); s != "open" {
		t.Errorf("it is shown as %q", s)
	}
}

// A request that waits for a dead plugin when its path ends is not begun
// afterwards.
func TestARetiredRequestThatWasNotBegunIsNot(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("vol", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.RetireAfter = 20 * time.Millisecond })
	i := r.connect("s")
	dev, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	d := r.server.openDevices()[0]
	setState(d, devRecovering) // as while its plugin is on the way back
	i.start(false, 512, ioMessage(dev.DeviceID, blk.Write, 0, 0, 512))
	eventually(t, "the write is parked", func() bool { return d.plugin.server.sessions[0].Load().openMappings()[0].inFlight() == 1 })
	i.close()
	eventually(t, "the device is stuck", func() bool { return d.retired.Load() > 0 })
	in, err := d.plugin.sup.Current()
	must(t, err)
	d.plugin.reviveDevice(in, d)
	eventually(t, "it is free", func() bool { return d.retired.Load() == 0 })
	if n := len(mem.requests()); n != 0 {
		t.Errorf("%d requests of a path that has gone reached the plugin", n)
	}
}

// setState moves d to a state that follows its state.
func setState(d *device, to devState) {
	d.plugin.mu.Lock()
	defer d.plugin.mu.Unlock()
	d.setState(to)
}

// Two devices are stuck after the loss of a session. One opens again when its
// own requests have ended, whether or not those of the other have.
func TestStuckDevicesDoNotWaitForEachOther(t *testing.T) {
	mem := newMemory()
	hangs, ends := mem.add("hangs", 1<<20), mem.add("ends", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.RetireAfter = 20 * time.Millisecond })
	first := r.connect("first")
	for _, name := range []string{"hangs", "ends"} {
		dev, err := first.open(name, blk.ReadWrite)
		must(t, err)
		mem.disks[name].hung.Store(true)
		first.start(false, 512, ioMessage(dev.DeviceID, blk.Write, 0, 0, 512))
	}
	eventually(t, "the plugin has the writes", func() bool { return len(mem.requests()) == 2 })
	first.close()
	eventually(t, "the session is gone", func() bool { return len(r.server.front.Load().rtrs.Sessions()) == 0 })
	second := r.connect("second")
	ends.hung.Store(false)
	eventually(t, "the device whose write has ended opens", func() bool { _, err := second.open("ends", blk.ReadWrite); return err == nil })
	if _, err := second.open("hangs", blk.ReadWrite); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("OPEN of the device that hangs: %v, want EBUSY", err)
	}
	hangs.hung.Store(false)
	eventually(t, "the other one opens", func() bool { _, err := second.open("hangs", blk.ReadWrite); return err == nil })
}
