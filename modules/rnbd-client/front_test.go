package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugintest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

func TestMain(m *testing.M) {
	plugintest.Main(m, func() {
		plugin.ServeFrontend(&testFront{devices: map[uint32]plugin.DeviceSpec{}, send: make(chan shm.SQE)})
	})
}

// testFront is a front end in a process of its own, this program. Its devices
// seem to be disks. The option "dir" of a device names a folder for talking to
// the test: "told" has a line for each call, and files change its behaviour:
//
//	hold         AddDevice does not come back
//	deaf         AddDevice forgets its caller
//	read         AddDevice sends a read before
//	ask          AddDevice asks for extents before
//	serve        AddDevice does not come back, whatever its caller does, and
//	             reads meanwhile; "told" gets the answers, errors or 0
//	fail         AddDevice fails after that
//	none         a disk that is looked for is not there
//	used         the disk is in use
//	open         a user has the disk open
//	slow         how long RemoveDevice takes
//	hold-remove  RemoveDevice does not come back, whatever its caller does
//	hold-resize  ResizeDevice does not come back
type testFront struct {
	send    chan shm.SQE // to Serve
	answers atomic.Pointer[frontDir]

	mu      sync.Mutex
	devices map[uint32]plugin.DeviceSpec
}

// frontDir is the test's end of such a folder.
type frontDir string

func (d frontDir) file(name string) string { return filepath.Join(string(d), name) }

func (d frontDir) has(name string) bool {
	_, err := os.Stat(d.file(name))
	return err == nil
}

func (d frontDir) tell(format string, args ...any) {
	f, err := os.OpenFile(d.file("told"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err == nil {
		fmt.Fprintf(f, format+"\n", args...)
		f.Close()
	}
}

func (d frontDir) set(name, value string) error {
	return os.WriteFile(d.file(name), []byte(value), 0o600)
}

func (d frontDir) remove(name string) error { return os.Remove(d.file(name)) }

func (d frontDir) slow() time.Duration {
	b, _ := os.ReadFile(d.file("slow"))
	limit, _ := time.ParseDuration(string(b))
	return limit
}

func (d frontDir) told() []string {
	b, _ := os.ReadFile(d.file("told"))
	return strings.Split(strings.TrimSpace(string(b)), "\n")
}

func (f *testFront) Describe() plugin.Info { return plugin.Info{Name: "test", Version: "1"} }

func (f *testFront) AddDevice(ctx context.Context, s plugin.DeviceSpec) error {
	dir := frontDir(s.Config["dir"])
	dir.tell("add %d pid %d", s.Limits.Size, os.Getpid())
	if dir.has("read") {
		f.send <- shm.SQE{Op: blk.Read, Device: s.Index, Arena: s.ArenaID, Len: 4096}
	}
	if dir.has("ask") {
		f.send <- shm.SQE{Op: blk.Extents, Device: s.Index, Arena: s.ArenaID, Len: 4096}
	}
	if dir.has("serve") {
		f.answers.Store(&dir)
	}
	for dir.has("serve") {
		f.send <- shm.SQE{Op: blk.Read, Device: s.Index, Arena: s.ArenaID, Len: 4096}
		time.Sleep(time.Millisecond)
	}
	if dir.has("deaf") {
		ctx = context.WithoutCancel(ctx)
	}
	for dir.has("hold") && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	if dir.has("fail") {
		return blk.EIO
	}
	if s.Location == plugin.LocationUnknown && dir.has("none") {
		return blk.ENODEV
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.devices[s.Index] = s
	return ctx.Err()
}

func (f *testFront) device(index uint32) (plugin.DeviceSpec, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, ok := f.devices[index]
	if !ok {
		return s, blk.ENODEV
	}
	return s, nil
}

func (f *testFront) RemoveDevice(ctx context.Context, index uint32, force bool) error {
	s, err := f.device(index)
	if err != nil {
		return err
	}
	dir := frontDir(s.Config["dir"])
	dir.tell("remove forced %t", force)
	for dir.has("hold-remove") {
		time.Sleep(time.Millisecond)
	}
	if slow := dir.slow(); slow > 0 {
		select {
		case <-time.After(slow):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if !force && dir.has("used") {
		return blk.EBUSY
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.devices, index)
	return nil
}

func (f *testFront) ResizeDevice(ctx context.Context, index uint32, l blk.Limits) error {
	s, err := f.device(index)
	if err != nil {
		return err
	}
	dir := frontDir(s.Config["dir"])
	dir.tell("resize %d", l.Size)
	for dir.has("hold-resize") && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	return nil
}

// AddListener appends the name to the file in the environment.
func (f *testFront) AddListener(_ context.Context, name string, file *os.File) error {
	file.Close()
	frontDir(os.Getenv(listenersEnv)).tell("%s", name)
	return nil
}

// listenersEnv names the folder where a testFront says which sockets it gets.
const listenersEnv = "RNBD_TEST_LISTENERS"

func (f *testFront) Openers(index uint32) int {
	s, err := f.device(index)
	if err == nil && frontDir(s.Config["dir"]).has("open") {
		return 1
	}
	return 0
}

func (f *testFront) Location(index uint32) string {
	s, err := f.device(index)
	if err != nil {
		return ""
	}
	return "/dev/test-" + s.Name
}

func (f *testFront) Serve(q *plugin.FrontQueue) error {
	var done [8]shm.CQE
	for !q.Closed() {
		for _, e := range done[:q.Pop(done[:])] {
			if dir := f.answers.Load(); dir != nil {
				dir.tell("answer %d", e.Errno)
			}
		}
		select {
		case e := <-f.send:
			q.Push(&e)
			q.Publish()
		case <-time.After(time.Millisecond):
		}
	}
	return nil
}

// process is the process of the front end that is in use.
func (f *frontend) process() (supervise.Process, error) {
	h, err := f.requireProcess()
	if err != nil {
		return nil, err
	}
	return h.Process, nil
}

// knows reports whether proc has d.
func knows(ctx context.Context, proc supervise.Process, d *Device) bool {
	_, err := proc.DeviceStatus(ctx, d.index)
	return !errors.Is(err, syscall.ENODEV)
}

// startGate is a Launch that can be shut: processes are not started then.
type startGate struct {
	mu   sync.Mutex
	open chan struct{} // nil: it is open
}

func (g *startGate) launch(ctx context.Context, c plugin.Config) (supervise.Process, error) {
	g.mu.Lock()
	open := g.open
	g.mu.Unlock()
	if open != nil {
		select {
		case <-open:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return supervise.Exec(ctx, c)
}

func (g *startGate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = make(chan struct{})
}

func (g *startGate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.open)
	g.open = nil
}

func (g *startGate) use(cfg *Config) { cfg.Launch = g.launch }

// withTestFront gives a client that front end.
func withTestFront(t *testing.T) func(*Config) {
	exe, err := os.Executable()
	must(t, err)
	return func(cfg *Config) {
		cfg.Frontends = []FrontendConfig{{Name: "test", Path: exe}}
		cfg.Frontend = "test"
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
}

// A size that the server tells while a process of the front end is starting
// reaches it all the same.
func TestFrontend_ResizedWhileItStarts(t *testing.T) {
	for _, v := range []string{"mapping", "after a crash"} {
		t.Run(v, func(t *testing.T) {
			s := newTarget(t, 1<<20)
			c := s.newClient(withTestFront(t))
			dir := newFrontDir(t)
			hold := func() { must(t, dir.set("hold", "")) }
			adds := func() (n int) {
				for _, l := range dir.told() {
					if strings.HasPrefix(l, "add ") {
						n++
					}
				}
				return n
			}
			mapped := make(chan error, 1)
			begin := func() {
				_, err := c.Map(t.Context(), MapRequest{Path: "vol", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Options: map[string]string{"dir": string(dir)}})
				mapped <- err
			}
			want := 1
			if v == "mapping" {
				hold()
				go begin()
			} else {
				begin()
				hold()
				proc, err := c.frontends[0].process()
				must(t, err)
				proc.Kill()
				want = 2
			}
			eventually(t, "the front end gets the device", func() bool { return adds() == want })
			d, err := c.Device("rnbd0")
			must(t, err)
			d.onResized(4096)
			must(t, os.Remove(dir.file("hold")))
			must(t, <-mapped)
			eventually(t, "the front end knows the new size", func() bool {
				told := dir.told()
				return told[len(told)-1] == fmt.Sprint("resize ", 4096*512)
			})
		})
	}
}

// A map that begins while the front end's process is restarted waits for the next
// process.
func TestMap_WaitsForTheNextProcessOfTheFrontEnd(t *testing.T) {
	var gate startGate
	s := newTarget(t, 1<<20)
	c := s.newClient(withTestFront(t), gate.use)
	gate.shut()
	c.killFront(t)
	c.frontends[0].awaitDeath(t)
	dir := newFrontDir(t)
	mapped := async(func() error { _, err := s.mapIn(c, "vol", dir); return err })
	eventually(t, "the map waits", func() bool { return len(c.frontends[0].allAttachments()) == 1 || len(mapped) > 0 })
	gate.release()
	if err := soon(t, "the map", mapped); err != nil {
		t.Errorf("map: %v", err)
	}
	if n := dir.adds(); n != 1 {
		t.Errorf("the device was shown %d times", n)
	}
}

// The wait for the next process ends with the map's time, and the error names the
// restart. The device's place is free then.
func TestMap_EndsWhenTheFrontEndDoesNotRunInTime(t *testing.T) {
	var gate startGate
	s := newTarget(t, 1<<20)
	c := s.newClient(withTestFront(t), gate.use, func(cfg *Config) { cfg.MapTimeout = 200 * time.Millisecond })
	gate.shut()
	defer gate.release()
	c.killFront(t)
	c.frontends[0].awaitDeath(t)
	err := soon(t, "the map", async(func() error { _, err := s.mapIn(c, "vol", newFrontDir(t)); return err }))
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "is being restarted") {
		t.Errorf("map: %v", err)
	}
	eventually(t, "the place is free", func() bool { return len(c.frontends[0].allAttachments()) == 0 && len(c.Devices()) == 0 })
}

// An export of a socket that another process keeps stays for the next daemon, with its users,
// also where the disk of the export has no user.
func TestClose_LeavesExportsOfKeptSockets(t *testing.T) {
	for _, x := range []struct {
		name   string
		change func(*Client)
		left   int
	}{
		{"the daemon ends", func(*Client) {}, 1},
		{"the host goes down", (*Client).LeaveNothing, 0},
	} {
		t.Run(x.name, func(t *testing.T) {
			c, dir := keptSocketRig(t)
			x.change(c)
			must(t, c.Close(t.Context()))
			saved, err := readState(c.cfg.StateFile)
			if must(t, err); len(saved) != x.left {
				t.Errorf("%d disks wait for the next daemon, want %d; the front end was told %q", len(saved), x.left, dir.told())
			}
		})
	}
}

// keptSocketRig is a client with a disk of a front end that has a socket of another process.
func keptSocketRig(t *testing.T) (*Client, frontDir) {
	t.Setenv(listenersEnv, string(newFrontDir(t)))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	socket, err := l.(*net.TCPListener).File()
	must(t, err)
	state := filepath.Join(t.TempDir(), "client.devices")
	s := newTarget(t, 1<<20)
	c := s.clientToClose(withTestFront(t), func(cfg *Config) {
		cfg.StateFile, cfg.Frontends[0].Sockets = state, []*os.File{socket}
	})
	dir := newFrontDir(t)
	_, err = s.mapIn(c, "vol", dir)
	must(t, err)
	return c, dir
}

// A process of a front end that starts while the client ends gets no sockets: it would
// refuse users, since it has no device any more.
func TestClose_FrontEndThatCrashesMeanwhileGetsNoSockets(t *testing.T) {
	c, _ := keptSocketRig(t)
	sockets := func() int { return len(frontDir(os.Getenv(listenersEnv)).told()) }
	if n := sockets(); n != 1 {
		t.Fatalf("%d sockets were given", n)
	}
	c.endRestoring() // as Close begins
	c.killFront(t)
	c.frontends[0].awaitDeath(t)
	eventually(t, "the next process", func() bool { h, err := c.frontends[0].requireProcess(); return err == nil && h.isAlive() })
	must(t, c.Close(t.Context()))
	if n := sockets(); n != 1 {
		t.Errorf("%d sockets were given", n)
	}
}
