package client

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-client/internal/mapline"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// MapRequest describes a mapping.
type MapRequest struct {
	Path     string   // on the server
	Session  string   // name of the session; empty: derived from host and address
	Paths    []string // to the server; may be empty if the session exists
	Mode     blk.AccessMode
	Frontend string // name of a front end; empty: Config.Frontend; "none": NewIO only
	Loss     Loss
	Name     string // empty: rnbdN
	Slots    int    // requests in flight; 0: Config.Slots
	Options  map[string]string
	// IOMode is the io plugin of the server to open the device with, such as
	// "fileio". If it is empty the server chooses, as a kernel always does.
	IOMode string

	// Port is the port of paths that a control file adds to the session; 0:
	// DefaultPort. PollQueues is shown. As in the kernel, a session with poll
	// queues has one device only. The pumps of this client always poll.
	Port       uint16
	PollQueues int

	// AnyPath opens a session with the first path that works. The others
	// connect when they can. Without it all paths must work.
	AnyPath bool

	identity, location string       // of a mapping of the last daemon; empty: a new mapping
	known              *deviceFacts // of that mapping
	// clean reports that no write of that mapping needs a flush, unreported that writes were
	// lost and no flush has failed since.
	clean, unreported bool
	tuning            sessionTuning // of a session of the last daemon
}

// requestOf converts a map_device line to a request.
func requestOf(l mapline.Line) MapRequest {
	return MapRequest{
		Path: l.Path, Session: l.Session, Paths: l.Paths, Mode: l.Mode,
		IOMode: l.IOMode, Port: l.Port, PollQueues: l.PollQueues,
	}
}
