package sim

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// userDisk is a disk in the kernel of a client's host: it outlives the
// processes of the front end, and issues again the requests that the last one
// has not answered.
type userDisk struct {
	name string

	waits atomic.Bool // waiting is not empty

	mu       sync.Mutex
	identity string         // of the mapping that it was made for
	waiting  []*userRequest // no process has them
	served   *front         // nil: by none
	by       *attached      // the latest, of that process
	limits   blk.Limits     // as users were told when the disk appeared
	gone     bool           // its front end has taken it away
}

// caches reports whether users have to flush, and whether writes with FUA are durable.
func (u *userDisk) caches() (flush, fua bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.limits.WriteCache, u.limits.FUA
}

// userRequest is one request of a user.
type userRequest struct {
	op     blk.Op
	flags  blk.Flags
	off    uint64
	data   []byte // of a write, or for a read
	length uint32
	done   chan blk.Errno // of room for one
}

// mapping returns the identity of the mapping that users have.
func (u *userDisk) mapping() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.identity
}

// submit hands r to whoever serves the disk.
func (u *userDisk) submit(r *userRequest) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.gone {
		r.done <- blk.EIO
		return
	}
	u.waiting = append(u.waiting, r)
	u.waits.Store(true)
}

// take returns the oldest waiting request for a; nil: none, or another serves.
func (u *userDisk) take(p *front, a *attached) *userRequest {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.served != p || u.by != a || len(u.waiting) == 0 {
		return nil
	}
	r := u.waiting[0]
	u.waiting = u.waiting[1:]
	u.waits.Store(len(u.waiting) > 0)
	return r
}

// abandon is told that a has ended, with these requests.
func (u *userDisk) abandon(a *attached, unanswered []*userRequest) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.waiting = append(unanswered, u.waiting...)
	u.waits.Store(len(u.waiting) > 0)
	if u.by == a {
		u.served, u.by = nil, nil
	}
	if u.gone {
		u.failAll()
	}
}

// remove takes the disk away from its users, unless it was shown again meanwhile.
func (u *userDisk) remove() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.by == nil {
		u.gone = true
		u.failAll()
	}
}

// isThere reports whether users have the disk.
func (u *userDisk) isThere() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return !u.gone
}

// giveUp takes the disk away from its users, whoever serves it.
func (u *userDisk) giveUp() {
	u.mu.Lock()
	u.served, u.by = nil, nil
	u.mu.Unlock()
	u.remove()
}

func (u *userDisk) failAll() {
	for _, r := range u.waiting {
		r.done <- blk.EIO
	}
	u.waiting = nil
	u.waits.Store(false)
}

// front is one process of the front end.
type front struct {
	process

	mu       sync.Mutex
	attached map[uint32]*attached
}

// attached is a device that the process serves, on one of its queues.
type attached struct {
	spec   plugin.DeviceSpec
	user   *userDisk
	queue  int
	serial uint32 // in tags: an index may be another device's when the last answers are read

	mu    sync.Mutex
	free  []int
	slots []*userRequest // under way, by slot
	ended bool
}

func (w *world) launchFront(ctx context.Context, c *host, life int, cfg plugin.Config) (supervise.Process, error) {
	if err := c.start.wait(ctx); err != nil {
		return nil, err
	}
	p := &front{attached: map[uint32]*attached{}}
	p.begin(w, p.release)
	inner, err := plugin.LaunchDirect(ctx, cfg, &frontBackend{p})
	if err != nil {
		return nil, err
	}
	p.Process = inner
	if !c.adopt(p, life) {
		p.Kill()
		return nil, fmt.Errorf("the host is going down: %w", syscall.ESHUTDOWN)
	}
	return p, nil
}

// release gives the requests that nobody will answer back to their disks.
func (p *front) release() {
	p.mu.Lock()
	all := p.attached
	p.attached = map[uint32]*attached{}
	p.mu.Unlock()
	for _, a := range all {
		a.user.abandon(a, a.end())
	}
}

// end takes all requests that are under way.
func (a *attached) end() (unanswered []*userRequest) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = true
	for i, r := range a.slots {
		if r != nil {
			unanswered = append(unanswered, r)
		}
		a.slots[i] = nil
	}
	return unanswered
}

// frontBackend is front as the plugin API sees it.
type frontBackend struct{ p *front }

func (b *frontBackend) Describe() plugin.Info {
	return plugin.Info{Name: "sim", Version: "1"}
}

func (b *frontBackend) AddDevice(ctx context.Context, s plugin.DeviceSpec) error {
	p := b.p
	if err := p.answering(ctx); err != nil {
		return err
	}
	u := p.w.user(s.Name)
	if u == nil {
		return fmt.Errorf("device %q: %w", s.Name, syscall.ENODEV)
	}
	u, err := u.disk(&s)
	if err != nil {
		return err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.served != nil && !u.served.dead() && u.served != p {
		return fmt.Errorf("device %q is served by process %d: %w", s.Name, u.served.number, syscall.EBUSY)
	}
	a := &attached{spec: s, user: u, serial: uint32(p.w.number()), queue: int(s.Index) % max(s.Queues, 1), slots: make([]*userRequest, s.Slots)}
	for i := range s.Slots {
		a.free = append(a.free, i)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead() {
		return syscall.EIO
	}
	p.attached[s.Index] = a
	if u.gone || u.limits.Size == 0 {
		u.limits = s.Limits // users are told once
	}
	u.served, u.by, u.gone, u.identity = p, a, false, s.Identity
	return nil
}

// disk returns the disk for s: u, or another one. A disk that is to be taken over bears
// the identity of s, or else is not touched: users of the name have another one by now,
// and the front end makes one without users.
func (u *userDisk) disk(s *plugin.DeviceSpec) (*userDisk, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case s.Location == "" || u.identity == s.Identity:
		return u, nil
	case s.Location == plugin.LocationUnknown:
		return nil, fmt.Errorf("device %q has another identity: %w", s.Name, syscall.ENODEV)
	}
	return &userDisk{name: u.name}, nil
}

func (b *frontBackend) RemoveDevice(ctx context.Context, index uint32, force bool) error {
	p := b.p
	if err := p.answering(ctx); err != nil {
		return err
	}
	p.mu.Lock()
	a := p.attached[index]
	p.mu.Unlock()
	if a == nil {
		return syscall.ENODEV
	}
	if !force && a.busy() {
		return syscall.EBUSY
	}
	p.mu.Lock()
	delete(p.attached, index)
	p.mu.Unlock()
	a.user.abandon(a, a.end())
	a.user.remove()
	return nil
}

func (a *attached) busy() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.free) < len(a.slots)
}

func (b *frontBackend) ResizeDevice(ctx context.Context, index uint32, l blk.Limits) error {
	return b.p.answering(ctx)
}

func (b *frontBackend) AddListener(context.Context, string, *os.File) error { return nil }

func (b *frontBackend) Openers(index uint32) int { return 0 }

// Location is a device node: such a device outlives the process.
func (b *frontBackend) Location(index uint32) string {
	b.p.mu.Lock()
	defer b.p.mu.Unlock()
	if a := b.p.attached[index]; a != nil {
		return "/dev/sim/" + a.user.name
	}
	return ""
}

// Serve moves the requests of users to the daemon.
func (b *frontBackend) Serve(q *plugin.FrontQueue) error {
	p := b.p
	var done [32]shm.CQE
	for nap := shortNap; p.serves(q.Closed()); {
		n := 0
		if !p.frozen.Load() {
			n = q.Pop(done[:])
			for _, c := range done[:n] {
				p.finish(&c)
			}
			n += p.push(q)
		}
		if n > 0 {
			nap = shortNap
		}
		time.Sleep(nap)
		nap = min(16*nap, longNap)
	}
	return nil
}

// push sends the requests that wait at the disks of the queue.
func (p *front) push(q *plugin.FrontQueue) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.attached {
		for a.queue == q.Pump() && a.user.waits.Load() && q.Space() > 0 && a.pushOne(p, q) {
			n++
		}
	}
	q.Publish()
	return n
}

func (a *attached) pushOne(p *front, q *plugin.FrontQueue) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.free) == 0 || a.ended {
		return false
	}
	r := a.user.take(p, a)
	if r == nil {
		return false
	}
	slot := a.free[len(a.free)-1]
	a.free = a.free[:len(a.free)-1]
	a.slots[slot] = r
	if r.op == blk.Write {
		copy(a.slot(slot), r.data)
	}
	return q.Push(&shm.SQE{
		Tag: uint64(a.serial)<<32 | uint64(slot), Device: a.spec.Index, Arena: a.spec.ArenaID,
		ArenaOff: uint64(slot * a.spec.SlotSize), Offset: r.off, Len: r.length, Op: r.op, Flags: r.flags,
	})
}

func (a *attached) slot(i int) []byte { return a.spec.Arena[i*a.spec.SlotSize:][:a.spec.SlotSize] }

func (p *front) ofSerial(serial uint32) *attached {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.attached {
		if a.serial == serial {
			return a
		}
	}
	return nil
}

// finish answers the user.
func (p *front) finish(c *shm.CQE) {
	a := p.ofSerial(uint32(c.Tag >> 32))
	if a == nil {
		return // of a device that was removed by force
	}
	slot := int(uint32(c.Tag))
	a.mu.Lock()
	defer a.mu.Unlock()
	if slot >= len(a.slots) || a.slots[slot] == nil {
		if !a.ended {
			p.w.violate("the daemon answered tag %#x, which is not in flight", c.Tag)
		}
		return
	}
	r := a.slots[slot]
	a.slots[slot] = nil
	a.free = append(a.free, slot)
	if r.op == blk.Read && c.Errno == 0 {
		copy(r.data, a.slot(slot))
	}
	r.done <- blk.Errno(c.Errno)
}
