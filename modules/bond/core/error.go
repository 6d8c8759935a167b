package core

import (
	"errors"
	"fmt"
	"syscall"
)

// Error is a refusal in the words of Linux's bonding driver. errors.Is finds its
// errno.
type Error struct {
	Text  string
	Errno syscall.Errno
}

func (e *Error) Error() string { return e.Text }

// Unwrap returns the errno that a writer of a control file gets.
func (e *Error) Unwrap() error { return e.Errno }

// Errorf returns an *Error.
func Errorf(errno syscall.Errno, format string, args ...any) error {
	return &Error{Text: fmt.Sprintf(format, args...), Errno: errno}
}

// ErrnoOf returns the errno in err's chain, EIO if there is none.
func ErrnoOf(err error) syscall.Errno {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return syscall.EIO
}
