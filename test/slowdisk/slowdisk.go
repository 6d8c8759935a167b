package slowdisk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// Write is one write as the medium saw it.
type Write struct {
	Off     int64
	Len     int
	First   byte      // first byte of the data, to tell writers apart
	Arrived time.Time // reached the medium
	Applied time.Time // became readable; zero: not yet, or failed
}

// Disk is a disk under the control of a test. All methods may be called from
// any goroutine.
type Disk struct {
	t      testing.TB // nil of a disk that Open made
	dir    string
	path   string
	loop   *loop
	server *fuse.Server

	mu      sync.Mutex
	changed *sync.Cond
	data    []byte
	hold    bool // writes
	reads   bool // hold them too
	delay   time.Duration
	failure syscall.Errno
	waiting int
	syncs   []time.Time
	history []Write
}

// New mounts a disk of size bytes, full of zeroes, and removes it when the
// test ends.
func New(t testing.TB, size int64) *Disk {
	t.Helper()
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skipf("slowdisk needs FUSE: %v", err)
	}
	if os.Geteuid() != 0 {
		t.Skip("slowdisk needs root to mount FUSE")
	}
	d, err := Open(t.TempDir(), size)
	if err != nil {
		t.Fatal(err)
	}
	d.t = t
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Log(err)
		}
	})
	return d
}

// Open mounts a disk of size bytes, full of zeroes, at the folder dir, for a
// program that is no test. Close removes it. Such a disk has no Loop and no
// WaitHeld.
func Open(dir string, size int64) (*Disk, error) {
	d := &Disk{dir: dir, data: make([]byte, size)}
	d.changed = sync.NewCond(&d.mu)
	d.path = filepath.Join(d.dir, fileName)
	if err := d.mount(); err != nil {
		return nil, fmt.Errorf("mount slow disk on %s: %w", d.dir, err)
	}
	return d, nil
}

func (d *Disk) mount() (err error) {
	var never time.Duration
	d.server, err = fs.Mount(d.dir, &root{disk: d}, &fs.Options{
		AttrTimeout:  &never,
		EntryTimeout: &never,
		MountOptions: fuse.MountOptions{
			DirectMountStrict: true,
			FsName:            "slowdisk",
			Name:              "slowdisk",
			MaxBackground:     256,
			MaxWrite:          1 << 20,
			DisableXAttrs:     true,
			// Without it io_uring and loop devices have one request on the way.
			ExtraCapabilities: fuse.CAP_ASYNC_DIO,
		},
	})
	if err != nil {
		return err
	}
	if err := keepFromChildren("/dev/fuse"); err != nil {
		return errors.Join(err, d.unmount())
	}
	return nil
}

// Close lets everything go and removes the disk. Where somebody still uses it
// the mount is detached, and the error says so.
func (d *Disk) Close() error {
	d.Release()
	d.SetDelay(0)
	if d.loop != nil {
		d.loop.detach()
	}
	return d.unmount()
}

// unmount waits a little for the last user of the mount, then detaches it. A mount
// namespace that another process has made meanwhile has a copy of the mount: then
// the server's threads go on, and are left behind.
func (d *Disk) unmount() error {
	done := make(chan struct{})
	var stop atomic.Bool
	go func() {
		defer close(done)
		for d.server.Unmount() != nil && !stop.Load() {
			time.Sleep(20 * time.Millisecond)
		}
	}()
	select {
	case <-done:
		return nil
	case <-time.After(3 * time.Second):
	}
	stop.Store(true)
	err := syscall.Unmount(d.dir, syscall.MNT_DETACH)
	if err == syscall.EINVAL { // it is gone from here
		err = nil
	}
	return errors.Join(fmt.Errorf("slow disk %s is still in use", d.dir), err)
}

// Path is the file on the slow mount.
func (d *Disk) Path() string { return d.path }

// Loop is a loop device over the file, attached at the first call.
func (d *Disk) Loop() string {
	d.t.Helper()
	if d.loop == nil {
		d.loop = attach(d.t, d.path)
	}
	return d.loop.path
}

// HoldWrites keeps back every write from now on until Release.
func (d *Disk) HoldWrites() { d.update(func() { d.hold = true }) }

// HoldReads keeps back every read from now on until Release.
func (d *Disk) HoldReads() { d.update(func() { d.reads = true }) }

// Release lets everything go that is held and ends the holding.
func (d *Disk) Release() { d.update(func() { d.hold, d.reads = false, false }) }

// SetDelay makes every later write take at least delay.
func (d *Disk) SetDelay(delay time.Duration) { d.update(func() { d.delay = delay }) }

// SetError makes every later read and write fail with errno; 0 ends that.
func (d *Disk) SetError(errno syscall.Errno) { d.update(func() { d.failure = errno }) }

func (d *Disk) update(change func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change()
	d.changed.Broadcast()
}

// Held is the number of writes and reads that have arrived and wait for
// Release.
func (d *Disk) Held() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.waiting
}

// WaitHeld waits until at least n of them are held; after 10 s it fails the
// test.
func (d *Disk) WaitHeld(n int) {
	d.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); d.Held() < n; {
		if time.Now().After(deadline) {
			d.t.Fatalf("slow disk holds %d requests after 10 s, want %d", d.Held(), n)
		}
		time.Sleep(time.Millisecond)
	}
}

// History returns the writes in the order of their arrival.
func (d *Disk) History() []Write {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]Write(nil), d.history...)
}

// Syncs returns the times of requests to make the data durable: a disk with a
// volatile cache would do that at a flush.
func (d *Disk) Syncs() []time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]time.Time(nil), d.syncs...)
}

func (d *Disk) noteSync() { d.update(func() { d.syncs = append(d.syncs, time.Now()) }) }

// Bytes returns a copy of n bytes of the medium at off, past every cache.
func (d *Disk) Bytes(off int64, n int) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]byte(nil), d.data[off:off+int64(n)]...)
}

// apply is the medium's side of a write.
func (d *Disk) apply(data []byte, off int64) syscall.Errno {
	d.mu.Lock()
	defer d.mu.Unlock()
	if off < 0 || off+int64(len(data)) > int64(len(d.data)) {
		return syscall.ENOSPC
	}
	index := len(d.history)
	d.history = append(d.history, Write{Off: off, Len: len(data), First: data[0], Arrived: time.Now()})
	d.stall()
	if d.failure != 0 {
		return d.failure
	}
	copy(d.data[off:], data)
	d.history[index].Applied = time.Now()
	return 0
}

// stall waits as long as the test wants it to. Called and returns with mu held.
func (d *Disk) stall() {
	if delay := d.delay; delay > 0 {
		d.mu.Unlock()
		time.Sleep(delay)
		d.mu.Lock()
	}
	d.wait(&d.hold)
}

// wait waits for the end of a holding. Called and returns with mu held.
func (d *Disk) wait(held *bool) {
	d.waiting++
	for *held {
		d.changed.Wait()
	}
	d.waiting--
}

// fetch is the medium's side of a read.
func (d *Disk) fetch(dst []byte, off int64) (int, syscall.Errno) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.wait(&d.reads)
	if d.failure != 0 {
		return 0, d.failure
	}
	if off >= int64(len(d.data)) {
		return 0, 0
	}
	return copy(dst, d.data[off:]), 0
}

// zero is the medium's side of a punched or zeroed range.
func (d *Disk) zero(off, n uint64) syscall.Errno {
	d.mu.Lock()
	defer d.mu.Unlock()
	size := uint64(len(d.data))
	if off > size {
		return 0
	}
	clear(d.data[off:min(size, off+n)])
	return 0
}
