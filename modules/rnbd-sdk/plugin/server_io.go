package plugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// ioServer is the control path of an io plugin.
type ioServer struct {
	pluginpb.UnimplementedStorageServer
	*server
	b     Backend
	disks table[device]

	opening sync.Map     // indices with an Open under way; it may hang
	maps    atomic.Int32 // Extents under way
}

func (s *ioServer) register(g grpc.ServiceRegistrar) { pluginpb.RegisterStorageServer(g, s) }

func (s *ioServer) newWorker(pump int, ring *shm.Ring) *worker {
	q := newQueue(pump, ring, &s.disks, &s.arenas)
	return &worker{
		asks:  &q.asks,
		idle:  q.idle,
		uses:  q.usesArena,
		serve: func() error { return s.b.Serve(q) },
		disk:  q.usesDisk,
	}
}

// arenaBusy returns nil: the queues check it.
func (s *ioServer) arenaBusy(uint32) error { return nil }

func (s *ioServer) OpenDisk(ctx context.Context, r *pluginpb.OpenDiskRequest) (*pluginpb.OpenDiskResponse, error) {
	opened, err := s.open(ctx, r)
	if err != nil {
		return nil, fmt.Errorf("open disk %q: %w", r.GetName(), err)
	}
	return &pluginpb.OpenDiskResponse{Limits: limitsToPB(opened.Limits), Verifier: opened.Verifier}, nil
}

func (s *ioServer) open(ctx context.Context, r *pluginpb.OpenDiskRequest) (OpenedDisk, error) {
	f, err := s.takeFile(ctx, r)
	if err != nil {
		return OpenedDisk{}, err
	}
	if f != nil {
		defer f.Close()
	}
	if s.disks.get(r.GetDevice()) != nil {
		return OpenedDisk{}, fmt.Errorf("index %d is in use: %w", r.GetDevice(), blk.EEXIST)
	}
	if _, busy := s.opening.LoadOrStore(r.GetDevice(), true); busy {
		return OpenedDisk{}, fmt.Errorf("index %d is being opened: %w", r.GetDevice(), blk.EBUSY)
	}
	defer s.opening.Delete(r.GetDevice())
	disk, err := s.b.Open(ctx, OpenRequest{
		Device: r.GetDevice(), Name: r.GetName(), Mode: blk.AccessMode(r.GetMode()),
		ReadOnly: r.GetReadOnly(), File: f, Generation: r.GetGeneration(),
	})
	if err != nil {
		return OpenedDisk{}, err
	}
	opened, err := s.add(ctx, r, disk)
	if err != nil {
		return OpenedDisk{}, errors.Join(err, disk.Close())
	}
	return opened, nil
}

// takeFile returns the O_PATH descriptor, nil for opaque names.
func (s *ioServer) takeFile(ctx context.Context, r *pluginpb.OpenDiskRequest) (*os.File, error) {
	if r.GetToken() == 0 {
		if s.info.Names == NamesPath {
			return nil, fmt.Errorf("%s wants a descriptor: %w", s.info.Name, blk.EINVAL)
		}
		return nil, nil
	}
	fds, err := s.fds.take(ctx, r.GetToken(), 1)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fds[0]), r.GetName()), nil
}

// add puts an opened disk into the table, where requests find it.
func (s *ioServer) add(ctx context.Context, r *pluginpb.OpenDiskRequest, disk Disk) (OpenedDisk, error) {
	d, err := newDevice(disk, disk.Limits(), &root{readOnly: r.GetReadOnly(), stats: s.newStats()})
	if err != nil {
		return OpenedDisk{}, err
	}
	opened := OpenedDisk{Limits: d.limits}
	if v, ok := disk.(Verifying); ok {
		opened.Verifier = v.Verifier()
	}
	if len(opened.Verifier) > MaxVerifier {
		return OpenedDisk{}, fmt.Errorf("verifier of %d bytes, at most %d are possible: %w", len(opened.Verifier), MaxVerifier, blk.EINVAL)
	}
	if ctx.Err() != nil { // the caller is gone and would never close it
		return OpenedDisk{}, context.Cause(ctx)
	}
	return opened, s.disks.add(r.GetDevice(), d)
}

func newDevice(disk Disk, l blk.Limits, r *root) (*device, error) {
	l.ReadOnly = l.ReadOnly || r.readOnly
	if err := checkLimits(&l); err != nil {
		return nil, fmt.Errorf("%w: %w", err, blk.EINVAL)
	}
	return &device{disk: disk, limits: l, root: r}, nil
}

func (s *ioServer) CloseDisk(ctx context.Context, r *pluginpb.CloseDiskRequest) (*pluginpb.CloseDiskResponse, error) {
	if err := s.closeDisk(ctx, r.GetDevice()); err != nil {
		return nil, fmt.Errorf("close disk %d: %w", r.GetDevice(), err)
	}
	return &pluginpb.CloseDiskResponse{}, nil
}

func (s *ioServer) closeDisk(ctx context.Context, index uint32) error {
	d := s.disks.get(index)
	for d != nil && !s.disks.swap(index, d, nil) {
		d = s.disks.get(index) // it has been resized
	}
	if d == nil {
		return fmt.Errorf("not open: %w", blk.ENODEV)
	}
	for _, w := range s.queues() {
		if err := w.asks.wait(ctx, func() bool { return !w.disk(d.root) }); err != nil {
			_ = s.disks.add(index, d)
			return fmt.Errorf("requests in flight: %w", err)
		}
	}
	if err := d.root.stop(ctx); err != nil {
		_ = s.disks.add(index, d)
		return err
	}
	return d.disk.Close()
}

func (s *ioServer) ResizeDisk(ctx context.Context, r *pluginpb.ResizeDiskRequest) (*pluginpb.ResizeDiskResponse, error) {
	limits, err := s.resize(ctx, r.GetDevice())
	if err != nil {
		return nil, fmt.Errorf("resize disk %d: %w", r.GetDevice(), err)
	}
	return &pluginpb.ResizeDiskResponse{Limits: limitsToPB(limits)}, nil
}

func (s *ioServer) resize(ctx context.Context, index uint32) (blk.Limits, error) {
	d := s.disks.get(index)
	if d == nil {
		return blk.Limits{}, fmt.Errorf("not open: %w", blk.ENODEV)
	}
	rs, ok := d.disk.(Resizer)
	if !ok {
		return blk.Limits{}, fmt.Errorf("%s cannot resize: %w", s.info.Name, blk.EOPNOTSUPP)
	}
	ctx, end, err := d.root.sizes.begin(ctx)
	if err != nil {
		return blk.Limits{}, err
	}
	defer end()
	l, err := rs.Resize(ctx)
	if err != nil {
		return blk.Limits{}, err
	}
	next, err := newDevice(d.disk, l, d.root)
	if err != nil {
		return blk.Limits{}, err
	}
	if !s.disks.swap(index, d, next) {
		return blk.Limits{}, fmt.Errorf("closed or resized meanwhile: %w", blk.EBUSY)
	}
	return next.limits, nil
}

func (s *ioServer) eachStats(f func(uint32, deviceStats)) {
	s.disks.each(func(index uint32, d *device) { f(index, d.root.stats) })
}

// closeAll is called when no queue is served any more. A disk in use by Extents or
// Resize when ctx ends stays open.
func (s *ioServer) closeAll(ctx context.Context) error {
	var all error
	for index, d := range s.disks.take() {
		err := d.root.stop(ctx)
		if err == nil {
			err = d.disk.Close()
		}
		if err != nil {
			all = errors.Join(all, fmt.Errorf("close disk %d: %w", index, err))
		}
	}
	return all
}
