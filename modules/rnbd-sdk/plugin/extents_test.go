package plugin

import (
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
)

// mapped is a Backend with disks of 1 MiB that know of their holes.
type mapped struct {
	*memory
	disk mapDisk
}

type mapDisk struct {
	list   []extents.Extent
	err    error
	gate   chan struct{} // not nil: calls return when it is closed, or their context ends if they heed it
	heeds  bool
	calls  atomic.Int32
	inside atomic.Int32 // calls that have not returned

	mu     sync.Mutex
	off, n uint64
	early  bool // closed while a call was inside
	closed int
}

func (b *mapped) Open(context.Context, OpenRequest) (Disk, error) { return &b.disk, nil }

func (d *mapDisk) Limits() blk.Limits { return blk.Limits{Size: 1 << 20, LogicalBlockSize: 512} }

func (d *mapDisk) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed++
	d.early = d.early || d.inside.Load() > 0
	return nil
}

func (d *mapDisk) Extents(ctx context.Context, off, n uint64) ([]extents.Extent, error) {
	defer d.enter()()
	d.mu.Lock()
	d.off, d.n = off, n
	d.mu.Unlock()
	if err := d.wait(ctx); err != nil {
		return nil, err
	}
	return d.list, d.err
}

func (d *mapDisk) Resize(ctx context.Context) (blk.Limits, error) {
	defer d.enter()()
	return d.Limits(), d.wait(ctx)
}

func (d *mapDisk) enter() (leave func()) {
	d.calls.Add(1)
	d.inside.Add(1)
	return func() { d.inside.Add(-1) }
}

func (d *mapDisk) wait(ctx context.Context) error {
	if d.gate == nil {
		return nil
	}
	ended := ctx.Done()
	if !d.heeds {
		ended = nil
	}
	select {
	case <-d.gate:
		return nil
	case <-ended:
		return ctx.Err()
	}
}

func data(n uint64) extents.Extent { return extents.Extent{Len: n} }
func hole(n uint64) extents.Extent { return extents.Extent{Len: n, Hole: true} }

func (d *mapDisk) closes() (n int, early bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.closed, d.early
}

// startMapped runs b in this process, with its disk open as device 1.
func startMapped(t *testing.T, b *mapped) *Process {
	t.Helper()
	p := inProcessT(t, b)
	if _, err := p.OpenDisk(testContext(t), OpenRequest{Device: 1, Name: "d"}); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestProcess_Extents(t *testing.T) {
	b := &mapped{memory: newMemory()}
	p := startMapped(t, b)
	const n = 256 << 10
	type list = []extents.Extent
	most := make(list, extents.Max)
	for i := range most {
		most[i] = extents.Extent{Len: 512, Hole: i%2 == 1}
	}
	for _, test := range []struct {
		name       string
		says, want list // want nil: malformed
	}{
		{"all of it", list{data(4096), hole(n - 4096)}, list{data(4096), hole(n - 4096)}},
		{"less than was asked for", list{hole(512)}, list{hole(512)}},
		{"as many as there may be", most, most},
		{"neighbours of one kind are joined", list{hole(512), hole(1024), data(512)}, list{hole(1536), data(512)}},
		{"nothing", nil, nil},
		{"more than there may be", append(slices.Clone(most), hole(512)), nil},
		{"an empty extent", list{hole(512), data(0)}, nil},
		{"half a sector", list{hole(256)}, nil},
		{"one that is too long", list{hole(n + 512)}, nil},
		{"all together too long", list{hole(n), data(512)}, nil},
		{"a sum that overflows", list{hole(512), data(math.MaxUint64 - 511)}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			b.disk.list = test.says
			got, err := p.Extents(testContext(t), 1, 4096, n)
			if test.want == nil {
				if err == nil || blk.ToErrno(err) != blk.EIO {
					t.Errorf("%v, error %v, want EIO", got, err)
				}
			} else if err != nil || !slices.Equal(got, test.want) {
				t.Errorf("%d ranges %.100v, error %v, want %d: %.100v", len(got), got, err, len(test.want), test.want)
			}
		})
	}
	if b.disk.off != 4096 || b.disk.n != n {
		t.Errorf("asked for %d bytes at %d", b.disk.n, b.disk.off)
	}
}

func TestProcess_ExtentsThatAreRefused(t *testing.T) {
	b := &mapped{memory: newMemory()}
	b.disk.list = []extents.Extent{data(512)}
	p := startMapped(t, b)
	ask := func(p *Process, device uint32, off, n uint64) error {
		_, err := p.Extents(testContext(t), device, off, n)
		return err
	}
	b.disk.err = syscall.ENOMEM
	failed := ask(p, 1, 0, 512)
	b.disk.err = nil
	calls := b.disk.calls.Load()
	ignorant := inProcessT(t, newMemory())
	if _, err := ignorant.OpenDisk(testContext(t), OpenRequest{Device: 1, Name: "d"}); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		err  error
		want blk.Errno
	}{
		"the errno of the plugin":            {failed, blk.ENOMEM},
		"a disk that is not open":            {ask(p, 2, 0, 512), blk.ENODEV},
		"nothing is asked for":               {ask(p, 1, 0, 0), blk.EINVAL},
		"begins within a sector":             {ask(p, 1, 256, 512), blk.EINVAL},
		"ends within a sector":               {ask(p, 1, 0, 768), blk.EINVAL},
		"begins behind the end":              {ask(p, 1, 1<<20, 512), blk.EIO},
		"ends behind the end":                {ask(p, 1, 512, 1<<20), blk.EIO},
		"overflows":                          {ask(p, 1, math.MaxUint64-511, 1024), blk.EIO},
		"a disk that knows nothing of holes": {ask(ignorant, 1, 0, 512), blk.EOPNOTSUPP},
	} {
		if test.err == nil || blk.ToErrno(test.err) != test.want {
			t.Errorf("%s: %v, want %v", name, test.err, test.want)
		}
	}
	if n := b.disk.calls.Load(); n != calls {
		t.Errorf("the disk was asked %d times by these", n-calls)
	}
}

// oldStorage answers as a plugin that was built before there was Extents.
type oldStorage struct{ pluginpb.StorageClient }

func (oldStorage) Extents(context.Context, *pluginpb.ExtentsRequest, ...grpc.CallOption) (*pluginpb.ExtentsResponse, error) {
	return nil, status.Error(codes.Unimplemented, "unknown method Extents")
}

func TestProcess_ExtentsOfAnOlderPlugin(t *testing.T) {
	p := startMapped(t, &mapped{memory: newMemory()})
	p.disks = oldStorage{p.disks}
	if _, err := p.Extents(testContext(t), 1, 0, 512); blk.ToErrno(err) != blk.EOPNOTSUPP {
		t.Errorf("%v, want EOPNOTSUPP", err)
	}
}

// Disks that hang do not take up the threads of the process.
func TestProcess_ExtentsAreBounded(t *testing.T) {
	b := &mapped{memory: newMemory()}
	b.disk.gate, b.disk.heeds = make(chan struct{}), true
	p := startMapped(t, b)
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	for i := range uint32(maxMaps) {
		if _, err := p.OpenDisk(testContext(t), OpenRequest{Device: 2 + i, Name: "d"}); err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = p.Extents(ctx, 2+i, 0, 512) }()
	}
	if !eventually(func() bool { return b.disk.inside.Load() == maxMaps }) {
		t.Fatalf("%d calls run", b.disk.inside.Load())
	}
	if _, err := p.Extents(testContext(t), 1, 0, 512); blk.ToErrno(err) != blk.EBUSY {
		t.Errorf("one more: %v, want EBUSY", err)
	}
}
