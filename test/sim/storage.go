package sim

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// storage is one process of a storage plugin. Like fileio, its successor finds
// every acknowledged write, and it opens a disk only when no operation of its
// predecessor is in flight.
type storage struct {
	process
	host *host

	mu      sync.Mutex
	open    map[*disk]bool
	regions map[uint32]*region // by id of the arena
	ready   map[*plugin.Queue][]completion
}

type completion struct {
	tag   uint64
	errno blk.Errno
	tells *disk // the error is that of the disk's write-back; nil: it is not
}

// launchStorage starts a process for a server.
func (w *world) launchStorage(ctx context.Context, s *host, life int, c plugin.Config) (supervise.Process, error) {
	if err := s.start.wait(ctx); err != nil {
		return nil, err
	}
	p := &storage{host: s, open: map[*disk]bool{}, regions: map[uint32]*region{}, ready: map[*plugin.Queue][]completion{}}
	p.begin(w, p.release)
	inner, err := plugin.LaunchDirect(ctx, c, &storageBackend{p})
	if err != nil {
		return nil, err
	}
	p.Process = inner
	if !s.adopt(p, life) {
		p.Kill()
		return nil, fmt.Errorf("the host is going down: %w", syscall.ESHUTDOWN)
	}
	return p, nil
}

// release closes everything that p has open.
func (p *storage) release() {
	p.mu.Lock()
	open := p.open
	p.open = map[*disk]bool{}
	for q, ready := range p.ready {
		tellAgain(ready)
		delete(p.ready, q)
	}
	p.mu.Unlock()
	for d := range open {
		d.release(p, true)
	}
}

// AttachArena has the daemon's arena mapped for operations that outlive p.
func (p *storage) AttachArena(ctx context.Context, id uint32, a *shm.Arena) error {
	r, err := p.w.memories.of(a)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.regions[id] = r
	p.mu.Unlock()
	return p.Process.AttachArena(ctx, id, a)
}

// storageBackend is storage as the plugin API sees it.
type storageBackend struct{ p *storage }

func (backend *storageBackend) Describe() plugin.Info {
	return plugin.Info{Name: "sim", Version: "1", Crash: plugin.KeepsAcknowledged, Names: plugin.NamesOpaque,
		Matches: plugin.RegularFiles | plugin.BlockDevices}
}

func (backend *storageBackend) Open(ctx context.Context, r plugin.OpenRequest) (plugin.Disk, error) {
	p := backend.p
	if err := p.answering(ctx); err != nil {
		return nil, err
	}
	if p.host.refuses.Load() {
		return nil, fmt.Errorf("open %q: %w", r.Name, syscall.EMFILE)
	}
	d := p.w.disk(r.Name)
	if d == nil {
		return nil, fmt.Errorf("no disk %q: %w", r.Name, syscall.ENOENT)
	}
	if err := d.open(ctx, p); err != nil {
		return nil, err
	}
	p.mu.Lock()
	p.open[d] = true
	p.mu.Unlock()
	if p.dead() { // it died meanwhile
		d.release(p, true)
		return nil, syscall.EIO
	}
	return &openDisk{d: d, p: p, limits: d.told()}, nil
}

type openDisk struct {
	d      *disk
	p      *storage
	limits blk.Limits
}

func (o *openDisk) Limits() blk.Limits { return o.limits }
func (o *openDisk) Close() error       { o.d.release(o.p, false); return nil }

const (
	shortNap = time.Millisecond
	longNap  = 10 * time.Millisecond
)

// Serve moves requests from the queue to the disks.
func (backend *storageBackend) Serve(q *plugin.Queue) error {
	p := backend.p
	var batch [32]plugin.Request
	for nap := shortNap; p.serves(q.Closed()); {
		n := 0
		if !p.frozen.Load() {
			n = q.Next(batch[:])
			for _, r := range batch[:n] {
				p.take(q, r)
			}
			n += p.answer(q)
		}
		if n > 0 {
			nap = shortNap
		}
		time.Sleep(nap)
		nap = min(16*nap, longNap)
	}
	return nil
}

func (p *storage) take(q *plugin.Queue, r plugin.Request) {
	d := r.Disk.(*openDisk).d
	o := &operation{d: d, p: p, q: q, r: r}
	if r.Op.HasData() {
		p.mu.Lock()
		o.mem = p.regions[r.Arena]
		p.mu.Unlock()
	}
	d.begin(o)
}

// done is told by a disk that o has ended.
func (p *storage) done(o *operation, errno blk.Errno) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := completion{tag: o.r.Tag, errno: errno}
	if o.tells {
		c.tells = o.d
	}
	if p.dead() {
		tellAgain([]completion{c})
		return
	}
	p.ready[o.q] = append(p.ready[o.q], c)
}

// tellAgain gives the errors in all, which no server gets, back to their disks.
func tellAgain(all []completion) {
	for _, c := range all {
		if c.tells != nil {
			c.tells.tellAgain()
		}
	}
}

func (p *storage) answer(q *plugin.Queue) int {
	p.mu.Lock()
	ready := p.ready[q]
	delete(p.ready, q)
	p.mu.Unlock()
	if q.Closed() { // the server has seen the end of the process
		tellAgain(ready)
	}
	for _, c := range ready {
		q.Complete(c.tag, c.errno)
	}
	if len(ready) > 0 {
		q.Publish()
	}
	return len(ready)
}
