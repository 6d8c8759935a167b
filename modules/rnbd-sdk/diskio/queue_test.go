package diskio

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

// fakeRing hands out requests and notes the answers.
type fakeRing struct {
	todo      []plugin.Request
	answers   map[uint64]blk.Errno
	published int
	closed    bool
}

func (r *fakeRing) UseClock(func() int64) {}

func (r *fakeRing) Next(batch []plugin.Request) int {
	n := copy(batch, r.todo)
	r.todo = r.todo[n:]
	return n
}

func (r *fakeRing) Complete(tag uint64, e blk.Errno) { r.answers[tag] = e }
func (r *fakeRing) Publish()                         { r.published++ }
func (r *fakeRing) Arm() bool                        { return len(r.todo) == 0 }
func (r *fakeRing) Disarm()                          {}
func (r *fakeRing) FD() int                          { return -1 }
func (r *fakeRing) Closed() bool                     { return r.closed }
func (r *fakeRing) Depth() int                       { return 128 }

// fakeEngine answers each request by a script, in order of submission.
type fakeEngine struct {
	run     func(r *uring.Request) int32
	full    bool
	workers int            // as many of the oldest requests make progress; 0: all
	hung    map[int32]bool // descriptors with requests that do not end
	waiting []uring.Request
	flushes int
	log     []uring.Request // all that was submitted
}

func (e *fakeEngine) Submit(r *uring.Request) bool {
	if e.full {
		return false
	}
	e.waiting = append(e.waiting, *r)
	e.log = append(e.log, *r)
	return true
}

func (e *fakeEngine) Flush() { e.flushes++ }

func (e *fakeEngine) Reap(done []uring.Completion) int {
	n, kept := 0, 0
	for i := range e.waiting {
		r := &e.waiting[i]
		if n == len(done) || e.hung[r.FD] || e.workers > 0 && i >= e.workers {
			e.waiting[kept] = *r
			kept++
			continue
		}
		done[n] = uring.Completion{Tag: r.Tag, Res: e.run(r)}
		n++
	}
	e.waiting = e.waiting[:kept]
	return n
}

func (e *fakeEngine) Workers(uring.Op) int { return e.workers }

func (e *fakeEngine) Arm() bool     { return len(e.waiting) == 0 }
func (e *fakeEngine) FD() int       { return -1 }
func (e *fakeEngine) InFlight() int { return len(e.waiting) }
func (e *fakeEngine) Close() error  { return nil }
func (e *fakeEngine) Name() string  { return "fake" }

// fakeDisk plans the steps of a test.
type fakeDisk struct {
	step     Step
	fallback *Step
	asked    []blk.Errno
}

func (d *fakeDisk) Limits() blk.Limits        { return blk.Limits{} }
func (d *fakeDisk) Close() error              { return nil }
func (d *fakeDisk) Plan(*plugin.Request) Step { return d.step }
func (d *fakeDisk) Fallback(_ *plugin.Request, _ Step, e blk.Errno) (Step, bool) {
	d.asked = append(d.asked, e)
	if d.fallback == nil {
		return Step{}, false
	}
	next := *d.fallback
	d.fallback = nil
	return next, true
}

type bench struct {
	ring   *fakeRing
	engine *fakeEngine
	queue  *queue
}

func newBench(run func(r *uring.Request) int32) *bench {
	b := &bench{ring: &fakeRing{answers: map[uint64]blk.Errno{}}, engine: &fakeEngine{run: run}}
	b.queue = newQueue(b.ring, b.engine)
	return b
}

// turn is one loop of the pump.
func (b *bench) turn() { outlet{b.queue}.Poll(); intake{b.queue}.Poll() }

// do runs requests to their end.
func (b *bench) do(rs ...plugin.Request) {
	b.ring.todo = append(b.ring.todo, rs...)
	for range 100 {
		b.turn()
	}
}

// page returns n bytes of aligned memory after skip bytes that make it
// misaligned.
func page(t *testing.T, n, skip int) []byte {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, n+4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(mem) })
	return mem[skip:][:n:n]
}

func all(r *uring.Request) int32 { return int32(r.Len) }

func write(d plugin.Disk, tag uint64, off uint64, buf []byte) plugin.Request {
	return plugin.Request{Disk: d, Op: blk.Write, Tag: tag, Off: off, Len: uint32(len(buf)), Buf: buf}
}

func TestABatchIsStartedAndPublishedOnce(t *testing.T) {
	b := newBench(all)
	d := &fakeDisk{step: Step{Op: uring.Pwrite, FD: 5, RWFlags: unix.RWF_DSYNC}}
	buf := page(t, 4096, 0)
	for tag := range uint64(100) {
		b.ring.todo = append(b.ring.todo, write(d, tag, tag*4096, buf))
	}
	b.turn()
	if b.engine.flushes != 1 || len(b.engine.log) != 100 || b.ring.published != 0 {
		t.Fatalf("100 requests made %d flushes and %d submissions, %d publications, want 1, 100, 0",
			b.engine.flushes, len(b.engine.log), b.ring.published)
	}
	b.turn()
	if b.ring.published != 1 || len(b.ring.answers) != 100 {
		t.Fatalf("100 completions made %d publications of %d answers, want 1 of 100", b.ring.published, len(b.ring.answers))
	}
	got := b.engine.log[7]
	if got.FD != 5 || got.Off != 7*4096 || got.Len != 4096 || got.RWFlags != unix.RWF_DSYNC || got.Op != uring.Pwrite {
		t.Errorf("request 7 became %+v", got)
	}
}

func TestTransfers(t *testing.T) {
	type piece struct {
		off uint64
		len uint64
	}
	for _, c := range []struct {
		name   string
		align  uint32
		n      int
		run    []int32 // results in order
		pieces []piece
		want   blk.Errno
	}{
		{"whole at once", 512, 4096, []int32{4096}, []piece{{8192, 4096}}, blk.OK},
		{"goes on after a short transfer", 512, 4096, []int32{1024, 3072}, []piece{{8192, 4096}, {9216, 3072}}, blk.OK},
		{"goes on from an aligned byte", 512, 4096, []int32{1000, 3584}, []piece{{8192, 4096}, {8704, 3584}}, blk.OK},
		{"goes on from any byte where there is no alignment", 0, 4096, []int32{1000, 3096}, []piece{{8192, 4096}, {9192, 3096}}, blk.OK},
		{"end of file is EIO", 0, 4096, []int32{1024, 0}, []piece{{8192, 4096}, {9216, 3072}}, blk.EIO},
		{"less than a block is EIO, not an endless loop", 512, 4096, []int32{100}, []piece{{8192, 4096}}, blk.EIO},
		{"EINTR is tried again", 0, 4096, []int32{-int32(unix.EINTR), 4096}, []piece{{8192, 4096}, {8192, 4096}}, blk.OK},
		{"EAGAIN is tried again", 0, 4096, []int32{-int32(unix.EAGAIN), 4096}, []piece{{8192, 4096}, {8192, 4096}}, blk.OK},
		{"an error in the middle fails the request", 0, 4096, []int32{1024, -int32(unix.EIO)}, []piece{{8192, 4096}, {9216, 3072}}, blk.EIO},
		{"no space", 0, 4096, []int32{-int32(unix.ENOSPC)}, []piece{{8192, 4096}}, blk.ENOSPC},
		{"file too large is no space", 0, 4096, []int32{-int32(unix.EFBIG)}, []piece{{8192, 4096}}, blk.ENOSPC},
		{"quota is no space", 0, 4096, []int32{-int32(unix.EDQUOT)}, []piece{{8192, 4096}}, blk.ENOSPC},
		{"a vanished device keeps its errno", 0, 4096, []int32{-int32(unix.ENODEV)}, []piece{{8192, 4096}}, blk.ENODEV},
		{"a stale handle is EIO", 0, 4096, []int32{-int32(unix.ESTALE)}, []piece{{8192, 4096}}, blk.EIO},
		{"an errno that the wire cannot carry is EIO", 0, 4096, []int32{-600}, []piece{{8192, 4096}}, blk.EIO},
	} {
		t.Run(c.name, func(t *testing.T) {
			results := c.run
			b := newBench(func(*uring.Request) int32 {
				if len(results) == 0 {
					t.Fatal("the engine was asked once more")
				}
				r := results[0]
				results = results[1:]
				return r
			})
			b.do(write(&fakeDisk{step: Step{Op: uring.Pwrite, Align: c.align}}, 3, 8192, page(t, c.n, 0)))
			if got, ok := b.ring.answers[3]; !ok || got != c.want {
				t.Errorf("answer %v (%v), want %v", got, ok, c.want)
			}
			var pieces []piece
			for _, r := range b.engine.log {
				pieces = append(pieces, piece{r.Off, uint64(len(r.Buf))})
			}
			if len(pieces) != len(c.pieces) {
				t.Fatalf("pieces %v, want %v", pieces, c.pieces)
			}
			for i := range pieces {
				if pieces[i] != c.pieces[i] {
					t.Errorf("piece %d is %v, want %v", i, pieces[i], c.pieces[i])
				}
			}
		})
	}
}

func TestRetriesEnd(t *testing.T) {
	b := newBench(func(*uring.Request) int32 { return -int32(unix.EAGAIN) })
	b.do(write(&fakeDisk{step: Step{Op: uring.Pwrite}}, 0, 0, page(t, 512, 0)))
	if b.ring.answers[0] != blk.EAGAIN || len(b.engine.log) != 1+maxTries {
		t.Errorf("answer %v after %d tries, want EAGAIN after %d", b.ring.answers[0], len(b.engine.log), 1+maxTries)
	}
}

func TestAnErrorStaysWithItsRequest(t *testing.T) {
	b := newBench(func(r *uring.Request) int32 {
		if r.Tag == 5 {
			return -int32(unix.EIO)
		}
		return int32(r.Len)
	})
	d := &fakeDisk{step: Step{Op: uring.Pwrite}}
	buf := page(t, 512, 0)
	var rs []plugin.Request
	for tag := range uint64(10) {
		rs = append(rs, write(d, tag, 0, buf))
	}
	b.do(rs...)
	for tag := range uint64(10) {
		want := blk.OK
		if tag == 5 {
			want = blk.EIO
		}
		if got, ok := b.ring.answers[tag]; !ok || got != want {
			t.Errorf("request %d got %v, want %v", tag, got, want)
		}
	}
}

func TestFallbackReplacesARefusedStep(t *testing.T) {
	b := newBench(func(r *uring.Request) int32 {
		if r.Op == uring.PunchHole {
			return -int32(unix.EOPNOTSUPP)
		}
		return 0
	})
	d := &fakeDisk{step: Step{Op: uring.PunchHole}, fallback: &Step{Op: uring.ZeroRange, Sync: true}}
	b.do(plugin.Request{Disk: d, Op: blk.WriteZeroes, Tag: 1, Len: 8192})
	wantOps(t, b, uring.PunchHole, uring.ZeroRange, uring.Fdatasync)
	if b.ring.answers[1] != blk.OK || b.queue.count.Fallbacks.Load() != 1 {
		t.Errorf("answer %v, %d fallbacks", b.ring.answers[1], b.queue.count.Fallbacks.Load())
	}
	b.do(plugin.Request{Disk: d, Op: blk.WriteZeroes, Tag: 2, Len: 8192})
	if b.ring.answers[2] != blk.EOPNOTSUPP {
		t.Errorf("without a fallback the answer is %v, want EOPNOTSUPP", b.ring.answers[2])
	}
}

func TestNoFallbackOnceBytesHaveMoved(t *testing.T) {
	results := []int32{512, -int32(unix.EINVAL)}
	b := newBench(func(*uring.Request) int32 { r := results[0]; results = results[1:]; return r })
	d := &fakeDisk{step: Step{Op: uring.Pwrite}, fallback: &Step{Op: uring.Pwrite}}
	b.do(write(d, 0, 0, page(t, 1024, 0)))
	if len(d.asked) != 0 || b.ring.answers[0] != blk.EINVAL {
		t.Errorf("the disk was asked %d times, answer %v", len(d.asked), b.ring.answers[0])
	}
}

func TestAFailedSyncFailsTheRequest(t *testing.T) {
	b := newBench(func(r *uring.Request) int32 {
		if r.Op == uring.Fdatasync {
			return -int32(unix.EIO)
		}
		return 0
	})
	b.do(plugin.Request{Disk: &fakeDisk{step: Step{Op: uring.ZeroRange, FD: 9, Sync: true}}, Op: blk.WriteZeroes, Len: 512})
	wantOps(t, b, uring.ZeroRange, uring.Fdatasync)
	if b.engine.log[1].FD != 9 || b.ring.answers[0] != blk.EIO {
		t.Errorf("flush on descriptor %d, answer %v", b.engine.log[1].FD, b.ring.answers[0])
	}
}

func wantOps(t *testing.T, b *bench, want ...uring.Op) {
	t.Helper()
	var got []uring.Op
	for _, r := range b.engine.log {
		got = append(got, r.Op)
	}
	if len(got) != len(want) {
		t.Fatalf("engine ran %v, want %v", got, want)
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("engine ran %v, want %v", got, want)
		}
	}
}

func TestMisalignedMemoryGoesThroughABounceBuffer(t *testing.T) {
	medium := make([]byte, 1<<20)
	b := newBench(func(r *uring.Request) int32 {
		if !Aligned(r.Buf, 512) || r.Off%512 != 0 || len(r.Buf)%512 != 0 {
			return -int32(unix.EINVAL)
		}
		if r.Op == uring.Pwrite {
			copy(medium[r.Off:], r.Buf)
		} else {
			copy(r.Buf, medium[r.Off:])
		}
		return int32(len(r.Buf))
	})
	const n = 200 << 10 // more than a bounce buffer
	out := page(t, n, 4)
	for i := range out {
		out[i] = byte(i >> 9)
	}
	b.do(write(&fakeDisk{step: Step{Op: uring.Pwrite, Align: 512, MemAlign: 512}}, 2, 4096, out))
	if b.ring.answers[2] != blk.OK || !bytes.Equal(medium[4096:][:n], out) {
		t.Fatalf("misaligned write: %v, data equal %v", b.ring.answers[2], bytes.Equal(medium[4096:][:n], out))
	}
	in := page(t, n, 12)
	b.do(plugin.Request{Disk: &fakeDisk{step: Step{Op: uring.Pread, Align: 512, MemAlign: 512}}, Op: blk.Read, Tag: 3, Off: 4096, Len: n, Buf: in})
	if b.ring.answers[3] != blk.OK || !bytes.Equal(in, out) {
		t.Fatalf("misaligned read: %v, data equal %v", b.ring.answers[3], bytes.Equal(in, out))
	}
	if got := b.queue.count.BouncedBytes.Load(); got != 2*n {
		t.Errorf("counted %d bounced bytes, want %d", got, 2*n)
	}
	b.do(write(&fakeDisk{step: Step{Op: uring.Pwrite, Align: 512, MemAlign: 512}}, 2, 0, page(t, 4096, 0)))
	if got := b.queue.count.BouncedBytes.Load(); got != 2*n {
		t.Error("aligned memory was bounced")
	}
}

func TestZeroesAreWrittenInPieces(t *testing.T) {
	b := newBench(func(r *uring.Request) int32 {
		if !bytes.Equal(r.Buf, make([]byte, len(r.Buf))) {
			t.Error("not zeroes")
		}
		return int32(len(r.Buf))
	})
	b.do(plugin.Request{Disk: &fakeDisk{step: Step{Op: uring.Pwrite, Zeroes: true}}, Op: blk.WriteZeroes, Off: 512, Len: zeroSize*2 + 1024})
	if len(b.engine.log) != 3 || b.engine.log[2].Off != 512+2*zeroSize || b.engine.log[2].Len != 1024 {
		t.Errorf("pieces: %d, the last %+v", len(b.engine.log), b.engine.log[len(b.engine.log)-1].Len)
	}
	if got, ok := b.ring.answers[0]; !ok || got != blk.OK {
		t.Errorf("answer %v", got)
	}
}

func TestInlineReads(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, bytes.Repeat([]byte{7}, 6000), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fd := int32(f.Fd())
	for _, c := range []struct {
		name   string
		inline Inline
		n      int
		engine int // requests that reach the engine
	}{
		{"what is cached needs no engine", InlineCached, 4096, 0},
		{"a file system in memory needs no engine", InlineMemory, 4096, 0},
		{"the rest of a short read goes to the engine", InlineCached, 8192, 1},
		{"not inline", InlineNo, 4096, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(func(r *uring.Request) int32 {
				for i := range r.Buf {
					r.Buf[i] = 7
				}
				return int32(len(r.Buf))
			})
			buf := page(t, c.n, 0)
			b.do(plugin.Request{Disk: &fakeDisk{step: Step{Op: uring.Pread, FD: fd, Inline: c.inline}}, Op: blk.Read, Tag: 1, Len: uint32(c.n), Buf: buf})
			if got, ok := b.ring.answers[1]; !ok || got != blk.OK || !bytes.Equal(buf, bytes.Repeat([]byte{7}, c.n)) {
				t.Errorf("answer %v %v", got, ok)
			}
			if len(b.engine.log) != c.engine {
				t.Errorf("%d requests reached the engine, want %d", len(b.engine.log), c.engine)
			}
		})
	}
}

func TestInlineRefusalIsAFallback(t *testing.T) {
	b := newBench(all)
	// A descriptor that is not open: EBADF. No engine can repair that.
	d := &fakeDisk{step: Step{Op: uring.Pread, FD: 1 << 20, Inline: InlineCached}, fallback: &Step{Op: uring.Pread}}
	b.do(plugin.Request{Disk: d, Op: blk.Read, Tag: 1, Len: 512, Buf: page(t, 512, 0)})
	if len(d.asked) != 1 || d.asked[0] != blk.EIO || b.ring.answers[1] != blk.OK || len(b.engine.log) != 1 {
		t.Errorf("asked %v, answers %v, engine %v", d.asked, b.ring.answers, b.engine.log)
	}
}

func TestOddRequestsAreAnswered(t *testing.T) {
	b := newBench(all)
	type stranger struct{ plugin.Disk }
	b.do(plugin.Request{Disk: stranger{}, Op: blk.Read, Tag: 1, Len: 512})
	if b.ring.answers[1] != blk.EIO {
		t.Errorf("a disk that cannot plan: %v, want EIO", b.ring.answers[1])
	}
	b.engine.full = true
	b.do(write(&fakeDisk{step: Step{Op: uring.Pwrite}}, 2, 0, page(t, 512, 0)))
	if b.ring.answers[2] != blk.EIO {
		t.Errorf("an engine that refuses: %v, want EIO", b.ring.answers[2])
	}
	if b.queue.inFlight != 0 {
		t.Errorf("%d requests in flight after all were answered", b.queue.inFlight)
	}
}

func TestASlotKeepsNothing(t *testing.T) {
	b := newBench(all)
	b.do(write(&fakeDisk{step: Step{Op: uring.Pwrite}}, 9, 0, page(t, 512, 0)))
	if o := &b.queue.ops[9]; o.req.Disk != nil || o.req.Buf != nil || o.disk != nil {
		t.Errorf("slot still holds %+v", o.req)
	}
}

func TestNothingIsAllocatedPerRequest(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	buf := page(t, 4096, 0)
	odd := page(t, 4096, 8)
	if _, err := f.Write(buf); err != nil {
		t.Fatal(err)
	}
	b := newBench(all)
	rs := []plugin.Request{
		write(&fakeDisk{step: Step{Op: uring.Pwrite, Align: 512, MemAlign: 512}}, 0, 0, buf),
		write(&fakeDisk{step: Step{Op: uring.Pwrite, Align: 512, MemAlign: 512}}, 1, 0, odd),
		{Disk: &fakeDisk{step: Step{Op: uring.Pread, FD: int32(f.Fd()), Inline: InlineCached}}, Op: blk.Read, Tag: 2, Len: 4096, Buf: buf},
		{Disk: &fakeDisk{step: Step{Op: uring.ZeroRange, Sync: true}}, Op: blk.WriteZeroes, Tag: 3, Len: 4096},
		{Disk: &fakeDisk{step: Step{Op: uring.Pwrite, Zeroes: true}}, Op: blk.WriteZeroes, Tag: 4, Len: 4096},
	}
	loop := func() {
		b.ring.todo = rs
		for range 4 {
			b.turn()
		}
		b.engine.log = b.engine.log[:0]
	}
	loop()
	if got := testing.AllocsPerRun(100, loop); got != 0 {
		t.Errorf("%v allocations for %d requests, want 0", got, len(rs))
	}
	if b.queue.inFlight != 0 {
		t.Errorf("%d requests are still in flight", b.queue.inFlight)
	}
}
