package server

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-server/volume"
)

// pooled is a server with the pool "fast", in which is the volume "v", and clients with
// the identities psk:a and psk:b.
type pooled struct {
	*judged
	api controlpb.ServerDaemonServer
	dir string
}

func newPooled(t *testing.T, change ...func(*Config)) *pooled {
	t.Helper()
	p := &pooled{dir: t.TempDir()}
	mem := newMemory()
	mem.names, mem.crash = plugin.NamesPath, plugin.KeepsAcknowledged
	for _, name := range []string{"fast/v", "fast/v@s", "/fast//v", "files/v"} {
		mem.add(name, 1<<20)
	}
	p.judged = newJudgedWith(t, mem, func(c *Config) {
		c.Pools = []volume.Config{{Name: "fast", Kind: volume.KindFiles, Path: p.dir}}
		for _, f := range change {
			f(c)
		}
	}, "a", "b")
	p.api = p.server.Control("")
	_, err := p.api.InitPool(t.Context(), &controlpb.PoolRequest{Pool: "fast"})
	must(t, err)
	_, err = p.api.CreateVolume(t.Context(), &controlpb.CreateVolumeRequest{Pool: "fast", Name: "v", Size: 1 << 20})
	must(t, err)
	return p
}

func (p *pooled) publish(t *testing.T, identity, access string) {
	t.Helper()
	_, err := p.api.PublishVolume(t.Context(), &controlpb.PublishVolumeRequest{Pool: "fast", Name: "v", Identity: identity, Access: access})
	must(t, err)
}

func (p *pooled) unpublish(ctx context.Context, identity string) error {
	_, err := p.api.UnpublishVolume(ctx, &controlpb.UnpublishVolumeRequest{Pool: "fast", Name: "v", Identity: identity})
	return err
}

func (p *pooled) delete(t *testing.T) error {
	_, err := p.api.DeleteVolume(t.Context(), &controlpb.DeleteVolumeRequest{Pool: "fast", Name: "v", KeepSnapshots: true})
	return err
}

// wantOpen opens a volume, and compares the error.
func wantOpen(t *testing.T, i *initiator, name string, mode blk.AccessMode, want error) (id uint32) {
	t.Helper()
	dev, err := i.open(name, mode)
	if want == nil && err != nil || want != nil && !errors.Is(err, want) {
		t.Errorf("open %s %s: %v, want %v", name, mode, err, want)
	}
	return dev.DeviceID
}

func TestVolumes_AreOpenedByPoolAndName(t *testing.T) {
	p := newPooled(t)
	a := p.as(t, "a")
	id := wantOpen(t, a, "fast/v", blk.ReadWrite, nil)
	for _, name := range []string{"fast", "fast/", "fast/none", "fast/.rnbd-pool", "fast/v/x", "fast/../fast/none", "slow/v", "fast/v@none"} {
		if _, err := a.open(name, blk.ReadOnly); err == nil {
			t.Errorf("%q is opened", name)
		}
	}
	if err := p.delete(t); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("delete while it is open: %v", err)
	}
	list, err := p.api.ListVolumes(t.Context(), &controlpb.ListVolumesRequest{Pool: "fast"})
	must(t, err)
	if len(list.Volumes) != 1 || list.Volumes[0].Writers != 1 {
		t.Errorf("listed: %v", list.Volumes)
	}
	must(t, a.closeDevice(id))
	_, err = p.api.CreateSnapshot(t.Context(), &controlpb.CreateSnapshotRequest{Pool: "fast", Name: "v", Snapshot: "s"})
	must(t, err)
	wantOpen(t, a, "fast/v@s", blk.ReadWrite, syscall.EROFS)
	wantOpen(t, a, "fast/v@s", blk.ReadOnly, nil)
	must(t, p.delete(t))
	wantOpen(t, a, "fast/v", blk.ReadOnly, syscall.ENOENT)
	for name, call := range map[string]func() error{
		"no pool": func() error {
			_, err := p.api.ListVolumes(t.Context(), &controlpb.ListVolumesRequest{Pool: "slow"})
			return err
		},
		"no pool to make one in": func() error {
			_, err := p.api.CreateVolume(t.Context(), &controlpb.CreateVolumeRequest{Pool: "slow", Name: "v", Size: 512})
			return err
		},
	} {
		if err := call(); !errors.Is(err, syscall.ENODEV) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A volume that is published to an identity is for that one, whatever the rules and
// whatever name leads to it.
func TestVolumes_ArePublished(t *testing.T) {
	root := t.TempDir()
	p := newPooled(t, func(c *Config) {
		c.SearchPath = root
		rules, err := access.New([]access.Rule{{Identity: []string{"psk:b"}, Allow: "rw"}})
		must(t, err)
		c.Access = rules
	})
	must(t, os.Mkdir(filepath.Join(root, "files"), 0o700))
	must(t, os.Link(filepath.Join(p.dir, "v"), filepath.Join(root, "files", "v")))
	a, b := p.as(t, "a"), p.as(t, "b")
	wantOpen(t, a, "fast/v", blk.ReadOnly, syscall.EACCES) // by the rules
	wantOpen(t, a, "fast/none", blk.ReadOnly, syscall.EACCES)
	must(t, b.closeDevice(wantOpen(t, b, "fast/v", blk.ReadWrite, nil)))

	p.publish(t, "psk:a", "ro")
	wantOpen(t, b, "fast/v", blk.ReadOnly, syscall.EACCES)
	wantOpen(t, b, "/fast//v", blk.ReadOnly, syscall.EACCES)
	wantOpen(t, b, "files/v", blk.ReadOnly, syscall.EACCES)
	wantOpen(t, a, "fast/v", blk.ReadWrite, syscall.EACCES)
	wantOpen(t, a, "fast/v", blk.ReadOnly, nil)
	p.server.SetAccess(p.server.Access(), 0) // closes what the rules forbid
	if n := p.openMappings(); n != 1 {
		t.Errorf("%d devices are open", n)
	}
	if _, err := p.api.PublishVolume(t.Context(), &controlpb.PublishVolumeRequest{Pool: "fast", Name: "v", Identity: "psk:a", Access: "rw"}); !errors.Is(err, syscall.EEXIST) {
		t.Errorf("published once more, with another access: %v", err)
	}
	must(t, p.unpublish(t.Context(), "psk:a"))
	must(t, p.unpublish(t.Context(), "psk:a"))
	wantOpen(t, a, "fast/v", blk.ReadOnly, syscall.EACCES)
	wantOpen(t, b, "fast/v", blk.ReadOnly, syscall.EACCES)
	if n := p.openMappings(); n != 0 {
		t.Errorf("%d devices are open", n)
	}
}

// Unpublish returns when no write of the client can reach the volume any more, or says
// that some can.
func TestVolumes_UnpublishWaitsForWrites(t *testing.T) {
	p := newPooled(t)
	p.publish(t, "psk:a", "rw")
	p.publish(t, "psk:b", "rw")
	a, b := p.as(t, "a"), p.as(t, "b")
	id := wantOpen(t, a, "fast/v", blk.ReadWrite, nil)
	p.mem.disks["fast/v"].hung.Store(true)
	write := a.start(false, 4096, ioMessage(id, blk.Write, 0, 0, 4096))
	eventually(t, "the write is in the plugin", func() bool { return len(p.mem.requests()) == 1 })

	brief, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.unpublish(brief, "psk:a"); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("while a write is under way: %v", err)
	}
	wantOpen(t, a, "fast/v", blk.ReadOnly, syscall.EACCES)
	if errno := a.rw(id, blk.Write, 0, make([]byte, 512)); errno != blk.ENOTCONN {
		t.Errorf("another write: %v", errno)
	}
	ended := make(chan error, 1)
	go func() { ended <- p.unpublish(t.Context(), "psk:a") }()
	p.mem.wake()
	if errno := a.await(write); errno != blk.OK {
		t.Errorf("the write that was under way: %v", errno)
	}
	must(t, <-ended)
	wantOpen(t, b, "fast/v", blk.ReadWrite, nil) // without waiting for anything
}

// While a device is paused its writes wait, and none of them fails.
func TestVolumes_PauseHoldsWritesBack(t *testing.T) {
	p := newPooled(t)
	a := p.as(t, "a")
	id := wantOpen(t, a, "fast/v", blk.ReadWrite, nil)
	d := p.server.openDevices()[0]
	vid := volume.ID{Dev: d.key.id.dev, Ino: d.key.id.ino}
	p.mem.setHold(true)
	before := a.start(false, 4096, ioMessage(id, blk.Write, 0, 0, 4096))
	eventually(t, "the write is in the plugin", func() bool { return len(p.mem.requests()) == 1 })
	brief, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := p.server.Pause(brief, vid); !errors.Is(err, syscall.ETIMEDOUT) || d.currentState() != devOpen {
		t.Errorf("pause while a write does not end: %v, the device is %s", err, d.currentState())
	}
	p.mem.setHold(false)
	resume, err := p.server.Pause(t.Context(), vid)
	must(t, err)
	if errno := a.await(before); errno != blk.OK {
		t.Errorf("the write before the pause: %v", errno)
	}
	seen := len(p.mem.requests())
	var during []<-chan int
	for i, flags := range []uint32{0, 0, rnbdwire.FlagPreflush, rnbdwire.FlagFUA} {
		during = append(during, a.start(false, 4096, ioMessage(id, blk.Write, flags, uint64(8*i), 4096)))
	}
	eventually(t, "the writes are parked", func() bool { return d.inPause(p.server) == len(during) })
	if n := len(p.mem.requests()); n != seen {
		t.Errorf("%d requests reached the plugin in the pause", n-seen)
	}
	must(t, resume())
	for _, done := range during {
		if errno := a.await(done); errno != blk.OK {
			t.Errorf("a write of the pause: %v", errno)
		}
	}
	if err := resume(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("the end of a pause that has ended: %v", err)
	}
	if states := strings.Join(p.states("fast/v"), " "); !strings.Contains(states, "paused open") {
		t.Errorf("states: %s", states)
	}
}

// A plugin that dies in a pause ends it: the copy may have parts of writes.
func TestVolumes_PluginDiesInPause(t *testing.T) {
	p := newPooled(t)
	a := p.as(t, "a")
	id := wantOpen(t, a, "fast/v", blk.ReadWrite, nil)
	d := p.server.openDevices()[0]
	resume, err := p.server.Pause(t.Context(), volume.ID{Dev: d.key.id.dev, Ino: d.key.id.ino})
	must(t, err)
	write := a.start(false, 4096, ioMessage(id, blk.Write, 0, 0, 4096))
	p.process().Kill()
	eventually(t, "the device is open again", d.isServing)
	if err := resume(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("the end of the pause: %v", err)
	}
	if errno := a.await(write); errno != blk.OK {
		t.Errorf("a write of the pause: %v", errno)
	}
}

// inPause counts the parked requests of d.
func (d *device) inPause(s *Server) (n int) {
	for _, q := range d.plugin.queues {
		s.pumps[q.pump].pump.Call(func() {
			q.eachRequest(func(r *request) {
				if r.state == reqParked && r.m.dev == d {
					n++
				}
			})
		})
	}
	return n
}

// states lists the states of a device in the journal.
func (p *pooled) states(device string) (out []string) {
	for _, e := range p.journal.After(0) {
		if e.Device == device {
			out = append(out, e.To)
		}
	}
	return slices.Clip(out)
}
