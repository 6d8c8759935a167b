package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// refusedOf returns the counter of refusals for that reason.
func (r *rig) refusedOf(reason string) uint64 {
	info, err := r.server.Control("").Info(r.t.Context(), &controlpb.InfoRequest{})
	must(r.t, err)
	for _, c := range info.FabricCounters {
		if c.Fabric == "server" && c.Name == "refused" && c.Reason == reason {
			return c.Value
		}
	}
	r.t.Errorf("nothing counts refused %s", reason)
	return 0
}

func TestDevicesPerSessionAreLimited(t *testing.T) {
	mem := newMemory()
	for n := range 4 {
		mem.add(fmt.Sprint("vol", n), 1<<20)
	}
	r := newRig(t, mem, func(c *Config) { c.SessionDevices = 2 })
	first, second := r.connect("first"), r.connect("second")
	dev, err := first.open("vol0", blk.ReadWrite)
	must(t, err)
	_, err = first.open("vol1", blk.ReadWrite)
	must(t, err)
	if _, err := first.open("vol2", blk.ReadWrite); !errors.Is(err, syscall.EMFILE) {
		t.Errorf("a device too many: %v, want EMFILE", err)
	}
	if n := r.refusedOf("devices"); n != 1 {
		t.Errorf("%d refusals are counted, want 1", n)
	}
	_, err = first.open("vol1", blk.ReadWrite) // is open
	must(t, err)
	_, err = second.open("vol2", blk.ReadWrite)
	must(t, err)
	must(t, first.closeDevice(dev.DeviceID))
	_, err = first.open("vol3", blk.ReadWrite)
	must(t, err)
}

func TestOpensUnderWayAreLimited(t *testing.T) {
	mem := newMemory()
	slow := mem.add("slow", 1<<20)
	slow.opening = make(chan struct{})
	mem.add("vol", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.Opens = 1 })
	i := r.connect("s")
	i.openAsync("slow")
	eventually(t, "an OPEN is under way", func() bool { return mem.opened() == 1 })
	if _, err := i.open("vol", blk.ReadWrite); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("an OPEN too many: %v, want EBUSY", err)
	}
	close(slow.opening)
	eventually(t, "the next OPEN is served", func() bool { _, err := i.open("vol", blk.ReadWrite); return err == nil })
	if n := r.refusedOf("opens"); n == 0 {
		t.Error("no refusal is counted")
	}
}

// tryConnect opens a session that is to be refused.
func (r *rig) tryConnect(name string) error {
	poller, err := rtrs.NewPoller(0)
	must(r.t, err)
	ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
	var wg sync.WaitGroup
	wg.Go(func() { poller.Run(ctx) })
	cfg := rtrs.ClientConfig{Pollers: []*rtrs.Poller{poller}, OnDone: func(int, uint64, int) {}, Logger: slog.New(slog.DiscardHandler)}
	s, err := rtrs.Open(ctx, name, []rtrs.PathAddr{{Device: r.clientDevice(name), Dst: r.addr}}, cfg)
	if err == nil {
		s.Close(ctx)
	}
	cancel()
	wg.Wait()
	poller.Close()
	return err
}

// The transport's limits come from the configuration.
func TestLimitsReachTheTransport(t *testing.T) {
	r := newRig(t, newMemory(), func(c *Config) { c.Limits.Sessions = 1 })
	r.connect("first")
	if u := r.server.front.Load().rtrs.Usage(); u.Sessions != 1 {
		t.Fatalf("usage %+v", u)
	}
	if err := r.tryConnect("second"); !errors.Is(err, syscall.ENOMEM) {
		t.Errorf("a session too many: %v, want ENOMEM", err)
	}
	if n := r.refusedOf("sessions"); n == 0 {
		t.Error("no refusal is counted")
	}
}
