package client

// State is the state of a device. Its words are those of the kernel's control
// files.
type State uint8

const (
	Init     State = iota // being mapped
	Open                  // mapped: "open"
	Closed                // mapped, without a connection to the server: "closed"
	Unmapped              // being unmapped
)

func (s State) String() string { return [...]string{"init", "open", "closed", "unmapped"}[s] }

// moves are the possible changes of state.
var moves = map[State][]State{
	Init:   {Open, Unmapped},
	Open:   {Closed, Unmapped},
	Closed: {Open, Unmapped},
}

// deviceGate is the treatment of a device's requests by the pumps.
type deviceGate = uint32

const (
	gateWait deviceGate = iota // park them: the session may come back
	gateOpen                   // send them
	gateFail                   // answer EIO
)
