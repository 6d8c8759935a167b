package client

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// withState gives a client a state file.
func withState(t *testing.T) (name string, use func(*Config)) {
	name = filepath.Join(t.TempDir(), "client.devices")
	return name, func(cfg *Config) { cfg.StateFile = name }
}

// load reads the state file.
func load(t *testing.T, name string) savedState {
	t.Helper()
	state, err := loadState(name)
	must(t, err)
	return state
}

// A disk is written down before it is made, as one to take away, and as one to serve
// when its map is done.
func TestState_DiskBeforeItIsMade(t *testing.T) {
	s := newTarget(t, 1<<20)
	name, use := withState(t)
	c := s.newClient(withTestFront(t), use)
	dir := newFrontDir(t)
	must(t, dir.set("hold", ""))
	mapped := async(func() error { _, err := s.mapIn(c, "vol", dir); return err })
	eventually(t, "the front end gets the device", func() bool { return dir.adds() == 1 })
	state := load(t, name)
	if len(state.Devices) != 0 || len(state.Leftovers) != 1 || state.Leftovers[0].Location != plugin.LocationUnknown || state.Leftovers[0].Identity == "" {
		t.Errorf("written down before: %+v", state)
	}
	must(t, dir.remove("hold"))
	must(t, soon(t, "the map", mapped))
	after := load(t, name)
	if len(after.Devices) != 1 || len(after.Leftovers) != 0 || after.Devices[0].Identity != state.Leftovers[0].Identity {
		t.Errorf("written down after: %+v", after)
	}
	must(t, c.Unmap(t.Context(), "rnbd0", false))
	eventually(t, "nothing is written down", func() bool {
		state := load(t, name)
		return len(state.Devices)+len(state.Leftovers) == 0
	})
}

// A map that fails leaves no entry.
func TestState_MapThatFails(t *testing.T) {
	s := newTarget(t, 1<<20)
	name, use := withState(t)
	c := s.newClient(withTestFront(t), use)
	dir := newFrontDir(t)
	must(t, dir.set("fail", ""))
	if _, err := s.mapIn(c, "vol", dir); err == nil {
		t.Fatal("the map succeeded")
	}
	eventually(t, "nothing is written down", func() bool { return len(load(t, name).Leftovers) == 0 })
}

func leftoverSample(dir frontDir, location string) savedLeftover {
	return savedLeftover{
		Name: "rnbd0", Frontend: "test", Settings: map[string]string{"dir": string(dir)}, Slots: 4, SlotSize: 4096,
		Limits: blk.Limits{Size: 1 << 20, LogicalBlockSize: 512}, Identity: "before", Location: location,
	}
}

// The leftovers of the last daemon are removed at any location, and no other
// mapping gets their index meanwhile. Without a disk there is nothing to do.
func TestState_LeftoverIsTakenAway(t *testing.T) {
	for name, x := range map[string]struct {
		location string
		none     bool
	}{
		"a disk that is known":                 {"/dev/test-rnbd0", false},
		"a disk that has to be looked for":     {plugin.LocationUnknown, false},
		"one that is looked for and not there": {plugin.LocationUnknown, true},
	} {
		t.Run(name, func(t *testing.T) {
			file, use := withState(t)
			dir := newFrontDir(t)
			if x.none {
				must(t, dir.set("none", ""))
			}
			must(t, writeState(file, &savedState{Version: stateVersion, Leftovers: []savedLeftover{leftoverSample(dir, x.location)}}))
			s := newTarget(t, 1<<20)
			c := s.newClient(withTestFront(t), use)
			eventually(t, "nothing is written down", func() bool { return len(load(t, file).Leftovers) == 0 })
			if told := dir.told(); dir.adds() != 1 || slices.Contains(told, removedByForce) == x.none {
				t.Errorf("the front end was told %q", told)
			}
			if len(c.Devices()) != 0 {
				t.Errorf("%d devices", len(c.Devices()))
			}
		})
	}
}

// A leftover that no front end here can remove is kept for a daemon that can.
func TestState_LeftoverOfAnotherFrontEnd(t *testing.T) {
	file, use := withState(t)
	l := leftoverSample("", "/dev/ublkb7")
	l.Frontend = "ublk"
	must(t, writeState(file, &savedState{Version: stateVersion, Leftovers: []savedLeftover{l}}))
	s := newTarget(t, 1<<20)
	c := s.clientToClose(withTestFront(t), use)
	c.saveLeftovers()
	must(t, c.Close(t.Context()))
	if state := load(t, file); len(state.Leftovers) != 1 || state.Leftovers[0].Location != "/dev/ublkb7" {
		t.Errorf("written down: %+v", state)
	}
}

// A disk that was unmapped by force while its front end was dead is taken away by
// the next daemon, if this one ends before.
func TestState_LingeringDiskIsLeftToTheNextDaemon(t *testing.T) {
	var gate startGate
	file, use := withState(t)
	s := newTarget(t, 1<<20)
	c := s.clientToClose(withTestFront(t), gate.use, use)
	dir := newFrontDir(t)
	d, err := s.mapIn(c, "vol", dir)
	must(t, err)
	gate.shut()
	c.killFront(t)
	c.frontends[0].awaitDeath(t)
	c.unmapByForce(t, d)
	must(t, soon(t, "the close", async(func() error { return c.Close(context.WithoutCancel(t.Context())) })))
	state := load(t, file)
	if len(state.Devices) != 0 || len(state.Leftovers) != 1 || state.Leftovers[0].Location != "/dev/test-rnbd0" {
		t.Fatalf("written down: %+v", state)
	}
	_ = s.newClient(withTestFront(t), use)
	eventually(t, "nothing is written down", func() bool { return len(load(t, file).Leftovers) == 0 })
	if told := dir.told(); !strings.HasPrefix(told[len(told)-1], removedByForce) {
		t.Errorf("the front end was told %q", told)
	}
}

// A map that is given up while its disk is being written down gives its memory back,
// and no process is shown it afterwards.
func TestState_MapGivenUpBeforeTheDiskIsWrittenDown(t *testing.T) {
	s := newTarget(t, 1<<20)
	_, use := withState(t)
	c := s.newClient(withTestFront(t), use)
	dir := newFrontDir(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c.saving.Lock()
	mapped := async(func() error {
		_, err := c.Map(ctx, MapRequest{Path: "vol", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Options: map[string]string{"dir": string(dir)}})
		return err
	})
	var all []*attachment
	eventually(t, "the disk is to be written down", func() bool { all = c.frontends[0].allAttachments(); return len(all) == 1 && c.unsaved.Load() })
	cancel()
	eventually(t, "the memory is given back", func() bool {
		all[0].mu.Lock()
		defer all[0].mu.Unlock()
		return all[0].dev == nil
	})
	c.saving.Unlock()
	if err := soon(t, "the map", mapped); !errors.Is(err, context.Canceled) {
		t.Errorf("map: %v", err)
	}
	eventually(t, "its place is free", func() bool { return !c.keepsIndex(0) })
	if dir.adds() != 0 {
		t.Error("the device was shown")
	}
}
