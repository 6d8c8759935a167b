package main

import (
	"crypto/tls"
	"errors"
	"net/netip"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// nbdUser is a client of a listener with TLS, as events show it. nil: its events are
// not kept.
type nbdUser struct {
	events         *plugin.UserEvents
	from           netip.Addr // of peer; zero: a unix socket
	peer, listener string
	identity       string // set by the handshake of TLS
	claimed        string // likewise, if the handshake fails
	connected      bool   // its connect is told
}

// TakeUsers implements plugin.UserReporter.
func (f *frontend) TakeUsers() ([]plugin.UserEvent, uint64) { return f.users.TakeUsers() }

func (u *nbdUser) addEvent(e plugin.UserEvent) {
	if u != nil {
		e.Peer, e.Listener, e.Identity = u.peer, u.listener, u.identity
		u.events.Add(e)
	}
}

// eventConnected tells that the user has proved to be identity.
func (u *nbdUser) eventConnected(identity string) {
	if u != nil && !u.connected {
		u.identity, u.connected = identity, true
		u.addEvent(plugin.UserEvent{Event: plugin.UserConnects})
	}
}

// noteClaim notes the identity that the user claims in a handshake that has failed.
func (u *nbdUser) noteClaim(t *tls.Conn, err error) {
	certs := t.ConnectionState().PeerCertificates
	if no, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		certs = no.UnverifiedCertificates
	}
	if u != nil && len(certs) > 0 {
		u.claimed = nameOf(certs[0])
	}
}

// eventRefused tells why the user is sent away. An end that is the user's own is none.
func (u *nbdUser) eventRefused(err error) {
	if u == nil {
		return
	}
	e := plugin.UserEvent{Event: plugin.UserConnects, Error: err.Error(), Peer: u.peer, Listener: u.listener, Identity: u.identity}
	switch {
	case errors.Is(err, errNeedsTLS), errors.Is(err, errNoTLS):
		e.Event, e.Claimed = plugin.UserHandshakes, u.claimed
	case errors.Is(err, errManyTunnels), errors.Is(err, errGaveWay), errors.Is(err, errManyOptions):
	default:
		return
	}
	u.events.AddRefused(u.from, e)
}

func (u *nbdUser) eventOpened(device string, readOnly bool) {
	u.addEvent(plugin.UserEvent{Event: plugin.UserOpens, Device: device, Mode: modeOf(readOnly)})
}

func (u *nbdUser) mayNotOpen(device, why string) {
	if u != nil {
		u.events.AddRefused(u.from, plugin.UserEvent{
			Event: plugin.UserOpens, Device: device, Error: "not allowed to open it: " + why, Peer: u.peer, Listener: u.listener, Identity: u.identity,
		})
	}
}

// accessChanged records that the user may do more or less than before.
func (u *nbdUser) accessChanged(device string, readOnly bool) {
	why := "writes are allowed again"
	if readOnly {
		why = "the rules allow no writes any more: they fail with EPERM"
	}
	u.addEvent(plugin.UserEvent{Event: plugin.UserJudged, Device: device, Mode: modeOf(readOnly), Reason: why})
}

// closes tells of the end of a connection, forced if the user would not be served any
// more.
func (u *nbdUser) closes(device string, readOnly bool, cause error, forced bool) {
	event := plugin.UserCloses
	if forced {
		event = plugin.UserForced
	}
	u.addEvent(plugin.UserEvent{Event: event, Device: device, Mode: modeOf(readOnly), Reason: cause.Error()})
}

func modeOf(readOnly bool) string {
	if readOnly {
		return blk.ReadOnly.String()
	}
	return blk.ReadWrite.String()
}
