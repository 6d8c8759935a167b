package rtrs

import (
	"math/bits"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
)

// requestSlots are the requests of a session, found by permit. Memory is taken once,
// when the queue depth is learned. A slot belongs to the queue that holds its
// permit; only that queue reads or writes it.
type requestSlots struct {
	depth   int
	permits *permitSet
	reqs    []request
	headers *Region // slotHeaderLen bytes per permit
	// held has a bitmap of permits for each cid; only that queue's owner
	// touches it. Each bitmap is an allocation of its own, so that owners do
	// not share cache lines.
	held [][]uint64
}

const (
	// slotHeaderLen bytes hold the user message and the header of a request.
	slotHeaderLen = 256
	// MaxUserLen is the longest user message of Queue.Write and Queue.Read.
	MaxUserLen = slotHeaderLen - rtrswire.MaxReqHdrLen
)

// requestKind is the kind of a request.
type requestKind uint8

const (
	kindWrite requestKind = iota
	kindRead
	kindFence
	kindListen // a READ that waits for news, and counts as no request in flight
)

// countsAsIO reports whether a request of this kind counts as in flight.
func (k requestKind) countsAsIO() bool { return k != kindListen }

// requestState is where a request is in its life.
type requestState uint8

const (
	// reqIdle: the permit is free, or just taken.
	reqIdle requestState = iota //lint:ignore U1000 the zero value has a name, too
	// reqInflight: sent on link, no answer yet.
	reqInflight
	// reqLost: link is lost; waits for the fence, then goes to another path.
	reqLost
	// reqAgain: may be sent again, and waits for room in a send queue.
	reqAgain
	// reqAborted: its submitter was told; the permit stays reserved until
	// nothing of link, and of runs, can use the chunk.
	reqAborted
)

// request is one permit's request.
type request struct {
	link  *link // last sent on
	runs  *link // earlier link with a running operation in the chunk; nil: none
	tag   uint64
	data  Data
	head  Data // the user message, with room for the header after it
	call  *adminCall
	kind  requestKind
	state requestState
	spare bool // the permit is one of those kept for fences

	settled func() // of an admin request: see AdminWriteOnce

	sentAt int64  // by the poller's clock
	sentOn uint32 // CPU
}

// givenUp reports whether the caller of an admin request has given up.
func (r *request) givenUp() bool { return r.call != nil && r.call.abandoned.Load() }

func newSlots(depth, queues int, headers *Region, wake func(queue int)) *requestSlots {
	sl := &requestSlots{
		depth:   depth,
		permits: newPermits(depth, queues, wake),
		reqs:    make([]request, depth),
		headers: headers,
		held:    make([][]uint64, queues),
	}
	for cid := range sl.held {
		// At least a cache line each.
		sl.held[cid] = make([]uint64, max(8, (depth+63)/64))
	}
	return sl
}

func (sl *requestSlots) holdPermit(cid int, id uint32)   { sl.held[cid][id>>6] |= 1 << (id & 63) }
func (sl *requestSlots) unholdPermit(cid int, id uint32) { sl.held[cid][id>>6] &^= 1 << (id & 63) }

func (sl *requestSlots) holdsPermit(cid int, id uint32) bool {
	return int(id) < sl.depth && sl.held[cid][id>>6]&(1<<(id&63)) != 0
}

// eachHeld calls f for every permit that cid holds. f may release it, and may take
// others: those are not visited for certain.
func (sl *requestSlots) eachHeld(cid int, f func(id uint32, r *request)) {
	for w := range sl.held[cid] {
		for set := sl.held[cid][w]; set != 0; set &= set - 1 {
			id := uint32(w<<6 + bits.TrailingZeros64(set))
			if sl.holdsPermit(cid, id) {
				f(id, &sl.reqs[id])
			}
		}
	}
}
