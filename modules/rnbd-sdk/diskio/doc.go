// Package diskio turns ring requests into engine requests on the descriptors
// of a disk. The code of a storage plugin for files or block devices (Planner)
// translates a request into operations on its descriptors. This package has
// the part that is the same for all of them: the table of requests by tag,
// batches with one submission per loop, short transfers, retries, buffers that
// are not aligned, the flush behind FUA, and the errnos.
//
//	func (d *disk) Plan(r *plugin.Request) diskio.Step {
//		switch r.Op {
//		case blk.Read:
//			return diskio.Step{Op: uring.Pread, FD: d.fd}
//		...
//	}
//
//	type backend struct{ diskio.Server } // Configure and Serve
//
// # Threads
//
// Server.Serve runs one queue on its own thread: a pump that polls the ring
// and the engine. Plan and Fallback are called on that thread, for one disk
// possibly on several threads at once. Nothing on this path allocates, locks
// or blocks, but for the kernel's copying out of the page cache in inline
// steps.
//
// # Order
//
// Requests that are in flight together may take effect in any order. A flush
// covers every write that was answered before the flush arrived.
//
// # Hazards
//
// RLIMIT_FSIZE makes the kernel send SIGXFSZ, and that would end the process.
// Serve has it ignored, so that the write fails instead.
package diskio
