package main

import (
	"context"
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// Extents asks the server for the state of the blocks.
func (d *disk) Extents(ctx context.Context, off, n uint64) ([]extents.Extent, error) {
	var block uint64
	known := false
	d.hub.pump.Call(func() {
		block = uint64(d.limits.LogicalBlockSize)
		known = len(d.conns) > 0 && d.conns[0].export.Allocation
	})
	if !known {
		return nil, fmt.Errorf("the server does not tell what holds data: %w", blk.EOPNOTSUPP)
	}
	start := off &^ (block - 1)
	end := min(off+n, start+maxRange)
	k := &call{command: nbdwire.CmdBlockStatus, off: start, n: uint32((end - start + block - 1) &^ (block - 1))}
	if err := d.wait(ctx, nil, k); err != nil {
		return nil, fmt.Errorf("ask the server what holds data: %w", err)
	}
	list := allocation(k.entries, start, off, end)
	if len(list) == 0 {
		return nil, fmt.Errorf("the server tells of no extent at %d: %w", off, blk.EIO)
	}
	return list, nil
}

// allocation translates the entries of a reply about start to a list about the bytes from
// off to end. A range is a hole if it is not allocated and reads as zeroes. Bounds within
// a sector move so that data grow.
func allocation(entries []byte, start, off, end uint64) (list []extents.Extent) {
	const sector = blk.SectorSize - 1
	at, pos := off, start
	for ; len(entries) >= nbdwire.StatusEntrySize && at < end; entries = entries[nbdwire.StatusEntrySize:] {
		n, flags := nbdwire.StatusEntry(entries)
		begin := pos
		pos += uint64(n)
		hole := flags&(nbdwire.StateHole|nbdwire.StateZero) == nbdwire.StateHole|nbdwire.StateZero
		until := (pos + sector) &^ sector
		if hole {
			until = pos &^ sector
		}
		until = min(until, end)
		if until <= at {
			continue
		}
		ok := false
		if list, ok = extents.Add(list, until-at, hole && at >= begin); !ok {
			break
		}
		at = until
	}
	return list
}
