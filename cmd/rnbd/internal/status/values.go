package status

// State is what /status.json has. Times are milliseconds since 1970, durations
// seconds, sizes and amounts of data bytes, rates per second. What is not known is
// null.
type State struct {
	Daemon   string   `json:"daemon"` // "client" or "server"
	Version  string   `json:"version"`
	Host     string   `json:"host"`
	PID      int32    `json:"pid"`
	Time     int64    `json:"time"`     // of the values
	Interval float64  `json:"interval"` // between two points of History
	Problem  string   `json:"problem"`  // why the daemon did not answer; empty: it did, or the rest is empty
	Config   []string `json:"config"`   // errors of the configuration
	// Conditions need attention now. Verdict is a line about them; empty: there are none.
	Conditions []Condition `json:"conditions"`
	Verdict    string      `json:"verdict"`
	Totals     Totals      `json:"totals"`
	Plugins    []Plugin    `json:"plugins"`
	Sessions   []Session   `json:"sessions"`
	Paths      []Path      `json:"paths"`
	Devices    []Device    `json:"devices"`
	Events     []Event     `json:"events"`  // latest first
	History    []Point     `json:"history"` // oldest first
}

// Condition is something that needs attention.
type Condition struct {
	Kind    string `json:"kind"`
	Subject string `json:"subject"` // device, session or plugin; empty: the daemon
	Text    string `json:"text"`
}

// Totals are those of all objects, also of those that the lists leave out.
type Totals struct {
	Devices           int    `json:"devices"`
	DevicesOpen       int    `json:"devices_open"`
	Sessions          int    `json:"sessions"`
	SessionsConnected int    `json:"sessions_connected"`
	Paths             int    `json:"paths"`
	PathsConnected    int    `json:"paths_connected"`
	Plugins           int    `json:"plugins"`
	PluginsRunning    int    `json:"plugins_running"`
	Hung              uint64 `json:"hung"`   // requests, now
	Failed            uint64 `json:"failed"` // requests, of the devices that there are
	Work
}

// Work is what was done in an interval. With it all is null while there is only one
// look at the daemon.
type Work struct {
	Read     *float64 `json:"read"`
	Written  *float64 `json:"written"`
	Requests *float64 `json:"requests"` // answered ones
	P50      *float64 `json:"p50"`      // of their time on the wire (client) or in the plugin (server); null without requests
	P99      *float64 `json:"p99"`
}

// Plugin is a process of the daemon's.
type Plugin struct {
	Name     string `json:"name"`
	Kind     string `json:"kind"`
	State    string `json:"state"`
	Restarts int32  `json:"restarts"`
	PID      int32  `json:"pid"`
}

// Session is a session, and the number of its paths.
type Session struct {
	Name           string `json:"name"`
	State          string `json:"state"`
	Peer           string `json:"peer"` // name of the host at the other end
	Policy         string `json:"policy"`
	Devices        uint32 `json:"devices"`
	Paths          int    `json:"paths"`
	PathsConnected int    `json:"paths_connected"`
	RetiredChunks  uint32 `json:"retired_chunks"`
}

// Path is a path of a session. Counts begin with it, or with their last reset.
type Path struct {
	Session    string   `json:"session"`
	ID         uint32   `json:"id"`
	State      string   `json:"state"`
	Fabric     string   `json:"fabric"`
	Source     string   `json:"source"`      // address of the client
	Target     string   `json:"destination"` // address of the server
	Protected  string   `json:"protected"`   // by what protocol; empty: not
	Received   uint64   `json:"received"`
	Sent       uint64   `json:"sent"`
	Inflight   uint64   `json:"inflight"`
	Reconnects uint64   `json:"reconnects"`
	Failovers  uint64   `json:"failovers"`
	Heartbeat  *float64 `json:"heartbeat"` // round trip of the last one
	Error      string   `json:"error"`     // why it was lost last
}

// Device is a mapped or an exported device.
type Device struct {
	Name     string  `json:"name"` // unique
	Path     string  `json:"path"` // name at the server, or of the storage behind it
	Session  string  `json:"session"`
	State    string  `json:"state"`
	Size     uint64  `json:"size"`
	Inflight *uint64 `json:"inflight"`
	Failed   uint64  `json:"failed"`
	Hung     uint64  `json:"hung"`
	HungAt   string  `json:"hung_at"` // stage and path of the oldest one
	Error    string  `json:"error"`   // why it is not open
	Work
}

// Event is a change of state.
type Event struct {
	Number uint64 `json:"number"`
	Time   int64  `json:"time"`
	Kind   string `json:"kind"`
	About  string `json:"about"`
	From   string `json:"from"`
	To     string `json:"to"`
	Why    string `json:"why"`
}

// Point is one interval of the history, which ends at Time.
type Point struct {
	Time   int64   `json:"time"`
	Failed float64 `json:"failed"` // requests
	Hung   uint64  `json:"hung"`
	Paths  int     `json:"paths"` // connected
	Work
	Busiest []Share `json:"busiest"`
}

// Share is the data that one device moved, read and written together.
type Share struct {
	Device string  `json:"device"`
	Rate   float64 `json:"rate"`
}
