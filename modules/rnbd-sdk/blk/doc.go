// Package blk is the vocabulary of block I/O that front ends, the client, the
// server and storage plugins share. It does no I/O, keeps no state and imports
// the standard library only.
//
// An Op with Flags on a range of bytes is a request. Limits are the limits of a
// device. A request from another process or machine is checked once, by its
// receiver:
//
//	if errno := limits.Check(op, off, n); errno != blk.OK {
//		complete(tag, errno)
//	}
//
// An Errno is the result, a number in completions. Err makes an error of it for
// control paths, ToErrno finds it in an error.
//
// Offsets and sizes are in bytes here; SectorSize converts to the sectors of
// Linux and of the RNBD wire.
package blk
