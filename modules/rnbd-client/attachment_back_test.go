package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
)

// The tests of comebacks wait for pauses most of the time, so they run in parallel.

// comebackRig is a client with devices by the test front end.
type comebackRig struct {
	t    *testing.T
	s    *target
	c    *Client
	f    *frontend
	dirs []frontDir
	devs []*Device
}

func newComebackRig(t *testing.T, devices int, change ...func(*Config)) *comebackRig {
	s := newTarget(t, 1<<20)
	r := &comebackRig{t: t, s: s, c: s.clientToClose(append(change, withTestFront(t))...)}
	t.Cleanup(func() { r.close() })
	r.f = r.c.frontends[0]
	for i := range devices {
		dir := newFrontDir(t)
		d, err := s.mapIn(r.c, fmt.Sprint("vol", i), dir)
		must(t, err)
		r.dirs, r.devs = append(r.dirs, dir), append(r.devs, d)
	}
	return r
}

func (r *comebackRig) close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := r.c.Close(ctx); err != nil {
		r.t.Errorf("close of the client: %v", err)
	}
}

// misses reports whether the process has not got d yet.
func (f *frontend) misses(d *Device) bool {
	a := f.attachmentOf(d)
	if a == nil {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state == attaching || a.state == away
}

// serving waits for a process that is in use.
func (r *comebackRig) serving() (proc supervise.Process) {
	r.t.Helper()
	eventually(r.t, "a process of the front end is in use", func() (ok bool) {
		var err error
		proc, err = r.f.process()
		return err == nil
	})
	return proc
}

// kill ends the process in use, and returns when the front end knows.
func (r *comebackRig) kill() {
	r.t.Helper()
	proc := r.serving()
	proc.Kill()
	eventually(r.t, "the front end knows of the death", func() bool {
		now, _ := r.f.process()
		return now != proc
	})
}

func (r *comebackRig) isBack(i int) bool {
	proc, err := r.f.process()
	return err == nil && knows(r.t.Context(), proc, r.devs[i]) && !r.f.misses(r.devs[i])
}

// A device that a new process cannot take over at once is tried again, and others
// do not wait for it.
func TestComeback_TriedAgain(t *testing.T) {
	t.Parallel()
	r := newComebackRig(t, 2)
	must(t, r.dirs[0].set("fail", ""))
	r.kill()
	eventually(t, "the device is tried again", func() bool { return r.dirs[0].adds() >= 3 })
	eventually(t, "the other device is back", func() bool { return r.isBack(1) })
	must(t, os.Remove(r.dirs[0].file("fail")))
	eventually(t, "the device is back", func() bool { return r.isBack(0) })
	must(t, r.c.Unmap(t.Context(), r.devs[0].name, false))
}

// A process that hangs over one device serves the others meanwhile.
func TestComeback_OthersDoNotWait(t *testing.T) {
	t.Parallel()
	r := newComebackRig(t, 2)
	must(t, r.dirs[0].set("hold", ""))
	r.kill()
	eventually(t, "the device is tried", func() bool { return r.dirs[0].adds() == 2 })
	eventually(t, "the other device is back", func() bool { return !r.f.misses(r.devs[1]) })
	eventually(t, "the front end is in use", func() bool { return r.isBack(1) })
	if !r.f.misses(r.devs[0]) {
		t.Error("the device that hangs counts as back")
	}
	must(t, os.Remove(r.dirs[0].file("hold")))
	eventually(t, "the device is back", func() bool { return r.isBack(0) })
}

// The next process takes over a device that this one could not.
func TestComeback_ByAnotherProcess(t *testing.T) {
	t.Parallel()
	r := newComebackRig(t, 1)
	must(t, r.dirs[0].set("fail", ""))
	r.kill()
	eventually(t, "the device is tried", func() bool { return r.dirs[0].adds() >= 2 })
	r.serving()
	must(t, os.Remove(r.dirs[0].file("fail")))
	r.kill()
	eventually(t, "the device is back", func() bool { return r.isBack(0) })
	must(t, r.c.Unmap(t.Context(), r.devs[0].name, false))
}

// A device that is not back may have users, so its unmap needs force. After
// that no try is made, and its place is free at any outcome in the process.
func TestComeback_Unmapped(t *testing.T) {
	t.Parallel()
	for _, x := range []struct {
		name  string
		files []string
		inUse bool // the process, for other devices
	}{
		{"between two tries", []string{"fail"}, true},
		{"during one that ends with it", []string{"hold"}, false},
		{"during one that succeeds all the same", []string{"hold", "deaf"}, false},
		{"during one that succeeds late", []string{"hold", "deaf"}, true},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			r := newComebackRig(t, 2) // the second keeps the session
			dir, d := r.dirs[0], r.devs[0]
			for _, name := range x.files {
				must(t, dir.set(name, ""))
			}
			r.kill()
			eventually(t, "the device is tried", func() bool { return dir.adds() >= 2 })
			if x.inUse {
				r.serving()
			}
			if err := r.c.Unmap(t.Context(), d.name, false); !errors.Is(err, syscall.EBUSY) {
				t.Errorf("unmap without force: %v, want EBUSY", err)
			}
			if err := soon(t, "the unmap", async(func() error { return r.c.Unmap(t.Context(), d.name, true) })); err != nil {
				t.Errorf("forced unmap: %v", err)
			}
			for _, name := range x.files {
				must(t, os.Remove(dir.file(name)))
			}
			eventually(t, "its place is free", func() bool { return !r.c.keepsIndex(0) && !r.c.retires(0) })
			tries := dir.adds()
			if knows(t.Context(), r.serving(), d) {
				t.Error("the process has a device that is unmapped")
			}
			again := newFrontDir(t)
			next, err := r.c.Map(t.Context(), MapRequest{Path: "vol0", Session: "one", Frontend: "test", Options: map[string]string{"dir": string(again)}})
			must(t, err)
			if next.index != d.index || again.adds() != 1 {
				t.Errorf("the next device has index %d and was shown %d times", next.index, again.adds())
			}
			if dir.adds() != tries {
				t.Error("a device that is unmapped was tried again")
			}
		})
	}
}

// Unmaps, deaths of the process and take-overs at the same time leave nothing
// in the process and no tries.
func TestComeback_UnmappedWhileProcessesDie(t *testing.T) {
	t.Parallel()
	r := newComebackRig(t, 4)
	for _, dir := range r.dirs[:2] {
		must(t, dir.set("fail", ""))
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 3 {
			r.kill()
		}
	})
	for _, d := range r.devs[:3] {
		wg.Go(func() {
			if err := r.c.Unmap(t.Context(), d.name, true); err != nil {
				t.Errorf("unmap of %s: %v", d.name, err)
			}
		})
	}
	wg.Wait()
	for _, dir := range r.dirs[:2] {
		must(t, os.Remove(dir.file("fail")))
	}
	eventually(t, "the device that is left is back", func() bool { return r.isBack(3) })
	for i, d := range r.devs[:3] {
		eventually(t, "the place is free", func() bool { return !r.c.keepsIndex(d.index) })
		if knows(t.Context(), r.serving(), d) {
			t.Errorf("the process has device %d, which is unmapped", i)
		}
		if r.f.misses(d) {
			t.Errorf("device %d is unmapped and to come back", i)
		}
	}
}

// The end of the client ends the tries. Users of the disk wait for the next
// client.
func TestComeback_Close(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"fail", "hold"} {
		t.Run(what, func(t *testing.T) {
			state := filepath.Join(t.TempDir(), "client.devices")
			r := newComebackRig(t, 1, func(cfg *Config) { cfg.StateFile = state })
			must(t, r.dirs[0].set(what, ""))
			r.kill()
			eventually(t, "the device is tried", func() bool { return r.dirs[0].adds() >= 2 })
			soon(t, "close", async(func() error { r.close(); return nil }))
			if saved, err := readState(state); len(saved) != 1 || err != nil {
				t.Errorf("%d of 1 disks are written down, %v", len(saved), err)
			}
			if slices.ContainsFunc(r.dirs[0].told(), func(l string) bool { return strings.HasPrefix(l, "remove ") }) {
				t.Error("a disk that is not back is taken away")
			}
			soon(t, "the end of all tries", async(func() error { r.f.workers.Wait(); return nil }))
		})
	}
}

// A disk of the last daemon that is not taken over in time is left as it is,
// because it may be in use. If the process takes it over later, that ends with
// the process.
func TestRestore_GivenUpLeavesTheDisk(t *testing.T) {
	t.Parallel()
	s := newTarget(t, 1<<20)
	c := s.newClient(withTestFront(t))
	dir := newFrontDir(t)
	for _, name := range []string{"hold", "deaf"} {
		must(t, dir.set(name, ""))
	}
	proc, err := c.frontends[0].process()
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	request := MapRequest{Path: "vol", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Options: map[string]string{"dir": string(dir)},
		Name: "vol0", identity: "before", location: "/dev/null"}
	c.mapMu.Lock()
	c.setWaiting([]savedDevice{{Name: "vol0", Identity: "before", Location: "/dev/null"}})
	c.mapDone()
	mapped := async(func() error { _, err := c.Map(ctx, request); return err })
	eventually(t, "the front end gets the device", func() bool { return dir.adds() == 1 })
	cancel()
	if err := soon(t, "the map", mapped); !errors.Is(err, context.Canceled) {
		t.Errorf("map: %v", err)
	}
	eventually(t, "the process has ended", func() bool { now, _ := c.frontends[0].process(); return now != proc })
	for _, name := range []string{"hold", "deaf"} {
		must(t, os.Remove(dir.file(name)))
	}
	eventually(t, "there is another process", func() bool { _, err := c.frontends[0].process(); return err == nil })
	if _, err := c.Map(t.Context(), request); err != nil {
		t.Errorf("the next map: %v", err)
	}
	if told := dir.told(); slices.ContainsFunc(told, func(l string) bool { return strings.HasPrefix(l, "remove ") }) {
		t.Errorf("the front end was told %q", told)
	}
}

// A disk of the last daemon that is taken over too late is served until the process
// ends: its users may have noticed nothing but a pause.
func TestRestore_GivenUpFailsNoRequest(t *testing.T) {
	t.Parallel()
	s := newTarget(t, 1<<20)
	c := s.newClient(withTestFront(t))
	dir := newFrontDir(t)
	must(t, dir.set("serve", ""))
	proc, err := c.frontends[0].process()
	must(t, err)
	c.mapMu.Lock()
	c.setWaiting([]savedDevice{{Name: "vol0", Identity: "before", Location: "/dev/null"}})
	c.mapDone()
	ctx, cancel := context.WithCancel(t.Context())
	mapped := async(func() error {
		_, err := c.Map(ctx, MapRequest{Path: "vol", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Options: map[string]string{"dir": string(dir)},
			Name: "vol0", identity: "before", location: "/dev/null"})
		return err
	})
	eventually(t, "requests are served", func() bool { return slices.Contains(dir.told(), "answer 0") })
	cancel()
	if err := soon(t, "the map", mapped); !errors.Is(err, context.Canceled) {
		t.Errorf("map: %v", err)
	}
	eventually(t, "the process has ended", func() bool { now, _ := c.frontends[0].process(); return now != proc })
	must(t, dir.remove("serve"))
	for _, l := range dir.told() {
		if strings.HasPrefix(l, "answer ") && l != "answer 0" {
			t.Fatalf("a request failed: %q", l)
		}
	}
}

// A process that has taken the device over, though the answer was lost, is not
// shown it again. It would refuse it for ever.
func TestComeback_AnswerWasLost(t *testing.T) {
	_, c, d, dir := mapShown(t)
	a := c.frontends[0].attachmentOf(d)
	a.mu.Lock()
	a.setState(away)
	a.mu.Unlock()
	a.wakeWorker()
	eventually(t, "the device is back", func() bool { return !c.frontends[0].misses(d) })
	if dir.adds() != 1 {
		t.Errorf("shown %d times", dir.adds())
	}
}
