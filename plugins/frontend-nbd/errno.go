package main

import (
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// Errors of the NBD protocol.
const (
	nbdEPERM     = 1
	nbdEIO       = 5
	nbdENOMEM    = 12
	nbdEINVAL    = 22
	nbdENOSPC    = 28
	nbdEOVERFLOW = 75
	nbdENOTSUP   = 95
)

// nbdErrno translates a block error to an NBD error. An error that NBD has no
// number for becomes EIO.
func nbdErrno(e blk.Errno) uint32 {
	switch e {
	case blk.OK:
		return 0
	case blk.EPERM, blk.EACCES, blk.EROFS:
		return nbdEPERM
	case blk.ENOMEM:
		return nbdENOMEM
	case blk.EINVAL, blk.EMSGSIZE:
		return nbdEINVAL
	case blk.ENOSPC, blk.Errno(syscall.EFBIG), blk.Errno(syscall.EDQUOT):
		return nbdENOSPC
	case blk.Errno(syscall.EOVERFLOW):
		return nbdEOVERFLOW
	case blk.EOPNOTSUPP:
		return nbdENOTSUP
	}
	return nbdEIO
}
