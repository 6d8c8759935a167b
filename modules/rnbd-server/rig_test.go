package server

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// memory is a storage plugin in this process.
type memory struct {
	crash plugin.CrashClass
	names plugin.NameKind

	mu    sync.Mutex
	disks map[string]*memDisk
	gate  chan struct{}    // not nil: Open waits until it is closed, as for a fence
	hold  bool             // answers wait
	mute  byte             // writes of that value are carried out, and their answers wait; 0: none
	opens int              // calls of Open
	fail  map[string]error // of Open, by name
	seen  []plugin.Request // requests that reached the plugin, without payload

	listed []plugin.ListedName // by ListNames

	attaching func(arena uint32) // not nil: called before an arena is attached
	// wrap makes the disk that a plugin answers with; nil: it is the memDisk.
	wrap func(context.Context, plugin.OpenRequest, *memDisk) (plugin.Disk, error)
	last plugin.Disk // that was opened
}

type memDisk struct {
	data   []byte
	limits blk.Limits
	// resized is the result of the next check; nil: nothing new.
	resized atomic.Pointer[blk.Limits]
	// unsized is the number of further checks that fail with EBUSY.
	unsized atomic.Int32
	closes  atomic.Int32
	hung    atomic.Bool // requests wait
	// flushErrno is the answer to a flush.
	flushErrno atomic.Uint32
	// Open and Close wait until they are closed; nil: they do not.
	opening, closing chan struct{}
}

func newMemory() *memory {
	return &memory{disks: map[string]*memDisk{}, fail: map[string]error{}, names: plugin.NamesOpaque}
}

// add makes a disk of size bytes.
func (m *memory) add(name string, size int, change ...func(*blk.Limits)) *memDisk {
	d := &memDisk{data: make([]byte, size), limits: blk.Limits{
		Size: uint64(size), LogicalBlockSize: 512, PhysicalBlockSize: 4096, MaxIOSize: 1 << 20,
		MaxDiscard: 1 << 30, MaxWriteZeroes: 1 << 29, DiscardGranularity: 4096, MaxSegments: 64, WriteCache: true, FUA: true,
	}}
	for _, f := range change {
		f(&d.limits)
	}
	m.disks[name] = d
	return d
}

func (m *memory) Describe() plugin.Info {
	return plugin.Info{Name: "memory", Version: "1", Crash: m.crash, Names: m.names, Matches: plugin.RegularFiles | plugin.BlockDevices}
}

func (m *memory) ListNames(context.Context, int) ([]plugin.ListedName, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.listed, nil
}

func (m *memory) Open(ctx context.Context, r plugin.OpenRequest) (plugin.Disk, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.opens++
	if gate := m.gate; gate != nil {
		m.mu.Unlock()
		<-gate
		m.mu.Lock()
	}
	if err := m.fail[r.Name]; err != nil {
		return nil, err
	}
	if d := m.disks[r.Name]; d != nil {
		if gate := d.opening; gate != nil {
			m.mu.Unlock()
			<-gate
			m.mu.Lock()
		}
		if m.wrap != nil {
			m.mu.Unlock()
			w, err := m.wrap(ctx, r, d)
			m.mu.Lock()
			m.last = w
			return w, err
		}
		return d, nil
	}
	return nil, fmt.Errorf("no disk %q: %w", r.Name, syscall.ENOENT)
}

func (m *memory) AttachArena(id uint32, _ []byte) error {
	m.mu.Lock()
	hook := m.attaching
	m.mu.Unlock()
	if hook != nil {
		hook(id)
	}
	return nil
}

func (m *memory) DetachArena(uint32) {}

func (d *memDisk) Limits() blk.Limits { return d.limits }
func (d *memDisk) Close() error {
	if d.closing != nil {
		<-d.closing
	}
	d.closes.Add(1)
	return nil
}

func (m *memory) Serve(q *plugin.Queue) error {
	batch := make([]plugin.Request, 16)
	var late []plugin.Request
	var done []uint64 // tags of writes without an answer
	for !q.Closed() {
		n := q.Next(batch)
		m.mu.Lock()
		hold, mute := m.hold, m.mute
		for _, r := range batch[:n] {
			kept := r
			kept.Buf = nil
			m.seen = append(m.seen, kept)
		}
		if mute == 0 {
			for _, tag := range done {
				q.Complete(tag, blk.OK)
			}
			done = nil
		}
		all := append(late, batch[:n]...)
		late = nil
		for _, r := range all {
			if hold || r.Disk.(interface{ memory() *memDisk }).memory().hung.Load() {
				late = append(late, r)
			} else if mute != 0 && r.Op == blk.Write && r.Buf[0] == mute {
				m.do(r)
				done = append(done, r.Tag)
			} else {
				q.Complete(r.Tag, m.do(r))
			}
		}
		m.mu.Unlock()
		q.Publish()
		if n == 0 && len(late)+len(done) == 0 {
			q.Wait()
		} else if n == 0 {
			time.Sleep(time.Millisecond)
		}
	}
	return nil
}

func (m *memory) do(r plugin.Request) blk.Errno {
	d := r.Disk.(interface{ memory() *memDisk }).memory()
	switch r.Op {
	case blk.Read:
		copy(r.Buf, d.data[r.Off:])
	case blk.Write:
		copy(d.data[r.Off:], r.Buf)
	case blk.Discard, blk.WriteZeroes, blk.SecureErase:
		clear(d.data[r.Off : r.Off+uint64(r.Len)])
	case blk.Flush:
		return blk.Errno(d.flushErrno.Load())
	}
	return blk.OK
}

// memory is that of a disk, wrapped or not.
func (d *memDisk) memory() *memDisk { return d }

func (m *memory) lastDisk() plugin.Disk {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last
}

// setFail lets Open of name fail; nil: no more.
func (m *memory) setFail(name string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail[name] = err
}

func (m *memory) setMute(value byte) {
	m.mu.Lock()
	m.mute = value
	m.mu.Unlock()
}

func (m *memory) setHold(hold bool) {
	m.mu.Lock()
	m.hold = hold
	m.mu.Unlock()
}

// wake lets all disks answer.
func (m *memory) wake() {
	for _, d := range m.disks {
		d.hung.Store(false)
	}
}

// setGate lets Open wait until the channel that it returns is closed.
func (m *memory) setGate() chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gate = make(chan struct{})
	return m.gate
}

func (m *memory) opened() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.opens
}

func (m *memory) requests() []plugin.Request {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]plugin.Request(nil), m.seen...)
}

// rig is a server with a plugin in this process, on a loopback fabric.
type rig struct {
	t      *testing.T
	net    *loopback.Network
	server *Server
	mem    *memory
	addr   netip.AddrPort
	auth   verbs.Authenticator // of clients that connect from now on; nil: none

	mu     sync.Mutex
	procs  []*plugin.Process
	closed bool // by the test itself
}

func newRig(t *testing.T, mem *memory, change ...func(*Config)) *rig {
	t.Helper()
	r := &rig{t: t, net: loopback.New(), mem: mem, addr: netip.MustParseAddrPort("10.0.0.1:1234")}
	log := &testWriter{t: t}
	t.Cleanup(log.end) // the last one to run
	cfg := DefaultConfig()
	cfg.Listen = []Listen{{Device: r.net.Device("srv"), Addr: r.addr}}
	cfg.Plugins = []PluginConfig{{Name: "memory", Path: "in process"}}
	cfg.Rules = []Rule{{Glob: "*", Plugin: "memory"}, {Glob: "*/*", Plugin: "memory"}}
	cfg.Pumps, cfg.QueueDepth = 2, 16 // whatever the machine has
	cfg.Timing.ReconnectMin = 5 * time.Millisecond
	cfg.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	cfg.NewRing = shm.NewHeapRing
	cfg.Launch = func(ctx context.Context, c plugin.Config) (supervise.Process, error) {
		p, err := plugin.LaunchInProcess(ctx, c, mem)
		r.mu.Lock()
		defer r.mu.Unlock()
		if err != nil {
			return nil, err
		}
		r.procs = append(r.procs, p)
		return p, nil
	}
	for _, f := range change {
		f(&cfg)
	}
	s, err := New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	r.server = s
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		mem.setHold(false)
		mem.wake()
		if r.closed {
			return
		}
		if err := s.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return r
}

// launched is how many processes were started.
func (r *rig) launched() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.procs)
}

// process is the plugin that runs now.
func (r *rig) process() *plugin.Process {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.procs[len(r.procs)-1]
}

// testWriter logs until the test ends: a goroutine that is on its way out then
// must not.
type testWriter struct {
	t     *testing.T
	mu    sync.Mutex
	ended bool
}

func (w *testWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.t.Logf("%s", b)
	}
	return len(b), nil
}

func (w *testWriter) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
}

// initiator is a client of RTRS that sends RNBD messages as a test wants them.
type initiator struct {
	t       *testing.T
	session *rtrs.Session
	poller  *rtrs.Poller
	region  *rtrs.Region
	mem     []byte

	mu      sync.Mutex
	waiting map[uint64]chan int
	next    uint64
}

func (r *rig) connect(name string) *initiator {
	r.t.Helper()
	return r.connectTo(name, r.addr)
}

// connectTo connects over a path to each address.
func (r *rig) connectTo(name string, addrs ...netip.AddrPort) *initiator {
	r.t.Helper()
	poller, err := rtrs.NewPoller(0)
	must(r.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { poller.Run(ctx) })
	i := &initiator{t: r.t, poller: poller, waiting: map[uint64]chan int{}, mem: make([]byte, 1<<20)}
	cfg := rtrs.ClientConfig{
		Pollers: []*rtrs.Poller{poller},
		OnDone: func(_ int, tag uint64, errno int) {
			i.mu.Lock()
			defer i.mu.Unlock()
			i.waiting[tag] <- errno
			delete(i.waiting, tag)
		},
		Logger: slog.New(slog.DiscardHandler),
	}
	if r.auth != nil {
		cfg.Auth, cfg.AuthMode = r.auth, rtrs.AuthRequire
	}
	var paths []rtrs.PathAddr
	for _, a := range addrs {
		paths = append(paths, rtrs.PathAddr{Device: r.clientDevice(name), Dst: a})
	}
	i.session, err = rtrs.Open(r.t.Context(), name, paths, cfg)
	must(r.t, err)
	i.region, err = i.session.Register(i.mem)
	must(r.t, err)
	r.t.Cleanup(func() {
		i.close()
		cancel()
		wg.Wait()
		poller.Close()
	})
	return i
}

func (r *rig) clientDevice(name string) verbs.Device { return r.net.Device("clt-" + name) }

func (i *initiator) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := i.session.Close(ctx); err != nil {
		i.t.Errorf("close of the session: %v", err)
	}
}

func (i *initiator) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	i.t.Cleanup(cancel)
	return ctx
}

func (i *initiator) sessInfo(ver uint8) (rnbdwire.SessInfoRsp, error) {
	msg := make([]byte, rnbdwire.SessInfoSize)
	rnbdwire.SessInfoFields{Version: ver}.Put(msg)
	for k := 5; k < len(msg); k++ {
		msg[k] = 0xa5 // the kernel leaves them uninitialised
	}
	rsp := make(rnbdwire.SessInfoRsp, rnbdwire.SessInfoRspSize)
	return rsp, i.session.AdminRead(i.ctx(), msg, rsp)
}

func (i *initiator) open(name string, mode blk.AccessMode) (rnbdwire.OpenRspFields, error) {
	msg := make([]byte, rnbdwire.OpenSize)
	must(i.t, rnbdwire.OpenFields{AccessMode: uint8(mode), Name: name}.Put(msg))
	msg[2], msg[3], msg[5] = 0xa5, 0xa5, 0xa5
	for k := 6 + len(name) + 1; k < len(msg); k++ {
		msg[k] = 0xa5
	}
	rsp := make(rnbdwire.OpenRsp, rnbdwire.OpenRspSize)
	err := i.session.AdminRead(i.ctx(), msg, rsp)
	return rsp.Fields(), err
}

func (i *initiator) closeDevice(id uint32) error {
	msg := make([]byte, rnbdwire.CloseSize)
	rnbdwire.CloseFields{DeviceID: id}.Put(msg)
	return i.session.AdminWrite(i.ctx(), msg)
}

// ioMessage builds an I/O message.
func ioMessage(id uint32, op blk.Op, flags uint32, sector uint64, n int) []byte {
	msg := make([]byte, rnbdwire.IOSize)
	rnbdwire.IOFields{DeviceID: id, Sector: sector, RW: uint32(op) | flags, BISize: uint32(n), Prio: 0x4004}.Put(msg)
	return msg
}

// start sends a request; the channel gives its errno.
func (i *initiator) start(read bool, data int, user []byte) <-chan int {
	i.t.Helper()
	done := make(chan int, 1)
	i.mu.Lock()
	tag := i.next
	i.next++
	i.waiting[tag] = done
	i.mu.Unlock()
	var d rtrs.Data
	if data > 0 {
		d = rtrs.Data{Region: i.region, Off: int(tag%8) << 17, Len: data}
	}
	var err error
	must(i.t, i.poller.Call(i.ctx(), func() {
		if read {
			err = i.session.Queue(0).Read(tag, d, user)
		} else {
			err = i.session.Queue(0).Write(tag, d, user)
		}
	}))
	must(i.t, err)
	return done
}

func (i *initiator) await(done <-chan int) blk.Errno {
	i.t.Helper()
	select {
	case errno := <-done:
		return blk.Errno(errno)
	case <-time.After(10 * time.Second):
		i.t.Fatal("no answer within 10 s")
		return 0
	}
}

// rw runs one read or write at a sector and returns the slot used.
func (i *initiator) rw(id uint32, op blk.Op, sector uint64, data []byte) blk.Errno {
	i.t.Helper()
	i.mu.Lock()
	off := int(i.next%8) << 17
	i.mu.Unlock()
	if op == blk.Write {
		copy(i.mem[off:], data)
	}
	errno := i.await(i.start(op == blk.Read, len(data), ioMessage(id, op, 0, sector, len(data))))
	if op == blk.Read {
		copy(data, i.mem[off:])
	}
	return errno
}

func (i *initiator) bare(id uint32, op blk.Op, flags uint32, sector uint64, n int, read bool) blk.Errno {
	i.t.Helper()
	return i.await(i.start(read, 0, ioMessage(id, op, flags, sector, n)))
}
