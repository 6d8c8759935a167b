package diskio

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

// Planner is a disk that knows how to run requests on its descriptors; it is a
// pointer. Its methods neither block nor allocate.
type Planner interface {
	// Plan says how r is run.
	Plan(r *plugin.Request) Step
	// Fallback is asked when a step failed before it moved a byte: another
	// way to run r, or false to let the client see errno. It must not offer a
	// step twice for one request.
	Fallback(r *plugin.Request, failed Step, errno blk.Errno) (Step, bool)
}

// Step is one way to run a request. It covers the request's whole range.
type Step struct {
	Op      uring.Op // Pread, Pwrite, Fdatasync, PunchHole, ZeroRange, Discard
	FD      int32
	RWFlags uint32 // RWF_* of Pread and Pwrite
	// Offset and length of every transfer must be a multiple of Align, in
	// bytes; 0: any. A short transfer is continued at a multiple.
	Align uint32
	// The address of the memory must be a multiple of MemAlign; any other
	// buffer goes through a bounce buffer. 0: any.
	MemAlign uint32
	Inline   Inline
	// Blocks says that the start of a transfer may block, as uring.Request.Blocks;
	// goes with InlineNo.
	Blocks bool
	Zeroes bool // Pwrite: zeroes, there is no payload
	Sync   bool // Fdatasync on FD behind it, before the answer
	// Padding is the number of bytes at the end of a Pread that may lie behind the
	// end of the file. There they read as zeroes. In bytes.
	Padding uint32
}

// Inline selects the steps that are tried on the queue's own thread first.
type Inline uint8

const (
	// InlineNo: the engine runs it.
	InlineNo Inline = iota
	// InlineCached: a read of the page cache's part (RWF_NOWAIT); the rest
	// goes to the engine.
	InlineCached
	// InlineMemory: a read or write of a file system in memory. It does not
	// wait for a device.
	InlineMemory
)

// moves reports whether the step transfers data.
func (s *Step) moves() bool { return s.Op == uring.Pread || s.Op == uring.Pwrite }
