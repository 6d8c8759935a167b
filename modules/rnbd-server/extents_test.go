package server

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

func data(n uint64) extents.Extent { return extents.Extent{Len: n} }
func hole(n uint64) extents.Extent { return extents.Extent{Len: n, Hole: true} }

// holes are what the disks of a plugin say about themselves.
type holes struct {
	mu     sync.Mutex
	list   []extents.Extent
	gate   chan struct{} // not nil: Extents returns when it is closed,
	heeds  bool          // or its context ends
	asked  [][2]uint64   // off, n
	inside atomic.Int32  // calls that have not returned
	early  atomic.Bool   // a disk was closed before a call returned
}

// holeyDisk is a disk that knows what of it holds data.
type holeyDisk struct {
	*memDisk
	h      *holes
	inside atomic.Int32
}

func (d *holeyDisk) Extents(ctx context.Context, off, n uint64) ([]extents.Extent, error) {
	d.h.inside.Add(1)
	d.inside.Add(1)
	defer d.h.inside.Add(-1)
	defer d.inside.Add(-1)
	d.h.mu.Lock()
	d.h.asked = append(d.h.asked, [2]uint64{off, n})
	list, gate, heeds := d.h.list, d.h.gate, d.h.heeds
	d.h.mu.Unlock()
	if gate != nil {
		end := ctx.Done()
		if !heeds {
			end = nil
		}
		select {
		case <-gate:
		case <-end:
			return nil, ctx.Err()
		}
	}
	return list, nil
}

func (d *holeyDisk) Close() error {
	if d.inside.Load() > 0 {
		d.h.early.Store(true)
	}
	return d.memDisk.Close()
}

// say sets the answers from now on.
func (h *holes) say(list ...extents.Extent) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.list = list
}

// hang lets calls hang until the function that it returns is called.
func (h *holes) hang(t *testing.T, heeds bool) (goOn func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	gate := make(chan struct{})
	h.gate, h.heeds = gate, heeds
	goOn = sync.OnceFunc(func() {
		h.mu.Lock()
		h.gate = nil
		h.mu.Unlock()
		close(gate)
	})
	t.Cleanup(goOn)
	return goOn
}

func (h *holes) questions() [][2]uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.asked)
}

// holeyRig is a server with the disk vol of 1 MiB, and other.
func holeyRig(t *testing.T, change ...func(*Config)) (*rig, *holes) {
	t.Helper()
	mem, h := lasting(), &holes{list: []extents.Extent{data(512)}}
	mem.add("vol", 1<<20)
	mem.add("other", 1<<20)
	mem.wrap = func(_ context.Context, _ plugin.OpenRequest, d *memDisk) (plugin.Disk, error) {
		return &holeyDisk{memDisk: d, h: h}, nil
	}
	return newRig(t, mem, change...), h
}

func (i *initiator) mustOpen(name string, mode blk.AccessMode) uint32 {
	i.t.Helper()
	dev, err := i.open(name, mode)
	must(i.t, err)
	return dev.DeviceID
}

// extents sends an EXTENTS.
func (i *initiator) extents(id uint32, sector, sectors uint64) ([]extents.Extent, error) {
	msg := make([]byte, rnbdwire.ExtentsSize)
	rnbdwire.ExtentsFields{DeviceID: id, Sector: sector, Sectors: sectors}.Put(msg)
	rsp := make(rnbdwire.ExtentsRsp, rnbdwire.ExtentsRspSize)
	if err := i.session.AdminRead(i.ctx(), msg, rsp); err != nil {
		return nil, err
	}
	return rsp.Extents(sectors * blk.SectorSize)
}

// startExtents asks for the extents of the first sector; the error comes on the channel.
func (i *initiator) startExtents(id uint32) <-chan error {
	done := make(chan error, 1)
	go func() {
		_, err := i.extents(id, 0, 1)
		done <- err
	}()
	return done
}

func TestE048_ExtentsAreAnnounced(t *testing.T) {
	r, _ := holeyRig(t)
	rsp, err := r.connect("s").sessInfo(2)
	must(t, err)
	if rsp.Features()&rnbdwire.FeatureExtents == 0 {
		t.Errorf("features %#x", rsp.Features())
	}
}

func TestE049_ExtentsThatAreRefused(t *testing.T) {
	r, h := holeyRig(t)
	i := r.connect("s")
	id := i.mustOpen("vol", blk.ReadWrite)
	const sectors = 1 << 20 / blk.SectorSize
	for name, c := range map[string]struct {
		id             uint32
		sector, length uint64
		want           syscall.Errno
	}{
		"an empty range":        {id, 0, 0, syscall.EINVAL},
		"begins behind the end": {id, sectors, 1, syscall.EIO},
		"ends behind the end":   {id, 1, sectors, syscall.EIO},
		"longer than any":       {id, 0, 1 << 63, syscall.EIO},
		"overflows":             {id, 1 << 63, 1<<63 + 1, syscall.EIO},
		"an unknown id":         {id + 1, 0, 1, syscall.ENOTCONN},
	} {
		if list, err := i.extents(c.id, c.sector, c.length); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, error %v, want %v", name, list, err, c.want)
		}
	}
	msg := make([]byte, rnbdwire.ExtentsSize+1)
	rnbdwire.ExtentsFields{DeviceID: id, Sectors: 1}.Put(msg)
	for _, c := range []struct{ msg, rsp int }{{23, 4096}, {25, 4096}, {24, 4095}, {24, 4097}, {24, 36}} {
		if err := i.session.AdminRead(i.ctx(), msg[:c.msg], make([]byte, c.rsp)); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("a message of %d bytes, a reply of %d: %v", c.msg, c.rsp, err)
		}
	}
	if err := i.session.AdminWrite(i.ctx(), msg[:24]); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("without a reply: %v", err)
	}
	if q := h.questions(); len(q) > 0 {
		t.Errorf("the plugin was asked %v", q)
	}
}

func TestE050_ExtentsAreThoseOfThePlugin(t *testing.T) {
	r, h := holeyRig(t)
	i := r.connect("s")
	for _, mode := range []blk.AccessMode{blk.ReadWrite, blk.ReadOnly} {
		id := i.mustOpen(map[blk.AccessMode]string{blk.ReadWrite: "vol", blk.ReadOnly: "other"}[mode], mode)
		want := []extents.Extent{data(4096), hole(512), data(512)}
		h.say(want...)
		if got, err := i.extents(id, 8, 2040); err != nil || !slices.Equal(got, want) {
			t.Errorf("%v: %v, error %v, want %v", mode, got, err, want)
		}
		if q := h.questions(); q[len(q)-1] != [2]uint64{4096, 1<<20 - 4096} {
			t.Errorf("%v: the plugin was asked %v", mode, q)
		}
	}
}

func TestE050_NoTwoNeighboursAreOfOneKind(t *testing.T) {
	r, h := holeyRig(t)
	i := r.connect("s")
	id := i.mustOpen("vol", blk.ReadWrite)
	h.say(hole(512), hole(512), data(512), data(1024))
	want := []extents.Extent{hole(1024), data(1536)}
	if got, err := i.extents(id, 0, 8); err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, error %v, want %v", got, err, want)
	}
}

func TestE050_APluginIsNotTrusted(t *testing.T) {
	r, h := holeyRig(t)
	i := r.connect("s")
	id := i.mustOpen("vol", blk.ReadWrite)
	for name, list := range map[string][]extents.Extent{
		"nothing":                 nil,
		"more than was asked for": {hole(4096), data(512)},
		"half a sector":           {hole(100)},
		"an empty range":          {hole(512), data(0)},
		"too many ranges":         make([]extents.Extent, 100000),
	} {
		h.say(list...)
		if got, err := i.extents(id, 0, 8); !errors.Is(err, syscall.EIO) {
			t.Errorf("%s: %v, error %v, want EIO", name, got, err)
		}
	}
}

func TestE051_APluginThatKnowsNothingOfHoles(t *testing.T) {
	mem := newMemory()
	mem.add("vol", 1<<20)
	i := newRig(t, mem).connect("s")
	id := i.mustOpen("vol", blk.ReadWrite)
	if list, err := i.extents(id, 0, 8); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("%v, error %v, want EOPNOTSUPP", list, err)
	}
}

func TestE051_OneExtentsOfADeviceAtATime(t *testing.T) {
	r, h := holeyRig(t, func(c *Config) { c.extentsTimeout = time.Minute })
	i, other := r.connect("s"), r.connect("t")
	id, second := i.mustOpen("vol", blk.ReadWrite), i.mustOpen("other", blk.ReadWrite)
	shared := other.mustOpen("vol", blk.ReadOnly)
	goOn := h.hang(t, false)
	first := i.startExtents(id)
	eventually(t, "the plugin is asked", func() bool { return h.inside.Load() == 1 })
	if _, err := i.extents(id, 0, 1); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("a second one: %v", err)
	}
	beside := []<-chan error{first, i.startExtents(second), other.startExtents(shared)}
	if errno := i.rw(id, blk.Read, 0, make([]byte, 512)); errno != blk.OK { // pumps do not wait
		t.Errorf("read beside it: %v", errno)
	}
	goOn()
	for k, done := range beside { // of another device, and of another session
		if err := await(t, done); err != nil {
			t.Errorf("number %d: %v", k, err)
		}
	}
	if _, err := i.extents(id, 0, 1); err != nil {
		t.Errorf("after it: %v", err)
	}
}

// Sessions that ask about the same opening of a node wait for one another.
func TestE051_SessionsTakeTurns(t *testing.T) {
	r, h := holeyRig(t, func(c *Config) { c.extentsTimeout = time.Minute })
	i, j := r.connect("s"), r.connect("t")
	a, b := i.mustOpen("vol", blk.ReadOnly), j.mustOpen("vol", blk.ReadOnly)
	goOn := h.hang(t, false)
	first := i.startExtents(a)
	eventually(t, "the plugin is asked", func() bool { return h.inside.Load() == 1 })
	second := j.startExtents(b)
	eventually(t, "the second one waits", func() bool {
		sess, err := r.server.sessionByName("t")
		return err == nil && sess.mappingByID(b).asking.Load() != nil
	})
	goOn()
	for _, done := range []<-chan error{first, second} {
		if err := await(t, done); err != nil {
			t.Error(err)
		}
	}
}

func TestE051_APluginThatHangs(t *testing.T) {
	r, h := holeyRig(t, func(c *Config) { c.extentsTimeout = 200 * time.Millisecond })
	i := r.connect("s")
	id := i.mustOpen("vol", blk.ReadWrite)
	goOn := h.hang(t, false)
	if _, err := i.extents(id, 0, 1); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("%v, want ETIMEDOUT", err)
	}
	for range 3 { // the plugin is at the first one still
		if _, err := i.extents(id, 0, 1); !errors.Is(err, syscall.EBUSY) {
			t.Errorf("asked again: %v, want EBUSY", err)
		}
	}
	if n := h.inside.Load(); n != 1 {
		t.Errorf("%d calls occupy the plugin", n)
	}
	if errno := i.rw(id, blk.Read, 0, make([]byte, 512)); errno != blk.OK {
		t.Errorf("read: %v", errno)
	}
	goOn()
	eventually(t, "it answers again", func() bool { _, err := i.extents(id, 0, 1); return err == nil })
}

// CLOSE does not wait for an EXTENTS. A plugin that hangs closes the disk later.
func TestCloseWhileExtentsRun(t *testing.T) {
	for name, heeds := range map[string]bool{"the plugin gives up": true, "it hangs": false} {
		t.Run(name, func(t *testing.T) {
			r, h := holeyRig(t, func(c *Config) { c.extentsTimeout = time.Minute })
			i := r.connect("s")
			id := i.mustOpen("vol", blk.ReadWrite)
			goOn := h.hang(t, heeds)
			asked := i.startExtents(id)
			eventually(t, "the plugin is asked", func() bool { return h.inside.Load() == 1 })
			must(t, i.closeDevice(id))
			if err := await(t, asked); !errors.Is(err, syscall.ENOTCONN) {
				t.Errorf("EXTENTS: %v, want ENOTCONN", err)
			}
			disk := r.mem.disks["vol"]
			if !heeds {
				if n := disk.closes.Load(); n != 0 {
					t.Error("the disk is closed in use")
				}
				goOn()
			}
			eventually(t, "the disk is closed", func() bool { return disk.closes.Load() == 1 })
			if h.early.Load() {
				t.Error("the disk was closed in use")
			}
			id = i.mustOpen("vol", blk.ReadWrite)
			goOn()
			if _, err := i.extents(id, 0, 8); err != nil {
				t.Errorf("opened again: %v", err)
			}
		})
	}
}

func TestSessionEndsWhileExtentsHang(t *testing.T) {
	r, h := holeyRig(t, func(c *Config) { c.extentsTimeout = 200 * time.Millisecond })
	i := r.connect("s")
	id := i.mustOpen("vol", blk.ReadWrite)
	h.hang(t, false)
	i.startExtents(id)
	eventually(t, "the plugin is asked", func() bool { return h.inside.Load() == 1 })
	i.close()
	eventually(t, "the session is gone", func() bool { return len(r.server.front.Load().rtrs.Sessions()) == 0 })
	if errno := r.connect("s").mustOpen("other", blk.ReadWrite); errno != 0 {
		t.Errorf("id %d", errno)
	}
}

// Nothing but HandOver itself ends the EXTENTS here. Its own time may be too short on a
// busy machine.
func TestHandOverWhileExtentsHang(t *testing.T) {
	r, h := holeyRig(t, func(c *Config) { c.extentsTimeout, c.RetireAfter = time.Hour, time.Hour })
	i := r.connect("s")
	id := i.mustOpen("vol", blk.ReadWrite)
	h.hang(t, false)
	i.startExtents(id)
	eventually(t, "the plugin is asked", func() bool { return h.inside.Load() == 1 })
	if _, closed, err := r.server.HandOver(t.Context()); !closed {
		t.Fatal(err)
	}
	eventually(t, "the session is gone", func() bool { return len(r.server.front.Load().rtrs.Sessions()) == 0 })
	must(t, r.server.Serve(r.server.cfg.Listen))
	i.awaitConnected()
}

func TestExtentsOfAPluginThatDies(t *testing.T) {
	r, h := holeyRig(t, func(c *Config) { c.extentsTimeout = time.Minute })
	i := r.connect("s")
	id := i.mustOpen("vol", blk.ReadWrite)
	goOn := h.hang(t, true)
	asked := i.startExtents(id)
	eventually(t, "the plugin is asked", func() bool { return h.inside.Load() == 1 })
	r.process().Kill()
	if err := await(t, asked); !errors.Is(err, syscall.EIO) {
		t.Errorf("%v, want EIO", err)
	}
	goOn()
	eventually(t, "the next process answers", func() bool { _, err := i.extents(id, 0, 8); return err == nil })
}

// An answer is worth nothing if the device has come into another process meanwhile.
func TestExtentsOfADeviceThatIsElsewhereMeanwhile(t *testing.T) {
	r, h := holeyRig(t, func(c *Config) { c.extentsTimeout = time.Minute })
	i := r.connect("s")
	id := i.mustOpen("vol", blk.ReadWrite)
	goOn := h.hang(t, false)
	asked := i.startExtents(id)
	eventually(t, "the plugin is asked", func() bool { return h.inside.Load() == 1 })
	sess, err := r.server.sessionByName("s")
	must(t, err)
	p := r.server.plugins[0]
	p.mu.Lock()
	in := p.in
	p.in = nil
	p.mu.Unlock()
	goOn()
	if err := await(t, asked); !errors.Is(err, syscall.EIO) {
		t.Errorf("%v, want EIO", err)
	}
	p.mu.Lock()
	p.in = in
	p.mu.Unlock()
	if sess.mappingByID(id) == nil {
		t.Error("the mapping is gone")
	}
}

// Clients that ask again and again do not fill the log.
func TestRefusedExtentsAreNotLogged(t *testing.T) {
	var mu sync.Mutex
	var lines bytes.Buffer
	mem := newMemory()
	mem.add("vol", 1<<20)
	i := newRig(t, mem, func(c *Config) {
		c.Logger = slog.New(slog.NewTextHandler(&lockedWriter{&mu, &lines}, &slog.HandlerOptions{Level: slog.LevelInfo}))
	}).connect("s")
	id := i.mustOpen("vol", blk.ReadWrite)
	for range 3 {
		if _, err := i.extents(id, 0, 8); !errors.Is(err, syscall.EOPNOTSUPP) {
			t.Fatal(err)
		}
	}
	if _, err := i.extents(id, 0, 0); !errors.Is(err, syscall.EINVAL) {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if !bytes.Contains(lines.Bytes(), []byte("device opened")) || bytes.Contains(lines.Bytes(), []byte("request refused")) {
		t.Errorf("refusals are logged, or nothing is:\n%s", lines.Bytes())
	}
}

type lockedWriter struct {
	mu *sync.Mutex
	b  *bytes.Buffer
}

func (w *lockedWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(b)
}
