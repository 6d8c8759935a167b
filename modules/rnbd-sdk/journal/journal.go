// Package journal keeps the last changes of state of a daemon, with numbers.
package journal

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ratelimit"
)

// Kind is what an event is about.
type Kind string

// Kinds of events.
const (
	Daemon  Kind = "daemon"  // it is ready, or about to end
	Session Kind = "session" // an RTRS session
	Path    Kind = "path"    // one path of a session
	Device  Kind = "device"  // a device of a client, or of a session of a server
	Plugin  Kind = "plugin"  // a plugin process
	Config  Kind = "config"  // the configuration, or the access rules
)

// Event is one change of state. Names that do not belong to its kind are empty.
type Event struct {
	Number  uint64 // from 1, without gaps, since the daemon started
	Time    time.Time
	Kind    Kind
	Session string
	Path    string // SRC@DST%FABRIC
	Device  string // name; at a server the name that the client asked for
	Plugin  string
	From    string // the state before; empty: there was none
	To      string // the state now
	Why     string // reason; empty: none is known
}

// limits bound the events of one subject, and those of a kind: a session that loses its
// paths again and again, or a peer that makes sessions, leaves room for the others. The
// last change of those that are left out follows within a minute, with their number.
var limits = ratelimit.Limits{Window: time.Minute, Burst: 20, PerWindow: 2, TotalBurst: 600, TotalPerWindow: 60}

// subject is what an event is about.
type subject struct{ session, path, device, plugin string }

// DefaultSize is how many events a daemon keeps.
const DefaultSize = 1000

// Journal has the last events of a daemon. A nil Journal takes none and has none.
// Its methods may be called by any goroutine, with any lock held: they call nothing.
type Journal struct {
	mu   sync.Mutex
	kept []Event       // a ring; event n is at (n-1) mod its length
	last uint64        // number of the latest event
	more chan struct{} // closed by the next event

	// Limiters of the kinds of events that repeat or that peers cause.
	limiters map[Kind]*ratelimit.Limiter[subject, Event]
}

// New returns a journal of the last size events. size is at least 1.
func New(size int) *Journal {
	j := &Journal{kept: make([]Event, size), more: make(chan struct{}), limiters: map[Kind]*ratelimit.Limiter[subject, Event]{}}
	for _, k := range []Kind{Session, Path, Device, Plugin} {
		j.limiters[k] = ratelimit.New(limits, j.addLimited)
	}
	return j
}

// Add numbers e, stamps it with the time, and keeps it in place of the oldest one. Of
// many events about one subject it keeps some, and the last one of each minute.
func (j *Journal) Add(e Event) {
	if j == nil {
		return
	}
	if l := j.limiters[e.Kind]; l != nil {
		l.Add(subject{e.Session, e.Path, e.Device, e.Plugin}, e)
		return
	}
	j.add(e)
}

// addLimited keeps an event that a limiter passes on.
func (j *Journal) addLimited(_ subject, e Event, leftOut uint64) {
	if leftOut > 1 {
		e.Why = strings.TrimPrefix(fmt.Sprintf("%s; the last of %d changes", e.Why, leftOut), "; ")
	}
	j.add(e)
}

func (j *Journal) add(e Event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.last++
	e.Number, e.Time = j.last, time.Now()
	j.kept[(e.Number-1)%uint64(len(j.kept))] = e
	close(j.more)
	j.more = make(chan struct{})
}

// Last returns the number of the latest event, 0 for none.
func (j *Journal) Last() uint64 {
	if j == nil {
		return 0
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.last
}

// After returns the events that follow number after, oldest first. The first one has
// a higher number than after+1 if those between are not kept any more. A number that
// was not given yet stands for one of an earlier journal: After returns all events.
func (j *Journal) After(after uint64) []Event {
	events, _ := j.after(after)
	return events
}

func (j *Journal) after(after uint64) ([]Event, <-chan struct{}) {
	if j == nil {
		return nil, nil
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if after > j.last {
		after = 0
	}
	if size := uint64(len(j.kept)); j.last > size {
		after = max(after, j.last-size)
	}
	var out []Event
	for n := after + 1; n <= j.last; n++ {
		out = append(out, j.kept[(n-1)%uint64(len(j.kept))])
	}
	return out, j.more
}

// Await is After, but waits for an event if there is none, until ctx ends.
func (j *Journal) Await(ctx context.Context, after uint64) []Event {
	for {
		events, more := j.after(after)
		if len(events) > 0 {
			return events
		}
		select {
		case <-ctx.Done():
			return nil
		case <-more:
		}
	}
}
