// Package uring does block I/O without blocking: an Engine over io_uring, or
// over a bounded number of threads where the kernel or a sandbox refuses
// io_uring, with one contract. Ring is the io_uring below it, just enough for
// disks and for drivers that speak URING_CMD. No cgo.
//
//	e, err := uring.NewEngine(uring.EngineConfig{Depth: 256})
//	e.Submit(&uring.Request{Op: uring.Pread, FD: fd, Buf: slot, Off: 4096, Tag: 7})
//	e.Flush()
//	...
//	n := e.Reap(done[:])
//
// # Threads
//
// A Ring and an Engine have one owner. It must be locked to its thread
// (runtime.LockOSThread): the kernel binds the ring to the thread that first
// submits to it and refuses every other. Creating one is not yet using it.
//
// # Memory
//
// A buffer belongs to the kernel from Submit until its completion is reaped.
// It must not be on a goroutine's stack or move for another reason; arenas and
// other mappings are right, and the only memory that O_DIRECT is sure to take.
//
// # Hazards
//
// Closing a descriptor does not end the I/O on it, nor does the end of the
// process: requests in flight run on in the kernel. Close of an Engine waits.
package uring
