package server

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// Resize returns the new size of the disk, if the test has set one.
func (d *memDisk) Resize(context.Context) (blk.Limits, error) {
	if d.unsized.Add(-1) >= 0 {
		return blk.Limits{}, syscall.EBUSY
	}
	if l := d.resized.Load(); l != nil {
		return *l, nil
	}
	return d.limits, nil
}

// resizeTo lets the next look find size bytes; the data have room for it.
func (d *memDisk) resizeTo(size uint64) {
	l := d.limits
	l.Size = size
	d.resized.Store(&l)
}

type told struct {
	rnbdwire.EventRspFields
	err error
}

// listen sends an EVENT. The answer comes on the channel.
func (i *initiator) listen(seen uint64) <-chan told {
	i.t.Helper()
	return i.ask(rnbdwire.EventFields{Seen: seen})
}

func (i *initiator) ask(f rnbdwire.EventFields) <-chan told {
	i.t.Helper()
	got := make(chan told, 1)
	msg := make([]byte, rnbdwire.EventSize)
	f.Put(msg)
	ctx := i.ctx()
	go func() {
		rsp := make(rnbdwire.EventRsp, rnbdwire.EventRspSize)
		err := i.session.AdminListen(ctx, msg, rsp)
		got <- told{rsp.Fields(), err}
	}()
	return got
}

// parked waits until an EVENT of the session waits at the server.
func (r *rig) parked(session string) {
	r.t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for time.Now().Before(deadline) {
		if sess, err := r.server.sessionByName(session); err == nil {
			sess.mu.Lock()
			ok := sess.events.waiting != nil
			sess.mu.Unlock()
			if ok {
				return
			}
		}
		time.Sleep(time.Millisecond)
	}
	r.t.Fatal("no EVENT waits")
}

func await[T any](t *testing.T, c <-chan T) T {
	t.Helper()
	select {
	case x := <-c:
		return x
	case <-time.After(10 * time.Second):
		t.Fatal("no answer within 10 s")
		panic("unreachable")
	}
}

func TestE001_E014_E018_E025_FeaturesAreAnnounced(t *testing.T) {
	i := newRig(t, newMemory()).connect("s")
	rsp, err := i.sessInfo(2)
	must(t, err)
	const want = rnbdwire.FeatureEvents | rnbdwire.FeatureOpenAs | rnbdwire.FeatureIdentity | rnbdwire.FeatureOnce | rnbdwire.FeatureList |
		rnbdwire.FeatureExtents | rnbdwire.FeatureVerifier | rnbdwire.FeatureReasons
	if rsp.Features() != want {
		t.Errorf("features %#x", rsp.Features())
	}
}

// A client may ask for a plugin that opens paths. A plugin that makes devices
// of names, as the rig's, is chosen by the operator only.
func TestE016_IOModesThatAreNotOffered(t *testing.T) {
	mem := newMemory()
	mem.add("vol", 1<<20)
	i := newRig(t, mem).connect("s")
	for mode, want := range map[string]error{"": nil, "memory": syscall.EINVAL, "nothing": syscall.EINVAL} {
		msg, rsp := make([]byte, rnbdwire.OpenAsSize), make(rnbdwire.OpenRsp, rnbdwire.OpenRspSize)
		must(t, rnbdwire.OpenAsFields{OpenFields: rnbdwire.OpenFields{AccessMode: uint8(blk.ReadOnly), Name: "vol"}, IOMode: mode}.Put(msg))
		if err := i.session.AdminRead(i.ctx(), msg, rsp); !errors.Is(err, want) {
			t.Errorf("io mode %q: %v, want %v", mode, err, want)
		}
		if want == nil {
			must(t, i.closeDevice(rsp.Fields().DeviceID))
		}
	}
	msg := make([]byte, rnbdwire.OpenAsSize-1)
	copy(msg, []byte{2, 0x80})
	if err := i.session.AdminRead(i.ctx(), msg, make([]byte, rnbdwire.OpenRspSize)); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a short message: %v", err)
	}
}

// describedPlugin returns a plugin that has said that of itself.
func describedPlugin(info plugin.Info) *ioPlugin {
	p := &ioPlugin{cfg: PluginConfig{Name: info.Name}}
	p.told.Store(&info)
	return p
}

// The operator's rule is binding; where none matches the client's wish counts.
func TestE016_RulesComeBeforeWishes(t *testing.T) {
	s := &Server{cfg: Config{Rules: []Rule{{"scratch*", "memory"}, {"raw/*", "blockio"}, {"*.img", "fileio"}}}}
	for _, p := range []plugin.Info{{Name: "fileio"}, {Name: "blockio"}, {Name: "memory", Names: plugin.NamesOpaque}} {
		s.plugins = append(s.plugins, describedPlugin(p))
	}
	for _, tt := range []struct {
		name, wish, want string
		err              error
	}{
		{"a.img", "", "fileio", nil},
		{"a.img", "fileio", "fileio", nil},
		{"a.img", "blockio", "", syscall.EPERM},
		{"/./a.img", "blockio", "", syscall.EPERM},
		{"scratch1", "fileio", "", syscall.EPERM},
		{"raw/a", "fileio", "", syscall.EPERM},
		{"raw/a.img", "", "blockio", nil},
		{"raw/a/b.img", "", "fileio", nil}, // "*" of a pattern with a slash stands for none
		{"pool/a.img", "", "fileio", nil},
		{"/pool//b/../scratch.img", "", "fileio", nil},
		{"scratch/vol", "", "memory", nil},
		{"other", "blockio", "blockio", nil},
		{"other", "", "", nil},
		{"other", "memory", "", syscall.EINVAL},
		{"other", "nothing", "", syscall.EINVAL},
	} {
		p, err := s.choosePlugin(t.Context(), tt.name, tt.wish)
		got := ""
		if p != nil {
			got = p.cfg.Name
		}
		if got != tt.want || !errors.Is(err, tt.err) {
			t.Errorf("open %q, wish %q: %q, %v; want %q, %v", tt.name, tt.wish, got, err, tt.want, tt.err)
		}
	}
}

func TestE004_ResizeIsToldUntilItIsSeen(t *testing.T) {
	mem := newMemory()
	disk := mem.add("vol", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s")
	first, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	got := i.listen(0)
	r.parked("s")
	disk.resizeTo(512 << 10)
	must(t, r.server.Resize(t.Context(), "vol"))
	want := rnbdwire.EventRspFields{DeviceID: first.DeviceID, Number: 1, Sectors: 1024, Kind: rnbdwire.EventResize}
	if x := await(t, got); x.err != nil || x.EventRspFields != want {
		t.Fatalf("E-004: told %+v, %v; want %+v", x.EventRspFields, x.err, want)
	}
	if x := await(t, i.listen(0)); x.EventRspFields != want {
		t.Errorf("E-004: not seen yet, but told %+v, %v", x.EventRspFields, x.err)
	}
	if errno := i.rw(first.DeviceID, blk.Read, 1024, make([]byte, 512)); errno != blk.EIO {
		t.Errorf("read behind the new end: errno %d, want EIO", errno)
	}
	again, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	if again.Sectors != 1024 {
		t.Errorf("another OPEN says %d sectors", again.Sectors)
	}

	got = i.listen(1)
	r.parked("s")
	must(t, r.server.Resize(t.Context(), "vol")) // as large as before: no news
	disk.resizeTo(1 << 20)
	must(t, r.server.Resize(t.Context(), "vol"))
	if x := await(t, got); x.Number != 2 || x.Sectors != 2048 {
		t.Errorf("E-004: told %+v, %v", x.EventRspFields, x.err)
	}
}

func TestE005_TheLatestEventReadWaits(t *testing.T) {
	mem := newMemory()
	mem.add("vol", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s")
	old := i.listen(0)
	r.parked("s")
	latest := i.listen(0)
	if x := await(t, old); !errors.Is(x.err, syscall.ECANCELED) {
		t.Errorf("E-005: the older one ends with %v, want ECANCELED", x.err)
	}
	dev, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	_, err = r.server.Control("").CloseDevice(t.Context(), &controlpb.CloseDeviceRequest{Session: "s", DeviceId: dev.DeviceID})
	must(t, err)
	if x := await(t, latest); x.Kind != rnbdwire.EventRemoved || x.DeviceID != dev.DeviceID {
		t.Errorf("E-009: told %+v, %v", x.EventRspFields, x.err)
	}
}

func TestE010_DrainIsTold(t *testing.T) {
	r := newRig(t, newMemory())
	i := r.connect("s")
	got := i.listen(0)
	r.parked("s")
	r.server.notifyDrain()
	if x := await(t, got); x.Kind != rnbdwire.EventDrain {
		t.Errorf("E-010: told %+v, %v", x.EventRspFields, x.err)
	}
}

func TestE012_IdsOfAClientThatListensAreFresh(t *testing.T) {
	mem := newMemory()
	mem.add("vol", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s")
	i.listen(0)
	r.parked("s")
	for want := range uint32(3) {
		dev, err := i.open("vol", blk.ReadWrite)
		must(t, err)
		if dev.DeviceID != want {
			t.Errorf("E-012: id %d, want %d", dev.DeviceID, want)
		}
		must(t, i.closeDevice(dev.DeviceID))
	}
}

func TestBadEventReads(t *testing.T) {
	i := newRig(t, newMemory()).connect("s")
	msg := make([]byte, rnbdwire.EventSize)
	rnbdwire.EventFields{}.Put(msg)
	for name, x := range map[string]struct{ msg, reply int }{
		"short message": {rnbdwire.EventSize - 1, rnbdwire.EventRspSize},
		"short reply":   {rnbdwire.EventSize, rnbdwire.EventRspSize - 1},
		"long reply":    {rnbdwire.EventSize, rnbdwire.EventRspSize + 1},
		"no reply":      {rnbdwire.EventSize, 0},
	} {
		err := i.session.AdminRead(i.ctx(), msg[:x.msg], make([]byte, x.reply))
		if !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%s: %v, want EINVAL", name, err)
		}
	}
}

func TestResizeOfADeviceThatNobodyHasOpen(t *testing.T) {
	r := newRig(t, newMemory())
	if err := r.server.Resize(t.Context(), "vol"); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("got %v, want ENOENT", err)
	}
}

func TestAFileThatGrowsIsNoticed(t *testing.T) {
	t.Run("at once", func(t *testing.T) { growFile(t, 0) })
	t.Run("the plugin cannot say it yet", func(t *testing.T) { growFile(t, 3) })
}

// growFile has a file grow. The plugin says so after a number of failures.
func growFile(t *testing.T, failures int32) {
	dir := t.TempDir()
	file := filepath.Join(dir, "vol")
	must(t, os.WriteFile(file, nil, 0o600))
	must(t, os.Truncate(file, 1<<20))
	mem := newMemory()
	mem.names = plugin.NamesPath
	disk := mem.add("vol", 2<<20)
	disk.limits.Size = 1 << 20
	r := newRig(t, mem, func(c *Config) { c.SearchPath, c.SizePoll = dir, 5*time.Millisecond })
	i := r.connect("s")
	_, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	got := i.listen(0)
	r.parked("s")
	disk.resizeTo(2 << 20)
	disk.unsized.Store(failures)
	must(t, os.Truncate(file, 2<<20))
	if x := await(t, got); x.Kind != rnbdwire.EventResize || x.Sectors != 4096 {
		t.Errorf("told %+v, %v", x.EventRspFields, x.err)
	}
}

func TestE017_AnOpenDeviceKeepsItsIOMode(t *testing.T) {
	mem := newMemory()
	mem.add("vol", 1<<20)
	i := newRig(t, mem).connect("s")
	_, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	msg, rsp := make([]byte, rnbdwire.OpenAsSize), make(rnbdwire.OpenRsp, rnbdwire.OpenRspSize)
	must(t, rnbdwire.OpenAsFields{OpenFields: rnbdwire.OpenFields{AccessMode: uint8(blk.ReadWrite), Name: "vol"}, IOMode: "fileio"}.Put(msg))
	if err := i.session.AdminRead(i.ctx(), msg, rsp); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("the same session, another io mode: %v, want EBUSY", err)
	}
}
