package verbs

import "time"

// Security is the protection of a connection, and the identity of its peer.
// The zero value is a connection without protection.
type Security struct {
	Protocol string    // "TLS 1.3"; "challenge": identities are proved, nothing is encrypted
	Cipher   string    // the name that IANA gives it
	Peer     string    // identity that the peer has proved
	Expires  time.Time // of the peer's certificate; zero: never
	Resumed  bool      // the handshake continued an earlier session
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
