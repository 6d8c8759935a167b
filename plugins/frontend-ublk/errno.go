package main

import (
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// result is what a completion commits: the bytes of a read or write, or a
// negative errno. The block layer knows few of them and turns the rest into
// EIO; some it does not even take for failures of the request (EAGAIN, ENOMEM:
// try again), so they become EIO here.
func result(errno blk.Errno, n int32) int32 {
	switch errno {
	case blk.OK:
		return n
	case blk.ENOSPC, blk.EOPNOTSUPP, blk.ETIMEDOUT:
		return -int32(errno)
	}
	return -int32(syscall.EIO)
}
