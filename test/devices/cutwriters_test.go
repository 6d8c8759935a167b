package devices

import (
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/test/faults"
)

const writersPerOutage = 4

// cutWriters write to a window of blocks until the first error: until the
// server is gone.
type cutWriters struct {
	t       *testing.T
	history *faults.History
	path    string
	first   int            // of the window
	last    []faults.Stamp // of each block, acknowledged in any way
	all     sync.WaitGroup
	quit    atomic.Bool // the test has failed

	mu      sync.Mutex
	durable int64 // writes that a flush or FUA has acknowledged
	closed  bool  // later acknowledged writes may be lost
	failed  error // of a writer, the first
}

func (r *cutRig) write(first int) *cutWriters {
	w := &cutWriters{t: r.t, history: r.history, path: r.written(), first: first, last: make([]faults.Stamp, cutWindow)}
	for i := range writersPerOutage {
		w.all.Go(func() { w.run(i) })
	}
	r.t.Cleanup(func() { w.quit.Store(true); w.wait() })
	return w
}

func (w *cutWriters) wait() { w.all.Wait() }

// await waits for n more writes that last.
func (w *cutWriters) await(n int64) {
	w.t.Helper()
	begin := w.lasting()
	eventually(w.t, "writes that last", func() bool { return w.lasting() >= begin+n })
}

// lasting is how many writes a flush or FUA has acknowledged. Writers must not
// have failed.
func (w *cutWriters) lasting() int64 {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failed != nil {
		w.t.Fatalf("a writer fails, and the power is on: %v", w.failed)
	}
	return w.durable
}

// close is called before the last cut. Writes acknowledged later may be lost.
func (w *cutWriters) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
}

// run is one writer: a block after the other among its own, some with FUA, with
// a flush now and then.
func (w *cutWriters) run(number int) {
	f, err := os.OpenFile(w.path, os.O_RDWR|syscall.O_DIRECT, 0)
	if err == nil {
		defer f.Close()
		err = w.writeTo(f, number)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failed == nil {
		w.failed = err
	}
}

func (w *cutWriters) writeTo(f *os.File, number int) error {
	buf := pages(1)
	defer unix.Munmap(buf)
	unflushed := map[int]faults.Stamp{}
	for !w.quit.Load() {
		own := rand.IntN(cutWindow / writersPerOutage)
		block, fua := own*writersPerOutage+number, own%4 == 0 // see medium: a block is for one kind of writes
		stamp := w.history.Begin(w.first+block, buf)
		if err := writeBlock(f, buf, w.first+block, fua); err != nil {
			return err
		}
		w.last[block] = stamp
		if fua {
			w.lasts(block, stamp)
			continue
		}
		unflushed[block] = stamp
		if rand.IntN(8) > 0 {
			continue
		}
		if err := f.Sync(); err != nil {
			return err
		}
		for b, stamp := range unflushed {
			w.lasts(b, stamp)
		}
		clear(unflushed)
	}
	return nil
}

// lasts takes down that a write was acknowledged as durable.
func (w *cutWriters) lasts(block int, s faults.Stamp) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.history.Acknowledge(w.first+block, s)
		w.durable++
	}
}

// writeBlock writes with FUA or without. Only on a file system without changes
// of metadata is that a write with FUA and no flush behind it.
func writeBlock(f *os.File, buf []byte, block int, fua bool) error {
	flags := 0
	if fua {
		flags = unix.RWF_DSYNC
	}
	_, err := unix.Pwritev2(int(f.Fd()), [][]byte{buf}, int64(block)*cutBlock, flags)
	return err
}

// pages is memory for direct I/O.
func pages(n int) []byte {
	b, err := unix.Mmap(-1, 0, n*cutBlock, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		panic(err) // no memory
	}
	return b
}
