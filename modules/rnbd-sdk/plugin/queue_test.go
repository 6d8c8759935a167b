package plugin

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sockpair"
)

// bench is a Queue with its host's end on one goroutine.
var selfPID = os.Getpid()

type bench struct {
	*Queue
	s      *shm.Submitter
	disks  *table[device]
	arenas *table[mapping]
	mem    []byte
}

var benchLimits = blk.Limits{Size: 1 << 20, LogicalBlockSize: 512, MaxIOSize: 8192, MaxDiscard: 1 << 20, FUA: true}

func newBench(t testing.TB, entries int) *bench {
	t.Helper()
	ring, err := shm.NewHeapRing(entries)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ring.Close() })
	b := &bench{s: ring.Submitter(), disks: &table[device]{}, arenas: &table[mapping]{}, mem: make([]byte, 16<<10)}
	b.Queue = newQueue(0, ring, b.disks, b.arenas)
	d, err := newDevice(&memDisk{}, benchLimits, &root{stats: deviceStats{make([]latency.Ops, 1)}})
	if err != nil {
		t.Fatal(err)
	}
	ro, err := newDevice(&memDisk{}, benchLimits, &root{readOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(b.disks.add(1, d), b.disks.add(2, ro), b.arenas.add(1, &mapping{mem: b.mem})); err != nil {
		t.Fatal(err)
	}
	return b
}

// An entry is given out only if everything it names exists and is in bounds.
func TestQueue_NextChecksEntries(t *testing.T) {
	good := shm.SQE{Tag: 42, Op: blk.Write, Device: 1, Arena: 1, Offset: 1024, Len: 4096, ArenaOff: 8192, Flags: blk.FUA, Prio: 7}
	for _, test := range []struct {
		name   string
		change func(*shm.SQE)
		want   blk.Errno
	}{
		{"good", func(*shm.SQE) {}, blk.OK},
		{"last bytes of disk and arena", func(e *shm.SQE) { e.Offset, e.ArenaOff = 1<<20-4096, 16384-4096 }, blk.OK},
		{"flush names nothing", func(e *shm.SQE) { e.Op, e.Offset, e.Len, e.Arena = blk.Flush, ^uint64(0), 1, 99 }, blk.OK},
		{"discard needs no memory", func(e *shm.SQE) { e.Op, e.Arena, e.Len = blk.Discard, 99, 1<<19 }, blk.OK},
		{"unknown disk", func(e *shm.SQE) { e.Device = 5 }, blk.ENODEV},
		{"disk 0 in the gap", func(e *shm.SQE) { e.Device = 0 }, blk.ENODEV},
		{"disk number far out", func(e *shm.SQE) { e.Device = ^uint32(0) }, blk.ENODEV},
		{"unknown operation", func(e *shm.SQE) { e.Op = 6 }, blk.EOPNOTSUPP},
		{"operation not offered", func(e *shm.SQE) { e.Op = blk.WriteZeroes }, blk.EOPNOTSUPP},
		{"write to a read-only disk", func(e *shm.SQE) { e.Device = 2 }, blk.EROFS},
		{"read of a read-only disk", func(e *shm.SQE) { e.Device, e.Op = 2, blk.Read }, blk.OK},
		{"behind the disk", func(e *shm.SQE) { e.Offset = 1<<20 - 512 }, blk.EIO},
		{"offset that wraps around", func(e *shm.SQE) { e.Offset = ^uint64(511) }, blk.EIO},
		{"unaligned", func(e *shm.SQE) { e.Offset = 1 }, blk.EINVAL},
		{"too large", func(e *shm.SQE) { e.Len = 8704 }, blk.EINVAL},
		{"unknown flag", func(e *shm.SQE) { e.Flags = 8 }, blk.EINVAL},
		{"unknown arena", func(e *shm.SQE) { e.Arena = 0 }, blk.EINVAL},
		{"arena number far out", func(e *shm.SQE) { e.Arena = ^uint32(0) }, blk.EINVAL},
		{"behind the arena", func(e *shm.SQE) { e.ArenaOff = 16384 - 4095 }, blk.EINVAL},
		{"memory that wraps around", func(e *shm.SQE) { e.ArenaOff = ^uint64(0) }, blk.EINVAL},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, 4)
			e := good
			test.change(&e)
			b.s.Push(&e)
			b.s.Publish()
			var reqs [4]Request
			var c [4]shm.CQE
			n := b.Next(reqs[:])
			if test.want != blk.OK {
				if n != 0 || b.s.Pop(c[:]) != 1 || c[0] != (shm.CQE{Tag: 42, Errno: uint32(test.want)}) {
					t.Fatalf("%d requests, answer %+v, want %v", n, c[0], test.want)
				}
				return
			}
			if n != 1 || b.InFlight() != 1 {
				t.Fatalf("%d requests, %d in flight", n, b.InFlight())
			}
			r := reqs[0]
			if r.Op != e.Op || r.Off != e.Offset || r.Len != e.Len || r.Flags != e.Flags || r.Prio != 7 || r.Disk != b.disks.get(e.Device).disk {
				t.Errorf("request %+v", r)
			}
			if e.Op.HasData() && (len(r.Buf) != int(e.Len) || cap(r.Buf) != int(e.Len) || &r.Buf[0] != &b.mem[e.ArenaOff] ||
				r.Arena != 1 || r.BufOff != e.ArenaOff) {
				t.Errorf("buffer of %d bytes, capacity %d", len(r.Buf), cap(r.Buf))
			}
			if !e.Op.HasData() && r.Buf != nil {
				t.Error("buffer for an operation without data")
			}
			b.Complete(r.Tag, blk.ENOSPC)
			b.Publish()
			if b.s.Pop(c[:]) != 1 || c[0] != (shm.CQE{Tag: 42, Errno: uint32(blk.ENOSPC)}) || b.InFlight() != 0 {
				t.Errorf("answer %+v", c[0])
			}
		})
	}
}

// For any contents of the ring, each entry is answered once, and every
// request stays within the limits of its disk and the memory of its arena.
func FuzzQueue_Next(f *testing.F) {
	f.Add(uint64(0), uint64(0), uint32(1), uint32(1), uint32(512), byte(1), byte(0))
	f.Add(uint64(1<<20-512), uint64(16384-512), uint32(1), uint32(1), uint32(512), byte(0), byte(1))
	f.Add(^uint64(0), ^uint64(0), ^uint32(0), ^uint32(0), ^uint32(0), byte(255), byte(255))
	f.Fuzz(func(t *testing.T, off, mem uint64, disk, arena, n uint32, op, flags byte) {
		b := newBench(t, 2)
		b.s.Push(&shm.SQE{Tag: 9, Op: blk.Op(op), Flags: blk.Flags(flags), Device: disk, Arena: arena, Offset: off, ArenaOff: mem, Len: n})
		b.s.Publish()
		var reqs [2]Request
		if got := b.Next(reqs[:]); got == 1 {
			r := reqs[0]
			if r.Op != blk.Flush && (r.Off+uint64(r.Len) > benchLimits.Size || r.Off+uint64(r.Len) < r.Off) {
				t.Fatalf("beyond the disk: %+v", r)
			}
			if r.Op.HasData() != (r.Buf != nil) || (r.Buf != nil && len(r.Buf) != int(r.Len)) || r.Len > benchLimits.MaxIOSize && r.Op.HasData() {
				t.Fatalf("buffer of %d bytes: %+v", len(r.Buf), r)
			}
			b.Complete(r.Tag, blk.OK)
			b.Publish()
		}
		var c [2]shm.CQE
		if b.s.Pop(c[:]) != 1 || c[0].Tag != 9 {
			t.Fatalf("answers %+v", c)
		}
	})
}

func TestQueue_CompleteOfAnotherTagPanics(t *testing.T) {
	for name, tag := range map[string]uint64{"never given out": 1, "out of range": 1 << 40} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			newBench(t, 4).Complete(tag, blk.OK)
		})
	}
}

// More requests than the batch holds stay for the next call, and a batch with
// nothing but bad entries is answered without the author.
func TestQueue_BatchesOfAnySize(t *testing.T) {
	b := newBench(t, 256)
	for i := range uint64(256) {
		e := shm.SQE{Tag: i, Op: blk.Flush, Device: 1}
		if i%3 == 0 {
			e.Device = 77
		}
		b.s.Push(&e)
	}
	b.s.Publish()
	answers := map[uint64]uint32{}
	var reqs [5]Request
	var c [256]shm.CQE
	for {
		n := b.Next(reqs[:])
		for _, r := range reqs[:n] {
			b.Complete(r.Tag, blk.OK)
		}
		b.Publish()
		for _, a := range c[:b.s.Pop(c[:])] {
			answers[a.Tag] = a.Errno
		}
		if n == 0 {
			break
		}
	}
	if len(answers) != 256 {
		t.Fatalf("%d of 256 answered", len(answers))
	}
	for tag, errno := range answers {
		if (tag%3 == 0) != (blk.Errno(errno) == blk.ENODEV) {
			t.Errorf("tag %d: errno %d", tag, errno)
		}
	}
}

// An author that answers a long batch only at its end would keep the host from
// sending the first answers.
func TestQueue_AnswersToMuchDataAreShownAtOnce(t *testing.T) {
	b := newBench(t, 16)
	for i := range uint64(10) {
		b.s.Push(&shm.SQE{Tag: i, Op: blk.Read, Device: 1, Arena: 1, Len: 4096})
	}
	b.s.Publish()
	var reqs [16]Request
	var c [16]shm.CQE
	shown := []int{}
	for _, r := range reqs[:b.Next(reqs[:])] {
		b.Complete(r.Tag, blk.OK)
		shown = append(shown, b.s.Pop(c[:]))
	}
	if want := []int{0, 0, 0, 0, 0, 0, 0, 8, 0, 0}; !slices.Equal(shown, want) {
		t.Errorf("answers shown after each of ten requests of 4 KiB: %v, want %v", shown, want)
	}
	if b.Publish(); b.s.Pop(c[:]) != 2 {
		t.Error("Publish does not show the rest")
	}
}

func TestQueue_NoAllocationPerRequest(t *testing.T) {
	b := newBench(t, 64)
	reqs := make([]Request, 16)
	cqes := make([]shm.CQE, 64)
	round := func() {
		for i := range uint64(32) {
			b.s.Push(&shm.SQE{Tag: i, Op: blk.Write, Device: 1, Arena: 1, Len: 4096})
		}
		b.s.Push(&shm.SQE{Tag: 99, Device: 50})
		b.s.Publish()
		for n := b.Next(reqs); n > 0; n = b.Next(reqs) {
			for i := range reqs[:n] {
				b.Complete(reqs[i].Tag, blk.OK)
			}
			b.Publish()
		}
		if n := b.s.Pop(cqes); n != 33 {
			t.Fatalf("%d answers", n)
		}
		b.Arm()
		b.Disarm()
	}
	if n := testing.AllocsPerRun(100, round); n != 0 {
		t.Errorf("%v allocations in 33 requests", n)
	}
}

// A queue is asleep only when there is nothing to do: calls of the control
// path wake it like a request does.
func TestQueue_WaitWakesForEverything(t *testing.T) {
	for _, test := range []struct {
		name string
		wake func(*bench)
		then func(*bench) bool
	}{
		{"a request", func(b *bench) { b.s.Push(&shm.SQE{Op: blk.Flush, Device: 1}); b.s.Publish() },
			func(b *bench) bool { var r [1]Request; return b.Next(r[:]) == 1 }},
		{"a question", func(b *bench) {
			go func() { _ = b.asks.wait(context.Background(), func() bool { return true }) }()
		}, func(b *bench) bool { return b.asks.pending() }},
		{"the end", func(b *bench) { b.asks.close() }, func(b *bench) bool { return b.Closed() }},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, 4)
			woken := make(chan bool)
			go func() {
				b.Wait()
				woken <- test.then(b)
			}()
			time.Sleep(20 * time.Millisecond)
			test.wake(b)
			select {
			case ok := <-woken:
				if !ok {
					t.Error("woken for nothing")
				}
			case <-time.After(5 * time.Second):
				t.Fatal("sleeps on")
			}
			var r [1]Request
			b.Next(r[:]) // answers the question
		})
	}
}

// A wait looks for work longer after many that found some in time, once.
func TestQueue_SteadyWaitsLookLongerOnce(t *testing.T) {
	b := newBench(t, 4)
	look := func(prompt int) time.Duration {
		b.prompt = prompt
		start := time.Now()
		if b.look() {
			t.Fatal("a request from nowhere")
		}
		return time.Since(start)
	}
	if d := look(promptWaits); d < pump.Grace*waitSpin {
		t.Errorf("looked for %v after many waits that found something", d)
	}
	if b.prompt != 0 {
		t.Error("a wait in vain is forgotten")
	}
	sdktest.Within(t, 30*time.Second, "a look after few waits that found something lasts no longer", func() bool {
		return look(promptWaits-1) < pump.Grace*waitSpin
	})
}

// source lets a pump drive a queue, as plugins with descriptors of their own
// do.
type source struct {
	*Queue
	batch [8]Request
}

func (s *source) Poll() int {
	n := s.Next(s.batch[:])
	for _, r := range s.batch[:n] {
		s.Complete(r.Tag, blk.OK)
	}
	s.Publish()
	return n
}

func TestQueue_IsASourceOfAPump(t *testing.T) {
	b := newBench(t, 8)
	p, err := pump.New(pump.Config{Name: "test", CPU: -1})
	if err != nil {
		t.Fatal(err)
	}
	p.Add(&source{Queue: b.Queue})
	ended := make(chan error, 1)
	go func() { ended <- p.Run(b.Closed) }()
	for i := range uint64(50) {
		b.s.Push(&shm.SQE{Tag: i, Op: blk.Flush, Device: 1})
		b.s.Publish()
		var c [1]shm.CQE
		if !eventually(func() bool { return b.s.Pop(c[:]) == 1 }) || c[0].Tag != i {
			t.Fatalf("answer %+v", c)
		}
		if i%10 == 0 {
			time.Sleep(5 * time.Millisecond) // the pump sleeps
		}
	}
	asked := make(chan error, 1)
	go func() { asked <- b.asks.wait(testContext(t), b.idle) }()
	if err := <-asked; err != nil {
		t.Error(err)
	}
	b.asks.close()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("the pump does not end")
	}
}

func TestTable_Indices(t *testing.T) {
	var tb table[int]
	one, two := 1, 2
	if tb.get(0) != nil || tb.get(^uint32(0)) != nil {
		t.Error("empty table has entries")
	}
	if err := tb.add(maxIndex, &one); blk.ToErrno(err) != blk.EINVAL {
		t.Errorf("index out of range: %v", err)
	}
	if err := tb.add(7, &one); err != nil {
		t.Fatal(err)
	}
	if err := tb.add(7, &two); blk.ToErrno(err) != blk.EEXIST {
		t.Errorf("index in use: %v", err)
	}
	if tb.swap(7, &two, nil) || tb.swap(3, nil, &two) || !tb.swap(7, &one, &two) || tb.get(7) != &two {
		t.Error("swap")
	}
	if all := tb.take(); len(all) != 1 || all[7] != &two || tb.get(7) != nil {
		t.Errorf("take %v", all)
	}
}

func TestFDPass_TokensFindTheirDescriptors(t *testing.T) {
	conn, peerFile, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	peer, err := sockpair.Conn(peerFile)
	if err != nil {
		t.Fatal(err)
	}
	before := openFDs(t, selfPID)
	r := newFDReceiver(peer)
	ended := make(chan error, 1)
	go func() { ended <- r.run() }()
	s := &connSender{conn: conn}
	ctx := testContext(t)
	first, err := s.send(0)
	if err != nil {
		t.Fatal(err)
	}
	second, err := s.send(1, 2)
	if err != nil {
		t.Fatal(err)
	}
	if fds, err := r.take(ctx, second, 2); err != nil || len(fds) != 2 {
		t.Errorf("second: %v, %v", fds, err)
	} else {
		closeFDs(fds)
	}
	if _, err := r.take(ctx, first, 2); err == nil {
		t.Error("wrong number of descriptors was accepted")
	}
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if _, err := r.take(short, 999, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("unknown token: %v", err)
	}
	var tokens []uint64
	for range 3 * maxPending { // nobody wants them
		token, err := s.send(0)
		if err != nil {
			t.Fatal(err)
		}
		tokens = append(tokens, token)
	}
	if fds, err := r.take(ctx, tokens[len(tokens)-1], 1); err != nil {
		t.Errorf("the last of many: %v", err)
	} else {
		closeFDs(fds)
	}
	if _, err := r.take(ctx, tokens[0], 1); !errors.Is(err, syscall.ENOBUFS) {
		t.Errorf("a token whose descriptors were dropped: %v, want ENOBUFS at once", err)
	}
	_ = conn.Close()
	if err := <-ended; err != nil {
		t.Errorf("end of file: %v", err)
	}
	_ = peer.Close()
	if now := openFDs(t, selfPID); now > before {
		t.Errorf("%d descriptors open, were %d", now, before)
	}
}

// The calls that ask for descriptors may all come after all descriptors: those of a
// host that opens many disks at once are all kept.
func TestFDPass_ManyBeforeTheFirstCall(t *testing.T) {
	conn, peerFile, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	peer, err := sockpair.Conn(peerFile)
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	r := newFDReceiver(peer)
	go func() { _ = r.run() }()
	defer r.closeAll()
	s := connSender{conn: conn}
	var tokens []uint64
	for range 300 {
		token, err := s.send(0)
		if err != nil {
			t.Fatal(err)
		}
		tokens = append(tokens, token)
	}
	ctx := testContext(t)
	for i, token := range tokens {
		fds, err := r.take(ctx, token, 1)
		if err != nil {
			t.Fatalf("descriptor %d of %d: %v", i+1, len(tokens), err)
		}
		closeFDs(fds)
	}
}

func TestFDPass_MalformedMessageEndsTheReceiver(t *testing.T) {
	conn, peerFile, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	peer, err := sockpair.Conn(peerFile)
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	if _, err := conn.Write(binary.LittleEndian.AppendUint32(nil, 1)); err != nil {
		t.Fatal(err)
	}
	if err := newFDReceiver(peer).run(); err == nil {
		t.Error("accepted")
	}
}
