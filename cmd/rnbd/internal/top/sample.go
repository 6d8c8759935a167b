package top

import (
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// Sample is the state of the daemons at one time. Counts are totals; Screen takes the
// differences.
type Sample struct {
	Time    time.Time
	Daemons []Daemon
	Devices []Device
	Paths   []Path
	Events  []string // lines, oldest first
}

// Daemon is one that is looked at.
type Daemon struct {
	Kind    string // "client" or "server"
	Journal uint64 // another one after each start; 0: not known
	Err     string // why it did not answer; empty: it did

	Conditions []Condition // that need attention
}

// Condition is something that needs attention.
type Condition struct{ Kind, Subject, Text string }

// Device is a mapped or an exported device.
type Device struct {
	Daemon, ID   string // kind of the daemon that has it; its name there, unique
	Name         string
	Session      string // of an exported device: those of all its users
	State        string
	Uses         map[string]Moved // by session and number
	Inflight     int64            // requests under way; -1: the daemon does not say
	Failed, Hung uint64           // requests: since the start, now
	Stages       []Stage
}

// Moved is the amount of data read and written.
type Moved struct{ Read, Written uint64 } // bytes

// Stage is the latency of one operation in one stage.
type Stage struct {
	Name    string
	Latency latency.Snapshot
}

// Path is a path of either side.
type Path struct {
	Daemon, Session, State string
	ID                     uint32
	Fabric, Address        string // Address is CLIENT@SERVER
	Received, Sent         uint64 // bytes
	Requests               int64  // sent, or arrived; -1: not asked
	Inflight               uint64
	Latency                time.Duration // last heartbeat's round trip; 0: none
	Reconnects, Failovers  uint64
	LastError              string
}
