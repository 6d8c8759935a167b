package client

import (
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// A server that has not done with a session lets go of the next one of its name:
// that is tried again, but only then.
func TestNameOfASessionThatJustEnded(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	mapVol := func() error {
		_, err := c.Map(t.Context(), MapRequest{Path: "vol", Session: "s", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Frontend: "none"})
		return err
	}
	s.refuse.Store(1)
	if err := mapVol(); !errors.Is(err, rtrs.ErrConnLost) || s.refuse.Load() != 0 {
		t.Fatalf("a name of another client: %v", err)
	}
	must(t, mapVol())
	must(t, c.Unmap(t.Context(), "rnbd0", false))
	s.refuse.Store(1)
	must(t, mapVol())
	must(t, c.Unmap(t.Context(), "rnbd0", false))

	s.refuse.Store(1 << 20)
	began := time.Now()
	if err := mapVol(); !errors.Is(err, rtrs.ErrConnLost) {
		t.Errorf("refused for good: %v", err)
	}
	if took := time.Since(began); took < nameLingers/2 || took > 2*nameLingers {
		t.Errorf("given up after %v", took)
	}
}

// A name that is reserved goes to a mapping that asks for it, and to no other.
func TestReservedNamesAreGivenWhenAskedFor(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient(func(cfg *Config) { cfg.ReservedNames = []string{"rnbd0", "rnbd1"} })
	d, err := s.mapIn(c, "vol", "")
	must(t, err)
	if d.Name() == "rnbd0" || d.Name() == "rnbd1" {
		t.Errorf("a mapping without a name is called %s", d.Name())
	}
	d, err = c.Map(t.Context(), MapRequest{Path: "vol2", Session: "one", Mode: blk.ReadWrite, Frontend: FrontendNone, Name: "rnbd0"})
	must(t, err)
	if d.Name() != "rnbd0" {
		t.Errorf("a mapping that asks for a name is called %s", d.Name())
	}
	must(t, c.Unmap(t.Context(), "rnbd0", false))
	c.Reserve([]string{"rnbd2"})
	for _, path := range []string{"vol3", "vol4", "vol5"} {
		d, err := s.mapIn(c, path, "")
		must(t, err)
		if d.Name() == "rnbd2" {
			t.Errorf("a mapping without a name has one that is reserved by now")
		}
	}
	_, err = c.Device("rnbd1")
	must(t, err) // not reserved any more
}

// The place of a device that is unmapped may go to another one.
func TestReservedNamesAreFreeAfterAnUnmap(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient(func(cfg *Config) { cfg.ReservedNames = []string{"rnbd0"} })
	_, err := c.Map(t.Context(), MapRequest{Path: "vol", Session: "one", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Frontend: FrontendNone, Name: "rnbd0"})
	must(t, err)
	must(t, c.Unmap(t.Context(), "rnbd0", false))
	d, err := s.mapIn(c, "vol2", "")
	must(t, err)
	if d.Name() != "rnbd0" {
		t.Errorf("the mapping in its place is called %s", d.Name())
	}
}

// A disk of the last daemon whose server is away keeps its name: no mapping that asks
// for none gets it, and the disk has it when its server is back.
func TestNamesOfDisksThatWaitAreKept(t *testing.T) {
	s := newTarget(t, 1<<20)
	dir := t.TempDir()
	state := filepath.Join(dir, "devices")
	saved := savedSample()
	saved.Name, saved.Path, saved.Location = "rnbd0", "vol2", "/dev/test-rnbd0"
	saved.Session, saved.Paths, saved.Frontend, saved.Settings, saved.Slots = "away", []string{"10.0.1.1"}, "test", map[string]string{"dir": dir}, 16
	must(t, writeState(state, &savedState{Version: stateVersion, Devices: []savedDevice{saved}}))
	s.kill()
	all := s.addrs
	s.addrs = all[:1]
	s.start()

	c := s.newClient(withTestFront(t), func(cfg *Config) { cfg.StateFile = state })
	for _, path := range []string{"vol", "vol3"} {
		d, err := s.mapIn(c, path, "")
		must(t, err)
		if d.Name() == saved.Name {
			t.Fatalf("%s has the name of a disk that waits", path)
		}
	}
	_, err := s.rtrs.Listen(s.net.Device("srv"), all[1])
	must(t, err)
	eventually(t, "the disk is served under its name", func() bool {
		d, err := c.Device(saved.Name)
		return err == nil && d.State() == Open && d.path == string(saved.Path)
	})
}
