// Package blk is the vocabulary of block I/O that front ends, the client, the
// server and storage plugins share. It does no I/O, keeps no state and imports
// the standard library only.
//
// An Op with Flags on a range of bytes is a request. Limits say what a device
// takes; whoever receives a request from another process or machine checks it
// once:
//
//	if errno := limits.Check(op, off, n); errno != blk.OK {
//		complete(tag, errno)
//	}
//
// An Errno is the result, and rides in completions as a number: control paths
// turn it into an error by Err, and an error into it by ToErrno.
//
// Offsets and sizes are in bytes here; SectorSize converts to the sectors of
// Linux and of the RNBD wire.
package blk
