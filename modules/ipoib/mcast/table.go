package mcast

import (
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// Limits. All but the number of groups are those of Linux.
const (
	queueLen   = 64 // packets that wait for one join
	backoffMin = time.Second
	backoffMax = 16 * time.Second
	maxGroups  = 1024
)

// Kind is the kind of a request.
type Kind uint8

const (
	Join         Kind = iota + 1 // as a full member
	JoinSendOnly                 // to send to the group without receiving
	Leave
)

// String returns the name of the request.
func (k Kind) String() string {
	return [...]string{"none", "join", "join send-only", "leave"}[k]
}

// Request is something to be done by the user of a table.
type Request struct {
	Kind Kind
	MGID wire.GID
}

// Group is one group, as Groups lists it.
type Group struct {
	MGID     wire.GID
	Created  time.Time
	Queued   int  // packets that wait for the join
	Complete bool // joined
	SendOnly bool
}

type groupState struct {
	Group
	queue   [][]byte
	asked   bool // a request is under way
	backoff time.Duration
	again   time.Time // when to ask, if not asked
}

// Stats are the counters of a table.
type Stats struct {
	Joins, Failures uint64
	QueueDrops      uint64 // packets dropped because too many waited, or the group went
	Full            uint64 // groups that were refused or removed for want of room
}

// Table holds the groups of an interface.
type Table struct {
	broadcast wire.GID
	groups    map[wire.GID]*groupState
	leaving   []wire.GID
	stats     Stats
}

// New makes a table with the broadcast group. It is not joined yet.
func New(now time.Time, broadcast wire.GID) *Table {
	t := &Table{broadcast: broadcast, groups: map[wire.GID]*groupState{}}
	t.addGroup(now, broadcast, false)
	return t
}

func (t *Table) addGroup(now time.Time, mgid wire.GID, sendOnly bool) *groupState {
	if len(t.groups) >= maxGroups && !t.evictSendOnly() {
		t.stats.Full++
		return nil
	}
	g := &groupState{Group: Group{MGID: mgid, Created: now, SendOnly: sendOnly}, backoff: backoffMin, again: now}
	t.groups[mgid] = g
	return g
}

// evictSendOnly removes the oldest send-only group.
func (t *Table) evictSendOnly() bool {
	var oldest *groupState
	for _, g := range t.groups {
		if g.SendOnly && (oldest == nil || g.Created.Before(oldest.Created)) {
			oldest = g
		}
	}
	if oldest == nil {
		return false
	}
	t.stats.Full++
	t.removeGroup(oldest)
	return true
}

func (t *Table) removeGroup(g *groupState) {
	t.stats.QueueDrops += uint64(len(g.queue))
	delete(t.groups, g.MGID)
	if g.Complete || g.asked {
		t.leaving = append(t.leaving, g.MGID)
	}
}

// Ready reports whether the broadcast group is joined.
func (t *Table) Ready() bool { return t.groups[t.broadcast].Complete }

// Add makes the interface a full member of mgid. It reports whether there was
// room.
func (t *Table) Add(now time.Time, mgid wire.GID) bool {
	g := t.groups[mgid]
	if g == nil {
		return t.addGroup(now, mgid, false) != nil
	}
	if g.SendOnly {
		g.SendOnly, g.Complete, g.asked, g.again = false, false, false, now
	}
	return true
}

// Remove ends the membership in mgid. The broadcast group stays.
func (t *Table) Remove(mgid wire.GID) {
	if g := t.groups[mgid]; g != nil && mgid != t.broadcast && !g.SendOnly {
		t.removeGroup(g)
	}
}

// Send reports whether a frame for mgid can be sent now. Otherwise a copy of the
// frame waits for the join.
func (t *Table) Send(now time.Time, mgid wire.GID, frame []byte) bool {
	g := t.groups[mgid]
	if g == nil {
		if g = t.addGroup(now, mgid, true); g == nil {
			t.stats.QueueDrops++
			return false
		}
	}
	if g.Complete {
		return true
	}
	if len(g.queue) >= queueLen {
		t.stats.QueueDrops++
		return false
	}
	g.queue = append(g.queue, slices.Clone(frame))
	return false
}

// Requests returns the requests to be executed now, in order: leaves, then
// joins. Joined or Failed must be called for each join.
func (t *Table) Requests(now time.Time) (out []Request) {
	for _, mgid := range t.leaving {
		if t.groups[mgid] == nil {
			out = append(out, Request{Leave, mgid})
		}
	}
	t.leaving = nil
	for _, g := range t.sortedGroups() {
		if g.Complete || g.asked || now.Before(g.again) || g.MGID != t.broadcast && !t.Ready() {
			continue
		}
		g.asked = true
		kind := Join
		if g.SendOnly {
			kind = JoinSendOnly
		}
		out = append(out, Request{kind, g.MGID})
	}
	return out
}

// sortedGroups returns the broadcast group, then the others in the order of their
// making.
func (t *Table) sortedGroups() []*groupState {
	out := make([]*groupState, 0, len(t.groups))
	for _, g := range t.groups {
		out = append(out, g)
	}
	slices.SortFunc(out, func(a, b *groupState) int {
		if (a.MGID == t.broadcast) != (b.MGID == t.broadcast) {
			if a.MGID == t.broadcast {
				return -1
			}
			return 1
		}
		if c := a.Created.Compare(b.Created); c != 0 {
			return c
		}
		return slices.Compare(a.MGID[:], b.MGID[:])
	})
	return out
}

// Next returns the time of the next join, or zero if there is none to wait for.
func (t *Table) Next() (next time.Time) {
	for _, g := range t.groups {
		if g.Complete || g.asked || g.MGID != t.broadcast && !t.Ready() {
			continue
		}
		if next.IsZero() || g.again.Before(next) {
			next = g.again
		}
	}
	return next
}

// Joined records that a join has succeeded. It returns the frames that waited
// for it. It does nothing if the group was removed meanwhile.
func (t *Table) Joined(mgid wire.GID) (frames [][]byte) {
	g := t.groups[mgid]
	if g == nil || !g.asked {
		return nil
	}
	t.stats.Joins++
	g.Complete, g.asked, g.backoff = true, false, backoffMin
	frames, g.queue = g.queue, nil
	return frames
}

// Failed records that a join has failed. It is tried again after 1, 2, 4, 8,
// 16, 16, ... seconds.
func (t *Table) Failed(now time.Time, mgid wire.GID) {
	g := t.groups[mgid]
	if g == nil || !g.asked {
		return
	}
	t.stats.Failures++
	g.asked, g.again = false, now.Add(g.backoff)
	g.backoff = min(2*g.backoff, backoffMax)
}

// Lost marks a group as not joined, so that it is joined again. With the
// broadcast group all are lost.
func (t *Table) Lost(now time.Time, mgid wire.GID) {
	if mgid == t.broadcast {
		t.Flush(now)
		return
	}
	if g := t.groups[mgid]; g != nil {
		g.Complete, g.asked, g.again, g.backoff = false, false, now, backoffMin
	}
}

// Flush marks all groups as not joined, so that they are joined again. It is
// for a fabric that has lost its memberships.
func (t *Table) Flush(now time.Time) {
	for _, g := range t.groups {
		g.Complete, g.asked, g.again, g.backoff = false, false, now, backoffMin
	}
}

// Retry makes groups with a failed join due now.
func (t *Table) Retry(now time.Time) {
	for _, g := range t.groups {
		if !g.Complete && !g.asked {
			g.again, g.backoff = now, backoffMin
		}
	}
}

// Stats returns the counters.
func (t *Table) Stats() Stats { return t.stats }

// Groups lists the groups: the broadcast group, then the others in the order of
// their making.
func (t *Table) Groups() (out []Group) {
	for _, g := range t.sortedGroups() {
		g.Queued = len(g.queue)
		out = append(out, g.Group)
	}
	return out
}

// Write writes groups in the format of Linux's debugfs file ipoib/*_mcg.
// created maps a time to the number shown for it, jiffies in Linux.
func Write(w io.Writer, groups []Group, created func(time.Time) uint64) error {
	yesNo := map[bool]string{true: "yes", false: "no"}
	for _, g := range groups {
		_, err := fmt.Fprintf(w, "GID: %s\n  created: %10d\n  queuelen: %9d\n  complete: %9s\n  send_only: %8s\n\n",
			g.MGID, created(g.Created), g.Queued, yesNo[g.Complete], yesNo[g.SendOnly])
		if err != nil {
			return err
		}
	}
	return nil
}
