package client

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// readState returns the disks that the file has.
func readState(name string) ([]savedDevice, error) {
	state, err := loadState(name)
	return state.Devices, err
}

func savedSample() savedDevice {
	return savedDevice{
		Name: "rnbd3", Path: "vg0/lv1", Session: "s1", Paths: []string{"10.0.0.2@10.0.0.1", "10.1.0.1%iwarp"}, Port: 1234,
		Access: "ro", Loss: "queue:30s", Frontend: "ublk", Settings: map[string]string{"number": "3"}, Slots: 64,
		Identity: "ABC", Location: "/dev/ublkb3",
	}
}

func TestState_RoundTrip(t *testing.T) {
	name := filepath.Join(t.TempDir(), "new", "client.devices")
	if saved, err := readState(name); len(saved) != 0 || err != nil {
		t.Errorf("no file: %v, %v", saved, err)
	}
	want := []savedDevice{savedSample()}
	must(t, writeState(name, &savedState{Version: stateVersion, Devices: want}))
	got, err := readState(name)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("read back %+v, %v", got, err)
	}
	if st, err := os.Stat(name); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	r, err := got[0].mapRequest()
	if err != nil || r.Mode != blk.ReadOnly || r.Loss.Queue != 30*time.Second || r.identity != "ABC" || r.location != "/dev/ublkb3" ||
		r.Slots != 64 || r.Name != "rnbd3" || r.Frontend != "ublk" || r.Options["number"] != "3" || len(r.Paths) != 2 {
		t.Errorf("request %+v, %v", r, err)
	}
	must(t, writeState(name, &savedState{Version: stateVersion}))
	if _, err := os.Stat(name); !os.IsNotExist(err) {
		t.Errorf("a file without devices is left: %v", err)
	}
}

// A state that is a link to another file is not followed: it is set aside like one
// that cannot be read.
func TestState_Link(t *testing.T) {
	dir := t.TempDir()
	name, other := filepath.Join(dir, "client.devices"), filepath.Join(dir, "other")
	must(t, writeState(other, &savedState{Version: stateVersion, Devices: []savedDevice{savedSample()}}))
	must(t, os.Symlink(other, name))
	if saved, err := readState(name); err == nil {
		t.Errorf("read %+v", saved)
	}
	if c := stateClient(t, name); len(c.waiting) != 0 {
		t.Errorf("%d disks wait", len(c.waiting))
	}
	must(t, writeState(name, &savedState{Version: stateVersion, Devices: []savedDevice{savedSample()}}))
	if st, err := os.Lstat(name); err != nil || !st.Mode().IsRegular() {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
}

func TestState_BadEntries(t *testing.T) {
	for name, change := range map[string]func(*savedDevice){
		"no identity": func(s *savedDevice) { s.Identity = "" },
		"no name":     func(s *savedDevice) { s.Name = "" },
		"no node":     func(s *savedDevice) { s.Location = "nbd://x" },
		"bad access":  func(s *savedDevice) { s.Access = "all" },
		"bad loss":    func(s *savedDevice) { s.Loss = "never" },
		"no slots":    func(s *savedDevice) { s.Slots = 0 },
	} {
		s := savedSample()
		change(&s)
		if r, err := s.mapRequest(); err == nil {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

// stateClient is a client without pumps and front ends, that restores name.
func stateClient(t *testing.T, name string) *Client {
	c := &Client{cfg: Config{StateFile: name, MapTimeout: time.Second}, log: slog.New(slog.DiscardHandler), sessions: map[string]*session{}}
	c.life, c.endLife = context.WithCancel(context.Background())
	t.Cleanup(c.endRestoring)
	c.restoreDisks()
	return c
}

func TestState_UnreadableIsKept(t *testing.T) {
	name := filepath.Join(t.TempDir(), "client.devices")
	for _, text := range []string{"{", `{"version": 0, "devices": []}`} {
		must(t, os.WriteFile(name, []byte(text), 0o600))
		c := stateClient(t, name)
		b, err := os.ReadFile(name + ".bad")
		if len(c.waiting) != 0 || err != nil || string(b) != text {
			t.Errorf("%s: %d wait, kept %q, %v", text, len(c.waiting), b, err)
		}
	}
}

// The state of a newer rnbd is left as it is, and no daemon starts beside it.
func TestState_NewerVersionIsRefused(t *testing.T) {
	name := filepath.Join(t.TempDir(), "client.devices")
	text := []byte(`{"version": 2, "devices": [{"name": "rnbd0", "colour": "red"}]}`)
	must(t, os.WriteFile(name, text, 0o600))
	cfg := DefaultConfig()
	cfg.StateFile = name
	c, err := New(t.Context(), cfg)
	if err == nil {
		c.Close(t.Context())
	}
	if !errors.Is(err, errNewerState) || !strings.Contains(err.Error(), "version 2") {
		t.Errorf("a daemon starts: %v", err)
	}
	if b, err := os.ReadFile(name); err != nil || string(b) != string(text) {
		t.Errorf("the file is %q now, %v", b, err)
	}
	if others, _ := filepath.Glob(name + ".*"); len(others) > 0 {
		t.Errorf("files %v were made", others)
	}
}

// A state that was cut anywhere is set aside whole: no disk of it is served with
// half of its settings.
func TestState_CutAnywhere(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "client.devices")
	must(t, writeState(name, &savedState{Version: stateVersion, Devices: []savedDevice{savedSample()}, Leftovers: []savedLeftover{{Identity: "DEF"}}}))
	whole, err := os.ReadFile(name)
	must(t, err)
	end := len(strings.TrimRight(string(whole), "\n"))
	for n := range end {
		must(t, os.WriteFile(name, whole[:n], 0o600))
		c := stateClient(t, name)
		b, err := os.ReadFile(name + ".bad")
		if len(c.waiting)+len(c.leftoverRecords()) != 0 || err != nil || len(b) != n {
			t.Fatalf("%d bytes: %d disks wait, %d bytes set aside, %v", n, len(c.waiting), len(b), err)
		}
		must(t, os.Remove(name+".bad"))
	}
}

// A state that cannot be written, as on a full disk, leaves the file of before,
// is logged once, and is written when that is possible again.
func TestState_WrittenLater(t *testing.T) {
	name := filepath.Join(t.TempDir(), "client.devices")
	must(t, writeState(name, &savedState{Version: stateVersion, Devices: []savedDevice{savedSample()}}))
	before, err := os.ReadFile(name)
	must(t, err)
	var log lockedText
	c := &Client{cfg: Config{StateFile: name}, log: slog.New(slog.NewTextHandler(&log, nil)), sessions: map[string]*session{}}
	c.life, c.endLife = context.WithCancel(context.Background())
	t.Cleanup(c.endRestoring)
	obstacle := filepath.Join(name+".new", "x") // a folder in the way of the next file
	must(t, os.MkdirAll(obstacle, 0o700))
	other := savedSample()
	other.Name, other.Identity = "rnbd4", "DEF"
	c.mapMu.Lock()
	c.setWaiting([]savedDevice{savedSample(), other})
	c.requestSave()
	c.mapDone()
	c.saveLeftovers()
	if b, err := os.ReadFile(name); err != nil || string(b) != string(before) {
		t.Errorf("the file of before is %q, %v", b, err)
	}
	if text := log.take(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "the state is not written") {
		t.Errorf("logged: %s", text)
	}
	must(t, os.RemoveAll(name+".new"))
	eventually(t, "the state is written", func() bool { saved, err := readState(name); return err == nil && len(saved) == 2 })
	eventually(t, "that is logged", func() bool { return strings.Contains(log.take(), "the state is written") })
}

// A disk waits while its server is away, keeps its name and its entry, and
// can be given up.
func TestState_WaitingDisk(t *testing.T) {
	name := filepath.Join(t.TempDir(), "client.devices")
	must(t, writeState(name, &savedState{Version: stateVersion, Devices: []savedDevice{savedSample()}}))
	c := stateClient(t, name)
	if _, err := c.Map(t.Context(), MapRequest{Path: "x", Name: "rnbd3", Paths: []string{"10.0.0.1"}}); !errors.Is(err, syscall.EEXIST) || !strings.Contains(err.Error(), "/dev/ublkb3") {
		t.Errorf("its name is given away: %v", err)
	}
	l, err := (&controlAPI{c: c}).ListDevices(t.Context(), nil)
	if err != nil || len(l.Devices) != 1 || l.Devices[0].Name != "rnbd3" || l.Devices[0].State != "closed" || l.Devices[0].LastError == "" {
		t.Errorf("listed as %v, %v", l.GetDevices(), err)
	}
	c.mapMu.Lock()
	c.requestSave()
	c.mapDone()
	if saved, err := readState(name); len(saved) != 1 || err != nil {
		t.Errorf("its entry is lost: %v, %v", saved, err)
	}
	if err := c.Unmap(t.Context(), "rnbd3", false); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("unmap: %v", err)
	}
	if err := c.Unmap(t.Context(), "ublkb3", true); err != nil {
		t.Errorf("forced: %v", err)
	}
	if saved, err := readState(name); len(saved) != 0 || err != nil {
		t.Errorf("its entry is left: %v, %v", saved, err)
	}
	if err := c.Unmap(t.Context(), "rnbd3", true); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("again: %v", err)
	}
}

// Disks are removed many at a time, but not all. Disks without a turn when the
// time is over stay.
func TestRemoveAllIsBounded(t *testing.T) {
	disks := make([]*Device, 2*removesAtOnce+7)
	for i := range disks {
		disks[i] = &Device{}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var running, begun atomic.Int32
	goOn := make(chan struct{})
	done := make(chan []error, 1)
	go func() {
		done <- removeAll(ctx, disks, func(*Device) error {
			if running.Add(1) > removesAtOnce {
				t.Error("too many at a time")
			}
			begun.Add(1)
			<-goOn
			running.Add(-1)
			return nil
		})
	}()
	eventually(t, "many at a time", func() bool { return begun.Load() == removesAtOnce })
	cancel()
	close(goOn)
	kept := 0
	for _, err := range <-done {
		if err != nil {
			kept++
		}
	}
	if kept+int(begun.Load()) != len(disks) || kept == 0 {
		t.Errorf("%d were asked for, %d stay, of %d", begun.Load(), kept, len(disks))
	}
}
