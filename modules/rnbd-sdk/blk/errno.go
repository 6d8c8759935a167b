package blk

import (
	"errors"
	"syscall"
)

// Errno is a Linux errno as a positive number; 0 is success. It rides in
// completions on the data path, where an error value would allocate.
type Errno uint16

// The errnos that block I/O produces. The RNBD wire has nine bits for them.
const (
	OK         Errno = 0
	EPERM      Errno = Errno(syscall.EPERM)
	ENOENT     Errno = Errno(syscall.ENOENT)
	EIO        Errno = Errno(syscall.EIO)
	ENXIO      Errno = Errno(syscall.ENXIO)
	EAGAIN     Errno = Errno(syscall.EAGAIN)
	ENOMEM     Errno = Errno(syscall.ENOMEM)
	EACCES     Errno = Errno(syscall.EACCES)
	ENOTBLK    Errno = Errno(syscall.ENOTBLK)
	EBUSY      Errno = Errno(syscall.EBUSY)
	EEXIST     Errno = Errno(syscall.EEXIST)
	ENODEV     Errno = Errno(syscall.ENODEV)
	EINVAL     Errno = Errno(syscall.EINVAL)
	ENOSPC     Errno = Errno(syscall.ENOSPC)
	EROFS      Errno = Errno(syscall.EROFS)
	EOPNOTSUPP Errno = Errno(syscall.EOPNOTSUPP)
	ENOTCONN   Errno = Errno(syscall.ENOTCONN)
	ETIMEDOUT  Errno = Errno(syscall.ETIMEDOUT)
	ECANCELED  Errno = Errno(syscall.ECANCELED)
	EMSGSIZE   Errno = Errno(syscall.EMSGSIZE)

	ECONNABORTED Errno = Errno(syscall.ECONNABORTED)
	ECONNRESET   Errno = Errno(syscall.ECONNRESET)

	// EREMCHG answers a write that is not repeated, since another client may have
	// written after it was sent first: docs/extend/protocol/rnbd.md.
	EREMCHG Errno = Errno(syscall.EREMCHG)
)

// Err returns nil for 0 and the syscall.Errno otherwise.
func (e Errno) Err() error {
	if e == OK {
		return nil
	}
	return syscall.Errno(e)
}

func (e Errno) Error() string { return syscall.Errno(e).Error() }

// ToErrno finds the errno that err wraps; an error without one is EIO.
func ToErrno(err error) Errno {
	var e Errno
	var sys syscall.Errno
	switch {
	case err == nil:
		return OK
	case errors.As(err, &e):
		return e
	case errors.As(err, &sys):
		return Errno(sys)
	}
	return EIO
}
