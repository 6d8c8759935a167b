package verbs

import (
	"net/netip"
	"time"
)

// Security is the protection of a connection, and the identity of its peer.
// The zero value is a connection without protection.
type Security struct {
	Protocol string    // "TLS 1.3"; "challenge": identities are proved, nothing is encrypted
	Cipher   string    // the name that IANA gives it
	Peer     string    // identity that the peer has proved
	Expires  time.Time // of the peer's certificate; zero: never
	Resumed  bool      // the handshake continued an earlier session
	Proof    Proof     // of Peer; nil: it cannot be looked at again
}

// Proof is how a peer has proved its identity. It is a pointer.
type Proof interface {
	// Holds returns the reason why the keys and certificates that this end has now do
	// not prove the identity any more; nil: they do. A certificate that has only run
	// out since is no reason. Any goroutine.
	Holds() error
}

// Refused describes a connection that a listener refuses because the peer does not
// begin the protection that is asked for, or does not prove its identity by it.
type Refused struct {
	Client, Server netip.AddrPort
	Claimed        string // identity that the peer claims; empty: unknown
	Err            error
}

// Refuser is a Listener of a fabric that can protect connections. WatchRefused has f
// called with each connection that is refused from then on, before it would reach
// Accept. f may be called by any goroutine, and must not block.
type Refuser interface {
	WatchRefused(f func(Refused))
}

// Secured is a QP or a ConnRequest of a fabric that can protect connections. The
// zero value of Security is returned for one that is not protected. Of a QP it
// may be called by any goroutine once it is connected.
type Secured interface {
	Security() Security
}

// SecurityOf returns how v, a QP or a ConnRequest, is protected.
func SecurityOf(v any) Security {
	if s, ok := v.(Secured); ok {
		return s.Security()
	}
	return Security{}
}
