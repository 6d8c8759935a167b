package load

import (
	"context"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// Device is the device under load.
type Device interface {
	// Limits: Size, LogicalBlockSize and MaxIOSize count; a MaxIOSize of 0 is
	// none.
	Limits() blk.Limits
	// Open makes a queue with memory of slots times slotSize bytes, for one of
	// jobs jobs. It is called by the goroutine that will own the queue and close
	// it. A queue that needs one thread locks that goroutine to its own until it
	// is closed; others do not, since a goroutine that is not locked wakes sooner.
	Open(ctx context.Context, job, jobs, slots, slotSize int) (Queue, error)
}

// Queue has the requests of one job in flight.
type Queue interface {
	// Buf is the memory of a slot; the queue's from Submit until its Done.
	Buf(slot int) []byte
	// Submit queues a request; Wait sends it.
	Submit(r Request)
	// Wait returns at least one answer while there are requests in flight.
	Wait(done []Done) int
	// Close ends it, with nothing in flight.
	Close() error
}

// Request is one request: Len bytes between Buf(Slot) and the device at Off.
type Request struct {
	Op   blk.Op
	Slot int
	Off  uint64
	Len  int
}

// Done is the answer to the request in Slot.
type Done struct {
	Slot int
	Err  error
}
