package main

import (
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

const (
	// maxBlock is the largest logical block of a disk, in bytes.
	maxBlock = 4096
	// maxRange is the longest trim or range of zeroes, in bytes.
	maxRange = 1 << 30
)

// limitsOf translates the announcement of a server. The errno is EINVAL for an export
// that is no disk.
func limitsOf(e *nbdwire.Export, readOnly bool) (blk.Limits, error) {
	block := max(blk.SectorSize, e.MinBlock)
	if block > maxBlock {
		return blk.Limits{}, fmt.Errorf("the server takes blocks of %d bytes only, the most is %d; nbdkit's blocksize filter divides them: %w", block, maxBlock, blk.EINVAL)
	}
	size := e.Size &^ (uint64(block) - 1)
	if size == 0 || size > 1<<63-1 {
		return blk.Limits{}, fmt.Errorf("the export has %d bytes: %w", e.Size, blk.EINVAL)
	}
	l := blk.Limits{
		Size: size, LogicalBlockSize: block, PhysicalBlockSize: physicalBlock(e, block),
		MaxIOSize:  max(min(e.MaxPayload, nbdwire.MaxPayload)&^(block-1), block),
		WriteCache: e.Flags&nbdwire.SendFlush != 0, FUA: e.Flags&nbdwire.SendFUA != 0,
		Rotational: e.Flags&nbdwire.Rotational != 0,
		ReadOnly:   readOnly || e.Flags&nbdwire.ReadOnly != 0,
	}
	if e.Flags&nbdwire.SendTrim != 0 && !l.ReadOnly {
		l.MaxDiscard, l.DiscardGranularity = maxRange, l.PhysicalBlockSize
	}
	if e.Flags&nbdwire.SendWriteZeroes != 0 && !l.ReadOnly {
		l.MaxWriteZeroes = maxRange
	}
	return l, nil
}

// physicalBlock is the preferred block of the server, if it is a power of two.
func physicalBlock(e *nbdwire.Export, block uint32) uint32 {
	if p := e.PreferredBlock; p > block && p&(p-1) == 0 {
		return p
	}
	return block
}

// stillServes reports by an error whether a new connection can carry requests within the
// limits l.
func stillServes(l *blk.Limits, e *nbdwire.Export, readOnly bool) error {
	now, err := limitsOf(e, readOnly)
	switch {
	case err != nil:
		return err
	case now.Size < l.Size:
		return fmt.Errorf("the export has shrunk from %d to %d bytes", l.Size, now.Size)
	case now.LogicalBlockSize > l.LogicalBlockSize || now.MaxIOSize < l.MaxIOSize:
		return fmt.Errorf("the server takes other block sizes than before")
	case now.ReadOnly && !l.ReadOnly, now.MaxDiscard < l.MaxDiscard, now.MaxWriteZeroes < l.MaxWriteZeroes,
		l.FUA && !now.FUA, l.WriteCache != now.WriteCache:
		return fmt.Errorf("the server offers other operations than before (transmission flags %#x)", e.Flags)
	}
	return nil
}

// toErrno translates the error of a reply. Numbers that NBD does not define are EIO.
func toErrno(code uint32) blk.Errno {
	switch e := blk.Errno(code); e {
	case blk.EPERM, blk.EIO, blk.ENOMEM, blk.EINVAL, blk.ENOSPC, blk.EOPNOTSUPP:
		if uint32(e) == code {
			return e
		}
	}
	const overflow = 75 // EOVERFLOW
	if code == overflow {
		return blk.EINVAL
	}
	return blk.EIO
}
