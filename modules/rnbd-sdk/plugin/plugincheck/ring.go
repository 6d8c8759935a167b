package plugincheck

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// sound are the checks without which data cannot be judged.
var sound = []string{"start-handshake", "ring-one-answer", "ring-tags", "ring-full"}

var ringChecks = []Check{
	{"ring-tags", "an answer carries the tag of its request, whatever its 64 bits are", gate, ringTags},
	{"ring-one-answer", "each request gets exactly one answer", []string{"start-handshake", "ring-tags"}, ringOneAnswer},
	{"ring-full", "a full ring is answered, again and again", []string{"start-handshake", "ring-one-answer"}, ringFull},
	{"ring-tags-reused", "a tag may come again as soon as it was answered, and while it is in flight", sound, ringTagsReused},
	{"ring-small", "a ring of one entry works", sound, ringSmall},
	{"ring-counters", "indices count on beyond the entries of the ring and beyond 2^16", sound, ringCounters},
	{"ring-wake", "a plugin that sleeps wakes up for a single request", sound, ringWake},
	{"ring-header", "a ring with another layout version, an unknown feature or wrong sizes is refused", gate, ringHeader},
	{"ring-seals", "a ring or an arena without seals, or shorter than it says, is refused", gate, ringSeals},
	{"ring-broken", "a ring whose tail shows more entries than there can be is not used any more", sound, ringBroken},
	{"arena-unknown-after", "a detached arena is unknown to requests", sound, arenaDetached},
}

// queueChecks use the ring, and judge data.
var queueChecks = []Check{
	{"ring-entry-once", "an entry is read once: one that changes meanwhile is judged as it was taken", append([]string{"refuse-outside-arena"}, faithful...), ringEntryOnce},
	{"ring-queues", "eight queues work at the same time", faithful, ringQueues},
	{"arena-load", "arenas are attached and detached while requests run", faithful, arenaLoad},
}

func ringTags(t *T) {
	d := t.one()
	q := d.h.queues[0]
	for _, tag := range []uint64{0, 1, 1 << 31, 1<<32 - 1, 1 << 32, 1<<63 + 5, 1<<64 - 1} {
		e := d.request(shm.SQE{Tag: tag, Op: blk.Read, Len: uint32(d.block())})
		q.post(e)
		if c := q.await(1)[0]; c.Tag != tag {
			t.Fatalf("the answer to tag %#x has tag %#x", tag, c.Tag)
		} else if c.Errno != 0 {
			t.Fatalf("read: %v", blk.Errno(c.Errno))
		}
	}
}

func ringOneAnswer(t *T) {
	d := t.one()
	q := d.h.queues[0]
	b := uint32(d.block())
	for round := range t.rounds(200) {
		n := 1 + round%32
		var es []shm.SQE
		for i := range n {
			op := []blk.Op{blk.Read, blk.Write, blk.Flush}[i%3]
			es = append(es, d.request(shm.SQE{Tag: uint64(round*100 + i), Op: op, Len: b, Offset: uint64(i) * uint64(b), ArenaOff: uint64(i) * uint64(b)}))
		}
		q.post(es...)
		var tags []uint64
		for _, c := range q.await(n) {
			tags = append(tags, c.Tag)
		}
		slices.Sort(tags)
		for i, tag := range tags {
			if want := uint64(round*100 + i); tag != want {
				t.Fatalf("of %d requests with tags from %d on, the answers have %v", n, round*100, tags)
			}
		}
	}
	// An answer too many has no request; the ring notices it.
	if more := q.answers(1, quietTime); len(more) > 0 || q.Err() != nil {
		t.Fatalf("an answer came that no request asked for: %v %v", more, q.Err())
	}
}

func ringTagsReused(t *T) {
	d := t.one()
	q := d.h.queues[0]
	for range t.rounds(100) {
		var es []shm.SQE
		for range 16 {
			es = append(es, d.request(shm.SQE{Tag: 7, Op: blk.Read, Len: uint32(d.block())}))
		}
		q.post(es...)
		for _, c := range q.await(len(es)) {
			if c.Tag != 7 || c.Errno != 0 {
				t.Fatalf("of 16 reads with tag 7, one has the answer tag %d, errno %d", c.Tag, c.Errno)
			}
		}
	}
}

func ringFull(t *T) {
	d := t.one()
	es := make([]shm.SQE, t.rounds(100)*entries)
	for i := range es {
		es[i] = shm.SQE{Op: blk.Op(i % 2), Len: uint32(d.block()), Offset: uint64(i%entries) * d.block(), ArenaOff: uint64(i%entries) * d.block()}
	}
	for i, errno := range d.all(es) {
		if errno != blk.OK {
			t.Fatalf("%v %d of %d: %v", es[i].Op, i, len(es), errno)
		}
	}
}

func ringSmall(t *T) {
	s := t.plain()
	d := t.start(s, life{entries: 1}).open(s, false)
	for i := range t.rounds(100) {
		d.write(uint64(i%8)*d.block(), t.random.bytes(int(d.block())), 0)
	}
}

func ringCounters(t *T) {
	s := t.plain()
	d := t.start(s, life{entries: 64}).open(s, false)
	es := make([]shm.SQE, t.rounds(70000))
	for i := range es {
		es[i] = shm.SQE{Op: blk.Flush}
		if d.limits.WriteCache {
			es[i] = shm.SQE{Op: blk.Read, Len: uint32(d.block())}
		}
	}
	for i, errno := range d.all(es) {
		if errno != blk.OK {
			t.Fatalf("%v %d: %v", es[i].Op, i, errno)
		}
	}
}

// wakeTime is how long a single request may take before a wake-up counts as lost. A host
// that has lost one looks again only after its poll.
const wakeTime = 5 * time.Second

func ringWake(t *T) {
	d := t.one()
	q := d.h.queues[0]
	e := d.request(shm.SQE{Op: blk.Read, Len: uint32(d.block())})
	for i := range t.rounds(3000) {
		e.Tag = uint64(i)
		q.post(e)
		var cqes [1]shm.CQE
		for start := time.Now(); q.Pop(cqes[:]) == 0; {
			q.check(1)
			if time.Since(start) > wakeTime {
				t.Fatalf("request %d has no answer after %v: the plugin was not woken, or did not wake its host", i, wakeTime)
			}
			q.sleep(wakeTime)
		}
		if i%50 == 0 {
			time.Sleep(time.Duration(t.random.IntN(3000)) * time.Microsecond) // it falls asleep
		}
	}
}

// entryField is the place of SQE.ArenaOff in an entry, and requestsAt that of the first
// entry in the ring's file (docs/abi/ring-v1.md).
const (
	requestsAt = 4096
	entrySize  = 64
	entryField = 16
)

// ringEntryOnce changes the place of the payload in entries all the time, between one in
// the arena and one far outside.
func ringEntryOnce(t *T) {
	if t.o.HeapRing {
		t.Skipf("the race detector sees this ring")
	}
	d := t.one()
	q := d.h.queues[0]
	fd, _, _ := q.ring.FDs()
	mem, err := unix.Mmap(fd, 0, requestsAt+entries*(entrySize+16), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	t.must("map the ring", err)
	defer unix.Munmap(mem)
	var next, done atomic.Uint32
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for i := 0; done.Load() == 0; i++ {
			// The entry that is about to be taken, with the other value in every second turn.
			e := mem[requestsAt+int(next.Load()%entries)*entrySize+entryField:]
			e[7] = byte(0x7f * (i % 2))
		}
	}()
	defer func() { done.Store(1); <-stopped }()
	good, bad := 0, 0
	for i := range t.rounds(20000) {
		next.Store(uint32(i))
		q.post(d.request(shm.SQE{Tag: uint64(i), Op: blk.Read, Len: uint32(d.block())}))
		switch c := q.await(1)[0]; blk.Errno(c.Errno) {
		case blk.OK:
			good++
		case blk.EINVAL:
			bad++
		default:
			t.Fatalf("a read whose entry changes: %v, want success or %v", blk.Errno(c.Errno), blk.EINVAL)
		}
	}
}

// ringHeader offers rings whose header is wrong in one place each.
func ringHeader(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	for _, c := range []struct {
		what  string
		at    int
		value byte
	}{
		{"another magic number", 0, 0xff}, {"layout version 2", 8, 2}, {"an unknown feature bit", 12, 1},
		{"a number of entries that is no power of two", 16, 0x63}, {"entries of 32 bytes", 20, 32}, {"completions of 8 bytes", 24, 8},
	} {
		ring, err := shm.NewRing(entries)
		t.must("ring", err)
		mem, sq, cq := ring.FDs()
		_, err = unix.Pwrite(mem, []byte{c.value}, int64(c.at))
		t.must("write the header", err)
		err = h.attachRaw(5, mem, sq, cq)
		_ = ring.Close()
		if err == nil {
			t.Fatalf("AttachQueue takes a ring with %s", c.what)
		}
		if e := h.p.ExitError(); e != nil {
			t.Fatalf("AttachQueue of a ring with %s ended the plugin: %v", c.what, e)
		}
	}
}

// attachRaw attaches descriptors as a queue.
func (h *host) attachRaw(pump uint32, fds ...int) error {
	return h.try(func(ctx context.Context) error {
		token, err := h.p.Probe().SendDescriptors(fds...)
		if err != nil {
			return err
		}
		_, err = pluginpb.NewPluginClient(h.p.Probe().Conn()).AttachQueue(ctx, &pluginpb.AttachQueueRequest{Token: token, Pump: pump})
		return err
	})
}

func ringSeals(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	plain, err := unix.MemfdCreate("plugin-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	t.must("memfd", err)
	defer unix.Close(plain)
	t.must("size a memfd", unix.Ftruncate(plain, arenaSize))
	ring, err := shm.NewRing(entries)
	t.must("ring", err)
	defer ring.Close()
	_, sq, cq := ring.FDs()
	if h.attachRaw(5, plain, sq, cq) == nil {
		t.Errorf("AttachQueue takes a ring without seals")
	}
	if h.attachArenaRaw(8, plain, arenaSize) == nil {
		t.Errorf("AttachArena takes an arena without seals")
	}
	if h.attachArenaRaw(9, h.mem.FD(), 2*arenaSize) == nil {
		t.Errorf("AttachArena takes an arena that is shorter than it says")
	}
}

func (h *host) attachArenaRaw(id uint32, fd int, size uint64) error {
	return h.try(func(ctx context.Context) error {
		token, err := h.p.Probe().SendDescriptors(fd)
		if err != nil {
			return err
		}
		_, err = pluginpb.NewPluginClient(h.p.Probe().Conn()).AttachArena(ctx, &pluginpb.AttachArenaRequest{Token: token, Id: id, Size: size})
		return err
	})
}

// ringBroken moves the tail of the ring further than there are entries. The plugin may end;
// it may not write to the disk what the ring happens to have.
func ringBroken(t *T) {
	if t.o.HeapRing {
		t.Skipf("the ring is heap memory")
	}
	s := t.plain()
	h := t.start(s, life{})
	d := h.open(s, false)
	before := t.random.bytes(int(d.block()))
	d.write(0, before, 0)
	d.flush()
	q := h.queues[0]
	fd, _, cq := q.ring.FDs()
	_ = cq
	_, err := unix.Pwrite(fd, []byte{0xff, 0xff, 0, 0}, 128) // sq.Tail
	t.must("write the tail", err)
	_, sq, _ := q.ring.FDs()
	_, _ = unix.Write(sq, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	if n := len(q.answers(1, 10*quietTime)); n > 0 {
		t.Fatalf("the plugin answers entries of a ring that is broken")
	}
}

func ringQueues(t *T) {
	s := t.plain()
	h := t.start(s, life{queues: 8})
	d := h.open(s, false)
	n := int(d.block())
	want := make([][]byte, len(h.queues))
	for round := range t.rounds(50) {
		for i, q := range h.queues {
			want[i] = t.random.bytes(n)
			copy(h.mem.Bytes()[i*n:], want[i])
			q.post(d.request(shm.SQE{Tag: uint64(round), Op: blk.Write, Len: uint32(n), Offset: uint64(i * n), ArenaOff: uint64(i * n)}))
		}
		for i, q := range h.queues {
			if c := q.await(1)[0]; c.Tag != uint64(round) || c.Errno != 0 {
				t.Fatalf("queue %d answers tag %d with tag %d, errno %d", i, round, c.Tag, c.Errno)
			}
		}
	}
	for i := range h.queues {
		d.expect("after writes by eight queues", uint64(i*n), want[i])
	}
}

func arenaLoad(t *T) {
	d := t.one()
	h, q := d.h, d.h.queues[0]
	n := int(d.block())
	for round := range t.rounds(60) {
		id := uint32(10 + round%3)
		a, err := shm.NewArena("plugin-test", 1<<20)
		t.must("arena", err)
		h.call("attach an arena under load", func(ctx context.Context) error { return h.p.AttachArena(ctx, id, a) })
		want := t.random.bytes(n)
		copy(a.Bytes(), want)
		q.post(d.request(shm.SQE{Tag: 1, Op: blk.Write, Arena: id, Len: uint32(n)}))
		q.post(d.request(shm.SQE{Tag: 2, Op: blk.Read, Len: uint32(n), Offset: uint64(4 * n), ArenaOff: uint64(n)}))
		for _, c := range q.await(2) {
			if c.Errno != 0 {
				t.Fatalf("request %d with an arena attached under load: %v", c.Tag, blk.Errno(c.Errno))
			}
		}
		h.call("detach an arena under load", func(ctx context.Context) error { return h.p.DetachArena(ctx, id) })
		_ = a.Close()
		d.expect("after a write from an arena attached under load", 0, want)
	}
}

func arenaDetached(t *T) {
	d := t.one()
	h := d.h
	a, err := shm.NewArena("plugin-test", 1<<20)
	t.must("arena", err)
	defer a.Close()
	h.call("attach an arena", func(ctx context.Context) error { return h.p.AttachArena(ctx, 9, a) })
	d.must(shm.SQE{Op: blk.Read, Arena: 9, Len: uint32(d.block())})
	h.call("detach the arena", func(ctx context.Context) error { return h.p.DetachArena(ctx, 9) })
	if errno := d.do(shm.SQE{Op: blk.Read, Arena: 9, Len: uint32(d.block())}); errno != blk.EINVAL {
		t.Fatalf("read into a detached arena: %v, want %v", answer(errno), blk.EINVAL)
	}
}
