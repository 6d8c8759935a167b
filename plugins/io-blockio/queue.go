package main

// DATA PATH. Plan translates a request into an operation on the block device;
// package diskio runs it: ring -> Plan -> io_uring -> answer.

import (
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/diskio"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

var _ diskio.Planner = (*blockDisk)(nil)

// Plan returns the step that runs r. r is within the limits.
func (d *blockDisk) Plan(r *plugin.Request) diskio.Step {
	switch r.Op {
	case blk.Read:
		return d.transfer(uring.Pread, 0)
	case blk.Write:
		return d.transfer(uring.Pwrite, dsync(r))
	case blk.Flush:
		return diskio.Step{Op: uring.Fdatasync, FD: d.fd}
	case blk.Discard:
		if d.noDiscard.Load() {
			return diskio.Step{Op: uring.Nop} // a discard is advice
		}
		return diskio.Step{Op: uring.Discard, FD: d.fd}
	case blk.SecureErase:
		return diskio.Step{Op: uring.SecureErase, FD: d.fd}
	default: // WriteZeroes
		return d.planZeroes(r)
	}
}

// transfer returns a read or write with an alignment of memory that direct I/O
// always accepts.
func (d *blockDisk) transfer(op uring.Op, flags uint32) diskio.Step {
	block := d.block.Load()
	return diskio.Step{Op: op, FD: d.fd, RWFlags: flags, Align: block, MemAlign: block}
}

// planZeroes unmaps the range if the request allows it and the device then reads
// zeroes, else writes zeroes. Neither can carry FUA, so a flush follows.
func (d *blockDisk) planZeroes(r *plugin.Request) diskio.Step {
	s := diskio.Step{Op: uring.PunchHole, FD: d.fd, Sync: r.Flags&blk.FUA != 0}
	if r.Flags&blk.NoUnmap != 0 || d.noPunch.Load() {
		s.Op = uring.ZeroRange
	}
	return s
}

// Fallback records that the device refuses an operation, for later requests too: the
// kernel writes zeroes where the device cannot unmap with zeroes, and a discard, which
// is advice, does nothing.
func (d *blockDisk) Fallback(r *plugin.Request, failed diskio.Step, errno blk.Errno) (diskio.Step, bool) {
	switch {
	case errno != blk.EOPNOTSUPP:
		return failed, false
	case failed.Op == uring.PunchHole:
		d.noPunch.Store(true)
	case failed.Op == uring.Discard:
		d.noDiscard.Store(true)
	default:
		return failed, false
	}
	return d.Plan(r), true
}

// dsync returns FUA as a flag of pwritev2(2). The block layer makes it a FUA
// write, or a write and a flush.
func dsync(r *plugin.Request) uint32 {
	if r.Flags&blk.FUA != 0 {
		return unix.RWF_DSYNC
	}
	return 0
}
