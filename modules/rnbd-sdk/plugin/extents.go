package plugin

import (
	"context"
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
)

// Extents asks the plugin what of n bytes from byte off on holds data. The list
// begins at off, and may end before n bytes; no two neighbours are of one kind. The
// error is EOPNOTSUPP if the plugin does not know, EBUSY while it has not answered an
// earlier call about the disk, EIO if its answer is malformed.
func (p *Process) Extents(ctx context.Context, device uint32, off, n uint64) ([]extents.Extent, error) {
	what := fmt.Sprintf("extents of disk %d", device)
	resp, err := p.disks.Extents(ctx, &pluginpb.ExtentsRequest{Device: device, Offset: off, Length: n})
	if err != nil {
		return nil, p.failed(what, err)
	}
	list, err := extentsFromPB(resp.GetExtents(), n)
	if err != nil {
		return nil, fmt.Errorf("%s: %s %q gives a malformed answer: %w", what, p.c.Kind, p.c.Name, err)
	}
	return list, nil
}

// extentsFromPB checks a plugin's list about n bytes, and joins neighbours of one
// kind.
func extentsFromPB(all []*pluginpb.Extent, n uint64) ([]extents.Extent, error) {
	if len(all) == 0 || len(all) > extents.Max {
		return nil, fmt.Errorf("%d extents, want 1 to %d: %w", len(all), extents.Max, blk.EIO)
	}
	list := make([]extents.Extent, 0, len(all))
	for i, e := range all {
		size := e.GetLength()
		if size == 0 || size%blk.SectorSize != 0 || size > n {
			return nil, fmt.Errorf("extent %d has %d bytes, %d are left: %w", i, size, n, blk.EIO)
		}
		n -= size
		list, _ = extents.Add(list, size, e.GetHole()) // there are not more than Max
	}
	return list, nil
}
