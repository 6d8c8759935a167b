package load

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// ram is a device in memory with faults that the test chooses.
type ram struct {
	data   []byte
	limits blk.Limits
	wrong  func(r Request) error // nil: nothing
	lose   func(r Request) bool  // a write that is acknowledged and not done

	answered  atomic.Int64
	enough    int64 // as many requests end the run
	endOfRuns context.CancelFunc
}

func newRAM(size int) *ram {
	return &ram{data: make([]byte, size), limits: blk.Limits{Size: uint64(size), LogicalBlockSize: 512, MaxIOSize: 16 << 10}}
}

// runs returns the context of runs that end when d has answered n requests:
// how long that takes is the machine's matter.
func (d *ram) runs(t *testing.T, n int64) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	d.enough, d.endOfRuns = n, cancel
	return ctx
}

func (d *ram) Limits() blk.Limits { return d.limits }

func (d *ram) Open(_ context.Context, _, _, slots, slotSize int) (Queue, error) {
	return &ramQueue{ram: d, slotSize: slotSize, mem: make([]byte, slots*slotSize)}, nil
}

type ramQueue struct {
	*ram
	slotSize int
	mem      []byte
	queued   []Request
}

func (q *ramQueue) Buf(slot int) []byte { return q.mem[slot*q.slotSize:][:q.slotSize] }
func (q *ramQueue) Submit(r Request)    { q.queued = append(q.queued, r) }
func (q *ramQueue) Close() error        { return nil }

// Wait answers the oldest, two at most: the rest stays in flight.
func (q *ramQueue) Wait(done []Done) (n int) {
	for ; n < min(len(done), len(q.queued), 2); n++ {
		r := q.queued[n]
		done[n] = Done{Slot: r.Slot}
		buf, at := q.Buf(r.Slot)[:r.Len], q.data[r.Off:r.Off+uint64(r.Len)]
		switch {
		case q.wrong != nil && q.wrong(r) != nil:
			done[n].Err = q.wrong(r)
		case r.Op == blk.Read:
			copy(buf, at)
		case q.lose == nil || !q.lose(r):
			copy(at, buf)
		}
	}
	q.queued = q.queued[n:]
	if total := q.answered.Add(int64(n)); q.endOfRuns != nil && total >= q.enough {
		q.endOfRuns()
	}
	return n
}

// untilEnough is for runs that end after an amount of work.
var untilEnough = Options{Time: time.Minute}

func workload(reads, block, depth, jobs int) Workload {
	return Workload{Reads: reads, Random: true, Blocks: []Block{{block, 1}}, Depth: depth, Jobs: jobs}.named()
}

func TestRunCountsWhatIsAnswered(t *testing.T) {
	a, b := newRAM(1<<20), newRAM(1<<20)
	targets := []*Target{{Name: "a", Device: a}, {Name: "b", Device: b, Size: 512 << 10}}
	w := workload(50, 40<<10, 3, 2) // in three parts each
	r, err := Run(a.runs(t, 1000), w, targets, untilEnough)
	if err != nil {
		t.Fatal(err)
	}
	for i, bytes := range r.Bytes {
		if n := r.Latency[i].Count(); n == 0 || bytes != n*40<<10 {
			t.Errorf("%s: %d bytes in %d requests", OpOf(i), bytes, n)
		}
	}
	if r.Elapsed <= 0 || r.Elapsed >= untilEnough.Time || r.Requests() != r.Latency[0].Count()+r.Latency[1].Count() {
		t.Errorf("%d requests in %v", r.Requests(), r.Elapsed)
	}
	for i, c := range b.data[512<<10:] {
		if c != 0 {
			t.Fatalf("byte %d behind the part that is used was written", i)
		}
	}
}

func TestReadsLeaveTheDeviceAlone(t *testing.T) {
	d := newRAM(1 << 20)
	for _, w := range Usual(false, 1) {
		if w.largest() > 64<<10 {
			w.Blocks[0].Bytes = 64 << 10
		}
		if _, err := Run(t.Context(), w, []*Target{{Device: d}}, Options{Time: time.Millisecond}); err != nil {
			t.Fatal(err)
		}
	}
	for i, c := range d.data {
		if c != 0 {
			t.Fatalf("byte %d was written", i)
		}
	}
}

func TestAnErrorEndsAllJobs(t *testing.T) {
	d := newRAM(1 << 20)
	d.wrong = func(r Request) error {
		if r.Off >= 1<<19 { // of the second job only
			return syscall.EIO
		}
		return nil
	}
	start := time.Now()
	_, err := Run(t.Context(), workload(100, 4096, 4, 2), []*Target{{Name: "bad", Device: d}}, Options{Time: time.Minute})
	if !errors.Is(err, syscall.EIO) || !strings.Contains(err.Error(), "bad: read of 4096 bytes at ") {
		t.Errorf("error %v", err)
	}
	if time.Since(start) > 20*time.Second {
		t.Errorf("it took %v", time.Since(start))
	}
}

func TestAnInterruptEndsARunWithItsResult(t *testing.T) {
	d := newRAM(1 << 20)
	r, err := Run(d.runs(t, 100), workload(100, 4096, 4, 1), []*Target{{Device: d}}, untilEnough)
	if err != nil || r.Requests() < 100 {
		t.Errorf("%d requests, %v", r.Requests(), err)
	}
}

func TestProgressIsTold(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	told := uint64(0)
	o := Options{Time: time.Minute, Progress: func(n uint64, _ time.Duration) {
		if told = n; n > 0 {
			cancel()
		}
	}}
	if _, err := Run(ctx, workload(100, 4096, 4, 1), []*Target{{Device: newRAM(1 << 20)}}, o); err != nil || told == 0 {
		t.Errorf("%d requests were told, %v", told, err)
	}
}

func TestPatternsFindWhatIsWrong(t *testing.T) {
	writes := map[uint64]int{}
	for _, c := range []struct {
		name  string
		spoil func(*ram)
		want  string
	}{
		{"nothing", func(*ram) {}, ""},
		{"a write is lost", func(d *ram) {
			d.lose = func(r Request) bool { writes[r.Off]++; return writes[r.Off] == 2 }
		}, "there is version 1 of the sector"},
		{"half a sector is lost", func(d *ram) {
			d.wrong = func(r Request) error {
				if r.Op == blk.Read {
					clear(d.data[r.Off+256 : r.Off+512])
				}
				return nil
			}
		}, "up to byte 256, then other data"},
		{"reads come from elsewhere", func(d *ram) {
			d.wrong = func(r Request) error {
				if r.Op == blk.Read && r.Off >= 512 {
					copy(d.data[r.Off:][:512], d.data[r.Off-512:][:512])
				}
				return nil
			}
		}, "wrong"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newRAM(256 << 10)
			c.spoil(d)
			target := &Target{Name: "d", Device: d, Pattern: NewPattern(d.limits.Size, 42)}
			_, err := Run(d.runs(t, 5000), workload(50, 4096, 4, 1), []*Target{target}, untilEnough)
			bytes := uint64(0)
			if err == nil {
				bytes, err = ReadBack(t.Context(), target)
			}
			switch {
			case c.want == "" && (err != nil || bytes == 0):
				t.Errorf("%d bytes read back, %v", bytes, err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
}

// The load never reads again the last write of a block. The reading at the end
// finds it.
func TestReadBackFindsALostWrite(t *testing.T) {
	d := newRAM(256 << 10)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	d.lose = func(r Request) bool {
		if r.Off == 8192 {
			cancel() // there is something to find
		}
		return r.Off == 8192
	}
	target := &Target{Name: "d", Device: d, Pattern: NewPattern(d.limits.Size, 42)}
	if _, err := Run(ctx, workload(0, 4096, 2, 1), []*Target{target}, untilEnough); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadBack(t.Context(), target); err == nil || !strings.Contains(err.Error(), "data at 8192 are wrong") {
		t.Errorf("error %v", err)
	}
}

func TestWhatDoesNotFitIsRefused(t *testing.T) {
	small, ro, big := newRAM(64<<10), newRAM(1<<20), newRAM(1<<20)
	ro.limits.ReadOnly = true
	big.limits.LogicalBlockSize = 4096
	for _, c := range []struct {
		name string
		t    *Target
		w    Workload
		want error
	}{
		{"fits", &Target{Device: small}, workload(100, 64<<10, 1, 1), nil},
		{"two jobs", &Target{Device: small}, workload(100, 64<<10, 1, 2), syscall.EINVAL},
		{"a part only", &Target{Device: big, Size: 4096}, workload(100, 8192, 1, 1), syscall.EINVAL},
		{"no room to compare", &Target{Device: small, Pattern: NewPattern(64<<10, 1)}, workload(0, 4096, 16, 1), syscall.EINVAL},
		{"read-only", &Target{Device: ro}, workload(0, 4096, 1, 1), syscall.EROFS},
		{"reads of it", &Target{Device: ro}, workload(100, 4096, 1, 1), nil},
		{"half a block", &Target{Device: big}, workload(100, 512, 1, 1), syscall.EINVAL},
		{"mixed sizes are rounded up", &Target{Device: big}, Mixed(1, 1), nil},
	} {
		if err := c.t.Fits(c.w); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

// tempFile is where O_DIRECT works, if anywhere.
func tempFile(t *testing.T, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFilesHoldWhatIsWritten(t *testing.T) {
	f, err := OpenFile(t.Context(), tempFile(t, 4<<20), true)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	target := &Target{Name: "file", Device: f, Pattern: NewPattern(4<<20, 1)}
	for _, w := range []Workload{workload(50, 4096, 8, 2), Mixed(4, 1), workload(100, 64<<10, 4, 1)} {
		if err := target.Fits(w); err != nil {
			t.Fatal(err)
		}
		for done := uint64(0); done < 100; {
			r, err := Run(t.Context(), w, []*Target{target}, Options{Time: 20 * time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			done += r.Requests()
		}
	}
	if n, err := ReadBack(t.Context(), target); err != nil || n == 0 {
		t.Errorf("%d bytes read back, %v", n, err)
	}
}

func TestAFileHasOneWriter(t *testing.T) {
	path := tempFile(t, 1<<20)
	f, err := OpenFile(t.Context(), path, true)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := OpenFile(t.Context(), path, true); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("a second writer: %v", err)
	}
	r, err := OpenFile(t.Context(), path, false)
	if err != nil {
		t.Fatalf("a reader beside it: %v", err)
	}
	r.Close()
}

func TestWhatIsNoDeviceIsRefused(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{dir: syscall.EINVAL, dir + "/none": syscall.ENOENT, dir + "/fifo": syscall.EINVAL, "/dev/null": syscall.EINVAL} {
		if _, err := OpenFile(t.Context(), path, false); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
}

func TestAJobMakesAsManyRequestsAsItMay(t *testing.T) {
	for _, most := range []uint64{1, 3, 100} { // fewer than in flight, too
		d := newRAM(1 << 20)
		r, err := Run(t.Context(), workload(100, 4096, 4, 2), []*Target{{Device: d}}, Options{Time: time.Minute, Requests: most})
		if err != nil || r.Requests() != 2*most {
			t.Errorf("%d requests of two jobs, want %d each: %v", r.Requests(), most, err)
		}
	}
}

func TestARunHasRatesOfItsIntervals(t *testing.T) {
	d := newRAM(1 << 20)
	r, err := Run(t.Context(), workload(100, 4096, 4, 1), []*Target{{Device: d}}, Options{Time: 3*interval + interval/2})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(r.Rates[0]); n < 1 || n > 3 || r.Rates[0][0] <= 0 || r.Rates[1][0] != 0 {
		t.Errorf("rates %v", r.Rates)
	}
	if r.CPU <= 0 {
		t.Errorf("CPU time %v", r.CPU)
	}
}

func TestFillWritesEveryByte(t *testing.T) {
	d := newRAM(1<<20 + 512)
	if err := Fill(t.Context(), &Target{Device: d}); err != nil {
		t.Fatal(err)
	}
	for at := 0; at < len(d.data); at += 512 {
		if string(d.data[at:at+512]) == string(make([]byte, 512)) {
			t.Fatalf("the sector at %d was not written", at)
		}
	}
	d.wrong = func(r Request) error {
		if r.Off >= 512<<10 {
			return syscall.ENOSPC
		}
		return nil
	}
	if err := Fill(t.Context(), &Target{Name: "full", Device: d}); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "full") {
		t.Errorf("fill of a device that is full: %v", err)
	}
}
