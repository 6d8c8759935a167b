package control

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
)

// maxWait bounds how long a call of Events waits.
const maxWait = time.Minute

// Journal is the journal of a daemon with a number of its own, by which callers find
// out that the daemon was started again.
type Journal struct {
	*journal.Journal
	id uint64
}

// NewJournal returns the journal j of a daemon that starts. j may be nil.
func NewJournal(j *journal.Journal) Journal { return Journal{j, max(rand.Uint64(), 1)} }

// Answer serves a call of Events.
func (j Journal) Answer(ctx context.Context, r *controlpb.EventsRequest) *controlpb.EventList {
	after := r.After
	if r.Journal != j.id {
		after = 0
	}
	events := j.After(after)
	if len(events) == 0 && r.WaitMs > 0 {
		ctx, cancel := context.WithTimeout(ctx, min(time.Duration(r.WaitMs)*time.Millisecond, maxWait))
		defer cancel()
		events = j.Await(ctx, after)
	}
	list := &controlpb.EventList{Journal: j.id, Last: after}
	for _, e := range events {
		list.Last = e.Number
		list.Events = append(list.Events, &controlpb.Event{
			Number: e.Number, TimeUnixNs: e.Time.UnixNano(), Kind: string(e.Kind), Session: e.Session, Path: e.Path,
			Device: e.Device, Plugin: e.Plugin, From: e.From, To: e.To, Why: e.Why,
		})
	}
	return list
}
