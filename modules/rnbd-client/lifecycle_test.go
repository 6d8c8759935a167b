package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// mapIn maps path in a session of that target, by the test front end or none.
func (s *target) mapIn(c *Client, path string, dir frontDir) (*Device, error) {
	r := MapRequest{Path: path, Session: "one", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Frontend: FrontendNone}
	if dir != "" {
		r.Frontend, r.Options = "test", map[string]string{"dir": string(dir)}
	}
	return c.Map(s.t.Context(), r)
}

// mapShown maps "vol" by the test front end; dir is the folder of its messages.
func mapShown(t *testing.T) (s *target, c *Client, d *Device, dir frontDir) {
	t.Helper()
	s = newTarget(t, 1<<20)
	c = s.newClient(withTestFront(t))
	dir = newFrontDir(t)
	d, err := s.mapIn(c, "vol", dir)
	must(t, err)
	return s, c, d, dir
}

// newFrontDir returns a folder for the records of a test's front end. Its process
// may write there until the client ends, after the test's own cleanup.
func newFrontDir(t *testing.T) frontDir {
	t.Helper()
	dir, err := os.MkdirTemp("", "rnbd-front-")
	must(t, err)
	t.Cleanup(func() {
		eventually(t, "the folder of the front end is removed", func() bool { return os.RemoveAll(dir) == nil })
	})
	return frontDir(dir)
}

// mapLost maps "vol" beside another device, then cuts the session from the
// server. The other device keeps the session.
func mapLost(t *testing.T) (s *target, c *Client, d *Device) {
	t.Helper()
	s = newTarget(t, 1<<20)
	c = s.newClient()
	_, err := s.mapIn(c, "other", "")
	must(t, err)
	d, err = s.mapIn(c, "vol", "")
	must(t, err)
	d.session.onEvent(rtrs.Event{Kind: rtrs.SessionDown, Session: d.session.transport})
	return s, c, d
}

// soon returns the result of f within the time that a stalled machine may take.
func soon[T any](t *testing.T, what string, result <-chan T) T {
	t.Helper()
	select {
	case r := <-result:
		return r
	case <-time.After(time.Minute):
	}
	t.Fatalf("%s hangs", what)
	panic("not reached")
}

// async runs f beside the test.
func async(f func() error) <-chan error {
	result := make(chan error, 1)
	go func() { result <- f() }()
	return result
}

// count is how many messages of that text the target got.
func (s *target) count(text string) (n int) {
	for _, m := range s.messages() {
		if m == text {
			n++
		}
	}
	return n
}

// hasOpen: an OPEN is held.
func (s *target) hasOpen() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.heldOpen != nil
}

// answerOpen lets the OPEN go that is held.
func (s *target) answerOpen() {
	s.t.Helper()
	must(s.t, s.pollers[0].Call(s.t.Context(), func() { s.heldOpen.Respond(0) }))
}

// Disks in use stay when the client stops, however little time it has and
// however long each takes to say so.
func TestClose_ManyUsedDisksAndLittleTime(t *testing.T) {
	s := newTarget(t, 1<<20)
	state := filepath.Join(t.TempDir(), "client.devices")
	c := s.clientToClose(withTestFront(t), func(cfg *Config) { cfg.StateFile = state })
	var dirs []frontDir
	for i := range 3 {
		dir := newFrontDir(t)
		must(t, dir.set("used", ""))
		must(t, dir.set("slow", "100ms"))
		_, err := s.mapIn(c, fmt.Sprint("vol", i), dir)
		must(t, err)
		dirs = append(dirs, dir)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	_ = c.Close(ctx) // it may have no time for the rest
	saved, err := readState(state)
	if len(saved) != 3 || err != nil {
		t.Errorf("%d of 3 disks are written down, %v", len(saved), err)
	}
	if left := load(t, state).Leftovers; len(left) != 0 {
		t.Errorf("disks in use are to be taken away: %+v", left)
	}
	for i, dir := range dirs {
		if slices.Contains(dir.told(), "remove forced true") {
			t.Errorf("disk %d, which is in use, is taken away by force", i)
		}
	}
}

// A disk that nobody uses goes when the client stops, beside one that stays.
func TestClose_UnusedDiskBesideAUsedOne(t *testing.T) {
	s := newTarget(t, 1<<20)
	state := filepath.Join(t.TempDir(), "client.devices")
	c := s.clientToClose(withTestFront(t), func(cfg *Config) { cfg.StateFile = state })
	used := newFrontDir(t)
	must(t, used.set("used", ""))
	for path, dir := range map[string]frontDir{"used": used, "unused": newFrontDir(t)} {
		_, err := s.mapIn(c, path, dir)
		must(t, err)
	}
	must(t, c.Close(t.Context()))
	if saved, err := readState(state); len(saved) != 1 || saved[0].Path != "used" || err != nil {
		t.Errorf("written down: %+v, %v", saved, err)
	}
}

// The loss of the session while OPEN is under way makes its answer void: the id
// is not that of the device in the session that comes back.
func TestOpen_SessionLostBeforeTheAnswerIsTakenOver(t *testing.T) {
	for _, x := range []struct {
		name string
		open func(*target, *Client, *Device) error
	}{
		{"map", func(s *target, c *Client, _ *Device) error { _, err := s.mapIn(c, "vol2", ""); return err }},
		{"reopen", func(s *target, _ *Client, d *Device) error { return d.tryReopen(s.t.Context()) }},
		{"remap", func(s *target, c *Client, d *Device) error { _, err := c.Remap(s.t.Context(), d.name); return err }},
	} {
		t.Run(x.name, func(t *testing.T) {
			s := newTarget(t, 1<<20)
			c := s.newClient()
			d, err := s.mapIn(c, "vol", "")
			must(t, err)
			io, err := d.NewIO(0, 0, 32)
			must(t, err)
			lose := func() { d.session.onEvent(rtrs.Event{Kind: rtrs.SessionDown, Session: d.session.transport}) }
			if x.name != "map" {
				lose()
			}
			s.set(func() { s.onOpen = lose })
			if err := x.open(s, c, d); !errors.Is(err, syscall.ECONNABORTED) {
				t.Errorf("got %v, want ECONNABORTED", err)
			}
			if d.State() != Closed {
				t.Errorf("state %s, and the session is lost", d.State())
			}
			if len(c.Devices()) != 1 {
				t.Errorf("%d devices", len(c.Devices()))
			}
			if s.count("close") != 0 {
				t.Error("CLOSE of an id of the lost session")
			}
			d.session.onEvent(rtrs.Event{Kind: rtrs.SessionUp})
			eventually(t, "open", func() bool { return d.State() == Open })
			if errno := do(t, io, Request{Op: blk.Write, Len: 512}); errno != blk.OK {
				t.Errorf("write: errno %d", errno)
			}
			s.set(func() {
				if last := s.ios[len(s.ios)-1].DeviceID; last != s.nextID-1 {
					t.Errorf("write to device %d, the server opened it as %d", last, s.nextID-1)
				}
			})
		})
	}
}

// The same a moment later: the answer is taken over, the device not open yet.
func TestOpen_SessionLostAfterTheAnswerIsTakenOver(t *testing.T) {
	for name, finish := range map[string]func(*Device) error{
		"reopen": func(d *Device) error { return d.finishReopen(nil) },
		"remap":  (*Device).finishRemap,
	} {
		t.Run(name, func(t *testing.T) {
			s := newTarget(t, 1<<20)
			d, err := s.mapIn(s.newClient(), "vol", "")
			must(t, err)
			d.session.onEvent(rtrs.Event{Kind: rtrs.SessionDown, Session: d.session.transport})
			must(t, d.open(t.Context()))
			d.session.onEvent(rtrs.Event{Kind: rtrs.SessionDown, Session: d.session.transport})
			if err := finish(d); !errors.Is(err, syscall.ECONNABORTED) || d.State() != Closed {
				t.Errorf("got %v, state %s", err, d.State())
			}
		})
	}
}

// A map that fails with a request under way on a disk that hangs ends, and so
// does the next one: only the memory waits for the disk.
func TestMap_FailsWithARequestThatHangs(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient(withTestFront(t))
	_, err := s.mapIn(c, "other", "")
	must(t, err)
	dir := newFrontDir(t)
	for _, what := range []string{"read", "hold", "fail"} {
		must(t, dir.set(what, ""))
	}
	s.set(func() { s.hold = true })
	mapped := async(func() error { _, err := s.mapIn(c, "vol", dir); return err })
	eventually(t, "the read is on the server", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.held) == 1 })
	must(t, os.Remove(dir.file("hold")))
	if err := soon(t, "the map", mapped); !errors.Is(err, syscall.EIO) {
		t.Errorf("map: %v", err)
	}
	retired := func() (n int) {
		c.mapMu.Lock()
		defer c.mapDone()
		return len(c.retired)
	}
	if retired() != 1 {
		t.Errorf("%d devices keep their memory", retired())
	}
	eventually(t, "the server is told", func() bool { return s.count("close") == 1 })
	if err := soon(t, "the next map", async(func() error { _, err := s.mapIn(c, "vol2", newFrontDir(t)); return err })); err != nil {
		t.Errorf("map of another device: %v", err)
	}
	s.releaseAll(blk.OK)
	eventually(t, "the memory is given back", func() bool { return retired() == 0 })
}

// An OPEN that is answered when its device is unmapped already leaves nothing
// open on the server.
func TestOpen_AnsweredAfterTheUnmap(t *testing.T) {
	for _, x := range []struct {
		name string
		open func(context.Context, *Client, *Device) error
		want error
	}{
		{"remap", func(ctx context.Context, c *Client, d *Device) error { _, err := c.Remap(ctx, d.name); return err }, syscall.ENODEV},
		{"reopen", func(ctx context.Context, _ *Client, d *Device) error { return d.tryReopen(ctx) }, nil},
	} {
		t.Run(x.name, func(t *testing.T) {
			s, c, d := mapLost(t)
			s.set(func() { s.holdOpen = true })
			opened := async(func() error { return x.open(t.Context(), c, d) })
			eventually(t, "OPEN is there", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.heldOpen != nil })
			must(t, c.Unmap(t.Context(), d.name, true))
			s.answerOpen()
			if err := soon(t, x.name, opened); !errors.Is(err, x.want) {
				t.Errorf("got %v, want %v", err, x.want)
			}
			if s.count("close") != 1 {
				t.Errorf("messages %q, want one CLOSE", s.messages())
			}
		})
	}
}

// The same a moment earlier: the unmap finds a device that is closed here, but
// open on the server already.
func TestUnmap_OpenOnTheServerOnly(t *testing.T) {
	s, c, d := mapLost(t)
	must(t, d.open(t.Context()))
	must(t, c.Unmap(t.Context(), d.name, true))
	if s.count("close") != 1 {
		t.Errorf("messages %q, want one CLOSE", s.messages())
	}
	if err := d.finishRemap(); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("the remap of it: %v, want ENODEV", err)
	}
}

// An unmap that was given up while the front end let go of the device can be
// repeated.
func TestUnmap_AgainAfterOneThatWasGivenUp(t *testing.T) {
	_, c, d, dir := mapShown(t)
	must(t, dir.set("hold-remove", ""))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	unmapped := async(func() error { return c.Unmap(ctx, d.name, false) })
	eventually(t, "the front end is asked", func() bool { return slices.Contains(dir.told(), "remove forced false") })
	cancel()
	if err := soon(t, "the unmap", unmapped); err == nil {
		t.Error("the unmap that was given up succeeded")
	}
	must(t, os.Remove(dir.file("hold-remove")))
	proc, err := c.frontends[0].process()
	must(t, err)
	eventually(t, "the front end has let go", func() bool { return !knows(t.Context(), proc, d) })
	for err = c.Unmap(t.Context(), d.name, false); isUnmapping(err); {
		time.Sleep(time.Millisecond)
		err = c.Unmap(t.Context(), d.name, false)
	}
	must(t, err)
}

// An unmap that is given up when the front end has let go of the device goes on: there
// is no way back.
func TestUnmap_GivenUpAfterTheFrontEndLetGo(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s := newTarget(t, 1<<20)
	c := s.newClient(withTestFront(t), func(cfg *Config) {
		cfg.Launch = func(ctx context.Context, pc plugin.Config) (supervise.Process, error) {
			p, err := supervise.Exec(ctx, pc)
			return beforeDetach{p, func(ctx context.Context) {
				cancel()
				select {
				case <-ctx.Done():
					t.Error("the memory's release is given up, too")
				case <-time.After(50 * time.Millisecond):
				}
			}}, err
		}
	})
	d, err := s.mapIn(c, "vol", newFrontDir(t))
	must(t, err)
	if err := c.Unmap(ctx, d.name, false); err != nil {
		for err = c.Unmap(t.Context(), d.name, false); isUnmapping(err); {
			time.Sleep(time.Millisecond)
			err = c.Unmap(t.Context(), d.name, false)
		}
		must(t, err)
	}
}

// beforeDetach calls do before memory is taken from the process.
type beforeDetach struct {
	supervise.Process
	do func(context.Context)
}

func (p beforeDetach) DetachArena(ctx context.Context, id uint32) error {
	p.do(ctx)
	return p.Process.DetachArena(ctx, id)
}

// isUnmapping reports whether err says that a cancelled unmap is not over yet.
func isUnmapping(err error) bool {
	return errors.Is(err, syscall.EBUSY) && strings.Contains(err.Error(), "already")
}

// A front end that shows a device although nobody waits for it any more is made to take
// it away: its place is free again.
func TestMap_CancelledWhileTheFrontEndShowsIt(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient(withTestFront(t))
	dir := newFrontDir(t)
	for _, name := range []string{"hold", "deaf"} {
		must(t, dir.set(name, ""))
	}
	r := MapRequest{Path: "vol", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Options: map[string]string{"dir": string(dir)}}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	mapped := async(func() error { _, err := c.Map(ctx, r); return err })
	eventually(t, "the front end gets the device", func() bool { return strings.HasPrefix(dir.told()[0], "add ") })
	cancel()
	if err := soon(t, "the map", mapped); !errors.Is(err, context.Canceled) {
		t.Fatalf("map: %v", err)
	}
	must(t, os.Remove(dir.file("hold")))
	eventually(t, "its place is free", func() bool { return !c.keepsIndex(0) })
	d, err := c.Map(t.Context(), r)
	must(t, err)
	if d.index != 0 {
		t.Errorf("index %d", d.index)
	}
}

// A close awaits an unmap that is under way, and has no error because of it.
func TestClose_AwaitsAnUnmap(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.clientToClose(withTestFront(t))
	s.mapHanging(c, "vol")
	unmapped := async(func() error { return c.Unmap(context.Background(), "rnbd0", true) })
	eventually(t, "the unmap is under way", func() bool {
		c.mapMu.Lock()
		defer c.mapMu.Unlock()
		return c.places[0] != nil && c.places[0].work == unmappingByForce
	})
	if err := soon(t, "the close", async(func() error { return c.Close(context.Background()) })); err != nil {
		t.Errorf("close: %v", err)
	}
	if err := soon(t, "the unmap", unmapped); err != nil {
		t.Errorf("unmap: %v", err)
	}
}
