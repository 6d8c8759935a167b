package sim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-server"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// world is the environment of a schedule. Lock order: world.mu is taken last.
type world struct {
	plan     *Schedule
	dir      string // for the client's state
	net      *loopback.Network
	memories memories
	servers  []*host
	client   *host
	loads    []*load
	log      *slog.Logger
	start    time.Time
	zombies  sync.WaitGroup // daemons that were killed, on their way out
	numbers  atomic.Int64

	mu         sync.Mutex
	disks      map[string]*disk
	users      map[string]*userDisk
	processes  []*process // of all plugins, that run or have
	violations []string
}

// host runs one daemon at a time, and the processes of its plugins.
type host struct {
	w     *world
	name  string
	index int
	addrs []netip.Addr
	start startGate

	refuses atomic.Bool // its storage cannot open disks

	mu    sync.Mutex
	up    bool
	life  int // counts the daemons
	boots int // counts the failures of power
	devs  []verbs.Device
	procs []supervise.Process // of the daemon that runs
	srv   *server.Server
	clt   *client.Client
	api   controlpb.ClientDaemonServer
	// Ends the start of the client that is under way; nil: none is.
	starting context.CancelCauseFunc
	sizes    sizes // of a server
	state    int   // number of the client's state file
}

// sizes are the queue depth and chunk size that a server announces to a
// session.
type sizes struct{ depth, chunk int }

// startGate decides how a new plugin process starts.
type startGate struct {
	mu    sync.Mutex
	fail  int // so many starts fail
	delay time.Duration
}

func (g *startGate) wait(ctx context.Context) error {
	g.mu.Lock()
	fail, delay := g.fail > 0, g.delay
	g.fail = max(g.fail-1, 0)
	g.mu.Unlock()
	select {
	case <-time.After(delay):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if fail {
		return errors.New("the process does not start")
	}
	return nil
}

func (g *startGate) set(fail int, delay time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fail, g.delay = fail, delay
}

// adopt enters a new process of a daemon, unless that is dead.
func (h *host) adopt(p supervise.Process, life int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.up || h.life != life {
		return false
	}
	h.procs = append(h.procs, p)
	return true
}

// process returns the latest plugin process; nil: there is none.
func (h *host) process() supervise.Process {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.procs); n > 0 {
		return h.procs[n-1]
	}
	return nil
}

func (w *world) number() int { return int(w.numbers.Add(1)) }

func (w *world) disk(name string) *disk {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.disks[name]
}

func (w *world) user(name string) *userDisk {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.users[strings.TrimSuffix(name, " (removed)")]
}

// since is a time as schedules count it.
func (w *world) since(t time.Time) time.Duration { return t.Sub(w.start).Round(time.Millisecond) }

// violate records a violation.
func (w *world) violate(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.violations) < 20 {
		w.violations = append(w.violations, fmt.Sprintf("%v: ", w.since(time.Now()))+fmt.Sprintf(format, args...))
	}
	w.log.Error("violation", "what", fmt.Sprintf(format, args...))
}

// newWorld starts everything and maps the devices.
func newWorld(ctx context.Context, plan *Schedule, dir string, log *slog.Logger) (*world, error) {
	w := &world{plan: plan, log: log, dir: dir, start: time.Now(), disks: map[string]*disk{}, users: map[string]*userDisk{}}
	w.net = loopback.New(loopback.WithAckTimeout(7 * time.Second))
	w.memories = memories{w: w, by: map[uint64]*region{}}
	for i := range plan.Servers {
		h := &host{w: w, name: fmt.Sprintf("server%d", i), index: i, sizes: plan.sizes()}
		for p := range plan.Paths {
			h.addrs = append(h.addrs, netip.AddrFrom4([4]byte{10, byte(p), byte(i), 1}))
		}
		w.servers = append(w.servers, h)
		for d := range plan.Devices {
			w.addDevice(i, d)
		}
		if err := h.startServer(ctx); err != nil {
			return w, err
		}
	}
	w.client = &host{w: w, name: "client"}
	for p := range plan.Paths {
		w.client.addrs = append(w.client.addrs, netip.AddrFrom4([4]byte{10, byte(p), 9, 9}))
	}
	for _, h := range w.servers {
		for p, a := range h.addrs {
			w.net.Behave(w.client.addrs[p], a, plan.fabric(p))
		}
	}
	if err := w.client.startClient(ctx); err != nil {
		return w, err
	}
	for _, l := range w.loads {
		if err := w.mapDevice(ctx, l); err != nil {
			return w, err
		}
	}
	return w, nil
}

// addDevice makes the disk d of server s, and its users' end.
func (w *world) addDevice(s, d int) {
	name := fmt.Sprintf("s%dd%d", s, d)
	seed := rand.NewPCG(w.plan.Seed, uint64(s)<<8|uint64(d))
	disk := newDisk(w, name, w.plan.Blocks, w.plan.Cache, rand.New(seed))
	user := &userDisk{name: name}
	session := w.servers[s].name
	if d%max(w.plan.Sessions, 1) > 0 {
		session += "b"
	}
	w.disks[name], w.users[name] = disk, user
	w.loads = append(w.loads, &load{w: w, name: name, index: len(w.loads), session: session, user: user, disk: disk, history: newHistory(uint32(s)<<8|uint32(d)+1, w.plan.Blocks),
		blocks: w.plan.Blocks, queues: w.plan.Queue > 0, writing: make([]bool, w.plan.Blocks), pending: map[*userRequest]time.Time{}})
}

func (w *world) serverOf(l *load) *host {
	return w.servers[l.index/w.plan.Devices]
}

func (w *world) mapDevice(ctx context.Context, l *load) error {
	s := w.serverOf(l)
	r := client.MapRequest{Path: l.name, Session: l.session, Name: l.name, Mode: blk.ReadWrite, Frontend: "sim", Loss: client.Loss{Queue: w.plan.Queue}}
	for i := range s.addrs {
		r.Paths = append(r.Paths, w.path(s, i))
	}
	c, _ := w.client.daemon()
	if c == nil {
		return errDown
	}
	_, err := c.Map(ctx, r)
	return err
}

var errDown = fmt.Errorf("the client is down: %w", syscall.ESHUTDOWN)

// daemon returns the client that runs and its control API; nil: none does.
func (h *host) daemon() (*client.Client, controlpb.ClientDaemonServer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.clt, h.api
}

func (w *world) path(s *host, i int) string {
	return fmt.Sprintf("%s@%s%%loopback", w.client.addrs[i], s.addrs[i])
}

// startServer brings a server up, with its disks as they are.
func (h *host) startServer(ctx context.Context) error {
	w := h.w
	cfg := server.DefaultConfig()
	h.mu.Lock()
	h.up, h.procs, h.devs = true, nil, nil
	h.life++
	life := h.life
	cfg.BootID = fmt.Sprintf("%s.%d", h.name, h.boots)
	for i, a := range h.addrs {
		dev := w.net.Device(fmt.Sprintf("%s.%d.%d", h.name, i, w.number()))
		h.devs = append(h.devs, dev)
		cfg.Listen = append(cfg.Listen, server.Listen{Device: dev, Addr: netip.AddrPortFrom(a, client.DefaultPort)})
	}
	cfg.QueueDepth, cfg.ChunkSize = h.sizes.depth, h.sizes.chunk
	h.mu.Unlock()
	cfg.Plugins = []server.PluginConfig{{Name: "sim", Path: "simulated"}}
	cfg.Rules = []server.Rule{{Glob: "*", Plugin: "sim"}}
	cfg.Pumps, cfg.RingEntries = w.plan.Pumps, 64
	cfg.SizePoll = -1
	cfg.CrashLimit = w.plan.crashes() + 2 // starts that fail are none
	cfg.Logger = w.log.With("host", h.name)
	cfg.Virtual = true
	cfg.NewRing = shm.NewHeapRing
	cfg.Launch = func(ctx context.Context, c plugin.Config) (supervise.Process, error) {
		return w.launchStorage(ctx, h, life, c)
	}
	s, err := server.New(ctx, cfg)
	if err != nil {
		h.mu.Lock()
		h.up = false
		h.mu.Unlock()
		return fmt.Errorf("start of %s: %w", h.name, err)
	}
	h.mu.Lock()
	h.srv = s
	h.mu.Unlock()
	return nil
}

// kill ends a server as a failure of its host would: processes first, then its
// connections. The rest of the daemon in this process does no harm and ends.
func (h *host) kill(power bool) {
	h.mu.Lock()
	if !h.up || h.srv == nil {
		h.mu.Unlock()
		return
	}
	srv, procs, devs := h.srv, h.procs, h.devs
	h.up, h.srv, h.procs = false, nil, nil
	if power {
		h.boots++
	}
	h.mu.Unlock()
	for _, p := range procs {
		p.Kill()
	}
	for i, d := range devs {
		h.w.net.Crash(d, h.w.plan.resets(i) && !power)
	}
	if power {
		h.w.powerCut(h)
	} else {
		h.w.forgetFlushes(h)
	}
	h.w.zombies.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_ = srv.Close(ctx)
	})
}

// forgetFlushes excuses a flush of each device of h that should fail for a write-back:
// whether a client was told is known to the process of the server alone, and it ends.
func (w *world) forgetFlushes(h *host) {
	if !w.plan.has("fail-write-back") {
		return
	}
	for _, l := range w.loads {
		if w.serverOf(l) == h {
			l.forgetLoss()
		}
	}
}

func (w *world) powerCut(h *host) {
	for _, l := range w.loads {
		if w.serverOf(l) == h {
			l.powerCut(l.disk.powerCut())
		}
	}
}

// stop ends a server in order.
func (h *host) stop() {
	h.mu.Lock()
	srv := h.srv
	h.srv = nil
	h.mu.Unlock()
	if srv == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	begin := time.Now()
	_ = srv.Close(ctx)
	h.w.forgetFlushes(h)
	if d := time.Since(begin); d > 30*time.Second {
		h.w.violate("liveness: the stop of %s took %v", h.name, d)
	}
	h.mu.Lock()
	h.up = false
	procs := h.procs
	h.procs = nil
	h.mu.Unlock()
	for _, p := range procs {
		p.Kill() // as the end of the daemon does
	}
}

// reboot ends a server and its host in order. The disks have written all back.
func (h *host) reboot() {
	h.stop()
	h.mu.Lock()
	h.boots++
	h.mu.Unlock()
	for _, l := range h.w.loads {
		if h.w.serverOf(l) == h {
			l.excuseLoss()
		}
	}
}

func (h *host) startClient(ctx context.Context) error {
	w := h.w
	ctx, cancel := context.WithCancelCause(ctx)
	h.mu.Lock()
	if h.up {
		h.mu.Unlock()
		cancel(nil)
		return nil // another fault's end was there first
	}
	h.life++
	life := h.life
	dev := w.net.Device(fmt.Sprintf("client.%d", life))
	h.up, h.starting, h.devs = true, cancel, []verbs.Device{dev}
	h.mu.Unlock()
	cfg := client.DefaultConfig()
	cfg.Fabrics = map[string]verbs.Device{"loopback": dev}
	cfg.DefaultFabric = "loopback"
	cfg.Hostname = "sim"
	cfg.Policy = w.plan.Policy
	cfg.Frontends = []client.FrontendConfig{{Name: "sim", Path: "simulated"}}
	cfg.Frontend = "sim"
	cfg.Pumps, cfg.RingEntries, cfg.Slots = w.plan.Pumps, w.plan.frontRing(), w.plan.Slots
	if w.plan.has("kill-client") {
		cfg.StateFile = h.stateFile(h.state)
	}
	cfg.Logger = w.log.With("host", h.name)
	cfg.Virtual = true
	cfg.NewRing = shm.NewHeapRing
	cfg.Launch = func(ctx context.Context, c plugin.Config) (supervise.Process, error) {
		return w.launchFront(ctx, h, life, c)
	}
	c, err := client.New(ctx, cfg)
	h.mu.Lock()
	defer h.mu.Unlock()
	killed := h.life != life || !h.up
	if !killed {
		h.starting = nil
	}
	switch {
	case err != nil && killed:
		return errKilled
	case err != nil:
		h.up = false
		_ = dev.Close()
		return fmt.Errorf("start of the client: %w", err)
	case killed:
		h.bury(c)
		return errKilled
	}
	if h.clt != nil {
		w.violate("set-up: two clients at once")
	}
	h.clt, h.api = c, c.Control("sim")
	return nil
}

// errKilled is of a client that was killed while it started. The fault that did so
// starts the next one.
var errKilled = errors.New("the client was killed while it started")

// bury ends the rest of a client in this process.
func (h *host) bury(c *client.Client) {
	h.w.zombies.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_ = c.Close(ctx)
	})
}

// stateFile returns the state file of a client's life; the next life restores
// its mappings from it.
func (h *host) stateFile(life int) string {
	return filepath.Join(h.w.dir, fmt.Sprintf("state.%d", life))
}

// killClient ends the client as a failure of its host would, but for its disks.
// The rest of it in this process writes to a state file of its own.
func (h *host) killClient() {
	h.mu.Lock()
	runs, clt, procs, devs := h.up, h.clt, h.procs, h.devs
	if h.starting != nil {
		h.starting(errKilled)
	}
	h.up, h.clt, h.api, h.procs, h.starting = false, nil, nil, nil, nil
	h.mu.Unlock()
	if !runs {
		return
	}
	if b, err := os.ReadFile(h.stateFile(h.state)); err == nil {
		if err := os.WriteFile(h.stateFile(h.state+1), b, 0o600); err != nil {
			h.w.violate("set-up: %v", err)
		}
	}
	h.state++
	for _, p := range procs {
		p.Kill()
	}
	for _, d := range devs {
		h.w.net.Crash(d, h.w.plan.resets(0))
	}
	if clt != nil {
		h.bury(clt)
	}
}

// restartClient brings the client up, as often as it takes.
func (h *host) restartClient() {
	for range 100 {
		h.mu.Lock()
		runs := h.up
		h.mu.Unlock()
		if runs {
			return
		}
		if err := h.startClient(context.Background()); err == nil || err == errKilled {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	h.w.violate("liveness: the client does not start")
}

// close ends everything.
func (w *world) close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if w.client != nil {
		if c, _ := w.client.daemon(); c != nil {
			_ = c.Close(ctx)
		}
	}
	for _, h := range w.servers {
		h.stop()
	}
	for _, h := range append(slices.Clone(w.servers), w.client) {
		if h == nil {
			continue
		}
		h.mu.Lock()
		procs := h.procs
		h.up = false
		h.mu.Unlock()
		for _, p := range procs {
			p.Kill()
		}
	}
	w.zombies.Wait()
	w.mu.Lock()
	processes := w.processes
	w.mu.Unlock()
	for _, p := range processes {
		p.die() // one that works on may not have
	}
	w.memories.close()
}
