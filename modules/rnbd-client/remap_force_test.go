package client

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// hangingRemap remaps "vol" by force while its storage hangs: a read has no answer, and
// the server does not open it again.
func hangingRemap(t *testing.T, change ...func(*Config)) (s *target, c *Client, dir frontDir) {
	t.Helper()
	s = newTarget(t, 1<<20)
	c = s.clientToClose(append(change, withTestFront(t), func(cfg *Config) { cfg.MapTimeout = 2 * time.Second })...)
	_, err := s.mapIn(c, "other", "") // keeps the session
	must(t, err)
	d, dir := s.mapHanging(c, "vol")
	s.set(func() { s.openErr = blk.EBUSY })
	again, err := (&controlAPI{c: c}).Remap(t.Context(), &controlpb.RemapRequest{Device: d.name, Force: true})
	if !errors.Is(err, syscall.ETIMEDOUT) || !strings.Contains(err.Error(), "tried again until it is mapped") {
		t.Fatalf("remap: %v, %v", again, err)
	}
	if told := dir.told(); !slices.Contains(told, removedByForce) {
		t.Errorf("the front end was told %q", told)
	}
	return s, c, dir
}

// comeBack ends the hang of the storage.
func (s *target) comeBack() {
	s.set(func() { s.openErr = 0 })
	s.releaseAll(blk.EIO)
}

// isServed reports whether the device is open.
func (c *Client) isServed(name string) bool {
	d, err := c.Device(name)
	return err == nil && d.State() == Open
}

// A device that is remapped by force while its storage hangs is listed meanwhile, and is
// there again when the storage is.
func TestRemapByForce_StorageComesBack(t *testing.T) {
	s, c, dir := hangingRemap(t)
	defer c.Close(t.Context())
	l, err := (&controlAPI{c: c}).ListDevices(t.Context(), nil)
	must(t, err)
	i := slices.IndexFunc(l.Devices, func(d *controlpb.ClientDevice) bool { return d.Name == "rnbd1" })
	if i < 0 || l.Devices[i].State != "closed" || l.Devices[i].Endpoint != "" || !strings.Contains(l.Devices[i].LastError, "remapped by force") {
		t.Fatalf("listed as %v", l.Devices)
	}
	if _, err := c.RemapByForce(t.Context(), "rnbd1"); !errors.Is(err, syscall.EALREADY) && !errors.Is(err, syscall.EBUSY) {
		t.Errorf("again: %v", err)
	}
	s.comeBack()
	eventually(t, "the device is there again", func() bool { return c.isServed("rnbd1") })
	eventually(t, "its users see it", func() bool { return dir.adds() == 2 })
	eventually(t, "it waits no more", func() bool { return len(c.describeWaiting()) == 0 })
}

// The next daemon goes on to map a disk that was remapped by force.
func TestRemapByForce_DaemonRestartsMeanwhile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "client.devices")
	state := func(cfg *Config) { cfg.StateFile = name }
	s, c, dir := hangingRemap(t, state)
	must(t, c.Close(t.Context()))
	if saved, err := readState(name); len(saved) != 1 || err != nil || !saved[0].Remapped || saved[0].Name != "rnbd1" {
		t.Fatalf("saved %+v, %v", saved, err)
	}
	next := s.newClient(state, withTestFront(t))
	s.comeBack()
	eventually(t, "the device is there again", func() bool { return next.isServed("rnbd1") })
	eventually(t, "its users see it", func() bool { return dir.adds() == 2 })
}

// A device that waits after a remap by force has no users, so it is unmapped without force.
func TestRemapByForce_GivenUp(t *testing.T) {
	s, c, _ := hangingRemap(t)
	defer c.Close(t.Context())
	eventually(t, "the device is given up", func() bool {
		err := c.Unmap(t.Context(), "rnbd1", false) // EBUSY during a try
		return err == nil || errors.Is(err, syscall.ENOENT)
	})
	s.comeBack()
	if d, err := s.mapIn(c, "vol", ""); err != nil || len(c.describeWaiting()) != 0 {
		t.Errorf("map: %v, %v", d, err)
	}
}

// A remap by force of a device that works maps it again at once.
func TestRemapByForce_Works(t *testing.T) {
	_, c, d, dir := mapShown(t)
	next, err := c.RemapByForce(t.Context(), d.name)
	if err != nil || next == d || next.name != d.name || dir.adds() != 2 || d.State() != Unmapped {
		t.Errorf("remap: %v, %v", next, err)
	}
}
