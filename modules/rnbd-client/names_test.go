package client

import (
	"errors"
	"fmt"
	"os"
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

// TestDefaultNamesStay has the token of default names be that of the client's folder, so
// that the next daemon there gives sessions the same names.
func TestDefaultNamesStay(t *testing.T) {
	one, again, other := clientToken("/run/rnbd/client.devices"), clientToken("/run/rnbd/client.devices"), clientToken("/run/user/7/rnbd/client.devices")
	if one != again || one == other || len(one) != 4 {
		t.Errorf("tokens %s and then %s, of another folder %s", one, again, other)
	}
	defer func(files []string) { hostIDFiles = files }(hostIDFiles)
	hostIDFiles = []string{filepath.Join(t.TempDir(), "none"), writeText(t, "7a3c\n")}
	if clientToken("/run/rnbd/client.devices") == one {
		t.Error("two hosts have one token")
	}
}

func writeText(t *testing.T, text string) string {
	name := filepath.Join(t.TempDir(), "text")
	must(t, os.WriteFile(name, []byte(text), 0o600))
	return name
}

// TestANameOfAKilledClientIsWaitedFor has a server that has not noticed yet that the last
// client is gone. Only a name that the client has made itself is waited for, and only
// soon after the start.
func TestANameOfAKilledClientIsWaitedFor(t *testing.T) {
	c := newTarget(t, 1<<20).newClient()
	refused := fmt.Errorf("open: %w", errors.Join(rtrs.ErrNameRefused, rtrs.ErrConnLost))
	made := "host-" + c.token + "@10-0-0-1:1234"
	for _, test := range []struct {
		name  string
		since time.Duration // after the start
		err   error
		want  bool
	}{
		{made, 0, refused, true},
		{made, killedLingers, refused, false},
		{made, 0, rtrs.ErrConnLost, false},
		{"given", 0, refused, false},
	} {
		c.started = time.Now().Add(-test.since)
		s := &session{client: c, name: test.name}
		if got := s.waitForName(t.Context(), test.err); got != test.want {
			t.Errorf("%s after %v, %v: waits %v", test.name, test.since, test.err, got)
		}
	}
}
