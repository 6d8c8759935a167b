package client

// The states of an attachment, and its next step. The step depends on the
// situation alone.

// attState is the state of an attachment.
//
//	        first try                 shown                asked to let go
//	absent -----------> attaching ----------> shown <---------------------> removing
//	   |                 | |   ^                |      refused: it is used   | | |
//	   |                 | |   | next process,  | process has died           | | |
//	   |                 | |   | slots free     v                            | | |
//	   |                 | |   `------------- away <-------------------------' | |
//	   |                 | `----------------> |  process has died, not forced  | |
//	   |                 |    failed          |                                | |
//	   |                 |                    | unmapped by force              | |
//	   |     first try   |                    v       process has died         | |
//	   |     failed      |                lingering <--------------------------' |
//	   |                 |                 |  |  ^                               |
//	   |                 |                 |  |  | next process is asked         |
//	   |                 `-----------------|--|--`-----> removing                |
//	   | no process                        v  |              | has let go       |
//	   `---------------------------------> gone <------------'------------------'
//
// At the end of the front end every state leads to gone. Disks in the kernel
// are left to the next daemon.
type attState uint8

const (
	absent    attState = iota // no process knows the device
	attaching                 // a process is being shown it, and uses its memory
	shown                     // a process serves it
	away                      // the process has died, or could not take it over: it is to be shown again
	removing                  // a process is asked to remove it
	lingering                 // no process has it, the kernel may have its disk
	gone                      // nothing is left of it
)

var attNames = [...]string{"absent", "attaching", "shown", "away", "removing", "lingering", "gone"}

func (s attState) String() string { return attNames[s] }

// attMoves are the transitions of the diagram.
var attMoves = map[attState][]attState{
	absent:    {attaching, lingering, gone},
	attaching: {shown, away, removing, lingering, gone},
	shown:     {shown, removing, away, lingering, gone}, // shown: the process has learnt other limits
	away:      {attaching, lingering, gone},
	removing:  {shown, away, lingering, gone},
	lingering: {removing, gone},
}

// attachmentAim is the aim of the attachment.
type attachmentAim uint8

const (
	wantShown attachmentAim = iota
	wantGone                // even if it is used; its disk is removed from the kernel
	wantLeft                // no process serves it; its disk stays for the next mapping of it
)

// workerInput is the input of the worker's decisions.
type workerInput struct {
	state   attState
	want    attachmentAim
	process processState
	busy    bool // requests of the device are under way
	due     bool // the pause since the last try is over
	left    bool // the kernel may have a disk of it
	asked   bool // a dismissal waits
	stale   bool // the process knows other limits
	spent   bool // no tries to remove its disk are left
	over    bool // the front end ends and starts no process
}

// processState compares the front end's process with the attachment's.
type processState uint8

const (
	noProcess    processState = iota
	sameProcess               // the process that has the device or is asked to remove it
	otherProcess              // another one
)

// workerStep is one action of the worker.
type workerStep uint8

const (
	stepRest    workerStep = iota
	stepAttach             // show it to the running process
	stepLose               // record that its process has died
	stepRemove             // make the process remove it
	stepDismiss            // make the process remove it unless it is used
	stepResize             // tell the process the new limits
	stepLinger             // wait for a process to remove its disk
	stepClear              // make the running process remove its disk
	stepEnd                // nothing is left, or it is to be left
)

var stepNames = [...]string{"rest", "attach", "lose", "remove", "dismiss", "resize", "linger", "clear", "end"}

func (s workerStep) String() string { return stepNames[s] }

// nextStep returns the step that leads to the aim.
func (s workerInput) nextStep() workerStep {
	switch s.state {
	case absent:
		return s.nextAbsent()
	case shown:
		return s.nextShown()
	case away:
		return s.nextAway()
	case removing:
		return s.nextRemoving()
	case lingering:
		return s.nextLingering()
	}
	return stepEnd
}

func (s workerInput) nextAbsent() workerStep {
	switch {
	case s.want == wantGone && s.left: // a disk of the last daemon; its map did not end
		return stepLinger
	case s.want != wantShown, s.process == noProcess && s.over:
		return stepEnd
	case s.process == noProcess: // the next process is being started
		return stepRest
	}
	return stepAttach
}

func (s workerInput) nextShown() workerStep {
	switch {
	case s.process != sameProcess:
		return stepLose
	case s.want != wantShown:
		return stepRemove
	case s.asked:
		return stepDismiss
	case s.stale:
		return stepResize
	}
	return stepRest
}

func (s workerInput) nextAway() workerStep {
	switch {
	case s.want == wantGone && s.left:
		return stepLinger
	case s.want != wantShown:
		return stepEnd
	case s.process == noProcess || s.busy || !s.due:
		return stepRest
	}
	return stepAttach
}

func (s workerInput) nextRemoving() workerStep {
	switch {
	case s.process != sameProcess:
		return stepLose
	case !s.due:
		return stepRest
	}
	return stepRemove
}

func (s workerInput) nextLingering() workerStep {
	switch {
	case s.want == wantLeft, s.spent, s.over && s.process == noProcess:
		return stepEnd
	case s.process == noProcess || !s.due:
		return stepRest
	}
	return stepClear
}
