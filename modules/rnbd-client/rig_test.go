package client

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
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// target is a scripted RNBD server on a loopback fabric: one disk under any
// name, with answers that a test can change.
type target struct {
	t       testing.TB
	net     *loopback.Network
	addrs   []netip.AddrPort
	pollers []*rtrs.Poller
	rtrs    *rtrs.Server
	stop    func()

	chunk  int          // bytes, of the next start
	depth  int          // of the queues, then
	refuse atomic.Int32 // how many sessions are let go of

	mu       sync.Mutex
	data     []byte
	rsp      rnbdwire.OpenRspFields
	openErr  blk.Errno
	ioErr    blk.Errno
	shapes   []string // of admin messages: direction, data, reply
	log      []string // messages in the order of arrival, admin and I/O
	ios      []rnbdwire.IOFields
	dataLens []int
	reads    []bool   // RTRS direction of ios
	users    [][]byte // messages of ios
	writers  []uint64 // that said WRITER
	shared   bool     // the server's answers about sharing, and their time
	mark     rnbdwire.Mark
	hold     bool
	forgot   uint32          // requests of devices below this id are answered ENOTCONN
	slow     string          // the OPEN of that path is held
	hung     map[uint32]bool // devices, by id, with held requests
	held     []*rtrs.Op
	nextID   uint32
	holdOpen bool
	heldOpen *rtrs.Op
	onOpen   func()     // once, before the next OPEN is answered
	closes   []*rtrs.Op // that wait for held
	// loseClose answers CLOSE with an error and does nothing, as if it was lost.
	loseClose bool
	features  uint16
	events    []*rtrs.Op // EVENTs that wait
	seen      []uint64   // numbers seen by clients
	sessions  atomic.Int32
	onList    func(after string, page []byte) (errno int) // answers LIST
	onExtents func(op *rtrs.Op, f rnbdwire.ExtentsFields) // answers EXTENTS
}

func newTarget(t testing.TB, size int) *target {
	t.Helper()
	s := &target{t: t, net: loopback.New(), data: make([]byte, size), chunk: 65536, depth: 16, addrs: []netip.AddrPort{
		netip.MustParseAddrPort("10.0.0.1:1234"), netip.MustParseAddrPort("10.0.1.1:1234"),
	}}
	s.rsp = rnbdwire.OpenRspFields{
		Sectors: uint64(size) / 512, MaxWriteZeroesSects: 1 << 20, MaxDiscardSectors: 1 << 20, DiscardGranularity: 4096,
		PhysicalBlockSize: 4096, LogicalBlockSize: 512, MaxSegments: 64, CachePolicy: rnbdwire.CacheFUA | rnbdwire.CacheWriteBack,
	}
	s.start()
	t.Cleanup(func() { s.kill() })
	return s
}

type memoryOf []byte

func (m memoryOf) Bytes() []byte { return m }
func (m memoryOf) Close() error  { return nil }

// start brings the target up, with its disk as it was.
func (s *target) start() {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	poller, err := rtrs.NewPoller(0)
	must(s.t, err)
	var wg sync.WaitGroup
	wg.Go(func() { poller.Run(ctx) })
	s.pollers = []*rtrs.Poller{poller}
	cfg := rtrs.DefaultServerConfig()
	cfg.Pollers = s.pollers
	cfg.QueueDepth, cfg.ChunkSize = s.depth, s.chunk
	cfg.Alloc = func(n int) (rtrs.Memory, error) { return make(memoryOf, n), nil }
	cfg.Handler = s
	cfg.Timing.Heartbeat = time.Hour // see noHeartbeats
	cfg.Logger = slog.New(slog.DiscardHandler)
	s.rtrs, err = rtrs.NewServer(cfg)
	must(s.t, err)
	for _, a := range s.addrs {
		_, err := s.rtrs.Listen(s.net.Device("srv"), a)
		must(s.t, err)
	}
	s.stop = func() {
		ctx, done := context.WithTimeout(context.Background(), 10*time.Second)
		defer done()
		s.releaseAll(blk.EIO)
		if err := s.rtrs.Close(ctx); err != nil {
			s.t.Errorf("close of the target: %v", err)
		}
		cancel()
		wg.Wait()
		poller.Close()
	}
}

// kill ends the target; clients lose their paths.
func (s *target) kill() {
	if s.stop != nil {
		s.stop()
		s.stop = nil
	}
}

func (s *target) SessionUp(*rtrs.SrvSession) error {
	if s.refuse.Add(-1) >= 0 {
		return syscall.EPERM
	}
	s.sessions.Add(1)
	return nil
}

func (s *target) SessionDown(*rtrs.SrvSession) { s.sessions.Add(-1) }

func (s *target) Request(op *rtrs.Op) {
	s.mu.Lock()
	defer s.mu.Unlock()
	user := op.User()
	if t := rnbdwire.TypeOf(user); t != rnbdwire.TypeIO && t != rnbdwire.TypeIOOnce && t != rnbdwire.TypeIOAgain {
		s.shapes = append(s.shapes, fmt.Sprintf("type %d read %t message %d data %d reply %d", rnbdwire.TypeOf(user), op.IsRead(), len(user), op.DataLen(), op.ReplyLen()))
	}
	switch rnbdwire.TypeOf(user) {
	case rnbdwire.TypeSessInfo:
		s.log = append(s.log, "sess-info")
		if op.IsRead() && op.ReplyLen() == 36 && len(user) == 36 {
			rnbdwire.SessInfoRspFields{Version: 2, Features: s.features}.Put(op.Data())
		}
		op.Respond(0)
	case rnbdwire.TypeOpen:
		s.log = append(s.log, "open "+rnbdwire.Open(user).Name())
		if s.openErr == 0 {
			f := s.rsp
			f.DeviceID = s.nextID
			s.nextID++
			if op.ReplyLen() == rnbdwire.OpenRspFullSize {
				f.PutFull(op.Data())
			} else {
				f.Put(op.Data())
			}
		}
		if f := s.onOpen; f != nil {
			s.onOpen = nil
			f()
		}
		if s.holdOpen || s.slow != "" && s.slow == rnbdwire.Open(user).Name() {
			s.heldOpen = op
			return
		}
		op.Respond(int(s.openErr))
	case rnbdwire.TypeEvent:
		s.log = append(s.log, "event")
		s.seen = append(s.seen, rnbdwire.Event(user).Seen())
		s.events = append(s.events, op)
		op.Park(func(op *rtrs.Op) { // with mu not held: a path closes
			s.set(func() { s.events = nil })
			op.Respond(int(blk.ECANCELED))
		})
	case rnbdwire.TypeClose:
		s.log = append(s.log, "close")
		if s.loseClose {
			op.Respond(int(blk.EIO))
			return
		}
		if len(s.held) > 0 {
			s.closes = append(s.closes, op)
			return
		}
		op.Respond(0)
	case rnbdwire.TypeWriter:
		s.log = append(s.log, "writer")
		s.writers = append(s.writers, rnbdwire.Writer(user).Writer())
		rnbdwire.WriterRspFields{Shared: s.shared, Mark: s.mark}.Put(op.Data())
		op.Respond(0)
	case rnbdwire.TypeList:
		s.log = append(s.log, "list "+rnbdwire.List(user).After())
		op.Respond(s.onList(rnbdwire.List(user).After(), op.Data()))
	case rnbdwire.TypeExtents:
		s.log = append(s.log, "extents")
		if s.hold {
			s.held = append(s.held, op)
			return
		}
		s.onExtents(op, rnbdwire.Extents(user).Fields())
	case rnbdwire.TypeIO, rnbdwire.TypeIOOnce, rnbdwire.TypeIOAgain:
		s.log = append(s.log, "io")
		m := rnbdwire.IO(user)
		s.users = append(s.users, append([]byte(nil), user...))
		s.ios = append(s.ios, rnbdwire.IOFields{DeviceID: m.DeviceID(), Sector: m.Sector(), RW: uint32(m.Op()) | flagsOf(m), BISize: m.BISize(), Prio: m.Prio()})
		s.dataLens = append(s.dataLens, op.DataLen())
		s.reads = append(s.reads, op.IsRead())
		if m.DeviceID() < s.forgot {
			op.Respond(int(blk.ENOTCONN))
			return
		}
		if s.hold || s.hung[m.DeviceID()] {
			s.held = append(s.held, op)
			return
		}
		s.finish(op, s.ioErr)
	}
}

func flagsOf(m rnbdwire.IO) (f uint32) {
	if m.Sync() {
		f |= rnbdwire.FlagSync
	}
	if m.FUA() {
		f |= rnbdwire.FlagFUA
	}
	if m.Preflush() {
		f |= rnbdwire.FlagPreflush
	}
	if m.NoUnmap() {
		f |= rnbdwire.FlagNoUnmap
	}
	return f
}

func (s *target) finish(op *rtrs.Op, errno blk.Errno) {
	if m := rnbdwire.Extents(op.User()); m.IsValid() {
		s.onExtents(op, m.Fields())
		return
	}
	m := rnbdwire.IO(op.User())
	off := m.Sector() * 512
	if errno == 0 {
		switch blk.Op(m.Op()) {
		case blk.Read:
			copy(op.Data(), s.data[off:])
		case blk.Write:
			copy(s.data[off:], op.Data())
		}
	}
	op.Respond(int(errno))
}

func (s *target) releaseAll(errno blk.Errno) {
	s.mu.Lock()
	s.hold, s.hung = false, nil
	held, closes := s.held, s.closes
	s.held, s.closes = nil, nil
	s.mu.Unlock()
	if len(held) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = s.pollers[0].Call(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, op := range held {
			s.finish(op, errno)
		}
		for _, op := range closes {
			op.Respond(0)
		}
	})
}

// tell answers the EVENT that waits.
func (s *target) tell(f rnbdwire.EventRspFields) {
	s.t.Helper()
	var op *rtrs.Op
	eventually(s.t, "the client listens", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.events) == 0 {
			return false
		}
		op, s.events = s.events[0], s.events[1:]
		return true
	})
	must(s.t, s.pollers[0].Call(s.t.Context(), func() {
		if op.ReplyLen() == rnbdwire.EventRspSize {
			f.Put(op.Data())
		}
		op.Respond(0)
	}))
}

// busy: the requests of all permits but a few spare ones are held.
func (s *target) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.held) >= 12
}

func (s *target) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *target) messages() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.log...)
}

// newClient makes a client without a front end that reaches the target.
func (s *target) newClient(change ...func(*Config)) *Client {
	s.t.Helper()
	c := s.clientToClose(change...)
	s.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			s.t.Errorf("close of the client: %v", err)
		}
	})
	return c
}

// clientToClose is newClient for a test that closes it.
func (s *target) clientToClose(change ...func(*Config)) *Client {
	s.t.Helper()
	cfg := DefaultConfig()
	cfg.Fabrics = map[string]verbs.Device{"loopback": s.net.Device("clt")}
	cfg.DefaultFabric = "loopback"
	cfg.Hostname = "host.example"
	cfg.Pumps = 2 // on a host with few CPUs, too
	cfg.Timing.ReconnectMin, cfg.Timing.ReconnectMax = 5*time.Millisecond, 20*time.Millisecond
	cfg.Slots = 32
	cfg.MapTimeout = 5 * time.Second
	for _, f := range change {
		f(&cfg)
	}
	c, err := New(s.t.Context(), cfg)
	must(s.t, err)
	return c
}

// logTo has a client log to write.
func logTo(write func([]byte)) func(*Config) {
	return func(cfg *Config) { cfg.Logger = slog.New(slog.NewTextHandler(writerFunc(write), nil)) }
}

type writerFunc func([]byte)

func (f writerFunc) Write(b []byte) (int, error) { f(b); return len(b), nil }

// noHeartbeats is for tests that count the messages of a path.
func noHeartbeats(cfg *Config) { cfg.Timing.Heartbeat = time.Hour }

// device maps "vol" without a front end and returns a way to it.
func (s *target) device(c *Client, change ...func(*MapRequest)) (*Device, *IO) {
	s.t.Helper()
	r := MapRequest{Path: "vol", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Frontend: "none"}
	for _, f := range change {
		f(&r)
	}
	d, err := c.Map(s.t.Context(), r)
	must(s.t, err)
	io, err := d.NewIO(0, 0, 32)
	must(s.t, err)
	// Heap rings need no closing order of their own: the client's end drains.
	return d, io
}

// do runs one request and returns its errno.
func do(t testing.TB, io *IO, r Request) blk.Errno {
	t.Helper()
	if !io.Submit(r) {
		t.Fatal("submit refused")
	}
	var done [8]Done
	deadline := time.Now().Add(10 * time.Second)
	for {
		if n := io.Wait(done[:]); n > 0 {
			return done[0].Errno
		}
		if time.Now().After(deadline) {
			t.Fatal("no answer within 10 s")
		}
	}
}

// eventually waits until a condition holds.
var eventually = sdktest.Eventually

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
