package main

import (
	"context"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// rig is a front end with queues over heap rings, each with a host that serves
// the disks.
type rig struct {
	t     testing.TB
	f     *frontend
	disks map[uint32]*disk
	hosts []*host
	addr  string // of a unix listener

	stop  chan struct{}
	hostW sync.WaitGroup
	pumps []*pump.Pump
}

type rigConfig struct {
	queues   int
	slots    int
	slotSize int
	entries  int
	seed     uint64
	limits   blk.Limits
}

// newRig starts a front end with device 0, "disk0".
func newRig(t testing.TB, c rigConfig) *rig {
	t.Helper()
	c.queues, c.entries = max(c.queues, 1), max(c.entries, 256)
	if c.slots == 0 {
		c.slots = 64
	}
	if c.slotSize == 0 {
		c.slotSize = 64 << 10
	}
	if c.limits.Size == 0 {
		c.limits = testLimits(4 << 20)
	}
	r := &rig{t: t, f: newFrontend(quiet), disks: map[uint32]*disk{}, stop: make(chan struct{})}
	r.disks[0] = newDisk(c.limits, c.slots, c.slotSize)
	for i := range c.queues {
		r.startQueue(c, i)
	}
	r.addDisk(0, "disk0")
	r.listen()
	t.Cleanup(r.close)
	return r
}

func (r *rig) addDisk(index uint32, name string) {
	r.t.Helper()
	d := r.disks[index]
	err := r.f.AddDevice(context.Background(), plugin.DeviceSpec{
		Index: index, Name: name, Limits: d.limits, Arena: d.arena, ArenaID: 7,
		SlotSize: d.slotSize, Slots: len(d.arena) / d.slotSize,
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) startQueue(c rigConfig, i int) {
	r.t.Helper()
	ring, err := shm.NewHeapRing(c.entries)
	if err != nil {
		r.t.Fatal(err)
	}
	q, err := newQueue(ring.Submitter(), quiet())
	if err != nil {
		r.t.Fatal(err)
	}
	p, err := pump.New(pump.Config{Name: "test", Logger: quiet()})
	if err != nil {
		r.t.Fatal(err)
	}
	if err := p.Add(q); err != nil {
		r.t.Fatal(err)
	}
	q.do = p.Do
	q.guard.patience = 200 * time.Millisecond
	r.f.addQueue(q)
	p.Start()
	r.pumps = append(r.pumps, p)
	seed := c.seed
	if seed != 0 {
		seed += uint64(i)
	}
	h := newHost(ring, r.disks, seed)
	r.hosts = append(r.hosts, h)
	r.hostW.Add(1)
	go r.serve(h)
}

// serve is the host's loop; it looks at the ring now and then.
func (r *rig) serve(h *host) {
	defer r.hostW.Done()
	for idle := 0; ; idle++ {
		select {
		case <-r.stop:
			return
		default:
		}
		if h.step() > 0 {
			idle = 0
		}
		if idle > 100 {
			time.Sleep(20 * time.Microsecond)
		} else {
			runtime.Gosched()
		}
	}
}

func (r *rig) listen() {
	r.t.Helper()
	r.addr = filepath.Join(r.t.TempDir(), "nbd.sock")
	r.listenOn("unix", r.addr)
}

func (r *rig) listenOn(network, address string) string {
	r.t.Helper()
	l, err := net.Listen(network, address)
	if err != nil {
		r.t.Fatal(err)
	}
	var file *os.File
	switch l := l.(type) {
	case *net.UnixListener:
		l.SetUnlinkOnClose(false)
		file, err = l.File()
	case *net.TCPListener:
		file, err = l.File()
	}
	if err == nil {
		err = r.f.AddListener(context.Background(), "test", file)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// onQueue runs fn on the thread of queue i.
func (r *rig) onQueue(i int, fn func(q *queue)) {
	r.pumps[i].Call(func() { fn(r.f.queues[i]) })
}

// free reports whether every slot is back.
func (r *rig) free(index uint32) bool {
	all := true
	e := r.f.exportAt(index)
	for i, s := range e.currentShares() {
		r.onQueue(i, func(*queue) { all = all && len(s.free) == len(s.ops) && s.gather == nil })
	}
	return all && e.claims.active.Load() == 0 && e.claims.waiting.Load() == 0
}

func (r *rig) close() {
	for _, l := range r.f.listeners {
		l.Close()
	}
	eventually(r.t, "connections end", func() bool {
		for i := range r.pumps {
			r.onQueue(i, func(q *queue) {
				for _, c := range q.conns {
					c.closeSocket(errShutdown)
				}
			})
		}
		n := 0
		for index := range r.disks {
			n += r.f.Openers(index)
		}
		return n == 0
	})
	for _, e := range r.f.exports {
		if c := &e.claims; c.ended.Load() != 0 || c.ahead.Load() != 0 || inFlight(e) != 0 {
			r.t.Errorf("export %q: %d ended connections and %d ranges of writes are left, number %d takes its commands", e.name, c.ended.Load(), inFlight(e), c.ahead.Load())
		}
	}
	for i, p := range r.pumps {
		p.Stop()
		r.f.queues[i].close()
	}
	close(r.stop)
	r.hostW.Wait()
	for i, d := range r.disks {
		d.check(r.t)
		if n := r.f.queues[0].stats.strayCompletions.Load(); n > 0 {
			r.t.Errorf("device %d: %d stray completions", i, n)
		}
	}
}

// eventually waits until a condition holds.
var eventually = sdktest.Eventually

// pair is a connected pair of sockets: ours raw and non-blocking, the client's.
func pair(t testing.TB) (int, net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fds[1]), "client")
	defer file.Close()
	c, err := net.FileConn(file)
	if err != nil {
		t.Fatal(err)
	}
	return fds[0], c
}

type spec = plugin.DeviceSpec
