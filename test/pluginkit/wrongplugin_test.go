package pluginkit

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/fence"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
)

// faultKey is the variable that makes this test program a storage plugin, and names what
// is wrong with it: a key of faults, or "none".
const faultKey = "RNBD_TEST_FAULT"

// wrong is a plugin on files that does everything right but one thing. Its I/O goes through
// the page cache, and each queue has threads enough for a medium that hangs.
type wrong struct {
	fault string
	first *os.File // disk that was opened first
	opens atomic.Int32
	used  [][]byte // memory that is never freed
	files []*os.File
	mu    sync.Mutex

	disks  map[uint32]*wrongDisk
	arenas map[uint32][]byte
}

func newWrong(fault string) *wrong {
	return &wrong{fault: fault, disks: map[uint32]*wrongDisk{}, arenas: map[uint32][]byte{}}
}

// is reports whether the plugin has a fault.
func (b *wrong) is(fault string) bool { return b.fault == fault }

func (b *wrong) Describe() plugin.Info {
	i := plugin.Info{Name: "wrong", Version: "1.0", Crash: plugin.KeepsAcknowledged, Names: plugin.NamesPath, Matches: plugin.RegularFiles}
	switch {
	case b.is("has no version"):
		i.Version = ""
	case b.is("has an unknown crash class"):
		i.Crash = 7
	}
	return i
}

func (b *wrong) Configure(settings map[string]string) error {
	if b.is("dies of SIGTERM") {
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		go func() { <-c; os.Exit(1) }()
	}
	for k := range settings {
		if !b.is("takes any setting") {
			return fmt.Errorf("unknown setting %q: %w", k, blk.EINVAL)
		}
	}
	return nil
}

// wrongDisk is an open disk.
type wrongDisk struct {
	b      *wrong
	index  uint32
	f      *os.File
	fd     int
	size   atomic.Int64
	writes bool

	mu      sync.Mutex
	pending map[uint64][]byte // sectors that are written at the next flush
}

func (b *wrong) Open(ctx context.Context, r plugin.OpenRequest) (plugin.Disk, error) {
	if err := b.beforeOpen(); err != nil {
		return nil, err
	}
	defer b.opens.Add(-1)
	if b.is("opens one disk at a time") {
		time.Sleep(5 * time.Millisecond)
	}
	flags := os.O_RDONLY
	if !r.ReadOnly {
		flags = os.O_RDWR
	}
	f, err := r.Reopen(flags)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("not a file: %w", blk.EINVAL)
	}
	if err == nil {
		err = b.lock(ctx, f, r)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	d := &wrongDisk{b: b, f: f, fd: int(f.Fd()), writes: !r.ReadOnly, pending: map[uint64][]byte{}}
	d.size.Store(st.Size())
	if b.is("has one file for all disks") && !r.ReadOnly {
		b.mu.Lock()
		if b.first == nil {
			b.first = f
		}
		d.fd = int(b.first.Fd())
		b.mu.Unlock()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.disks[r.Device], d.index = d, r.Device
	return d, nil
}

// beforeOpen has the faults of opens.
func (b *wrong) beforeOpen() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.opens.Add(1) > 1 && b.is("opens one disk at a time"):
		b.opens.Add(-1)
		return blk.EBUSY
	case b.is("leaks a descriptor with each open"):
		f, _ := os.Open("/dev/null")
		b.files = append(b.files, f)
	case b.is("leaks memory with each open"):
		m := make([]byte, 256<<10)
		for i := range m {
			m[i] = 1
		}
		b.used = append(b.used, m)
	case b.is("leaks a thread with each open"):
		go func() {
			runtime.LockOSThread()
			time.Sleep(time.Hour)
		}()
	case b.is("reads a file elsewhere"):
		if _, err := os.ReadFile("/etc/hostname"); err != nil {
			return err
		}
	}
	return nil
}

// lock takes the fence: slot 0 for a writer, one of its own for a reader.
func (b *wrong) lock(ctx context.Context, f *os.File, r plugin.OpenRequest) error {
	slot := uint32(0)
	if r.ReadOnly && !b.is("makes readers wait") {
		slot = 16 + 2*r.Device
	}
	switch {
	case b.is("has no fence"):
		return nil
	case b.is("takes the fence after its answer"):
		go func() { _ = fence.Lock(context.Background(), f, slot) }()
		return nil
	case b.is("has a lock elsewhere") && !r.ReadOnly:
		return lockAt(ctx, f, 0)
	case b.is("fails where it should wait") && !r.ReadOnly:
		if free, err := fence.Free(f); err != nil || !free {
			return blk.EBUSY
		}
	}
	return fence.Lock(ctx, f, slot)
}

// lockAt waits for a lock of the description of f on the byte at off.
func lockAt(ctx context.Context, f *os.File, off int64) error {
	for ctx.Err() == nil {
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: off, Len: 1}
		if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &l); err == nil {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
	return ctx.Err()
}

func (d *wrongDisk) Limits() blk.Limits {
	l := blk.Limits{Size: uint64(d.size.Load()), LogicalBlockSize: 512, FUA: true, WriteCache: true,
		MaxDiscard: 1 << 30, DiscardGranularity: 512, MaxWriteZeroes: 1 << 30}
	switch {
	case d.b.is("has physical blocks below the logical ones"):
		l.PhysicalBlockSize = 256
	case d.b.is("offers what it cannot do"):
		l.SecureErase = true
	case d.b.is("says it has no cache"):
		l.WriteCache = false
	}
	return l
}

func (d *wrongDisk) Close() error {
	if d.b.is("forgets the first block at close") && d.writes {
		_, _ = unix.Pwrite(d.fd, make([]byte, 512), 0)
	}
	d.b.mu.Lock()
	defer d.b.mu.Unlock()
	if d.b.disks[d.index] == d {
		delete(d.b.disks, d.index)
	}
	if d.b.first == d.f {
		d.b.first = nil
	}
	return d.f.Close()
}

func (d *wrongDisk) Resize(context.Context) (blk.Limits, error) {
	st, err := d.f.Stat()
	if err == nil && !d.b.is("resizes to the old size") {
		d.size.Store(st.Size())
	}
	return d.Limits(), err
}

func (d *wrongDisk) Extents(_ context.Context, off, n uint64) ([]extents.Extent, error) {
	switch {
	case d.b.is("keeps writes to itself"):
		return nil, blk.EOPNOTSUPP
	case d.b.is("says all is a hole"):
		return []extents.Extent{{Len: n, Hole: true}}, nil
	case d.b.is("lists more than it was asked"):
		return []extents.Extent{{Len: n + 512}}, nil
	}
	data, err := unix.Seek(d.fd, int64(off), unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return []extents.Extent{{Len: n, Hole: true}}, nil
	}
	if err != nil || uint64(data)&^511 <= off {
		return []extents.Extent{{Len: n}}, nil
	}
	return []extents.Extent{{Len: min(n, uint64(data)&^511-off), Hole: true}}, nil
}

// wrongQueue hands requests to threads.
type wrongQueue struct {
	*plugin.Queue
	b        *wrong
	requests chan plugin.Request
	batch    [64]plugin.Request
	single   int // batches of one request
}

func (b *wrong) Serve(q *plugin.Queue) error {
	if rawFaults[b.fault] {
		return b.serveRaw(q)
	}
	p, err := pump.New(pump.Config{Name: "wrong", CPU: -1})
	if err != nil {
		return err
	}
	source := &wrongQueue{Queue: q, b: b, requests: make(chan plugin.Request, q.Depth())}
	if err := p.Add(source); err != nil {
		return err
	}
	var running sync.WaitGroup
	threads := 64
	if b.is("stops where one disk hangs") {
		threads = 1
	}
	for range threads {
		running.Go(func() {
			for r := range source.requests {
				errno := r.Disk.(*wrongDisk).carryOut(&r)
				p.Do(func() { q.Complete(r.Tag, errno) })
			}
		})
	}
	err = p.Run(q.Closed)
	close(source.requests)
	running.Wait()
	if b.is("ends with status 3") {
		os.Exit(3)
	}
	return err
}

func (q *wrongQueue) Poll() int {
	n := q.Next(q.batch[:])
	for _, r := range q.batch[:n] {
		q.requests <- r
	}
	if n == 1 {
		q.single++
	} else if n > 1 {
		q.single = 0
	}
	if n == 1 && q.single == 2500 && q.b.is("oversleeps") {
		time.Sleep(7 * time.Second)
	}
	q.Publish()
	return n
}
