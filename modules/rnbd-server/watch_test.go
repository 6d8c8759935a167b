package server

import (
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
)

// Requests that a plugin does not answer are reported with their session and
// path, and those that it fails are counted.
func TestWatchdogFindsHungAndFailedRequests(t *testing.T) {
	mem := newMemory()
	mem.add("vol0", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.Pumps, c.HungAfter = 1, 100*time.Millisecond })
	i := r.connect("s")
	rsp, err := i.open("vol0", blk.ReadWrite)
	must(t, err)
	api := r.server.Control("test")
	stats := func() *controlpb.DeviceStats {
		l, err := api.DeviceStats(t.Context(), &controlpb.DeviceRequest{Device: "vol0"})
		must(t, err)
		return l.Devices[0]
	}
	if errno := <-i.start(true, 512, ioMessage(rsp.DeviceID, blk.Read, 0, 1<<40, 512)); errno == 0 {
		t.Error("a read far behind the end was answered")
	}
	if f := stats().Failed; len(f) != 1 || f[0].Stage != "check" || f[0].Count != 1 {
		t.Errorf("failed: %v", f)
	}
	if errno := <-i.start(true, 512, ioMessage(rsp.DeviceID, blk.Read, 0, 0, 512)); errno != 0 || r.server.pumps[0].busy() {
		t.Errorf("after a read, with errno %d, the pump has a request in flight: %v", errno, r.server.pumps[0].busy())
	}
	mem.disks["vol0"].hung.Store(true)
	for range 3 {
		i.start(true, 512, ioMessage(rsp.DeviceID, blk.Read, 0, 0, 512))
	}
	sdktest.Eventually(t, "three requests hang in the plugin", func() bool {
		h := stats().Hung
		return len(h) == 1 && h[0].Stage == "plugin" && h[0].Count == 3 && h[0].Session == "s" && h[0].Path != "" && h[0].Op == "read"
	})
	l, err := api.ListDevices(t.Context(), &controlpb.ListRequest{})
	must(t, err)
	if d := l.Devices[0]; len(d.Hung) != 1 || d.FailedRequests != 1 {
		t.Errorf("the list has %v", d)
	}
}
