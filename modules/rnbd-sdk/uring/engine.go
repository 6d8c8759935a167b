package uring

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Op is an operation of an Engine.
type Op uint8

const (
	Nop       Op = iota
	Pread        // Buf from Off
	Pwrite       // Buf to Off
	Fdatasync    // completed writes are durable, file size included
	Fsync
	PunchHole   // Len bytes at Off read as zero and are given back; the file keeps its size
	ZeroRange   // Len bytes at Off read as zero and stay allocated; likewise
	Discard     // block device: BLKDISCARD of Len bytes at Off
	SecureErase // block device: BLKSECDISCARD
)

// Request is one operation on a descriptor. The engine copies it at Submit; Buf
// stays the engine's until the completion is reaped.
type Request struct {
	Op      Op
	FD      int32
	Buf     []byte
	Off     uint64 // bytes
	Len     uint64 // bytes, for operations without a buffer
	RWFlags uint32 // RWF_DSYNC, RWF_NOWAIT, ... of pread and pwrite
	// Blocks says that the start of a pread or pwrite may block: io_uring gives it to
	// a thread of the kernel then, and does not try it on the owner's thread.
	Blocks bool
	// Fixed is 1 + the number of the registered buffer that Buf lies in; 0: none.
	Fixed uint16
	// Prio is a Linux ioprio, a hint: only io_uring passes it on, and only
	// classes that need no privilege.
	Prio uint16
	Tag  uint64
}

// Completion is the end of one request.
type Completion struct {
	Tag uint64
	Res int32 // bytes done, possibly fewer than asked, or a negative errno
}

// Engine runs requests on descriptors. It has one owner, locked to its thread,
// and never blocks it, except in Close. Requests run in any order and beside
// each other: a caller that needs an order waits for the completion.
type Engine interface {
	// Submit queues a request; false: no room, reap first. There is always room
	// when nothing is in flight.
	Submit(r *Request) bool
	// Flush starts everything submitted.
	Flush()
	// Reap copies completions to done and returns how many.
	Reap(done []Completion) int
	// InFlight returns the requests submitted and not yet reaped.
	InFlight() int
	// Arm flushes, and has FD become readable at the next completion. False:
	// there is one already, do not sleep. FD may be readable without one.
	Arm() bool
	FD() int
	// Close waits for the requests in flight and drops their completions.
	Close() error
	// Name is "uring" or "threads".
	Name() string
	// Workers returns how many requests of the kind the engine runs at once; 0: all
	// that are in flight. The rest waits for one of these to end.
	Workers(op Op) int
}

// BufferRegistrar is an optional interface of an Engine with Request.Fixed.
// The owner calls it with nothing in flight; it replaces all registered
// buffers.
type BufferRegistrar interface {
	RegisterBuffers(bufs [][]byte) error
}

// EngineConfig selects the engine and its size. The zero value is fit for use.
type EngineConfig struct {
	Depth int // most requests in flight; 0: 256; rounded up to a power of two
	// Prefer is "auto" (or empty: io_uring where it works, see Supported),
	// "uring" or "threads". The environment variable RNBD_IO_ENGINE overrides it.
	Prefer  string
	Threads int // most threads of the thread engine, started as needed; 0: 64
}

// EngineEnv names the environment variable that overrides EngineConfig.Prefer.
const EngineEnv = "RNBD_IO_ENGINE"

const (
	defaultDepth   = 256
	maxDepth       = 1 << 15
	defaultThreads = 64
)

// NewEngine makes an engine. Where "auto" had to take threads, Supported says
// why.
func NewEngine(cfg EngineConfig) (Engine, error) {
	if cfg.Depth == 0 {
		cfg.Depth = defaultDepth
	}
	if cfg.Depth < 0 || cfg.Depth > maxDepth {
		return nil, fmt.Errorf("new I/O engine: depth %d: want 1 to %d", cfg.Depth, maxDepth)
	}
	cfg.Depth = int(roundUp(uint32(cfg.Depth)))
	if cfg.Threads <= 0 {
		cfg.Threads = defaultThreads
	}
	if v := os.Getenv(EngineEnv); v != "" {
		cfg.Prefer = v
	}
	switch cfg.Prefer {
	case "", "auto":
		if Supported() != nil {
			return newThreadEngine(cfg)
		}
		return newURingEngine(cfg)
	case "uring":
		if err := Supported(); err != nil {
			return nil, fmt.Errorf("new I/O engine: %w", err)
		}
		return newURingEngine(cfg)
	case "threads":
		return newThreadEngine(cfg)
	}
	return nil, fmt.Errorf("new I/O engine: %q is neither auto, uring nor threads", cfg.Prefer)
}

// fallocateMode returns the mode of the operations that are fallocate calls.
func (o Op) fallocateMode() uint32 {
	if o == PunchHole {
		return unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	}
	return unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE
}

func roundUp(n uint32) uint32 {
	p := uint32(1)
	for p < n {
		p <<= 1
	}
	return p
}

// drain waits for everything in flight and drops the completions.
func drain(e Engine) error {
	var done [64]Completion
	for e.InFlight() > 0 {
		if e.Reap(done[:]) > 0 || !e.Arm() {
			continue
		}
		fds := []unix.PollFd{{Fd: int32(e.FD()), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, -1); err != nil && err != unix.EINTR {
			return fmt.Errorf("wait for %d requests in flight: %w", e.InFlight(), err)
		}
	}
	return nil
}
