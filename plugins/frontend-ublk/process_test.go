package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugintest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

func TestMain(m *testing.M) { plugintest.Main(m, main) }

// The driver itself is tested in test/devices. Here: a host that has none.
func TestWithoutDriver(t *testing.T) {
	if uring.Supported() != nil {
		t.Skip("no io_uring here")
	}
	f := newFrontend(quiet)
	dir := t.TempDir()
	spec := plugin.DeviceSpec{Name: "x", Limits: limits(), Slots: 4, SlotSize: 64 << 10, Arena: make([]byte, 256<<10)}
	f.ctl.path = filepath.Join(dir, "ublk-control")
	err := f.AddDevice(t.Context(), spec)
	if blk.ToErrno(err) != blk.ENODEV || !strings.Contains(err.Error(), "modprobe ublk_drv") {
		t.Errorf("no driver: %v", err)
	}
	if f.Openers(0) != 0 || f.Location(0) != "" || f.RemoveDevice(t.Context(), 0, true) == nil {
		t.Error("a device that was refused is there")
	}
	if os.Geteuid() != 0 {
		if err := os.WriteFile(f.ctl.path, nil, 0); err != nil {
			t.Fatal(err)
		}
		if err := f.AddDevice(t.Context(), spec); blk.ToErrno(err) != blk.EACCES {
			t.Errorf("no permission: %v", err)
		}
	}
}

// The process lives with its host whether there is a driver or not.
func TestProcess(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p, err := plugin.Launch(ctx, plugin.Config{Path: exe, Kind: plugin.KindFrontend, Name: "ublk", Pumps: 2, Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Kill()
	arena, err := shm.NewArena("ublk-test", 4*64<<10)
	if err != nil {
		t.Fatal(err)
	}
	defer arena.Close()
	for i := range 2 {
		ring, err := shm.NewRing(64)
		if err != nil {
			t.Fatal(err)
		}
		defer ring.Close()
		if err := p.AttachQueue(ctx, i, ring); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.AttachArena(ctx, 1, arena); err != nil {
		t.Fatal(err)
	}
	bad := limits()
	bad.LogicalBlockSize = 3
	spec := plugin.DeviceSpec{Index: 1, Name: "x", Limits: bad, ArenaID: 1, Slots: 4, SlotSize: 64 << 10}
	if err := p.AddDevice(ctx, spec); blk.ToErrno(err) != blk.EINVAL {
		t.Errorf("block size 3: %v", err)
	}
	if err := p.DetachArena(ctx, 1); err != nil {
		t.Error(err)
	}
	if err := p.Stop(ctx); err != nil {
		t.Error(err)
	}
}
