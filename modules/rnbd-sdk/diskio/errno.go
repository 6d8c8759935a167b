package diskio

import (
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// wireErrnos bounds an errno on the RNBD wire. The wire has 9 bits for it.
const wireErrnos = 1 << 9

// toErrno translates the errno of a system call on a file to one of a block
// device. Errnos that block devices use themselves are returned as they are.
func toErrno(e unix.Errno) blk.Errno {
	switch e {
	case unix.EFBIG, unix.EDQUOT:
		return blk.ENOSPC // there is no room for these data
	case unix.ENOSYS, unix.ENOTTY, unix.ENOTSUP:
		return blk.EOPNOTSUPP
	case unix.EBADF, unix.EFAULT, unix.ESTALE, unix.EINTR, unix.ESPIPE, unix.EISDIR:
		return blk.EIO
	}
	if e <= 0 || e >= wireErrnos {
		return blk.EIO
	}
	return blk.Errno(e)
}
