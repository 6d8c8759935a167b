package main

import (
	"bytes"
	"context"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugintest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

func TestMain(m *testing.M) { plugintest.Main(m, main) }

// daemon is a host with two rings and one device, and the plugin as a process
// of its own.
type daemon struct {
	*rig
	p        *plugin.Process
	listener *net.UnixListener
	arena    *shm.Arena
	rings    []*shm.Ring
}

const (
	daemonSlots = 32
	daemonSlot  = 64 << 10
)

func newDaemon(t *testing.T) *daemon {
	t.Helper()
	d := &daemon{rig: &rig{t: t, disks: map[uint32]*disk{}, stop: make(chan struct{})}}
	var err error
	if d.arena, err = shm.NewArena("nbd-test", daemonSlots*daemonSlot); err != nil {
		t.Fatal(err)
	}
	l := testLimits(4 << 20)
	d.disks[3] = &disk{limits: l, arena: d.arena.Bytes(), slotSize: daemonSlot, mem: make([]byte, l.Size)}
	d.addr = filepath.Join(t.TempDir(), "nbd.sock")
	if d.listener, err = net.ListenUnix("unix", &net.UnixAddr{Name: d.addr, Net: "unix"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.close)
	d.launch()
	return d
}

// launch starts the plugin, with new rings, on the listener that is there.
func (d *daemon) launch() {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	exe, err := os.Executable()
	must(d.t, "find executable", err)
	d.p, err = plugin.Launch(ctx, plugin.Config{Path: exe, Kind: plugin.KindFrontend, Name: "nbd", Pumps: 2, Logger: quiet()})
	must(d.t, "launch", err)
	for i := range 2 {
		ring, err := shm.NewRing(256)
		must(d.t, "make ring", err)
		d.rings = append(d.rings, ring)
		must(d.t, "attach queue", d.p.AttachQueue(ctx, i, ring))
		h := newHost(ring, d.disks, rand.Uint64()|1)
		d.hosts = append(d.hosts, h)
		d.hostW.Add(1)
		go d.serve(h)
	}
	must(d.t, "attach arena", d.p.AttachArena(ctx, 9, d.arena))
	must(d.t, "add device", d.p.AddDevice(ctx, plugin.DeviceSpec{
		Index: 3, Name: "disk0", Limits: d.disks[3].limits, ArenaID: 9, SlotSize: daemonSlot, Slots: daemonSlots,
	}))
	file, err := d.listener.File()
	must(d.t, "get listener", err)
	defer file.Close()
	must(d.t, "add listener", d.p.AddListener(ctx, "unix", file))
}

// The daemon hands over the means of TLS, and new ones.
func TestProcess_TLS(t *testing.T) {
	d := newDaemon(t)
	a := newAuthority(t)
	tls := a.server(true, true)
	must(t, "set TLS", d.p.SetTLS(t.Context(), tls))
	mustAsk(t, greeted(t, "unix", d.addr), nbdwire.OptList, nil, needsTLS)
	s, err := upgrade(greeted(t, "unix", d.addr), a.member("web"))
	must(t, "start TLS", err)
	mustAsk(t, s, nbdwire.OptGo, goData("disk0"), nbdwire.RepInfo)
	tls.PrivateKey = []byte("-----BEGIN PRIVATE KEY-----\nsecret\n-----END PRIVATE KEY-----\n")
	if err := d.p.SetTLS(t.Context(), tls); blk.ToErrno(err) != blk.EINVAL || strings.Contains(err.Error(), "secret") {
		t.Errorf("a broken key: %v", err)
	}
	b := newAuthority(t)
	must(t, "set TLS", d.p.SetTLS(t.Context(), b.server(true, true)))
	_, err = upgrade(greeted(t, "unix", d.addr), b.member("web"))
	must(t, "start TLS with the new files", err)
}

func must(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func (d *daemon) close() {
	if d.p != nil {
		d.p.Kill()
		<-d.p.Exited()
	}
	close(d.stop)
	d.hostW.Wait()
	for _, r := range d.rings {
		r.Close()
	}
	d.arena.Close()
	d.listener.Close()
	d.disks[3].check(d.t)
}

func TestProcess(t *testing.T) {
	d := newDaemon(t)
	ctx := t.Context()
	want, got := pattern(300001, 1), make([]byte, 300001)
	a, b := d.connect(true), d.connect(false)
	if a.write(777, want) != 0 || b.read(777, got) != 0 || !bytes.Equal(got, want) {
		t.Fatal("data differ")
	}
	st, err := d.p.DeviceStatus(ctx, 3)
	if err != nil || st.Openers != 2 || st.Location != "nbd+unix:///disk0?socket="+escaped(d.addr) {
		t.Errorf("status %+v, %v", st, err)
	}
	if err := d.p.RemoveDevice(ctx, 3, false); blk.ToErrno(err) != blk.EBUSY {
		t.Errorf("remove while open: %v", err)
	}
	if err := d.p.RemoveDevice(ctx, 3, true); err != nil {
		t.Error(err)
	}
	if err := d.p.DetachArena(ctx, 9); err != nil {
		t.Error(err)
	}
	if err := d.p.Stop(ctx); err != nil {
		t.Error(err)
	}
}

// The listener is the daemon's: clients that come while no plugin runs wait,
// and the next one serves them.
func TestProcess_DeathEndsConnectionsAndNotTheListener(t *testing.T) {
	d := newDaemon(t)
	c := d.connect(true)
	if c.write(0, pattern(4096, 1)) != 0 {
		t.Fatal("write fails")
	}
	d.p.Kill()
	<-d.p.Exited()
	if _, err := c.start(nbdwire.CmdFlush, 0, 0, 0, nil).wait(); err == nil {
		t.Error("connection survives the plugin")
	}
	early := make(chan *client)
	go func() { early <- d.connect(true) }()
	time.Sleep(10 * time.Millisecond)
	d.launch()
	got := make([]byte, 4096)
	if code := (<-early).read(0, got); code != 0 || !bytes.Equal(got, pattern(4096, 1)) {
		t.Error("next plugin does not serve the data")
	}
}

// Users' connections go on in another process, with what they have sent and not read.
func TestProcess_ConnectionsChangeTheProcess(t *testing.T) {
	d := newDaemon(t)
	a, b := d.connect(true), d.connect(false)
	if a.write(0, pattern(100000, 1)) != 0 {
		t.Fatal("write fails")
	}
	for round := range 3 {
		n := 50000 + round
		write := a.start(nbdwire.CmdWrite, 0, 200000, n, []byte{}) // no payload yet
		payload := pattern(n, uint64(round))
		a.must(a.conn.Write(payload[:n/2]))
		old := d.p
		all, closed, err := old.ReleaseConnections(t.Context(), 20*time.Second)
		if err != nil || len(all) != 2+round || closed != 0 {
			t.Fatalf("%d connections, %d closed, %v", len(all), closed, err)
		}
		must(t, "remove the device", old.RemoveDevice(t.Context(), 3, false))
		read := b.start(nbdwire.CmdRead, 0, 0, 100000, make([]byte, 100000))
		d.launch()
		must(t, "adopt", d.p.AdoptConnections(t.Context(), all))
		plugin.CloseConnections(all)
		old.Kill()
		<-old.Exited()
		must(t, "serve", d.p.ServeConnections(t.Context()))
		a.must(a.conn.Write(payload[n/2:]))
		if code, err := write.wait(); code != 0 || err != nil {
			t.Fatalf("write: %d, %v", code, err)
		}
		if code, err := read.wait(); code != 0 || err != nil || !bytes.Equal(read.buf, pattern(100000, 1)) {
			t.Fatalf("read: %d, %v", code, err)
		}
		got := make([]byte, n)
		if code := d.connect(true).read(200000, got); code != 0 || !bytes.Equal(got, payload) {
			t.Fatalf("a new connection: %d", code)
		}
	}
	if err := d.p.AdoptConnections(t.Context(), []plugin.Connection{{Device: "disk0", State: []byte("{}"), FDs: []int{2}}}); err == nil {
		t.Error("a state of nothing is adopted")
	}
}
