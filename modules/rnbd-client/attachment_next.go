package client

// What an attachment does next follows from its situation alone.

// situation is what the worker decides by.
type situation struct {
	state attState
	want  want
	host  hostState
	busy  bool // requests of the device are under way
	due   bool // the pause since the last try is over
	left  bool // the kernel may have a disk of it
	asked bool // to take it away unless it is used
	stale bool // the process knows other limits than ours
	spent bool // it was tried often enough to take it away
	over  bool // the front end ends, and starts no process any more
}

// hostState is what process there is.
type hostState uint8

const (
	noHost    hostState = iota
	sameHost            // the one that has the device, or is asked to let go of it
	otherHost           // another one
)

// step is what the worker does.
type step uint8

const (
	stepRest    step = iota
	stepAttach       // show it to the process there is
	stepLose         // the process that had it is gone
	stepRemove       // have the process let go of it
	stepDismiss      // have the process let go of it unless it is used
	stepResize       // tell the process the limits
	stepLinger       // wait for a process that takes its disk away
	stepClear        // have the process that there is now take its disk away
	stepEnd          // nothing is left, or it is left as it is
)

var stepNames = [...]string{"rest", "attach", "lose", "remove", "dismiss", "resize", "linger", "clear", "end"}

func (s step) String() string { return stepNames[s] }

// next returns the step that brings what is closer to what is wanted.
func (s situation) next() step {
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

func (s situation) nextAbsent() step {
	switch {
	case s.want == wantGone && s.left: // of the last daemon, which did not finish it
		return stepLinger
	case s.want != wantShown || s.host == noHost:
		return stepEnd
	}
	return stepAttach
}

func (s situation) nextShown() step {
	switch {
	case s.host != sameHost:
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

func (s situation) nextAway() step {
	switch {
	case s.want == wantGone && s.left:
		return stepLinger
	case s.want != wantShown:
		return stepEnd
	case s.host == noHost || s.busy || !s.due:
		return stepRest
	}
	return stepAttach
}

func (s situation) nextRemoving() step {
	switch {
	case s.host != sameHost:
		return stepLose
	case !s.due:
		return stepRest
	}
	return stepRemove
}

func (s situation) nextLingering() step {
	switch {
	case s.want == wantLeft, s.spent, s.over && s.host == noHost:
		return stepEnd
	case s.host == noHost || !s.due:
		return stepRest
	}
	return stepClear
}
