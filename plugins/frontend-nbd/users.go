package main

import (
	"errors"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// user is a client of a listener with TLS, as events show it. nil: its events are
// not kept.
type user struct {
	events         *plugin.UserEvents
	peer, listener string
	identity       string // set by the handshake of TLS
	connected      bool   // its connect is told
}

// TakeUsers implements plugin.UserReporter.
func (f *frontend) TakeUsers() ([]plugin.UserEvent, uint64) { return f.users.TakeUsers() }

func (u *user) add(e plugin.UserEvent) {
	if u != nil {
		e.Peer, e.Listener, e.Identity = u.peer, u.listener, u.identity
		u.events.Add(e)
	}
}

// connects tells that the user has proved to be identity.
func (u *user) connects(identity string) {
	if u != nil && !u.connected {
		u.identity, u.connected = identity, true
		u.add(plugin.UserEvent{Event: plugin.UserConnects})
	}
}

// refused tells why the user is sent away. An end that is the user's own is none.
func (u *user) refused(err error) {
	for _, reason := range []error{errNeedsTLS, errNoTLS, errManyTunnels, errGaveWay, errManyOptions} {
		if errors.Is(err, reason) {
			u.add(plugin.UserEvent{Event: plugin.UserConnects, Error: err.Error()})
			return
		}
	}
}

func (u *user) opens(device string, readOnly bool) {
	u.add(plugin.UserEvent{Event: plugin.UserOpens, Device: device, Mode: modeOf(readOnly)})
}

func (u *user) mayNotOpen(device, why string) {
	u.add(plugin.UserEvent{Event: plugin.UserOpens, Device: device, Error: "not allowed to open it: " + why})
}

func (u *user) closes(device string, readOnly bool, cause error) {
	u.add(plugin.UserEvent{Event: plugin.UserCloses, Device: device, Mode: modeOf(readOnly), Reason: cause.Error()})
}

func modeOf(readOnly bool) string {
	if readOnly {
		return blk.ReadOnly.String()
	}
	return blk.ReadWrite.String()
}
