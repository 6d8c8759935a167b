package pluginkit

import (
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// rawFaults are those of plugins that take requests out of the ring by themselves, as a
// plugin without the SDK does.
var rawFaults = map[string]bool{
	"answers a request twice": true, "cuts tags to 32 bits": true, "reads entries twice": true, "forgets what is in flight": true,
	"serves devices that are not open": true, "takes unaligned requests": true, "takes requests without length": true,
	"answers EINVAL beyond the end": true, "takes unknown operations": true, "takes unknown flags": true,
	"takes unknown arenas": true, "answers EIO outside of an arena": true, "does what it does not offer": true, "writes to read-only disks": true,
	"reads into memory of others": true, "drops the last of a full ring": true,
}

// raw serves one queue. Next is called for the calls of the host alone, which then believe
// that nothing is in flight.
type raw struct {
	b        *wrong
	c        *shm.Completer
	taken    uint32 // requests out of the ring
	inFlight int
	done     chan shm.CQE
	twice    uint64
}

func (b *wrong) serveRaw(q *plugin.Queue) error {
	r := &raw{b: b, c: completerOf(q), done: make(chan shm.CQE, q.Depth())}
	var batch [64]shm.SQE
	for !q.Closed() {
		n := r.c.Pop(batch[:])
		for i := range batch[:n] {
			r.take(batch[i], n)
		}
		got := r.answer()
		if r.inFlight == 0 || b.is("forgets what is in flight") {
			q.Next(nil)
		}
		if n == 0 && !got && r.c.Arm() {
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(r.c.FD()), Events: unix.POLLIN}}, 1)
			r.c.Disarm()
		}
		if r.c.Err() != nil {
			return r.c.Err()
		}
	}
	return nil
}

// take starts a request of a batch of n.
func (r *raw) take(e shm.SQE, n int) {
	place := r.taken
	r.taken++
	if r.b.is("drops the last of a full ring") && n == 64 && place%64 == 63 {
		return
	}
	if r.b.is("reads entries twice") {
		ring := requestsOf(r.c)
		check := r.check(&e)
		e = ring[place%uint32(len(ring))]
		if check != blk.OK {
			r.inFlight++
			r.done <- shm.CQE{Tag: e.Tag, Errno: uint32(check)}
			return
		}
		if a := r.b.arena(e.Arena); e.Op.HasData() && e.ArenaOff >= uint64(len(a)) {
			panic("memory outside of the arena")
		}
	}
	r.inFlight++
	go func() { r.done <- shm.CQE{Tag: e.Tag, Errno: uint32(r.run(&e))} }()
}

// answer answers what is done, and reports whether there was something.
func (r *raw) answer() bool {
	any := false
	for {
		select {
		case c := <-r.done:
			any = true
			r.inFlight--
			switch {
			case r.b.is("cuts tags to 32 bits"):
				c.Tag &= 1<<32 - 1
			case r.b.is("answers a request twice") && r.inFlight > 4:
				c.Tag, r.twice = max(r.twice, 1), c.Tag
			}
			r.c.Push(&c)
		default:
			r.c.Publish()
			return any
		}
	}
}

// check is what the SDK checks, but for the fault.
func (r *raw) check(e *shm.SQE) blk.Errno {
	d := r.b.disk(e.Device)
	if d == nil {
		return blk.ENODEV
	}
	l := d.Limits()
	l.ReadOnly = !d.writes && !r.b.is("writes to read-only disks")
	end := e.Offset+uint64(e.Len) > l.Size || e.Offset > l.Size
	switch {
	case !e.Op.Valid() && r.b.is("takes unknown operations"):
		return blk.OK
	case e.Op == blk.SecureErase && r.b.is("does what it does not offer"):
		return blk.OK
	case r.b.is("answers EINVAL beyond the end") && end && e.Op != blk.Flush:
		return blk.EINVAL
	case r.b.is("takes requests without length") && e.Len == 0,
		r.b.is("takes unaligned requests") && (e.Offset|uint64(e.Len))%512 != 0 && e.Len != 0 && !end:
	default:
		if errno := l.Check(e.Op, e.Offset, uint64(e.Len)); errno != blk.OK {
			return errno
		}
	}
	if e.Flags&^blk.KnownFlags != 0 && !r.b.is("takes unknown flags") {
		return blk.EINVAL
	}
	if !e.Op.HasData() {
		return blk.OK
	}
	a := uint64(len(r.b.arena(e.Arena)))
	switch {
	case a == 0:
		return blk.EINVAL
	case uint64(e.Len) > a || e.ArenaOff > a-uint64(e.Len):
		if r.b.is("answers EIO outside of an arena") {
			return blk.EIO
		}
		return blk.EINVAL
	}
	return blk.OK
}

func (r *raw) run(e *shm.SQE) blk.Errno {
	if !r.b.is("reads entries twice") {
		if errno := r.check(e); errno != blk.OK {
			return errno
		}
	}
	d := r.b.disk(e.Device)
	if d == nil {
		return blk.ENODEV
	}
	if !e.Op.Valid() || e.Op == blk.SecureErase || e.Len == 0 && e.Op != blk.Flush {
		return blk.OK
	}
	request := plugin.Request{Disk: d, Op: e.Op, Flags: e.Flags, Len: e.Len, Off: e.Offset, BufOff: e.ArenaOff}
	if e.Op.HasData() {
		a := r.b.arena(e.Arena)
		if uint64(e.Len) > uint64(len(a)) || e.ArenaOff > uint64(len(a))-uint64(e.Len) {
			return blk.EINVAL
		}
		request.Buf = a[e.ArenaOff:][:e.Len]
		if e.Op == blk.Write && !d.writes {
			return blk.OK
		}
		if r.b.is("reads into memory of others") && e.Op == blk.Read && e.Len == 512 && e.ArenaOff > 0 {
			a[e.ArenaOff-1] ^= 1
		}
	}
	return d.carryOut(&request)
}

// disk returns the disk of a number; with a fault any disk.
func (b *wrong) disk(index uint32) *wrongDisk {
	b.mu.Lock()
	defer b.mu.Unlock()
	d := b.disks[index]
	if d == nil && b.is("serves devices that are not open") {
		for _, other := range b.disks {
			return other
		}
	}
	return d
}

// arena returns the memory of an arena; with a fault any one.
func (b *wrong) arena(id uint32) []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.arenas[id]
	if a == nil && b.is("takes unknown arenas") {
		for _, other := range b.arenas {
			return other
		}
	}
	return a
}

func (b *wrong) AttachArena(id uint32, mem []byte) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.arenas[id] = mem
	return nil
}

func (b *wrong) DetachArena(id uint32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.arenas, id)
}
