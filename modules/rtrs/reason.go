package rtrs

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
)

// Reasons of refusals travel between our own ends. A client of another kind has the errno
// alone.

// reasonedError is an error whose reason a client is told.
type reasonedError struct {
	error
	code rtrswire.ReasonCode
	text string // empty: the code says all
}

func (e *reasonedError) Unwrap() error { return e.error }

// withReason gives err a reason for clients.
func withReason(code rtrswire.ReasonCode, text string, err error) error {
	return &reasonedError{err, code, text}
}

// reasonOf returns what a client may know of err. An error without a reason may name what
// is none of the client's business: its text is not told.
func reasonOf(err error) (code rtrswire.ReasonCode, text string) {
	if r, ok := errors.AsType[*reasonedError](err); ok {
		return r.code, r.text
	}
	if errors.Is(err, ErrProtocol) { // about the client's own message
		return rtrswire.ReasonProtocol, strings.TrimPrefix(err.Error(), ErrProtocol.Error()+": ")
	}
	return rtrswire.ReasonOther, ""
}

// describeReason says a reason in words; empty: there are none. The text of the server
// follows those of the code.
func describeReason(code rtrswire.ReasonCode, text string) string {
	words := map[rtrswire.ReasonCode]string{
		rtrswire.ReasonName:      "another client has a session of this name",
		rtrswire.ReasonAddress:   "it does not admit clients of this address",
		rtrswire.ReasonLimit:     "its limit for clients is reached",
		rtrswire.ReasonClosing:   "it is closing",
		rtrswire.ReasonNoSession: "it has no session of this client",
		rtrswire.ReasonProtocol:  "it takes the request for wrong",
		rtrswire.ReasonHangs:     "requests of the path's earlier life have not ended",
		rtrswire.ReasonSession:   "it does not take the session",
	}[code]
	switch {
	case words == "":
		return text
	case text == "":
		return words
	}
	return words + " (" + text + ")"
}

// refusedError is the error of a client that the server has refused for a reason.
type refusedError struct {
	what, why string
	causes    []error // the first one is shown
}

func (e *refusedError) Error() string {
	return fmt.Sprintf("%s: %s: %v", e.what, e.why, e.causes[0])
}

func (e *refusedError) Unwrap() []error { return e.causes }

// errorOfReason returns the error of a session that the server has refused by m, nil if m is
// no REASON.
func (l *link) errorOfReason(m rtrswire.ReasonMsg) error {
	if !m.Valid() {
		return nil
	}
	e := &refusedError{"the server refuses the session", describeReason(m.Code(), m.Text()), []error{syscall.Errno(m.Errno()), ErrConnLost}}
	if m.Code() == rtrswire.ReasonName {
		e.why = fmt.Sprintf("another client has the name %q", l.path.session.name)
		e.causes = append(e.causes, ErrNameRefused)
	}
	return e
}

// refuseSession tells the client why it gets no INFO_RSP, if it takes reasons, and closes the
// path.
func (p *srvPath) refuseSession(err error) {
	if p.takesReasons && p.goesOn() {
		code, text := reasonOf(err)
		send := func() error { return p.conns[0].postReason(rtrswire.AppendReason(nil, ErrnoOf(err), code, text)) }
		if p.onOwner(p.conns[0], send) == nil {
			p.awaitEnd(refusalGrace)
		}
	}
	p.close(err)
}
