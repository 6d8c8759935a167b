package loopback

import (
	"net/netip"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Kind is the kind of an Event.
type Kind uint8

const (
	KindConnect Kind = iota // Connect; Data is its private data
	KindAccept              // the answer; Data is its private data
	KindReject
	KindWork // a request of a send queue leaves, or runs if it is local
)

// Event is one thing that a Tap function sees, in the order of leaving.
type Event struct {
	Kind     Kind
	From, To netip.AddrPort

	// Of KindWork:
	ID         uint64
	Op         verbs.Opcode
	Signaled   bool
	SGEs       int // number of elements
	Len        int // bytes of payload, or that OpRead asks for
	Imm        uint32
	RKey       uint32
	RemoteAddr uint64

	// Data is the payload, valid during the call; nil for OpRead.
	Data []byte
}

// Tap calls f for each connection request, answer and work request from now
// on; nil ends it. Calls do not overlap. They come from the acting goroutine,
// before the event takes effect: f may cut the connection under it. It must
// not use the queues of that goroutine.
func (n *Network) Tap(f func(Event)) {
	if f == nil {
		n.tap.Store(nil)
		return
	}
	n.tap.Store(&f)
}

func (n *Network) emitEvent(e Event) {
	f := n.tap.Load()
	if f == nil {
		return
	}
	n.tapMu.Lock()
	defer n.tapMu.Unlock()
	(*f)(e)
}

// emitUnlocked gives up mu for the time of the call, also when that panics.
func (n *Network) emitUnlocked(e Event) {
	n.mu.Unlock()
	defer n.mu.Lock()
	n.emitEvent(e)
}

func (e *sendEntry) event(q *queuePair, data []byte) Event {
	return Event{
		Kind: KindWork, From: q.local, To: q.remote,
		ID: e.wr.ID, Op: e.wr.Op, Signaled: e.wr.Signaled, SGEs: len(e.sges), Len: e.size,
		Imm: e.wr.Imm, RKey: e.wr.RKey, RemoteAddr: e.wr.RemoteAddr, Data: data,
	}
}
