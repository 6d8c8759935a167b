package softverbs

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH. A request meets, in this order:
//
//	SendQueue.Post        checks, then the request is in the queue
//	Cursor.Next           its payload, piece by piece
//	SendQueue.Retire      room: requests that are done and need no completion
//	SendQueue.Reap        completions of those that are done
//	SendQueue.Flush       the end: completions of all others
//
// RecvQueue.Post, Head, Take and Flush do the same for receives. Positions in
// a queue count up and never wrap.

// Send is a work request in a send queue.
type Send struct {
	ID     uint64
	Addr   uint64 // at the peer
	End    uint64 // where the request ends, once known, in the numbers of the fabric
	Key    uint32
	Imm    uint32
	Length uint32 // of the payload, in bytes
	Op     verbs.Opcode
	Status verbs.Status
	// Signaled requests get a completion even if they succeed.
	Signaled bool
	// Done requests have ended out of order: the provider sets and reads it.
	Done     bool
	elements uint8
}

// SendQueue is the send queue of a queue pair. The requests at positions Head
// to Tail are in it. Init must be called before the first use. Owner only.
type SendQueue struct {
	Head, Tail uint64

	entries []Send // a power of two
	sges    []verbs.SGE
	mask    uint64
	depth   uint64
	maxSGE  int
}

// Init sizes the queue for depth requests of at most maxSGE elements. It has
// memory for first of them and doubles that when it is full. If a provider's
// Owner.Release looks at the queue while the owner posts, the provider sets
// first to depth, so that the memory never moves.
func (q *SendQueue) Init(depth, first, maxSGE int) {
	q.depth, q.maxSGE = uint64(max(depth, 1)), max(maxSGE, 1)
	q.resizeRing(min(ringSize(q.depth), ringSize(uint64(max(first, 1)))))
}

// ringSize returns the smallest power of two that is at least n.
func ringSize(n uint64) uint64 { return 1 << bits.Len64(n-1) }

func (q *SendQueue) resizeRing(n uint64) {
	q.entries = make([]Send, n)
	q.sges = make([]verbs.SGE, n*uint64(q.maxSGE))
	q.mask = n - 1
}

// Room returns the number of requests that the queue has memory for now.
func (q *SendQueue) Room() int { return len(q.entries) }

// growMemory doubles the memory.
func (q *SendQueue) growMemory() {
	old := *q
	q.resizeRing(2 * uint64(len(old.entries)))
	for at := q.Head; at != q.Tail; at++ {
		*q.At(at) = *old.At(at)
		copy(q.elementRoom(at), old.Elements(at))
	}
}

// At returns the request at a position.
func (q *SendQueue) At(pos uint64) *Send { return &q.entries[pos&q.mask] }

// Elements returns the payload of the request at a position.
func (q *SendQueue) Elements(pos uint64) []verbs.SGE {
	at := int(pos&q.mask) * q.maxSGE
	return q.sges[at : at+int(q.entries[pos&q.mask].elements)]
}

// elementRoom returns the room for the elements of the request at a position.
func (q *SendQueue) elementRoom(pos uint64) []verbs.SGE {
	at := int(pos&q.mask) * q.maxSGE
	return q.sges[at : at+q.maxSGE]
}

// ErrPostUnconnected is the error of PostSend unless the phase is Up.
var ErrPostUnconnected = fmt.Errorf("post send: %w", verbs.ErrNotConnected)

var (
	errPostFull   = fmt.Errorf("post send: %w", verbs.ErrQueueFull)
	errPostAccess = fmt.Errorf("post send: %w", verbs.ErrAccess)
	errPostSGEs   = errors.New("post send: more elements than the MaxSGE of the queue pair")
	errPostLength = errors.New("post send: payload is longer than a message of this fabric")
)

// Post appends wr. Requests before the position done have finished. The payload
// must lie in regions of d and have at most longest bytes.
func (q *SendQueue) Post(wr *verbs.SendWR, done uint64, d *Domain, longest uint64) error {
	if q.Tail-q.Head >= q.depth && !q.Retire(done) {
		return errPostFull
	}
	if len(wr.SGEs) > q.maxSGE {
		return errPostSGEs
	}
	if q.Tail-q.Head == uint64(len(q.entries)) {
		q.growMemory()
	}
	own := q.elementRoom(q.Tail)
	var length uint64
	for i := range wr.SGEs {
		if !d.Holds(wr.SGEs[i].LKey, wr.SGEs[i].Buf) {
			return errPostAccess
		}
		own[i] = wr.SGEs[i]
		length += uint64(len(wr.SGEs[i].Buf))
	}
	if length > longest {
		return errPostLength
	}
	// Field by field: a literal is put together elsewhere and then copied, in
	// wider pieces that wait for the narrow ones.
	e := q.At(q.Tail)
	*e = Send{}
	e.ID, e.Op, e.Signaled, e.elements = wr.ID, wr.Op, wr.Signaled, uint8(len(wr.SGEs))
	e.Addr, e.Key, e.Imm, e.Length = wr.RemoteAddr, wr.RKey, wr.Imm, uint32(length)
	q.Tail++
	return nil
}

// Cursor is a position in the elements of a request.
type Cursor struct{ element, offset int }

// Next returns the next piece, of at least 1 and at most n bytes, and moves
// behind it. That many bytes must be left.
func (c *Cursor) Next(sges []verbs.SGE, n int) []byte {
	for {
		if b := sges[c.element].Buf[c.offset:]; len(b) > 0 {
			b = b[:min(len(b), n)]
			c.offset += len(b)
			return b
		}
		c.element, c.offset = c.element+1, 0
	}
}

// Skip moves n bytes on. That many bytes must be left.
func (c *Cursor) Skip(sges []verbs.SGE, n int) {
	for n > 0 {
		n -= len(c.Next(sges, n))
	}
}

// Retire removes requests before the position done that need no completion,
// up to the first that needs one. It reports whether the queue has room.
func (q *SendQueue) Retire(done uint64) bool {
	for q.Head < done {
		if e := q.At(q.Head); e.Signaled || e.Status != verbs.StatusOK {
			break
		}
		q.Head++
	}
	return q.Tail-q.Head < q.depth
}

// Reapable reports whether Reap would return a completion.
func (q *SendQueue) Reapable(done uint64) bool {
	q.Retire(done)
	return q.Head < done
}

// Reap removes requests before the position done, in order, and fills wcs with
// their completions.
func (q *SendQueue) Reap(wcs []verbs.WC, done uint64, context uint64) (n int) {
	for ; n < len(wcs) && q.Reapable(done); n++ {
		e := q.At(q.Head)
		wcs[n] = verbs.WC{ID: e.ID, QP: context, Op: e.Op, Status: e.Status}
		if e.Status == verbs.StatusOK {
			wcs[n].ByteLen = e.Length
		}
		q.Head++
	}
	return n
}

// Flush removes requests and fills wcs with their completions: with their own
// status, or StatusFlushed if they have none.
func (q *SendQueue) Flush(wcs []verbs.WC, context uint64) (n int) {
	for ; n < len(wcs) && q.Head < q.Tail; n++ {
		e := q.At(q.Head)
		wcs[n] = verbs.WC{ID: e.ID, QP: context, Op: e.Op, Status: flushStatus(e.Status)}
		q.Head++
	}
	return n
}

// flushStatus returns the status of a request that is not executed.
func flushStatus(s verbs.Status) verbs.Status {
	if s == verbs.StatusOK {
		return verbs.StatusFlushed
	}
	return s
}

// RecvQueue is the receive queue of a queue pair. The receives at positions
// Head to Tail are in it. Init must be called before the first use. Owner only; the
// creator before the connection is up.
type RecvQueue struct {
	Head, Tail uint64

	// Status is that of the oldest receive if it is flushed; StatusOK means
	// StatusFlushed.
	Status verbs.Status

	entries []verbs.RecvWR // a power of two
	mask    uint64
	depth   uint64
}

// Init makes a queue for depth receives.
func (q *RecvQueue) Init(depth int) {
	q.depth = uint64(max(depth, 1))
	q.entries = make([]verbs.RecvWR, ringSize(q.depth))
	q.mask = uint64(len(q.entries) - 1)
}

// Post appends wr. Its buffer must lie in a region of d.
func (q *RecvQueue) Post(wr *verbs.RecvWR, d *Domain) error {
	if q.Tail-q.Head >= q.depth {
		return fmt.Errorf("post receive: %w", verbs.ErrQueueFull)
	}
	if !d.Holds(wr.LKey, wr.Buf) {
		return fmt.Errorf("post receive: %w", verbs.ErrAccess)
	}
	*q.At(q.Tail) = *wr
	q.Tail++
	return nil
}

// Empty reports whether no receive is posted.
func (q *RecvQueue) Empty() bool { return q.Head == q.Tail }

// At returns the receive at a position.
func (q *RecvQueue) At(pos uint64) *verbs.RecvWR { return &q.entries[pos&q.mask] }

// Oldest returns the oldest receive. The queue must not be empty.
func (q *RecvQueue) Oldest() *verbs.RecvWR { return q.At(q.Head) }

// Take removes the oldest receive and returns its ID. The queue must not be
// empty.
func (q *RecvQueue) Take() uint64 {
	id := q.Oldest().ID
	q.Head++
	return id
}

// Any reports whether match is true for a receive in the queue.
func (q *RecvQueue) Any(match func(*verbs.RecvWR) bool) bool {
	for at := q.Head; at != q.Tail; at++ {
		if match(q.At(at)) {
			return true
		}
	}
	return false
}

// Flush removes receives and fills wcs with their completions.
func (q *RecvQueue) Flush(wcs []verbs.WC, context uint64) (n int) {
	for ; n < len(wcs) && !q.Empty(); n++ {
		wcs[n] = verbs.WC{ID: q.Take(), QP: context, Op: verbs.OpRecv, Status: flushStatus(q.Status)}
		q.Status = verbs.StatusOK
	}
	return n
}
