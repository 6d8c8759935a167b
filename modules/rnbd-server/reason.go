package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// Errors of an OPEN whose reason a client is told by a code.
var (
	errOtherWriter error = &reasonedError{"another client has it open for writing", syscall.EPERM, rnbdwire.ReasonWriter}
	errRules       error = &reasonedError{"the access rules of the server do not allow it", syscall.EACCES, rnbdwire.ReasonRules}
	errSlowOpen    error = &reasonedError{"it did not open in time, the disk below it may be slow or hang", syscall.ETIMEDOUT, rnbdwire.ReasonTimeout}
)

// reasonedError is an error with an errno for every client, and a code and a text for
// clients that ask for the reason.
type reasonedError struct {
	text  string
	errno syscall.Errno
	code  uint16
}

func (e *reasonedError) Error() string { return e.text }
func (e *reasonedError) Unwrap() error { return e.errno }

// maxReasons is the number of refusals that a session keeps.
const maxReasons = 16

// openReasons are the reasons of a session's latest refused OPENs, one for each name.
type openReasons struct {
	mu   sync.Mutex
	list []refusedOpen // the oldest first
}

type refusedOpen struct {
	name   string
	reason rnbdwire.ReasonFields
}

// Note keeps the reason of a refused OPEN of name.
func (r *openReasons) Note(name string, f rnbdwire.ReasonFields) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.removeReason(name)
	if len(r.list) >= maxReasons {
		r.list = r.list[1:]
	}
	r.list = append(r.list, refusedOpen{name, f})
}

// Find returns the reason of the last refused OPEN of name, and false if none is known.
func (r *openReasons) Find(name string) (rnbdwire.ReasonFields, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, o := range r.list {
		if o.name == name {
			return o.reason, true
		}
	}
	return rnbdwire.ReasonFields{}, false
}

// removeReason removes the reason of name. The caller holds mu.
func (r *openReasons) removeReason(name string) {
	for i, o := range r.list {
		if o.name == name {
			r.list = append(r.list[:i:i], r.list[i+1:]...)
			return
		}
	}
}

// reasonOf returns what a client may know of err, the error of an OPEN. Nothing of the
// rules, of the folders above the search path, or of names outside of it is told.
func reasonOf(err error, searchPath string) rnbdwire.ReasonFields {
	var known *reasonedError
	switch {
	case errors.As(err, &known):
		return rnbdwire.ReasonFields{Code: known.code, Text: known.text}
	case errors.Is(err, syscall.ENOENT):
		return rnbdwire.ReasonFields{Text: "it exports no such name"}
	}
	text := err.Error()
	if searchPath != "" && searchPath != "/" {
		text = strings.ReplaceAll(text, strings.TrimRight(searchPath, "/"), "")
	}
	f := rnbdwire.ReasonFields{Text: text}
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EROFS) {
		f.Code = rnbdwire.ReasonHost
	}
	return f
}

// inTime gives an error that comes from the end of ctx, which bounds an OPEN, its errno.
func inTime(ctx context.Context, err error) error {
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) && blk.ToErrno(err) == blk.EIO {
		return fmt.Errorf("%w: %w", errSlowOpen, err)
	}
	return err
}
