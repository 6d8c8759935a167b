package server

import (
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// flushError is the failure of a flush of a node: its number, from 1, and its errno. 0 means
// none.
type flushError uint64

func newFlushError(number uint64, errno blk.Errno) flushError {
	return flushError(number<<16 | uint64(errno)&0xffff)
}

func (e flushError) number() uint64   { return uint64(e) >> 16 }
func (e flushError) errno() blk.Errno { return blk.Errno(e & 0xffff) }

// flushErrors is the record of failed flushes of one node.
type flushErrors struct {
	last  atomic.Uint64 // flushError
	known atomic.Uint64 // the last flushError that some client is sure to know
}

// add records a failure.
func (f *flushErrors) add(errno blk.Errno) {
	for {
		old := flushError(f.last.Load())
		if f.last.CompareAndSwap(uint64(old), uint64(newFlushError(old.number()+1, errno))) {
			return
		}
	}
}

// owed returns the last failure if no client is sure to know it, else 0.
func (f *flushErrors) owed() flushError {
	if last := f.last.Load(); last > f.known.Load() {
		return flushError(last)
	}
	return 0
}

// raise stores n in v unless v is larger.
func raise(v *atomic.Uint64, n uint64) {
	for old := v.Load(); old < n && !v.CompareAndSwap(old, n); old = v.Load() {
	}
}

// FlushError is a failure of a flush that no client is sure to know. The node is a device
// number and an inode, or the name of a plugin and that of its device.
type FlushError struct {
	Dev   uint64    `json:"dev,omitempty"`
	Ino   uint64    `json:"ino,omitempty"`
	Name  string    `json:"name,omitempty"`
	Errno blk.Errno `json:"errno"`
}
