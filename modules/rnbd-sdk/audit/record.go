package audit

import (
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
)

// Record is one line. What is empty or zero is left out.
type Record struct {
	// Number is set by Log.Add, as Time is if it is zero. Numbers are consecutive from 1 in one run
	// of a daemon; Missing of them are not in the log, directly before this record.
	Time    time.Time `json:"time"`
	Number  uint64    `json:"number"`
	Missing uint64    `json:"missing,omitempty"`

	Daemon string `json:"daemon"` // server or client
	Event  string `json:"event"`  // one of the constants below
	// Result is "ok", or the error that the one who asked has got.
	Result string `json:"result"`

	Session  string `json:"session,omitempty"`
	Client   string `json:"client,omitempty"`   // address of the peer's end of a path
	Server   string `json:"server,omitempty"`   // address of the server's end of a path
	Fabric   string `json:"fabric,omitempty"`   // of the path
	Identity string `json:"identity,omitempty"` // that the client has proved
	Claimed  string `json:"claimed,omitempty"`  // that it claims, and has not proved here
	Device   string `json:"device,omitempty"`   // as the client calls it
	Mode     string `json:"mode,omitempty"`     // ro, rw or migration
	Reason   string `json:"reason,omitempty"`   // of what the daemon did by itself
	// LeftOut is set in a record that stands for so many events of the address Client
	// that have none of their own, because there were too many in a short time. Result
	// and Server are those of the last one. Without Client they are of several addresses.
	LeftOut uint64 `json:"left_out,omitempty"`

	// Of a call of the control API: its name, its arguments, and the process that
	// made it as the kernel knows it.
	Call string `json:"call,omitempty"`
	Args string `json:"args,omitempty"`
	UID  *int   `json:"uid,omitempty"`
	PID  *int   `json:"pid,omitempty"`
}

// spell spells the parts that a peer may have chosen, and bounds their length.
func (r *Record) spell() {
	for _, name := range []*string{&r.Session, &r.Identity, &r.Claimed, &r.Device} {
		*name = names.Spell((*name)[:min(len(*name), maxName)])
	}
	r.Result, r.Reason = names.Line(r.Result), names.Line(r.Reason)
}

// maxName is how many bytes of a name are recorded. Those on the wire are not longer.
const maxName = 256

// Events of records.
const (
	EventConnect    = "connect"    // the first path of a session is about to be connected
	EventPath       = "path"       // a further path asks to join
	EventProof      = "proof"      // a client is refused, whose proof of identity is missing, wrong, or of another identity than the session's
	EventHandshake  = "handshake"  // the handshake of TLS with a client fails, or the client begins none where it must
	EventDisconnect = "disconnect" // the last path of a session has gone
	EventOpen       = "open"       // a client asks for a device
	EventClose      = "close"      // a device is closed for a client
	EventForced     = "force-close"
	EventRules      = "rules" // access rules have changed
	EventCall       = "call"  // of the control API; calls that only read are left out
)

// OK is the Result of what was done.
const OK = "ok"

// ResultOf is the text of err, or OK.
func ResultOf(err error) string {
	if err == nil {
		return OK
	}
	return err.Error()
}
