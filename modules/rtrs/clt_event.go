package rtrs

import (
	"fmt"
	"sync"
)

// EventKind is the kind of an Event.
type EventKind uint8

const (
	// SessionUp: the first path is up after there was none, and no request of
	// an earlier path can run late any more. Requests may be sent again.
	SessionUp EventKind = iota + 1
	// SessionDown: the last path is lost. Requests in flight are answered
	// with ECONNABORTED.
	SessionDown
	// PathChanged: a path is in another state.
	PathChanged
)

func (k EventKind) String() string {
	switch k {
	case SessionUp:
		return "session up"
	case SessionDown:
		return "session down"
	case PathChanged:
		return "path changed"
	}
	return fmt.Sprintf("event(%d)", uint8(k))
}

// Event is news of a session.
type Event struct {
	Kind    EventKind
	Session *Session
	Path    int       // PathChanged: id of the path
	State   PathState // PathChanged
	Err     error     // PathChanged: why, nil if asked for or for the better
}

// eventQueue hands events to one goroutine, in order. add never blocks, so
// events can be added under a lock.
type eventQueue struct {
	mu     sync.Mutex
	wait   sync.Cond // on mu
	events []Event
	closed bool
	done   chan struct{}
}

func newEventQueue() *eventQueue {
	q := &eventQueue{done: make(chan struct{})}
	q.wait.L = &q.mu
	return q
}

func (q *eventQueue) addEvent(e Event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.events = append(q.events, e)
	q.wait.Signal()
}

// run hands out events until close was called and all are handed out.
func (q *eventQueue) run(f func(Event)) {
	defer close(q.done)
	for {
		e, ok := q.nextEvent()
		if !ok {
			return
		}
		if f != nil {
			f(e)
		}
	}
}

func (q *eventQueue) nextEvent() (Event, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.events) == 0 {
		if q.closed {
			return Event{}, false
		}
		q.wait.Wait()
	}
	e := q.events[0]
	q.events = q.events[1:]
	return e, true
}

// close makes run return once it has delivered the events added before.
func (q *eventQueue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.wait.Signal()
}
