package supervise

// State is where a plugin is in its life.
//
//	      Start             joined              Stop
//	idle ------> starting ---------> running ---------> stopping ---> stopped
//	              ^    |                | its end
//	 pause is over|    | failed         |
//	              |    v                |
//	             waiting <--------------'
//	              |    ^
//	     too many |    | Reset
//	      crashes v    |
//	             givenUp
//
// Stop and NoRestart lead from every other state to stopped; so does a first
// start that fails, without Config.Patience. A process that runs when NoRestart
// is called goes on until Stop or its own end.
type State int

// States.
const (
	Idle     State = iota // Start was not called yet
	Starting              // a process is being started and joined
	Running               // a process runs
	Waiting               // until the next start
	GivenUp               // too many crashes; Reset starts it again
	Stopping              // the process is being stopped
	Stopped               // for good
)

var stateNames = [...]string{"idle", "starting", "running", "waiting", "given up", "stopping", "stopped"}

func (s State) String() string {
	if s < 0 || int(s) >= len(stateNames) {
		return "unknown"
	}
	return stateNames[s]
}

// moves are those of the drawing.
var moves = map[State][]State{
	Idle:     {Starting, Stopped},
	Starting: {Running, Waiting, Stopped},
	Running:  {Waiting, Stopping},
	Waiting:  {Starting, GivenUp, Stopped},
	GivenUp:  {Waiting, Stopped},
	Stopping: {Stopped},
}

// String describes the plugin for its users: "running", or why it does not run.
func (st Status) String() string {
	switch {
	case st.State == Running:
		return "running"
	case st.State == GivenUp:
		return "failed: crashes too often"
	case st.FailedStarts > 0:
		return "failed: does not start: " + st.LastError
	}
	return "restarting"
}
