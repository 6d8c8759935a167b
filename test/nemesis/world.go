package nemesis

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

// The devices of every world that are under load.
const (
	fastDevice = "fast" // a file
	slowDevice = "slow" // a block device on a medium that the test controls
)

// world is the environment of a schedule.
type world struct {
	t      testing.TB
	setup  Setup
	lab    *lab.Lab
	nets   [2]*wire // nil without root
	ns     [2]string
	specs  [2]string // of the paths, as commands have them
	server *lab.Server
	client *lab.Client
	disk   *slowdisk.Disk    // nil without root
	names  map[string]string // of the client's devices, by ours
	log    func(format string, args ...any)

	mu     sync.Mutex
	active map[*Fault]bool
	ended  map[string]time.Time // the end of the last fault that lets requests of a device fail

	// run guards the server's life: its holder may start or end the server.
	run    sync.Mutex
	downs  int // faults that want it down
	frozen int // faults that want it stopped
	other  int // faults that want it with other settings
	done   []func() error
}

// patience is how long anything may take when nothing is broken any more.
const patience = 30 * time.Second

// build starts everything. close ends it, also after an error.
func build(t testing.TB, s Setup, rooted bool) (*world, error) {
	w := &world{t: t, setup: s, names: map[string]string{}, active: map[*Fault]bool{}, ended: map[string]time.Time{}, log: t.Logf}
	var err error
	if w.lab, err = lab.Open(); err != nil {
		return w, err
	}
	addrs := [2][2]string{{lab.LoopbackAddr(21), lab.LoopbackAddr(22)}, {lab.LoopbackAddr(31), lab.LoopbackAddr(32)}}
	if rooted {
		addrs = [2][2]string{{"10.211.0.1", "10.211.0.2"}, {"10.211.1.1", "10.211.1.2"}}
		if err := w.connect(addrs); err != nil {
			return w, err
		}
		w.disk = slowdisk.New(t, diskSize)
	}
	if err := w.startDaemons(addrs); err != nil {
		return w, err
	}
	return w, w.mapDevices()
}

// connect makes two namespaces and two networks between them.
func (w *world) connect(addrs [2][2]string) error {
	pid := strconv.Itoa(os.Getpid())
	for i, role := range []string{"c", "s"} {
		ns := "rnbd" + pid + role
		if err := ip("netns", "add", ns); err != nil {
			return err
		}
		w.ns[i] = ns
		w.done = append(w.done, func() error { return ip("netns", "delete", ns) })
		if err := ip("-n", ns, "link", "set", "lo", "up"); err != nil {
			return err
		}
	}
	for i := range w.nets {
		n, err := newWire("nm"+pid+strconv.Itoa(i), w.ns, addrs[i])
		if err != nil {
			return err
		}
		w.nets[i] = n
		w.done = append(w.done, func() error { n.close(); return nil })
	}
	return nil
}

func inNamespace(ns string) []string {
	if ns == "" {
		return nil
	}
	return []string{"ip", "netns", "exec", ns}
}

const diskSize = 4 << 20

func (w *world) startDaemons(addrs [2][2]string) (err error) {
	var listen []string
	for i, fabric := range w.setup.Fabrics {
		port := map[string]string{"iwarp": "1234", "rocev2": "4791"}[fabric]
		listen = append(listen, fabric+"://"+addrs[i][1]+":"+port)
		w.specs[i] = addrs[i][0] + "@" + addrs[i][1] + ":" + port + "%" + fabric
	}
	w.server, err = w.lab.StartServer(lab.ServerOptions{
		SearchPath: "/", Listen: listen, Plugins: []string{"fileio", "blockio"}, Prefix: inNamespace(w.ns[1]),
		Env: []string{"RNBD_IO_ENGINE=" + w.setup.Engine}, Extra: w.settings(0),
	})
	if err != nil {
		return fmt.Errorf("server: %w", err)
	}
	w.client, err = w.lab.StartClient(lab.ClientOptions{Prefix: inNamespace(w.ns[0]), Extra: []string{"--pumps", "2", "--policy", w.setup.Policy}})
	if err != nil {
		return fmt.Errorf("client: %w", err)
	}
	return nil
}

// settings are the server's; variant 0 are the usual ones.
func (w *world) settings(variant int) []string {
	depth, chunk := w.setup.QueueDepth, w.setup.ChunkSize
	if variant > 0 {
		depth, chunk = depth*2, chunk*2
	}
	return []string{
		"--pumps", "2", "--crash-limit", "100000",
		"--queue-depth", strconv.Itoa(depth), "--chunk-size", strconv.Itoa(chunk),
	}
}

func (w *world) mapDevices() error {
	images := map[string]string{fastDevice: filepath.Join(w.lab.Dir, "fast.img")}
	for i := range w.setup.Crowd {
		images["crowd"+strconv.Itoa(i)] = filepath.Join(w.lab.Dir, "crowd"+strconv.Itoa(i)+".img")
	}
	for _, image := range images {
		if err := os.WriteFile(image, nil, 0o644); err != nil {
			return err
		}
		if err := os.Truncate(image, diskSize); err != nil {
			return err
		}
	}
	if w.disk != nil {
		images[slowDevice] = w.disk.Loop()
	}
	for name, image := range images {
		d, err := w.client.Map(image[1:], w.server, func(r *controlpb.MapRequest) {
			r.Paths, r.Session, r.Loss = w.specs[:], session, w.setup.Loss
		})
		if err != nil {
			return fmt.Errorf("map %s: %w", image, err)
		}
		w.names[name] = d.Name
	}
	return nil
}

const session = "nemesis"

// loaded are the devices that get load.
func (w *world) loaded() []string {
	if w.disk == nil {
		return []string{fastDevice}
	}
	return []string{fastDevice, slowDevice}
}

// begin and end a fault.
func (w *world) begin(f *Fault) error {
	w.log("begin %v", f)
	w.shape(func() { w.active[f] = true })
	if act := kinds[f.Kind].begin; act != nil {
		return act(w, f)
	}
	return nil
}

func (w *world) end(f *Fault) error {
	w.log("end   %v", f)
	w.shape(func() {
		delete(w.active, f)
		w.noteEnd(f)
	})
	act := kinds[f.Kind].end
	if act == nil {
		return nil
	}
	err := act(w, f)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.noteEnd(f)
	return err
}

// noteEnd records, for each device that f lets fail, the end of the fault. mu
// is held.
func (w *world) noteEnd(f *Fault) {
	fails := kinds[f.Kind].fails
	for _, device := range w.loaded() {
		if fails != nil && fails(device) {
			w.ended[device] = time.Now()
		}
	}
}

// failedSince reports whether such a fault has ended since then. Requests
// that waited for the fault to end may fail a little later.
func (w *world) failedSince(device string, at time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ended[device].After(at.Add(-aftermath))
}

const aftermath = 2 * time.Second

// shape changes the active faults, then the wires and the disk accordingly.
func (w *world) shape(change func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change()
	var effects [2][2]effect
	var m medium
	for f := range w.active {
		k := kinds[f.Kind]
		for i := range effects {
			if k.wire != nil {
				k.wire(f, i, &effects[i])
			}
		}
		if k.disk != nil {
			k.disk(f, &m)
		}
	}
	for i, n := range w.nets {
		if n != nil {
			n.set(effects[i])
		}
	}
	if w.disk == nil {
		return
	}
	w.disk.SetDelay(m.delay)
	w.disk.SetError(m.errno)
	if !m.hung {
		w.disk.Release()
		return
	}
	w.disk.HoldWrites()
	w.disk.HoldReads()
}

// failing reports whether an active fault lets requests of the device fail
// although the device waits for its server.
func (w *world) failing(device string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for f := range w.active {
		if fails := kinds[f.Kind].fails; fails != nil && fails(device) {
			return true
		}
	}
	return false
}

// awaitBack waits until all paths are connected and all devices are open.
func (w *world) awaitBack(limit time.Duration) error {
	deadline := time.Now().Add(limit)
	for {
		err := w.back()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (w *world) back() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	sessions, err := w.client.API.ListSessions(ctx, &controlpb.ListRequest{})
	if err != nil {
		return fmt.Errorf("list sessions: %w", err)
	}
	if len(sessions.Sessions) != 1 || len(sessions.Sessions[0].Paths) != 2 {
		return fmt.Errorf("the client has %v, want a session of two paths", sessions.Sessions)
	}
	for _, p := range sessions.Sessions[0].Paths {
		if p.State != "connected" {
			return fmt.Errorf("path %s is %s: %s", p.Dst, p.State, p.LastError)
		}
	}
	devices, err := w.client.API.ListDevices(ctx, &controlpb.ListRequest{Brief: true})
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	if len(devices.Devices) != len(w.names) {
		return fmt.Errorf("the client has %d devices, want %d", len(devices.Devices), len(w.names))
	}
	for _, d := range devices.Devices {
		if d.State != "open" {
			return fmt.Errorf("device %s (%s) is %s: %s", d.Name, d.Path, d.State, d.LastError)
		}
	}
	return nil
}

// stop ends the daemons in order; they must not leave sockets.
func (w *world) stop() error {
	var errs []error
	for _, d := range []struct {
		what    string
		stop    func() error
		sockets []string
	}{
		{"client", w.client.Stop, []string{w.client.Socket, w.client.NBD}},
		{"server", w.server.Stop, []string{w.server.Socket}},
	} {
		at := time.Now()
		if err := d.stop(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", d.what, err))
		}
		if took := time.Since(at); took > patience-time.Second {
			errs = append(errs, fmt.Errorf("the %s took %v to end", d.what, took))
		}
		for _, s := range d.sockets {
			if _, err := os.Lstat(s); err == nil {
				errs = append(errs, fmt.Errorf("the %s has left %s", d.what, s))
			}
		}
	}
	return errors.Join(errs...)
}

// keep copies the daemons' logs to a folder that stays.
func (w *world) keep() string {
	dir, err := os.MkdirTemp("", "rnbd-nemesis-")
	if err != nil {
		return err.Error()
	}
	logs, _ := filepath.Glob(filepath.Join(w.lab.Dir, "*.log")) // fails for a bad pattern only
	for _, name := range logs {
		if text, err := os.ReadFile(name); err == nil {
			_ = os.WriteFile(filepath.Join(dir, filepath.Base(name)), text, 0o644)
		}
	}
	return dir
}

// close takes everything away, whatever state it is in.
func (w *world) close() {
	if w.disk != nil {
		w.shape(func() { clear(w.active) })
	}
	if w.lab != nil {
		if err := w.lab.Close(); err != nil {
			w.log("end of the lab: %v", err)
		}
	}
	for i := len(w.done) - 1; i >= 0; i-- {
		if err := w.done[i](); err != nil {
			w.log("clear away: %v", err)
		}
	}
}
