package main

import (
	"fmt"
	"math/bits"
	"os"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

var pageSize = int64(os.Getpagesize())

const (
	paramBasic   = 1 << 0
	paramDiscard = 1 << 1

	attrReadOnly   = 1 << 0
	attrRotational = 1 << 1
	attrWriteCache = 1 << 2
	attrFUA        = 1 << 3

	paramsSize = 8 + 32 + 20
	// maxRange bounds ranges without payload: ring entries have 32 bits for
	// their length in bytes.
	maxRange = 1 << 31
)

// ublkParams is struct ublk_params as far as we set it.
type ublkParams struct {
	attrs             uint32
	logicalShift      uint8
	physicalShift     uint8
	maxSectors        uint32
	sectors           uint64
	discard           bool // the fields below are set
	discardAlignment  uint32
	discardGranule    uint32
	maxDiscardSectors uint32
	maxZeroesSectors  uint32
}

// checkSpec refuses devices that the driver cannot serve, or would serve
// wrongly.
func checkSpec(s *plugin.DeviceSpec) error {
	l := &s.Limits
	switch bs := l.LogicalBlockSize; {
	case bs < blk.SectorSize || bits.OnesCount32(bs) != 1:
		return fmt.Errorf("logical block size %d is no power of two from 512 up: %w", bs, blk.EINVAL)
	case int64(bs) > pageSize:
		return fmt.Errorf("logical block size %d is larger than a page of this host (%d): %w", bs, pageSize, blk.EINVAL)
	case s.Slots < 1 || int64(s.SlotSize) < pageSize || int64(s.SlotSize)%pageSize != 0:
		return fmt.Errorf("%d slots of %d bytes, want whole pages: %w", s.Slots, s.SlotSize, blk.EINVAL)
	case len(s.Arena)/s.SlotSize < s.Slots:
		return fmt.Errorf("arena of %d bytes for %d slots of %d: %w", len(s.Arena), s.Slots, s.SlotSize, blk.EINVAL)
	}
	return checkSize(l.Size, l.LogicalBlockSize)
}

// checkSize refuses sizes, in bytes, that a disk cannot have.
func checkSize(size uint64, block uint32) error {
	switch {
	case size == 0:
		return fmt.Errorf("the device has no size: %w", blk.EINVAL)
	case size%uint64(block) != 0:
		return fmt.Errorf("size %d is no multiple of the logical block size %d: %w", size, block, blk.EINVAL)
	}
	return nil
}

// paramsOf translates limits; maxIO is the driver's buffer size per tag.
func paramsOf(l *blk.Limits, maxIO uint32) ublkParams {
	logical := log2(l.LogicalBlockSize)
	p := ublkParams{
		logicalShift: logical, physicalShift: max(logical, log2(l.PhysicalBlockSize)),
		sectors: l.Size / blk.SectorSize,
	}
	for _, a := range []struct {
		set bool
		bit uint32
	}{{l.ReadOnly, attrReadOnly}, {l.Rotational, attrRotational}, {l.WriteCache, attrWriteCache}, {l.WriteCache && l.FUA, attrFUA}} {
		if a.set {
			p.attrs |= a.bit
		}
	}
	if l.MaxIOSize != 0 {
		maxIO = min(maxIO, l.MaxIOSize)
	}
	p.maxSectors = max(maxIO&^(l.LogicalBlockSize-1), l.LogicalBlockSize) / blk.SectorSize
	if l.ReadOnly || l.MaxDiscard == 0 && l.MaxWriteZeroes == 0 {
		return p
	}
	p.discard = true // the driver wants a granularity, discard or not
	p.discardGranule = max(l.DiscardGranularity, l.LogicalBlockSize)
	p.discardAlignment = l.DiscardAlignment
	p.maxDiscardSectors = rangeSectors(l.MaxDiscard, p.discardGranule)
	p.maxZeroesSectors = rangeSectors(l.MaxWriteZeroes, l.LogicalBlockSize)
	return p
}

// rangeSectors returns the largest range up to n bytes, in sectors, of whole
// units.
func rangeSectors(n uint64, unit uint32) uint32 {
	n = min(n, maxRange)
	if whole := n / uint64(unit) * uint64(unit); whole > 0 {
		n = whole
	}
	return uint32(n / blk.SectorSize)
}

// log2 returns the logarithm of the power of two at or below n; n counts as a
// sector at least.
func log2(n uint32) uint8 { return uint8(bits.Len32(max(n, blk.SectorSize)) - 1) }

// encodeInto writes struct ublk_params into b.
func (p *ublkParams) encodeInto(b []byte) {
	clear(b[:paramsSize])
	types := uint32(paramBasic)
	if p.discard {
		types |= paramDiscard
	}
	native.PutUint32(b[0:], paramsSize)
	native.PutUint32(b[4:], types)
	basic := b[8:]
	native.PutUint32(basic[0:], p.attrs)
	basic[4], basic[5] = p.logicalShift, p.physicalShift
	basic[6], basic[7] = p.physicalShift, p.physicalShift // optimal and minimal I/O size
	native.PutUint32(basic[8:], p.maxSectors)
	native.PutUint64(basic[16:], p.sectors)
	if !p.discard {
		return
	}
	d := b[40:]
	native.PutUint32(d[0:], p.discardAlignment)
	native.PutUint32(d[4:], p.discardGranule)
	native.PutUint32(d[8:], p.maxDiscardSectors)
	native.PutUint32(d[12:], p.maxZeroesSectors)
	if p.maxDiscardSectors > 0 {
		native.PutUint16(d[16:], 1) // segments of a discard
	}
}

// sizeIn returns the size of a device in bytes from struct ublk_params.
func sizeIn(b []byte) uint64 { return native.Uint64(b[24:]) * blk.SectorSize }
