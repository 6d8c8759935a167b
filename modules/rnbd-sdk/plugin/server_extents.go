package plugin

import (
	"context"
	"fmt"
	"sync"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
)

// maxMaps bounds the Extents of a process that run at once: each may occupy a thread.
const maxMaps = 64

func (s *ioServer) Extents(ctx context.Context, r *pluginpb.ExtentsRequest) (*pluginpb.ExtentsResponse, error) {
	list, err := s.extents(ctx, r.GetDevice(), r.GetOffset(), r.GetLength())
	if err != nil {
		return nil, fmt.Errorf("extents of disk %d: %w", r.GetDevice(), err)
	}
	resp := &pluginpb.ExtentsResponse{}
	for _, e := range list {
		resp.Extents = append(resp.Extents, &pluginpb.Extent{Length: e.Len, Hole: e.Hole})
	}
	return resp, nil
}

func (s *ioServer) extents(ctx context.Context, index uint32, off, n uint64) ([]extents.Extent, error) {
	d := s.disks.get(index)
	if d == nil {
		return nil, fmt.Errorf("not open: %w", blk.ENODEV)
	}
	m, ok := d.disk.(Mapper)
	if !ok {
		return nil, fmt.Errorf("%s knows of no holes: %w", s.info.Name, blk.EOPNOTSUPP)
	}
	if n == 0 || (off|n)%blk.SectorSize != 0 {
		return nil, fmt.Errorf("%d bytes at %d, want whole sectors: %w", n, off, blk.EINVAL)
	}
	if size := d.limits.Size; n > size || off > size-n {
		return nil, fmt.Errorf("%d bytes at %d are beyond the end at %d: %w", n, off, size, blk.EIO)
	}
	if s.maps.Add(1) > maxMaps {
		s.maps.Add(-1)
		return nil, fmt.Errorf("%d other disks do not answer: %w", maxMaps, blk.EBUSY)
	}
	defer s.maps.Add(-1)
	ctx, end, err := d.root.maps.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	return m.Extents(ctx, off, n)
}

// mapUse lets one Extents of a disk run at a time, and none while the disk closes.
// A disk that hangs takes up one goroutine, and stays open.
type mapUse struct {
	mu      sync.Mutex
	cancel  context.CancelFunc // of the call that runs; nil: none does
	ended   chan struct{}      // closed when it has returned
	closing bool
}

// begin admits a call. The context that it returns ends with end, too, and when the
// disk is to be closed.
func (u *mapUse) begin(ctx context.Context) (_ context.Context, end func(), err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.closing:
		return nil, nil, fmt.Errorf("is being closed: %w", blk.ENODEV)
	case u.cancel != nil:
		return nil, nil, fmt.Errorf("an earlier call has not returned: %w", blk.EBUSY)
	}
	ctx, u.cancel = context.WithCancel(ctx)
	u.ended = make(chan struct{})
	return ctx, u.end, nil
}

func (u *mapUse) end() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.cancel()
	u.cancel = nil
	close(u.ended)
}

// stop keeps calls out, and returns when none runs. After an error they are let in
// again: the disk stays open.
func (u *mapUse) stop(ctx context.Context) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.closing = true
	if u.cancel == nil {
		return nil
	}
	u.cancel()
	ended := u.ended
	u.mu.Unlock()
	var err error
	select {
	case <-ended:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	u.mu.Lock()
	if err != nil {
		u.closing = false
		return fmt.Errorf("its list of extents is still being made: %w", err)
	}
	return nil
}
