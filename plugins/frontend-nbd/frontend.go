package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blockdev"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
)

const version = "0.1.0"

// maxIndex bounds the tables by device index.
const maxIndex = 1 << 16

// frontend implements plugin.Frontend: devices, listeners and queues come and
// go here. Lock order: frontend.mu, then export.mu.
type frontend struct {
	log    func() *slog.Logger
	kernel kernelClient

	protection atomic.Pointer[tlsProtection] // nil: TLS is off
	rechecking sync.Mutex                    // held while connections are rechecked; locked before mu
	closeGrace time.Duration                 // closeGrace of recheck.go, shorter in tests
	users      plugin.UserEvents             // with TLS
	tunnels    atomic.Int32                  // connections with TLS
	carried    atomic.Uint64                 // bytes that tunnels have copied

	mu        sync.Mutex
	queues    []*queue
	exports   map[uint32]*export
	listeners []*acceptSocket
	adopted   []*conn // of another process, not served yet

	transfer sync.Mutex // held while connections are given up; before mu
}

func newFrontend(log func() *slog.Logger) *frontend {
	return &frontend{
		log:     log,
		kernel:  netlinkClient{},
		exports: map[uint32]*export{},

		closeGrace: closeGrace,
	}
}

func (f *frontend) Describe() plugin.Info {
	return plugin.Info{Name: "nbd", Version: version}
}

// AddDevice makes a device an export under its name.
func (f *frontend) AddDevice(ctx context.Context, s plugin.DeviceSpec) error {
	if s.Index >= maxIndex {
		return fmt.Errorf("device index %d: %w", s.Index, blk.EINVAL)
	}
	e, err := newExport(s)
	if err != nil {
		return err
	}
	if err := f.addExport(s.Index, e); err != nil {
		return err
	}
	d, err := f.attachDisk(ctx, e, &s)
	if err != nil {
		return errors.Join(fmt.Errorf("export %q: %w", e.name, err), f.removeExport(ctx, e, true))
	}
	e.disk.Store(d)
	f.log().Info("export added", "export", e.name, "size", e.limits.Load().Size)
	return nil
}

func (f *frontend) addExport(index uint32, e *export) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.exports[index] != nil || f.byName(e.name) != nil {
		return fmt.Errorf("export %q or index %d is there already: %w", e.name, index, blk.EEXIST)
	}
	f.exports[index] = e
	return nil
}

// partingTime is the time for connections to end after their clients have
// exited.
const partingTime = time.Second

// RemoveDevice removes an export. It fails with EBUSY if connections remain for
// partingTime and force is not set. It returns when no slot is with the device
// any more.
func (f *frontend) RemoveDevice(ctx context.Context, index uint32, force bool) error {
	e := f.exportAt(index)
	if e == nil {
		return blk.ENODEV
	}
	d := e.disk.Load()
	if d == nil || force {
		return f.removeExport(ctx, e, force)
	}
	hold, err := blockdev.Claim(ctx, d.devicePath()) // no mount succeeds from here on
	if err != nil {
		return fmt.Errorf("%s: %w", d.devicePath(), err)
	}
	defer hold.Close()
	return f.removeExport(ctx, e, force)
}

func (f *frontend) removeExport(ctx context.Context, e *export, force bool) error {
	err := e.closeToNew(force)
	for end := time.Now().Add(partingTime); errors.Is(err, blk.EBUSY) && time.Now().Before(end) && ctx.Err() == nil; {
		time.Sleep(10 * time.Millisecond)
		err = e.closeToNew(force)
	}
	if err != nil {
		return fmt.Errorf("export %q: %w", e.name, err)
	}
	if d := e.disk.Load(); d != nil {
		if err := d.disconnectDisk(); err != nil {
			f.log().Warn("the kernel's NBD client keeps its disk", "export", e.name, "err", err)
		}
	}
	for _, s := range e.currentShares() {
		f.runOnQueue(s.q, func() { s.q.evictExport(e) })
	}
	select {
	case <-e.idle:
	case <-ctx.Done():
		return fmt.Errorf("export %q: wait for requests in flight: %w", e.name, ctx.Err())
	}
	f.mu.Lock()
	delete(f.exports, e.index)
	f.mu.Unlock()
	f.log().Info("export removed", "export", e.name)
	return nil
}

// ResizeDevice sets new limits. NBD has no message for connected clients; new
// connections see the new size.
func (f *frontend) ResizeDevice(_ context.Context, index uint32, l blk.Limits) error {
	e := f.exportAt(index)
	if e == nil {
		return blk.ENODEV
	}
	if uint64(l.LogicalBlockSize) != e.block {
		return fmt.Errorf("export %q: logical block size %d becomes %d: %w", e.name, e.block, l.LogicalBlockSize, blk.EINVAL)
	}
	e.setLimits(l)
	if d := e.disk.Load(); d != nil {
		if err := d.resizeDisk(e.limits.Load().Size); err != nil {
			return err
		}
	}
	f.log().Info("export resized", "export", e.name, "size", l.Size)
	return nil
}

// Openers returns the number of connections of an export and users of its disk.
func (f *frontend) Openers(index uint32) int {
	e := f.exportAt(index)
	if e == nil {
		return 0
	}
	n := e.openerCount()
	if d := e.disk.Load(); d != nil {
		users, err := blockdev.Users(d.devicePath())
		if err != nil {
			f.log().Warn("looking for users failed", "path", d.devicePath(), "err", err)
		}
		n += users
	}
	return n
}

// Location returns the node of an export's disk or, if it has none, its URI on
// the first listener.
func (f *frontend) Location(index uint32) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	e := f.exports[index]
	if e == nil {
		return ""
	}
	if d := e.disk.Load(); d != nil {
		return d.devicePath()
	}
	if len(f.listeners) == 0 {
		return ""
	}
	first := f.listeners[0]
	addr := first.Addr()
	u := url.URL{Scheme: "nbd", Host: addr.String(), Path: "/" + e.name}
	if f.securityOf(first.name).tlsRequired() {
		u.Scheme = "nbds"
	}
	if addr.Network() == "unix" {
		path := addr.String()
		if name, ok := strings.CutPrefix(first.name, "unix:"); ok {
			path = name // the address of a long path is another
		}
		u.Scheme, u.Host = u.Scheme+"+unix", ""
		u.RawQuery = "socket=" + escapePath(path)
	}
	return u.String()
}

// escapePath escapes a path for the query of a URI. A blank is "%20": clients do
// not read "+" as one.
func escapePath(path string) string {
	return strings.NewReplacer("+", "%20", "%2F", "/").Replace(url.QueryEscape(path))
}

// Serve runs one queue until the host closes it.
func (f *frontend) Serve(fq *plugin.FrontQueue) error {
	q, err := newQueue(fq, f.log())
	if err != nil {
		return err
	}
	p, err := pump.New(pump.Config{Name: fmt.Sprintf("nbd%d", fq.Pump()), Logger: f.log()})
	if err != nil {
		q.close()
		return err
	}
	if err := p.Add(q); err != nil {
		p.Stop()
		q.close()
		return err
	}
	q.do, q.now, q.served = p.Do, p.Now, fq.Served
	p.Do(q.seat.Take)
	f.addQueue(q)
	err = p.Run(fq.Closed)
	f.removeQueue(q)
	q.close()
	f.log().Debug("queue ends", "queue", fq.Pump(), "requests", q.stats.requests.Load(),
		"errors", q.stats.errors.Load(), "placed_copy_bytes", q.stats.placedBytes.Load(),
		"stray_completions", q.stats.strayCompletions.Load())
	return err
}

func (f *frontend) addQueue(q *queue) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queues = append(f.queues, q)
}

func (f *frontend) removeQueue(q *queue) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queues = slices.DeleteFunc(f.queues, func(other *queue) bool { return other == q })
}

// placedBytes returns the number of payload bytes that the queues have copied, and
// of all bytes that tunnels have.
func (f *frontend) placedBytes() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	sum := f.carried.Load()
	for _, q := range f.queues {
		sum += q.stats.placedBytes.Load()
	}
	return sum
}

// awaitQueues waits until n queues serve. At the start of the process their
// threads may not have begun yet.
func (f *frontend) awaitQueues(ctx context.Context, n int) error {
	for range 5000 {
		f.mu.Lock()
		have := len(f.queues)
		f.mu.Unlock()
		if have >= n {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
	return fmt.Errorf("the queues do not begin to serve: %w", blk.ENODEV)
}

// runOnQueue makes the queue's thread run fn. It returns false if the queue has ended;
// f.mu keeps it from ending in between.
func (f *frontend) runOnQueue(q *queue, fn func()) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !slices.Contains(f.queues, q) {
		return false
	}
	q.do(fn)
	return true
}

func (f *frontend) exportAt(index uint32) *export {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.exports[index]
}

func (f *frontend) byName(name string) *export {
	for _, e := range f.exports {
		if e.name == name {
			return e
		}
	}
	return nil
}

// findExport implements catalogue. The empty name finds the only export, if there is
// exactly one.
func (f *frontend) findExport(name string) (*export, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if e := f.byName(name); e != nil && !e.beingRemoved() {
		return e, nil
	}
	if name == "" && len(f.exports) == 1 {
		for _, e := range f.exports {
			return e, nil
		}
	}
	return nil, fmt.Errorf("no export %q", name)
}

// openExport implements catalogue.
func (f *frontend) openExport(name string) (*export, error) {
	e, err := f.findExport(name)
	if err != nil {
		return nil, err
	}
	if !e.addOpener() {
		return nil, fmt.Errorf("export %q is being removed", e.name)
	}
	return e, nil
}

// exportNames implements catalogue: sorted.
func (f *frontend) exportNames() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var names []string
	for _, e := range f.exports {
		names = append(names, e.name)
	}
	slices.Sort(names)
	return names
}
