package main

import (
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// commitResult returns the result that a completion commits: n bytes of a read or
// write, or a negative errno. The block layer passes few errnos on and turns the
// rest into EIO. It takes some for "try again" (EAGAIN, ENOMEM), so these become
// EIO here.
func commitResult(errno blk.Errno, n int32) int32 {
	switch errno {
	case blk.OK:
		return n
	case blk.ENOSPC, blk.EOPNOTSUPP, blk.ETIMEDOUT:
		return -int32(errno)
	}
	return -int32(syscall.EIO)
}
