package rtrs

import (
	"errors"
	"fmt"
	"syscall"
)

// sentinelError is an error that is allocated once and has an errno in its chain.
type sentinelError struct {
	text  string
	errno syscall.Errno
}

func (e *sentinelError) Error() string { return e.text }
func (e *sentinelError) Unwrap() error { return e.errno }

// nameRefused is an ErrNameRefused for the name of a session, with the cause of the path's end.
type nameRefused struct {
	name  string
	cause error
}

func (e nameRefused) Error() string {
	return fmt.Sprintf("the path ended when the server got the session's name %q: another client may have the name, the server's log has the reason: wait for INFO_RSP: %v: %v", e.name, syscall.ECONNRESET, e.cause)
}
func (e nameRefused) Unwrap() []error { return []error{ErrNameRefused, syscall.ECONNRESET, e.cause} }

// leftError is the type of errLeft.
type leftError struct{}

func (leftError) Error() string { return "the client has disconnected" }
func (leftError) Unwrap() error { return ErrConnLost }

// Errors of the data path. They are never wrapped, so that == works.
var (
	// ErrNoPermit: every buffer of the session is in use; wait for a completion.
	ErrNoPermit error = &sentinelError{"rtrs: all buffers of the session are in use", syscall.EAGAIN}
	// ErrDisconnected: the session has no connected path.
	ErrDisconnected error = &sentinelError{"rtrs: the session has no connected path", syscall.ECONNABORTED}
	// ErrTooLarge: the request does not fit in a chunk, or its header in the
	// part of it that is meant for headers.
	ErrTooLarge error = &sentinelError{"rtrs: the request is too large for a chunk", syscall.EMSGSIZE}

	// errSuperseded: the client has lost the path before the server, and makes it again.
	errSuperseded error = &sentinelError{"rtrs: the client connects the path again", syscall.ECONNRESET}

	// errLeft: the client has disconnected in order. It is an ErrConnLost.
	errLeft error = leftError{}

	// errNoCredit: the send queue has no room; a completion will make some.
	errNoCredit error = &sentinelError{"rtrs: send queue is full", syscall.EAGAIN}
)

// Errors of the control path, wrapped with a description.
var (
	// ErrClosed: the server, session or poller was closed.
	ErrClosed error = &sentinelError{"rtrs: closed", syscall.ESHUTDOWN}
	// ErrProtocol: the peer broke the protocol.
	ErrProtocol error = &sentinelError{"rtrs: protocol error", syscall.ECONNRESET}
	// ErrHeartbeat: the peer did not answer in time.
	ErrHeartbeat error = &sentinelError{"rtrs: heartbeat expired", syscall.ETIMEDOUT}
	// ErrNameRefused: the path ended when the server got the session's name. Another
	// session may have it.
	ErrNameRefused error = &sentinelError{"rtrs: the path ended when the server got the session's name", syscall.ECONNRESET}
	// ErrConnLost: a connection of the path ended.
	ErrConnLost error = &sentinelError{"rtrs: connection lost", syscall.ECONNRESET}
)

// ErrnoOf returns the errno in err's chain as a positive number, 0 for nil and
// EIO for an error without one.
func ErrnoOf(err error) int {
	var errno syscall.Errno
	switch {
	case err == nil:
		return 0
	case errors.As(err, &errno) && errno != 0:
		return int(errno)
	}
	return int(syscall.EIO)
}

// protocolErrorf returns an ErrProtocol with a description of the peer's
// violation.
func protocolErrorf(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

// Lost is the errno of a request that ended without an answer, because no path was left.
// It may have been carried out. No server can answer with it: an answer has nine bits for
// the errno (docs/extend/protocol/rtrs.md, "Immediates").
const Lost = 1 << 9
