package load

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blockdev"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/fence"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

// File is a block device or regular file of this host, past the page cache
// where that is possible.
type File struct {
	f      *os.File
	claim  *os.File // of a block device that is written to
	limits blk.Limits
	direct bool
}

// lockPatience is the time for the last I/O of another writer to end.
const lockPatience = 300 * time.Millisecond

// OpenFile opens the file or device at path. For writing it must not be in use: a
// device that is mounted or open, or a file that another process of rnbd
// writes to, is EBUSY.
func OpenFile(ctx context.Context, path string, write bool) (_ *File, err error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if block := st.Mode()&fs.ModeDevice != 0 && st.Mode()&fs.ModeCharDevice == 0; !block && !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is neither a block device nor a regular file: %w", path, syscall.EINVAL)
	}
	d := &File{}
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if write && !st.Mode().IsRegular() {
		if d.claim, err = blockdev.Claim(ctx, path); err != nil {
			return nil, fmt.Errorf("write to %s: %w", path, err)
		}
	}
	if err := d.open(path, write); err != nil {
		return nil, err
	}
	if write {
		if err := d.lock(ctx, path); err != nil {
			return nil, err
		}
	}
	return d, d.measure(path)
}

// open tries to go past the page cache; a file system may refuse that.
func (d *File) open(path string, write bool) (err error) {
	flags := os.O_RDONLY
	if write {
		flags = os.O_RDWR
	}
	d.direct = true
	d.f, err = os.OpenFile(path, flags|unix.O_DIRECT, 0)
	if errors.Is(err, syscall.EINVAL) {
		d.direct = false
		d.f, err = os.OpenFile(path, flags, 0)
	}
	return err
}

// lock takes the same locks as the storage plugins, so that neither writes to
// a disk that the other has open.
func (d *File) lock(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, lockPatience)
	defer cancel()
	for slot := range uint32(2) {
		if err := fence.Lock(ctx, d.f, slot); errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("write to %s: another process, as the plugin of a server, has it open for writing: %w", path, syscall.EBUSY)
		} else if err != nil {
			return fmt.Errorf("write to %s: %w", path, err)
		}
	}
	return nil
}

// measure finds the size and the smallest request that works.
func (d *File) measure(path string) error {
	size, err := d.f.Seek(0, 2)
	if err != nil {
		return fmt.Errorf("size of %s: %w", path, err)
	}
	mem, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	defer unix.Munmap(mem)
	d.limits = blk.Limits{Size: uint64(size), LogicalBlockSize: sector}
	for n := sector; n <= len(mem); n *= 2 {
		if _, err = d.f.ReadAt(mem[:n], 0); !errors.Is(err, syscall.EINVAL) {
			d.limits.LogicalBlockSize = uint32(n)
			break
		}
	}
	if err != nil && size >= int64(len(mem)) {
		return fmt.Errorf("read the start of %s: %w", path, err)
	}
	return nil
}

// Limits are those of the file.
func (d *File) Limits() blk.Limits { return d.limits }

// Access returns the kind of access in words.
func (d *File) Access() string {
	how := "io_uring"
	if uring.Supported() != nil || os.Getenv(uring.EngineEnv) == "threads" {
		how = "threads"
	}
	if d.direct {
		return how + ", direct"
	}
	return how + ", page cache"
}

// Close gives it back.
func (d *File) Close() error {
	var errs []error
	for _, f := range []*os.File{d.f, d.claim} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// Open makes a queue with an engine of its own, which belongs to one thread.
func (d *File) Open(_ context.Context, _, _, slots, slotSize int) (Queue, error) {
	q := &fileQueue{fd: int32(d.f.Fd()), slotSize: slotSize, lens: make([]int, slots)}
	var err error
	if q.mem, err = unix.Mmap(-1, 0, slots*slotSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON); err != nil {
		return nil, fmt.Errorf("memory for %d requests of %d bytes: %w", slots, slotSize, err)
	}
	runtime.LockOSThread() // unlocked by Close
	if q.engine, err = uring.NewEngine(uring.EngineConfig{Depth: slots}); err != nil {
		runtime.UnlockOSThread()
		unix.Munmap(q.mem)
		return nil, err
	}
	return q, nil
}

// fileQueue has requests in flight on an engine.
type fileQueue struct {
	engine   uring.Engine
	fd       int32
	mem      []byte
	slotSize int
	lens     []int // of the requests in flight, by slot
	done     [64]uring.Completion
}

func (q *fileQueue) Buf(slot int) []byte { return q.mem[slot*q.slotSize : (slot+1)*q.slotSize] }

func (q *fileQueue) Submit(r Request) {
	op := uring.Pread
	if r.Op == blk.Write {
		op = uring.Pwrite
	}
	q.lens[r.Slot] = r.Len
	req := uring.Request{Op: op, FD: q.fd, Buf: q.Buf(r.Slot)[:r.Len], Off: r.Off, Tag: uint64(r.Slot)}
	for !q.engine.Submit(&req) { // a worker may be slow to empty its place
		q.engine.Flush()
		unix.Poll(nil, 1)
	}
}

func (q *fileQueue) Wait(done []Done) int {
	q.engine.Flush()
	for {
		n := q.engine.Reap(q.done[:min(len(done), len(q.done))])
		for i, c := range q.done[:n] {
			done[i] = Done{Slot: int(c.Tag), Err: q.errorOf(c)}
		}
		if n > 0 || q.engine.InFlight() == 0 {
			return n
		}
		if q.engine.Arm() {
			fds := []unix.PollFd{{Fd: int32(q.engine.FD()), Events: unix.POLLIN}}
			_, _ = unix.Poll(fds, -1) // an interrupted sleep is a short one
		}
	}
}

func (q *fileQueue) errorOf(c uring.Completion) error {
	switch want := q.lens[c.Tag]; {
	case c.Res < 0:
		return syscall.Errno(-c.Res)
	case int(c.Res) < want:
		return fmt.Errorf("only %d of %d bytes were done: %w", c.Res, want, syscall.EIO)
	}
	return nil
}

func (q *fileQueue) Close() error {
	defer runtime.UnlockOSThread()
	return errors.Join(q.engine.Close(), unix.Munmap(q.mem))
}
