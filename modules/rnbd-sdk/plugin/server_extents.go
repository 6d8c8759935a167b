package plugin

import (
	"context"
	"fmt"

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
