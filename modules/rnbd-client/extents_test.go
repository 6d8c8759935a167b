package client

import (
	"context"
	"errors"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// says answers EXTENTS with a list.
func says(list ...extents.Extent) func(*rtrs.Op, rnbdwire.ExtentsFields) {
	return func(op *rtrs.Op, _ rnbdwire.ExtentsFields) {
		rnbdwire.PutExtents(op.Data(), list)
		op.Respond(0)
	}
}

// ask asks by the ring of io, and returns the list in the slot.
func ask(t *testing.T, io *IO, off uint64, n uint32) ([]extents.Extent, blk.Errno) {
	t.Helper()
	clear(io.Buf(0)[:extents.Size])
	if errno := do(t, io, Request{Op: blk.Extents, Off: off, Len: n}); errno != blk.OK {
		return nil, errno
	}
	list, err := extents.Parse(io.Buf(0), uint64(n))
	must(t, err)
	return list, blk.OK
}

func data(n uint64) []extents.Extent { return []extents.Extent{{Len: n}} }

func TestE049_E050_ExtentsByCallAndByRing(t *testing.T) {
	s := newTarget(t, 1<<20)
	s.features = rnbdwire.FeatureExtents
	var asked rnbdwire.ExtentsFields
	want := []extents.Extent{{Len: 4096}, {Len: 512, Hole: true}}
	s.onExtents = func(op *rtrs.Op, f rnbdwire.ExtentsFields) {
		asked = f
		says(want...)(op, f)
	}
	d, io := s.device(s.newClient())
	got, err := d.Extents(t.Context(), 1024, 64<<10)
	must(t, err)
	if !slices.Equal(got, want) || asked != (rnbdwire.ExtentsFields{DeviceID: d.id.Load(), Sector: 2, Sectors: 128}) {
		t.Errorf("%v, the server was asked %+v", got, asked)
	}
	if got, errno := ask(t, io, 1024, 64<<10); errno != blk.OK || !slices.Equal(got, want) {
		t.Errorf("%v, errno %v", got, errno)
	}
	if n := d.inFlight(); n != 0 {
		t.Errorf("%d requests are in flight", n)
	}
}

func TestExtents_BadRanges(t *testing.T) {
	s := newTarget(t, 1<<20)
	s.features = rnbdwire.FeatureExtents
	s.onExtents = func(op *rtrs.Op, _ rnbdwire.ExtentsFields) { t.Error("it was asked"); op.Respond(0) }
	d, io := s.device(s.newClient())
	for _, c := range []struct {
		off  uint64
		n    uint32
		want blk.Errno
	}{{0, 0, blk.EINVAL}, {1, 512, blk.EINVAL}, {0, 513, blk.EINVAL}, {1 << 20, 512, blk.EIO}, {0, 1<<20 + 512, blk.EIO}, {^uint64(511), 512, blk.EIO}} {
		if _, err := d.Extents(t.Context(), c.off, uint64(c.n)); blk.ToErrno(err) != c.want {
			t.Errorf("%d bytes at %d: error %v", c.n, c.off, err)
		}
		if _, errno := ask(t, io, c.off, c.n); errno != c.want {
			t.Errorf("%d bytes at %d: errno %v", c.n, c.off, errno)
		}
	}
	e := io.source.sqes[0]
	e.Op, e.Offset, e.Len, e.Device, e.Arena = blk.Extents, 0, 4096, d.index, d.index
	for _, at := range []uint64{uint64(d.arena.Size()), uint64(d.arena.Size()) - extents.Size + 1, ^uint64(0)} {
		if e.ArenaOff = at; d.checkExtents(&e) != blk.EINVAL {
			t.Errorf("a list at %d of the arena is taken", at)
		}
	}
	if e.ArenaOff, e.Arena = 0, d.index+1; d.checkExtents(&e) != blk.EINVAL {
		t.Error("a list in another arena is taken")
	}
}

// Whatever a server does, a range about which nothing is known is data.
func TestE048_E052_InDoubtAllIsData(t *testing.T) {
	for name, c := range map[string]struct {
		features uint16
		answer   func(*rtrs.Op, rnbdwire.ExtentsFields)
		want     error
	}{
		"a server that does not tell":  {0, nil, syscall.EOPNOTSUPP},
		"a storage that does not know": {rnbdwire.FeatureExtents, func(op *rtrs.Op, _ rnbdwire.ExtentsFields) { op.Respond(int(blk.EOPNOTSUPP)) }, syscall.EOPNOTSUPP},
		"an error":                     {rnbdwire.FeatureExtents, func(op *rtrs.Op, _ rnbdwire.ExtentsFields) { op.Respond(int(blk.EBUSY)) }, syscall.EBUSY},
		"another message":              {rnbdwire.FeatureExtents, func(op *rtrs.Op, _ rnbdwire.ExtentsFields) { op.Respond(0) }, syscall.EPROTO},
		"no extent":                    {rnbdwire.FeatureExtents, says(), syscall.EPROTO},
		"an empty one":                 {rnbdwire.FeatureExtents, says(extents.Extent{Hole: true}), syscall.EPROTO},
		"more than the range":          {rnbdwire.FeatureExtents, says(extents.Extent{Len: 8192 + 512, Hole: true}), syscall.EPROTO},
	} {
		t.Run(name, func(t *testing.T) {
			s := newTarget(t, 1<<20)
			s.features, s.onExtents = c.features, c.answer
			d, io := s.device(s.newClient())
			if _, err := d.Extents(t.Context(), 0, 8192); !errors.Is(err, c.want) {
				t.Errorf("error %v, want %v", err, c.want)
			}
			if got, errno := ask(t, io, 0, 8192); errno != blk.OK || !slices.Equal(got, data(8192)) {
				t.Errorf("%v, errno %v", got, errno)
			}
		})
	}
}

// An answer that may be about another device is none.
func TestE052_ADeviceThatIsOpenedAgain(t *testing.T) {
	s := newTarget(t, 1<<20)
	s.features = rnbdwire.FeatureExtents
	c := s.newClient()
	d, _ := s.device(c)
	s.onExtents = func(op *rtrs.Op, f rnbdwire.ExtentsFields) {
		d.mu.Lock()
		d.id.Add(1)
		d.mu.Unlock()
		says(extents.Extent{Len: 4096, Hole: true})(op, f)
	}
	if got, err := d.Extents(t.Context(), 0, 4096); !errors.Is(err, errReopened) {
		t.Errorf("%v, error %v", got, err)
	}
	s.onExtents = func(op *rtrs.Op, f rnbdwire.ExtentsFields) {
		d.mu.Lock()
		d.openedIn++
		d.mu.Unlock()
		says(extents.Extent{Len: 4096, Hole: true})(op, f)
	}
	if got, err := d.Extents(t.Context(), 0, 4096); !errors.Is(err, errReopened) {
		t.Errorf("%v, error %v", got, err)
	}
}

// A server that does not answer holds up neither requests nor another question
// beyond its time.
func TestExtents_AServerThatHangs(t *testing.T) {
	s := newTarget(t, 1<<20)
	s.features, s.onExtents, s.hold = rnbdwire.FeatureExtents, says(extents.Extent{Len: 4096, Hole: true}), true
	d, io := s.device(s.newClient())
	answer := async(func() error {
		_, err := d.Extents(t.Context(), 0, 4096)
		return err
	})
	eventually(t, "the server has it", func() bool { return s.holds() == 1 })
	s.set(func() { s.hold = false })
	if errno := do(t, io, Request{Op: blk.Read, Len: 4096}); errno != blk.OK {
		t.Errorf("a read: %v", errno)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := d.Extents(ctx, 0, 4096); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("another question: %v", err)
	}
	s.releaseAll(blk.OK)
	must(t, soon(t, "the answer", answer))
}

// mapAsking maps "vol" by the test front end. That asks for extents, and the server
// does not answer.
func (s *target) mapAsking(c *Client) (*Device, frontDir) {
	s.t.Helper()
	dir := frontDir(s.t.TempDir())
	must(s.t, dir.set("ask", ""))
	s.set(func() {
		s.features, s.onExtents, s.hold = rnbdwire.FeatureExtents, says(extents.Extent{Len: 4096, Hole: true}), true
	})
	d, err := s.mapIn(c, "vol", dir)
	must(s.t, err)
	must(s.t, dir.remove("ask")) // the next process asks nothing
	eventually(s.t, "the question is on the server", func() bool { return d.inFlight() == 1 && s.holds() == 1 })
	return d, dir
}

// The slot of a question is not given to the next process of the front end before
// the answer is in it.
func TestExtents_TheFrontEndDies(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient(withTestFront(t))
	d, dir := s.mapAsking(c)
	c.killFront(t)
	time.Sleep(300 * time.Millisecond) // for a process that does not wait
	if dir.adds() != 1 || d.inFlight() != 1 {
		t.Errorf("shown %d times, %d questions are under way", dir.adds(), d.inFlight())
	}
	s.releaseAll(blk.OK)
	eventually(t, "the device is back", func() bool { return dir.adds() == 2 })
	if d.inFlight() != 0 {
		t.Errorf("%d requests", d.inFlight())
	}
}

func TestExtents_UnmapAndCloseBesideAQuestion(t *testing.T) {
	for name, end := range map[string]func(c *Client, d *Device) error{
		"unmapped by force": func(c *Client, d *Device) error { return c.Unmap(context.Background(), d.Name(), true) },
		"closed":            func(c *Client, _ *Device) error { return c.Close(context.Background()) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newTarget(t, 1<<20)
			c := s.clientToClose(withTestFront(t))
			d, _ := s.mapAsking(c)
			if err := soon(t, "the end", async(func() error { return end(c, d) })); err != nil {
				t.Error(err)
			}
			s.releaseAll(blk.OK)
			eventually(t, "the memory is given back", func() bool { return !c.retires(d.index) })
			_ = soon(t, "the close", async(func() error { return c.Close(context.Background()) }))
		})
	}
}

// The answer to a front end that has gone does not touch its ring, also if other
// answers wait there.
func TestExtents_TheRingIsGone(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	d, _ := s.device(c)
	p := c.pumps[0]
	p.pump.Call(func() {
		orphan := newSource(p, nil, nil, 16)
		orphan.orphaned, orphan.answered = true, true
		orphan.onExtentsDone(orphan.beginRequest(d, &shm.SQE{Op: blk.Extents, Len: 4096}), data(4096))
	})
	if n := d.inFlight(); n != 0 {
		t.Errorf("%d requests are in flight", n)
	}
}
