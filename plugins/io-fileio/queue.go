package main

// DATA PATH. Plan translates a request into an operation on the file; package
// diskio runs it: ring -> Plan -> page cache inline, or io_uring -> answer.

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/diskio"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

var _ diskio.Planner = (*fileDisk)(nil)

// Plan returns the step that runs r on one of the file's two descriptions. r is
// within the limits.
func (d *fileDisk) Plan(r *plugin.Request) diskio.Step {
	switch r.Op {
	case blk.Read:
		return d.planRead(r)
	case blk.Write:
		return d.planWrite(r)
	case blk.Flush:
		return diskio.Step{Op: uring.Fdatasync, FD: d.cachedFD, Inline: d.inlineMemory()}
	case blk.Discard:
		if d.splitsPage(r) || d.noPunch.Load() {
			return diskio.Step{Op: uring.Nop} // a discard is advice
		}
		return diskio.Step{Op: uring.PunchHole, FD: d.cachedFD}
	default: // WriteZeroes; SecureErase is not among our limits
		return d.planZeroes(r)
	}
}

// planRead reads cached data inline and anything else by the engine.
func (d *fileDisk) planRead(r *plugin.Request) diskio.Step {
	s := diskio.Step{Op: uring.Pread, FD: d.cachedFD, Inline: diskio.InlineCached}
	if end, length := r.Off+uint64(r.Len), d.length.Load(); end > length && end-length < blk.SectorSize {
		s.Padding = uint32(end - length)
	}
	if d.memory {
		s.Inline = diskio.InlineMemory
	} else if d.blocks || d.noNowait.Load() {
		s.Inline, s.Blocks = diskio.InlineNo, d.blocks
	}
	return s
}

// planWrite writes past the page cache if r is aligned, else through it and on
// to the device.
func (d *fileDisk) planWrite(r *plugin.Request) diskio.Step {
	mask := uint64(d.align.offset) - 1
	if d.direct == nil || (r.Off|uint64(r.Len))&mask != 0 || !diskio.Aligned(r.Buf, d.align.memory) {
		return d.planCachedWrite(r)
	}
	s := diskio.Step{Op: uring.Pwrite, FD: d.directFD, Align: d.align.offset, MemAlign: d.align.memory, Blocks: d.blocks}
	switch {
	case r.Flags&blk.FUA == 0:
	case d.noDsync:
		s.Sync = true
	default:
		s.RWFlags = unix.RWF_DSYNC
	}
	return s
}

// planCachedWrite leaves nothing dirty where direct writes come after it.
func (d *fileDisk) planCachedWrite(r *plugin.Request) diskio.Step {
	s := diskio.Step{Op: uring.Pwrite, FD: d.cachedFD, Inline: d.inlineMemory(), Blocks: d.blocks}
	if d.direct != nil || r.Flags&blk.FUA != 0 {
		s.RWFlags = unix.RWF_DSYNC
	}
	return s
}

// pageMask has the bits of an offset within a page of the page cache.
var pageMask = uint64(os.Getpagesize()) - 1

// splitsPage reports whether r begins or ends within a page of a block device.
// The kernel discards such a range without regard to a write of the rest of the
// page: if that write has read the page before, it brings the old bytes back.
// Such a discard does nothing instead, and zeroes are written.
func (d *fileDisk) splitsPage(r *plugin.Request) bool {
	return d.device && (r.Off|uint64(r.Len))&pageMask != 0
}

// planZeroes chooses the best operation that the kernel has not refused before: a
// hole where r allows one, else a range that the file system zeroes and allocates.
// Only a write of zeroes can carry FUA itself; the others are followed by a flush.
func (d *fileDisk) planZeroes(r *plugin.Request) diskio.Step {
	s := diskio.Step{FD: d.cachedFD, Sync: r.Flags&blk.FUA != 0}
	if !d.splitsPage(r) {
		if r.Flags&blk.NoUnmap == 0 && !d.noPunch.Load() {
			s.Op = uring.PunchHole
			return s
		}
		if !d.noZeroRange.Load() {
			s.Op = uring.ZeroRange
			return s
		}
	}
	s = d.planCachedWrite(r)
	s.Inline, s.Zeroes = diskio.InlineNo, true
	return s
}

// Fallback records the kernel's refusal, for later requests too, and plans
// again.
func (d *fileDisk) Fallback(r *plugin.Request, failed diskio.Step, errno blk.Errno) (diskio.Step, bool) {
	if errno == blk.EINVAL && failed.Op == uring.Pwrite && failed.FD == d.directFD && d.direct != nil {
		return d.planCachedWrite(r), true // alignment that the file system did not report
	}
	unsupported := errno == blk.EOPNOTSUPP
	switch {
	case unsupported && failed.Inline == diskio.InlineCached:
		d.noNowait.Store(true)
	case failed.Op == uring.ZeroRange && (unsupported || errno == blk.EINVAL):
		d.noZeroRange.Store(true)
	case failed.Op == uring.PunchHole && (unsupported || errno == blk.EINVAL): // EINVAL: as some FUSE file systems refuse a mode
		d.noPunch.Store(true)
	default:
		return failed, false
	}
	return d.Plan(r), true
}

func (d *fileDisk) inlineMemory() diskio.Inline {
	if d.memory {
		return diskio.InlineMemory
	}
	return diskio.InlineNo
}
