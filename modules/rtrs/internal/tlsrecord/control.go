package tlsrecord

import (
	"errors"
	"fmt"
)

// AlertCode is the description of an alert (RFC 8446, section 6).
type AlertCode uint8

// The alerts that this package sends.
const (
	CloseNotify       AlertCode = 0
	UnexpectedMessage AlertCode = 10
	BadRecordMAC      AlertCode = 20
	RecordOverflow    AlertCode = 22
	DecodeError       AlertCode = 50
	InternalError     AlertCode = 80
)

const (
	levelWarning = 1
	levelFatal   = 2
)

// Error is why a connection cannot go on.
type Error struct {
	Code     AlertCode // to send to the peer, or received from it
	Received bool      // the peer has sent it
	cause    error
}

func (e *Error) Error() string {
	if e.Received {
		return fmt.Sprintf("the peer ended TLS with alert %d", e.Code)
	}
	return "TLS: " + e.cause.Error()
}

func (e *Error) Unwrap() error { return e.cause }

// Event is the request of a record that is not application data.
type Event uint8

const (
	Nothing         Event = iota
	Closed                // the peer has sent close_notify
	UpdateRequested       // the next record must be a KeyUpdate
)

const (
	typeNewSessionTicket = 4
	typeKeyUpdate        = 24

	handshakeHeader = 4
	keyUpdateLen    = handshakeHeader + 1
	maxTicket       = 1 << 17 // bytes, more than any ticket has

	// maxIdleRecords is how many records may come in a row without application
	// data.
	maxIdleRecords = 32
)

// controlReader reads the messages that come after the handshake.
type controlReader struct {
	client bool
	idle   int // records in a row without application data
	skip   int // bytes of a session ticket to come
	head   [keyUpdateLen]byte
	have   int // bytes in head
}

var errIdle = &Error{Code: UnexpectedMessage, cause: errors.New("too many records without data")}

// countRecord counts a record with n bytes of application data.
func (c *controlReader) countRecord(n int) error {
	if c.have > 0 || c.skip > 0 {
		return &Error{Code: UnexpectedMessage, cause: errors.New("data inside a handshake message")}
	}
	if n > 0 {
		c.idle = 0
		return nil
	}
	return c.checkRest()
}

func (c *controlReader) checkRest() error {
	if c.idle++; c.idle > maxIdleRecords {
		return errIdle
	}
	return nil
}

// Control handles a record of another type than ApplicationData. The error is an
// *Error.
func (o *Opener) Control(typ byte, content []byte) (Event, error) {
	if err := o.checkRest(); err != nil {
		return Nothing, err
	}
	switch typ {
	case Alert:
		return alertEvent(content)
	case Handshake:
		return o.onHandshake(content)
	}
	return Nothing, &Error{Code: UnexpectedMessage, cause: fmt.Errorf("a record of type %d", typ)}
}

func alertEvent(b []byte) (Event, error) {
	if len(b) != 2 {
		return Nothing, &Error{Code: DecodeError, cause: fmt.Errorf("an alert of %d bytes", len(b))}
	}
	if AlertCode(b[1]) == CloseNotify {
		return Closed, nil
	}
	return Nothing, &Error{Code: AlertCode(b[1]), Received: true}
}

// onHandshake handles handshake messages. Records may cut them anywhere.
func (o *Opener) onHandshake(b []byte) (Event, error) {
	if len(b) == 0 {
		return Nothing, &Error{Code: UnexpectedMessage, cause: errors.New("an empty handshake record")}
	}
	c := &o.controlReader
	for len(b) > 0 {
		if c.skip > 0 {
			n := min(c.skip, len(b))
			c.skip -= n
			b = b[n:]
			continue
		}
		c.head[c.have] = b[0]
		c.have++
		b = b[1:]
		if c.have < handshakeHeader {
			continue
		}
		switch typ, n := c.head[0], int(c.head[1])<<16|int(c.head[2])<<8|int(c.head[3]); {
		case typ == typeNewSessionTicket && c.client && n <= maxTicket:
			c.skip, c.have = n, 0
		case typ == typeKeyUpdate && n == 1:
			if c.have < keyUpdateLen {
				continue
			}
			c.have = 0
			return o.onKeyUpdate(c.head[handshakeHeader], len(b))
		default:
			return Nothing, &Error{Code: UnexpectedMessage, cause: fmt.Errorf("a handshake message of type %d, %d bytes", typ, n)}
		}
	}
	return Nothing, nil
}

// onKeyUpdate changes the key because of a KeyUpdate with rest bytes behind it.
func (o *Opener) onKeyUpdate(request byte, rest int) (Event, error) {
	switch {
	case rest > 0:
		return Nothing, &Error{Code: UnexpectedMessage, cause: errors.New("a message behind a key update")}
	case request > 1:
		return Nothing, &Error{Code: DecodeError, cause: fmt.Errorf("a key update with request %d", request)}
	}
	if err := o.Update(); err != nil {
		return Nothing, &Error{Code: InternalError, cause: err}
	}
	if request == 1 {
		return UpdateRequested, nil
	}
	return Nothing, nil
}
