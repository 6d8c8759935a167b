package plugincheck

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

const (
	callTime   = 15 * time.Second // longest call of the control path
	answerTime = 15 * time.Second // longest request
	endTime    = 5 * time.Second  // for a process to end when it is told to
	quietTime  = 50 * time.Millisecond
)

const (
	entries   = 128     // of a ring
	arenaSize = 8 << 20 // bytes
	arenaID   = 2
)

// host is a running plugin with queues, one arena and disks. The check is the host: it
// owns the submitters.
type host struct {
	t       *T
	p       *plugin.Process
	s       *storage
	queues  []*queue
	mem     *shm.Arena
	devices uint32 // the last number that was given to a disk
	ended   bool
}

// queue is the host's end of one ring.
type queue struct {
	h    *host
	ring *shm.Ring
	*shm.Submitter
}

// life says how a process is started.
type life struct {
	queues   int // 0: 1
	entries  int // of each; 0: 128
	confined bool
}

// start starts a process for a storage.
func (t *T) start(s *storage, l life) *host {
	h := &host{t: t, s: s}
	p, err := t.launch(s, l)
	if err != nil {
		t.Fatalf("%v", err)
	}
	h.p = p
	t.Cleanup(h.end)
	h.mem, err = shm.NewArena("plugin-test", arenaSize)
	t.must("arena", err)
	for i := range max(l.queues, 1) {
		h.attachQueue(i, l)
	}
	h.call("attach an arena", func(ctx context.Context) error { return p.AttachArena(ctx, arenaID, h.mem) })
	return h
}

// launch starts a process without queues.
func (t *T) launch(s *storage, l life) (*plugin.Process, error) {
	ctx, cancel := context.WithTimeout(t.ctx, 2*callTime) // StartTimeout ends first, and says what it waited for
	defer cancel()
	c := plugin.Config{
		Path: t.o.Executable, Kind: plugin.KindIO, Configure: t.o.config(s.dir), Pumps: l.queues, Logger: t.o.Logger,
		StartTimeout: callTime,
		Env:          []string{"GORACE=atexit_sleep_ms=0"}, // a program with the race detector would take a second to end
	}
	if l.confined {
		c.Confine, c.Launcher = t.profile(s), t.o.Launcher
	}
	if t.o.Backend != nil {
		return plugin.LaunchInProcess(ctx, c, t.o.Backend)
	}
	return plugin.Launch(ctx, c)
}

func (t *T) profile(s *storage) *confine.Profile {
	c := confine.Config{Mode: confine.Strict, Launcher: t.o.Launcher, Allow: map[string][]string{"plugin": {s.dir}}}
	root := s.dir
	if s.path != "" {
		root = filepath.Dir(s.path)
	}
	p, err := c.Storage("plugin", root, false)
	t.must("confinement", err)
	return p
}

func (h *host) attachQueue(i int, l life) {
	newRing := shm.NewRing
	if h.t.o.HeapRing {
		newRing = shm.NewHeapRing
	}
	n := l.entries
	if n == 0 {
		n = entries
	}
	ring, err := newRing(n)
	h.t.must("ring", err)
	h.queues = append(h.queues, &queue{h, ring, ring.Submitter()})
	h.call("attach a queue", func(ctx context.Context) error { return h.p.AttachQueue(ctx, i, ring) })
}

// call makes a call of the control path that must not fail.
func (h *host) call(what string, f func(context.Context) error) {
	h.t.must(what, h.try(f))
}

func (h *host) try(f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(h.t.ctx, callTime)
	defer cancel()
	return f(ctx)
}

// end ends the process if it runs, and frees what was shared with it.
func (h *host) end() {
	if h.ended {
		return
	}
	h.ended = true
	if h.s.medium != nil {
		h.s.medium.Release()
	}
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	_ = h.p.Stop(ctx) // checks of the end look at what it returns
	h.free()
}

func (h *host) free() {
	for _, q := range h.queues {
		_ = q.ring.Close()
	}
	if h.mem != nil {
		_ = h.mem.Close()
	}
}

// kill ends the process by SIGKILL, and does not wait: its I/O may keep it.
func (h *host) kill() { h.p.Kill() }

// awaitEnd waits for the end of the process.
func (h *host) awaitEnd(most time.Duration) bool {
	select {
	case <-h.p.Exited():
		return true
	case <-time.After(most):
		return false
	}
}

// disk is an open disk.
type disk struct {
	h      *host
	s      *storage
	index  uint32
	limits blk.Limits
}

// open opens a disk that must open.
func (h *host) open(s *storage, readOnly bool) *disk {
	d, err := h.tryOpen(h.t.ctx, s, readOnly)
	h.t.must("open a disk", err)
	return d
}

// tryOpen opens a disk under a number of its own.
func (h *host) tryOpen(ctx context.Context, s *storage, readOnly bool) (*disk, error) {
	h.devices++
	return h.openAs(ctx, h.devices, s, readOnly)
}

func (h *host) openAs(ctx context.Context, index uint32, s *storage, readOnly bool) (*disk, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	r := plugin.OpenRequest{Device: index, Name: s.name, Mode: blk.ReadWrite, ReadOnly: readOnly, Generation: 1}
	if readOnly {
		r.Mode = blk.ReadOnly
	}
	f, err := s.open()
	if err != nil {
		return nil, err
	}
	if f != nil {
		defer f.Close()
		r.File = f
	}
	l, err := h.p.OpenDisk(ctx, r)
	if err != nil {
		return nil, err
	}
	return &disk{h: h, s: s, index: r.Device, limits: l}, nil
}

// close closes the disk.
func (d *disk) close() {
	d.h.call("close a disk", func(ctx context.Context) error { return d.h.p.CloseDisk(ctx, d.index) })
}

// one starts a process on plain storage and opens its disk.
func (t *T) one() *disk {
	s := t.plain()
	return t.start(s, life{}).open(s, false)
}

// oneOnMedium is one on the kit's own medium.
func (t *T) oneOnMedium() *disk {
	s := t.onMedium()
	return t.start(s, life{}).open(s, false)
}

// request fills in what most requests have in common.
func (d *disk) request(e shm.SQE) shm.SQE {
	if e.Device == 0 {
		e.Device = d.index
	}
	if e.Arena == 0 {
		e.Arena = arenaID
	}
	return e
}

// do makes one request and returns its answer.
func (d *disk) do(e shm.SQE) blk.Errno { return d.all([]shm.SQE{e})[0] }

// all makes requests on the first queue, as many at once as it takes, and returns the
// answers in the order of the requests.
func (d *disk) all(es []shm.SQE) []blk.Errno {
	for i := range es {
		es[i] = d.request(es[i])
	}
	return d.h.queues[0].all(es)
}

// must makes a request that must succeed.
func (d *disk) must(e shm.SQE) {
	if errno := d.do(e); errno != blk.OK {
		d.h.t.Fatalf("%v of %d bytes at byte %d: %v", e.Op, e.Len, e.Offset, errno)
	}
}

// all gives each request the number of its place as a tag.
func (q *queue) all(es []shm.SQE) []blk.Errno {
	errnos := make([]blk.Errno, len(es))
	answered := make([]bool, len(es))
	var cqes [64]shm.CQE
	deadline := time.Now().Add(answerTime)
	for pushed, done := 0, 0; done < len(es); {
		for pushed < len(es) {
			es[pushed].Tag = uint64(pushed)
			if !q.Push(&es[pushed]) {
				break
			}
			pushed++
		}
		q.Publish()
		n := q.Pop(cqes[:])
		for _, c := range cqes[:n] {
			if c.Tag >= uint64(pushed) || answered[c.Tag] {
				q.h.t.Fatalf("an answer to tag %d, which is not in flight", c.Tag)
			}
			answered[c.Tag], errnos[c.Tag] = true, blk.Errno(c.Errno)
		}
		if done += n; n == 0 {
			q.wait(deadline, pushed-done)
		}
	}
	return errnos
}

// wait sleeps until an answer may be there.
func (q *queue) wait(deadline time.Time, inFlight int) {
	q.check(inFlight)
	if time.Now().After(deadline) || q.h.t.ctx.Err() != nil {
		q.h.t.Fatalf("%d requests have no answer after %v", inFlight, answerTime)
	}
	q.sleep(100 * time.Millisecond)
}

// check ends the check if the plugin has broken the ring or has ended.
func (q *queue) check(inFlight int) {
	if err := q.Err(); err != nil {
		q.h.t.Fatalf("the plugin broke the ring: %v", err)
	}
	if err := q.h.p.ExitError(); err != nil {
		q.h.t.Fatalf("the plugin ended with %d requests in flight: %v", inFlight, err)
	}
}

// sleep waits for a completion, as a host that asks for a wake-up.
func (q *queue) sleep(most time.Duration) {
	if q.Arm() {
		p := []unix.PollFd{{Fd: int32(q.FD()), Events: unix.POLLIN}}
		_, _ = unix.Poll(p, int(most.Milliseconds()))
		q.Disarm()
	}
}

// post shows the plugin requests without waiting for their answers.
func (q *queue) post(es ...shm.SQE) {
	for i := range es {
		if !q.Push(&es[i]) {
			q.h.t.Fatalf("the ring takes no request: %v", q.Err())
		}
	}
	q.Publish()
}

// answers collects answers until there are n, or the time is over.
func (q *queue) answers(n int, most time.Duration) []shm.CQE {
	var all []shm.CQE
	var cqes [64]shm.CQE
	for deadline := time.Now().Add(most); ; {
		got := q.Pop(cqes[:])
		all = append(all, cqes[:got]...)
		left := time.Until(deadline)
		if len(all) >= n || left <= 0 || q.Err() != nil || q.h.p.ExitError() != nil {
			return all
		}
		if got == 0 {
			q.sleep(min(left, 100*time.Millisecond))
		}
	}
}

// await is answers that must come, and must be n.
func (q *queue) await(n int) []shm.CQE {
	all := q.answers(n, answerTime)
	q.check(n - len(all))
	if len(all) != n {
		q.h.t.Fatalf("%d of %d requests have an answer after %v", len(all), n, answerTime)
	}
	return all
}

// largest is the most one request carries here, in bytes.
func (d *disk) largest() uint32 {
	n := uint64(min(arenaSize/2, 1<<20))
	if m := d.limits.MaxIOSize; m != 0 {
		n = min(n, uint64(m))
	}
	n = min(n, d.limits.Size)
	return uint32(n - n%d.block())
}

func (d *disk) block() uint64 { return uint64(d.limits.LogicalBlockSize) }

// write writes data at byte off by way of the beginning of the arena.
func (d *disk) write(off uint64, data []byte, flags blk.Flags) {
	copy(d.h.mem.Bytes(), data)
	d.must(shm.SQE{Op: blk.Write, Offset: off, Len: uint32(len(data)), Flags: flags})
}

// read reads n bytes at off.
func (d *disk) read(off uint64, n int) []byte {
	mem := d.h.mem.Bytes()[arenaSize/2:][:n]
	for i := range mem {
		mem[i] = 0xa5
	}
	d.must(shm.SQE{Op: blk.Read, Offset: off, Len: uint32(n), ArenaOff: arenaSize / 2})
	return bytes.Clone(mem)
}

// expect reads and compares.
func (d *disk) expect(what string, off uint64, want []byte) {
	if got := d.read(off, len(want)); !bytes.Equal(got, want) {
		i := differ(got, want)
		d.h.t.Fatalf("%s: byte %d of the disk is %#x, want %#x (seed %d)", what, off+uint64(i), got[i], want[i], d.h.t.o.Seed)
	}
}

// flush flushes.
func (d *disk) flush() { d.must(shm.SQE{Op: blk.Flush}) }

// differ is the index of the first difference, or the length.
func differ(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return len(a)
}

// within reports whether ok turns true in time.
func within(most time.Duration, ok func() bool) bool {
	for end := time.Now().Add(most); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

func (s *storage) String() string { return fmt.Sprintf("%q in %s", s.name, s.dir) }
