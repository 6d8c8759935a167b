package rtrs

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The client against the real server.

const blockSize = 512

// cltDisk is the consumer of a server: blocks in memory, and an operation takes
// a while. It deliberately reads and writes the chunk outside the owner's
// thread, late: the race detector sees a write into a chunk that is in use.
type cltDisk struct {
	mu     sync.Mutex
	blocks map[uint32][blockSize]byte
	gate   chan struct{} // operations wait until it is closed; nil: they do not
	runs   atomic.Int64
	begun  atomic.Int64  // requests that wait at the gate, or have
	slow   time.Duration // longest time that an operation takes
	tells  bool          // every poller that an operation has ended, before the client
	srv    *ServerConfig
}

func (d *cltDisk) request(op *Op) {
	lba := binary.LittleEndian.Uint32(op.User())
	p := d.srv.Pollers[op.Poller()]
	if d.slow == 0 && d.gate == nil {
		d.execute(op, lba)
		op.Respond(0)
		return
	}
	go func() {
		d.begun.Add(1)
		if d.gate != nil {
			<-d.gate
		}
		time.Sleep(time.Duration(rand.Int64N(int64(d.slow) + 1)))
		d.execute(op, lba)
		if d.tells {
			d.tell()
		}
		p.Do(func() { op.Respond(0) })
	}()
}

// tell is for a fabric of raw system calls: the race detector does not see that
// a chunk's next request, maybe on another poller, comes after the answer.
func (d *cltDisk) tell() {
	for _, p := range d.srv.Pollers {
		_ = p.Call(context.Background(), func() {})
	}
}

func (d *cltDisk) execute(op *Op, lba uint32) {
	d.runs.Add(1)
	d.mu.Lock()
	defer d.mu.Unlock()
	block := d.blocks[lba]
	if op.IsRead() {
		copy(op.Data(), block[:])
		return
	}
	copy(block[:], op.Data())
	d.blocks[lba] = block
}

func (d *cltDisk) version(lba uint32) uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	block := d.blocks[lba]
	return binary.LittleEndian.Uint64(block[8:])
}

// serveDisk starts a server with a disk on a loopback network.
func serveDisk(t testing.TB, net *loopback.Network, opts ...serverOption) (*cltDisk, *testServer) {
	t.Helper()
	d := &cltDisk{blocks: map[uint32][blockSize]byte{}}
	return d, d.serve(t, net, opts...)
}

func (d *cltDisk) serve(t testing.TB, net *loopback.Network, opts ...serverOption) *testServer {
	t.Helper()
	return startServer(t, net, d.request, append(opts, func(c *ServerConfig) { d.srv = c })...)
}

// fillBlock is the content of a block: number and version, all over.
func fillBlock(b []byte, lba uint32, version uint64) {
	for i := 0; i < len(b); i += 16 {
		binary.LittleEndian.PutUint64(b[i:], uint64(lba))
		binary.LittleEndian.PutUint64(b[i+8:], version)
	}
}

// cltLoad keeps a session busy and knows the expected contents of each block.
// Block numbers are split among the queues; a block has one request at a
// time.
type cltLoad struct {
	t       testing.TB
	s       *Session
	region  *Region
	done    []chan cltDone // by queue
	stop    atomic.Bool
	ops     atomic.Int64
	aborted atomic.Int64
	wg      sync.WaitGroup
}

const (
	loadSlots  = 6  // requests at a time, of each queue
	loadBlocks = 24 // of each queue
)

// loadBlock is one block of the model.
type loadBlock struct {
	version uint64 // acknowledged
	next    uint64 // of the write under way, 0: none
	reading bool
}

// openLoad opens a session with completions for a load that does not run yet.
func openLoad(t testing.TB, paths []PathAddr, edit func(*ClientConfig)) (*cltLoad, *cltClient) {
	t.Helper()
	w := &cltLoad{t: t}
	c := cltOpen(t, paths, func(cfg *ClientConfig) {
		if edit != nil {
			edit(cfg)
		}
		for range len(cfg.Pollers) {
			w.done = append(w.done, make(chan cltDone, 256))
		}
		cfg.OnDone = func(queue int, tag uint64, errno int) { w.done[queue] <- cltDone{queue, tag, errno} }
	})
	w.s, w.region = c.Session, c.region
	return w, c
}

func (w *cltLoad) start() {
	for queue := range w.done {
		w.wg.Go(func() { w.run(queue) })
	}
}

// finish stops the load and checks every block once more.
func (w *cltLoad) finish() {
	w.t.Helper()
	w.stop.Store(true)
	done := make(chan struct{})
	go func() { w.wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		w.t.Fatalf("the load hangs after %d operations; paths %+v", w.ops.Load(), w.s.Paths())
	}
}

// until waits for n more operations.
func (w *cltLoad) until(n int64) {
	w.t.Helper()
	n += w.ops.Load()
	eventually(w.t, fmt.Sprintf("%d operations", n), func() bool { return w.ops.Load() >= n })
}

func (w *cltLoad) run(queue int) {
	q := &loadQueue{w: w, queue: queue, free: make([]int, 0, loadSlots), slot: map[int]int{}}
	for i := range loadSlots {
		q.free = append(q.free, i)
	}
	for !w.stop.Load() {
		for len(q.free) > 0 && q.submit(rand.IntN(loadBlocks), rand.IntN(3) > 0) {
		}
		q.complete()
	}
	for len(q.slot) > 0 {
		q.complete()
	}
	for b := range loadBlocks {
		for !q.submit(b, false) {
			time.Sleep(time.Millisecond)
		}
		for len(q.slot) > 0 {
			q.complete()
		}
	}
}

type loadQueue struct {
	w      *cltLoad
	queue  int
	blocks [loadBlocks]loadBlock
	free   []int
	slot   map[int]int // slot -> block, of requests under way
}

func (q *loadQueue) lba(block int) uint32 { return uint32(q.queue*loadBlocks + block) }

func (q *loadQueue) mem(slot int) Data {
	return Data{q.w.region, (q.queue*loadSlots + slot) * blockSize, blockSize}
}

// submit starts a request; false: not now.
func (q *loadQueue) submit(block int, write bool) bool {
	b := &q.blocks[block]
	if b.next != 0 || b.reading {
		return false
	}
	slot := q.free[len(q.free)-1]
	d := q.mem(slot)
	mem := q.w.region.Bytes()[d.Off : d.Off+d.Len]
	if write {
		b.next = b.version + 1
		fillBlock(mem, q.lba(block), b.next)
	} else {
		b.reading = true
		clear(mem)
	}
	q.free = q.free[:len(q.free)-1]
	q.slot[slot] = block
	if q.send(slot) {
		return true
	}
	q.forget(slot)
	return false
}

func (q *loadQueue) forget(slot int) {
	b := &q.blocks[q.slot[slot]]
	b.next, b.reading = 0, false
	delete(q.slot, slot)
	q.free = append(q.free, slot)
}

// send hands the request of a slot to the session.
func (q *loadQueue) send(slot int) bool {
	block := q.slot[slot]
	var user [16]byte
	binary.LittleEndian.PutUint32(user[:], q.lba(block))
	queue := q.w.s.Queue(q.queue)
	var err error
	call := queue.poller.Call(context.Background(), func() {
		if q.blocks[block].reading {
			err = queue.Read(uint64(slot), q.mem(slot), user[:])
		} else {
			err = queue.Write(uint64(slot), q.mem(slot), user[:])
		}
	})
	if call != nil {
		q.w.t.Error(call)
	}
	if err != nil && err != ErrNoPermit && err != ErrDisconnected {
		q.w.t.Errorf("submit: %v", err)
	}
	return err == nil
}

// complete handles one completion, if there is one soon.
func (q *loadQueue) complete() {
	select {
	case d := <-q.w.done[q.queue]:
		q.onDone(int(d.tag), d.errno)
	case <-time.After(2 * time.Millisecond):
	}
}

func (q *loadQueue) onDone(slot, errno int) {
	block, ok := q.slot[slot]
	if !ok {
		q.w.t.Errorf("completion of a request that is not under way")
		return
	}
	switch syscall.Errno(errno) {
	case 0:
		q.check(slot, block)
		q.forget(slot)
		q.w.ops.Add(1)
	case Lost: // the memory is kept, the same request comes again
		q.w.aborted.Add(1)
		for !q.send(slot) {
			time.Sleep(time.Millisecond)
		}
	default:
		q.w.t.Errorf("errno %d", errno)
		q.forget(slot)
	}
}

// check compares the read data with the model, and records the written data.
func (q *loadQueue) check(slot, block int) {
	b, d := &q.blocks[block], q.mem(slot)
	if !b.reading {
		b.version = b.next
		return
	}
	mem := q.w.region.Bytes()[d.Off : d.Off+d.Len]
	for i := 0; i < len(mem); i += 16 {
		lba, version := binary.LittleEndian.Uint64(mem[i:]), binary.LittleEndian.Uint64(mem[i+8:])
		if version != b.version || b.version > 0 && lba != uint64(q.lba(block)) {
			q.w.t.Errorf("block %d byte %d: block %d version %d, want version %d", q.lba(block), i, lba, version, b.version)
			return
		}
	}
}

// plainDevice hides the server's extensions, as an old server would.
type plainDevice struct{ verbs.Device }

func (d plainDevice) Connect(ctx context.Context, qp verbs.QP, p verbs.ConnectParams) ([]byte, error) {
	rsp, err := d.Device.Connect(ctx, qp, p)
	if len(rsp) > 20 {
		clear(rsp[20:])
	}
	return rsp, err
}

func loopbackPaths(net *loopback.Network) []PathAddr {
	dev := net.Device("client")
	return []PathAddr{pathTo(dev, cltA, srvA), pathTo(dev, cltB, srvB)}
}

// refuseDials lets the requests of loopbackPaths fail with err; nil ends it.
func refuseDials(net *loopback.Network, err error) {
	for _, addr := range []string{srvA, srvB} {
		net.RefuseDial(netip.MustParseAddrPort(addr), err)
	}
}

func slowDisk(d *cltDisk) { d.slow = 300 * time.Microsecond }

func TestR102_R108_CutPathsUnderLoad(t *testing.T) {
	for _, newRkey := range []bool{false, true} {
		t.Run(fmt.Sprintf("NEW_RKEY %v", newRkey), func(t *testing.T) {
			net := loopback.New()
			d, _ := serveDisk(t, net, depth(16), func(c *ServerConfig) { c.AlwaysInvalidate = newRkey })
			slowDisk(d)
			w, c := openLoad(t, loopbackPaths(net), nil)
			w.start()
			for i := range 6 {
				w.until(100)
				if i%2 == 0 {
					net.Cut(cltA, addrOf(srvA))
				} else {
					net.Cut(cltB, addrOf(srvB))
				}
			}
			w.until(100)
			w.finish()
			var sum PathStats
			for _, p := range c.Paths() {
				sum.Add(p.Stats)
				if p.State != PathConnected {
					eventually(t, "path is back", func() bool { return c.Paths()[p.ID-1].State == PathConnected })
				}
			}
			if sum.Failovers == 0 {
				t.Error("nothing was failed over")
			}
		})
	}
}

func TestTotalLossUnderLoad(t *testing.T) {
	net := loopback.New()
	d, _ := serveDisk(t, net, depth(16))
	slowDisk(d)
	w, c := openLoad(t, loopbackPaths(net), nil)
	w.start()
	for range 5 {
		w.until(50)
		refuseDials(net, syscall.ECONNREFUSED) // no path is back before the other is lost
		net.Cut(cltA, addrOf(srvA))
		net.Cut(cltB, addrOf(srvB))
		c.awaitKind(SessionDown)
		refuseDials(net, nil)
		c.awaitKind(SessionUp)
	}
	w.until(50)
	w.finish()
	if w.aborted.Load() == 0 {
		t.Error("no request was under way at a loss")
	}
}

func TestStalledPathIsNoticedByHeartbeats(t *testing.T) {
	net := loopback.New()
	d, _ := serveDisk(t, net, depth(16), heartbeatEvery(30*time.Millisecond, 10))
	slowDisk(d)
	w, c := openLoad(t, loopbackPaths(net), func(cfg *ClientConfig) {
		cfg.Timing.Heartbeat, cfg.Timing.HeartbeatMisses = 30*time.Millisecond, 10
	})
	timing := c.Timing()
	timing.ConnectTimeout = 300 * time.Millisecond
	if err := c.SetTiming(timing); err != nil {
		t.Fatal(err)
	}
	w.start()
	w.until(50)
	net.Stall(cltA, addrOf(srvA))
	c.awaitState(1, PathReconnecting)
	w.until(50)
	net.Resume(cltA, addrOf(srvA))
	c.awaitState(1, PathConnected)
	w.until(50)
	w.finish()
}

func TestPathsComeAndGoUnderLoad(t *testing.T) {
	net := loopback.New()
	d, srv := serveDisk(t, net, depth(16))
	slowDisk(d)
	paths := loopbackPaths(net)
	w, c := openLoad(t, paths, nil)
	ctx := cltContext(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	w.start()
	w.until(50)
	third, err := c.AddPath(ctx, pathTo(net.Device("other"), netip.MustParseAddr("10.1.0.3"), "10.0.0.3:1234"))
	must(err)
	w.until(50)
	must(c.DisconnectPath(ctx, 1))
	w.until(50)
	must(c.RemovePath(ctx, 2))
	w.until(50)
	must(c.ReconnectPath(ctx, 1))
	w.until(50)
	must(c.RemovePath(ctx, third))
	w.until(50)
	must(c.SetPolicy(RoundRobin))
	eventually(t, "the server has only path 1", func() bool { return len(srv.Sessions()[0].Paths()) == 1 })
	_, err = c.AddPath(ctx, paths[1])
	must(err)
	w.until(50)
	must(c.ReconnectPath(ctx, 1))
	w.finish()
	if n := w.aborted.Load(); n != 0 {
		t.Errorf("%d requests were given up although there was always a path", n)
	}
	if _, err := c.AddPath(ctx, paths[1]); ErrnoOf(err) != int(syscall.EEXIST) {
		t.Errorf("the same addresses again: %v", err)
	}
}

func TestR105_ServerRestartUnderLoad(t *testing.T) {
	net := loopback.New()
	d, srv := serveDisk(t, net, depth(16))
	slowDisk(d)
	w, c := openLoad(t, loopbackPaths(net), nil)
	w.start()
	w.until(50)
	srv.stop()
	c.awaitKind(SessionDown)
	again := &cltDisk{blocks: d.blocks} // nothing of d runs any more
	again.serve(t, net, depth(16), plainKeys)
	c.awaitKind(SessionUp)
	w.until(50)
	w.finish()
}

func TestServerWithoutExtensionUnderLoad(t *testing.T) {
	net := loopback.New()
	serveDisk(t, net, depth(16)) // answers at once: nothing of a cut path runs late
	dev := plainDevice{net.Device("client")}
	w, _ := openLoad(t, []PathAddr{pathTo(dev, cltA, srvA), pathTo(dev, cltB, srvB)}, nil)
	w.start()
	for range 4 {
		w.until(100)
		net.Cut(cltA, addrOf(srvA))
	}
	w.until(100)
	w.finish()
}

// One write at a time, by hand.
type cltWriter struct {
	*cltClient
	tag uint64
}

func (w *cltWriter) start(version uint64) {
	w.t.Helper()
	w.tag++
	fillBlock(w.region.Bytes()[:blockSize], 0, version)
	if err := w.write(0, w.tag, 0, blockSize, "\x00\x00\x00\x00"); err != nil {
		w.t.Fatal(err)
	}
}

// Writes of a stalled path must not overwrite newer data when it comes to life
// again: path 1 stalls with a write that the server has not read; the client
// gives it up, repeats the write on path 2, and writes a newer version. The same
// without the extension shows that the test would notice.
func TestFence_UnreadWriteOfAStalledPathStaysUnread(t *testing.T) {
	for name, want := range map[string]uint64{"with the extension": 2, "without": 1} {
		t.Run(name, func(t *testing.T) {
			net := loopback.New()
			d, srv := serveDisk(t, net)
			var dev verbs.Device = net.Device("client")
			if want == 1 {
				dev = plainDevice{dev}
			}
			paths := []PathAddr{pathTo(dev, cltA, srvA), pathTo(dev, cltB, srvB)}
			c := &cltWriter{cltClient: cltOpen(t, paths, nil)}
			net.RefuseDial(paths[0].Dst, syscall.ECONNREFUSED)
			net.Hold(cltA, addrOf(srvA))
			c.start(1)
			eventually(t, "the write is on its way", func() bool { return net.Held(cltA, addrOf(srvA)) == 1 })
			c.loseLink(0)
			c.finished(1, 0) // by path 2
			c.start(2)
			c.finished(2, 0)
			for net.Step(cltA, addrOf(srvA)) { // path 1 comes to life, bit by bit
				srv.turn()
			}
			if v := d.version(0); v != want {
				t.Errorf("version %d, want %d", v, want)
			}
			net.Release(cltA, addrOf(srvA))
			net.RefuseDial(paths[0].Dst, nil)
			c.awaitState(1, PathReconnecting)
			c.awaitState(1, PathConnected)
			c.start(3)
			c.finished(3, 0)
			if v := d.version(0); v != 3 {
				t.Errorf("version %d at the end", v)
			}
		})
	}
}

// The same with a write that is already running: the FENCE waits for its end.
func TestFence_RunningWriteFinishesBeforeTheReplay(t *testing.T) {
	net := loopback.New()
	d, srv := serveDisk(t, net)
	d.gate = make(chan struct{})
	c := &cltWriter{cltClient: cltOpen(t, loopbackPaths(net), nil)}
	c.start(1)
	eventually(t, "the write runs", func() bool { return c.Paths()[0].Stats.Inflight == 1 && srvInflight(srv) == 1 && d.begun.Load() == 1 })
	net.RefuseDial(netip.MustParseAddrPort(srvA), syscall.ECONNREFUSED)
	net.Cut(cltA, addrOf(srvA))
	c.awaitState(1, PathReconnecting)
	time.Sleep(50 * time.Millisecond)
	if n := d.runs.Load(); n != 0 || len(c.done) != 0 {
		t.Fatalf("%d writes ran, %d finished before the first had ended", n, len(c.done))
	}
	close(d.gate)
	c.finished(1, 0)
	if n := d.runs.Load(); n != 2 {
		t.Errorf("%d writes ran, want the lost one and its repetition", n)
	}
}

// loseLink ends a connected path as its heartbeats would.
func (c *cltClient) loseLink(i int) {
	c.mu.Lock()
	l := c.links[i]
	c.mu.Unlock()
	l.failLink(ErrHeartbeat)
}

// turn waits until every poller has handled all events that had arrived:
// between two calls is a whole Poll.
func (s *testServer) turn() {
	for range 2 {
		for _, p := range s.cfg.Pollers {
			if err := p.Call(s.t.Context(), func() {}); err != nil {
				s.t.Fatal(err)
			}
		}
	}
}

func srvInflight(s *testServer) (n int64) {
	for _, sess := range s.Sessions() {
		for _, p := range sess.Paths() {
			n += p.Stats.Inflight
		}
	}
	return n
}

func TestR100_ReconnectWhileTheServerStillCloses(t *testing.T) {
	net := loopback.New()
	d, _ := serveDisk(t, net)
	d.gate = make(chan struct{})
	c := &cltWriter{cltClient: cltOpen(t, loopbackPaths(net)[:1], nil)}
	c.awaitKind(SessionUp)
	c.start(1)
	eventually(t, "the write is under way", func() bool { return c.Paths()[0].Stats.Inflight == 1 && d.begun.Load() == 1 })
	net.Cut(cltA, addrOf(srvA))
	c.finished(1, Lost)
	// The server refuses the path until its operation has ended.
	e := c.awaitState(1, PathConnectingErr)
	if ErrnoOf(e.Err) != int(syscall.ECONNRESET) {
		t.Errorf("refused with %v", e.Err)
	}
	close(d.gate)
	c.awaitKind(SessionUp)
	c.start(2)
	c.finished(2, 0)
	if v := d.version(0); v != 2 {
		t.Errorf("version %d", v)
	}
}

func TestR107_BothEndsDisconnect(t *testing.T) {
	net := loopback.New()
	_, srv := serveDisk(t, net)
	c := cltOpen(t, loopbackPaths(net), nil)
	sess := srv.Sessions()[0]
	if sess.Name() != "clt" {
		t.Errorf("session %q", sess.Name())
	}
	if err := sess.DisconnectPath(sess.Paths()[1].ID); err != nil {
		t.Fatal(err)
	}
	c.awaitState(2, PathReconnecting)
	c.awaitState(2, PathConnected)
	for range 5 { // crossing
		id := sess.Paths()[1].ID
		go func() { _ = sess.DisconnectPath(id) }() // it may be gone already
		if err := c.DisconnectPath(cltContext(t), 2); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the server has only path 1", func() bool { return len(sess.Paths()) == 1 })
		if err := c.ReconnectPath(cltContext(t), 2); err != nil {
			t.Fatal(err)
		}
	}
}
