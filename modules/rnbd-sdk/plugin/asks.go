package plugin

import (
	"context"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// asks lets the control path wait until something is true on the thread of a
// queue: that no request of a disk is in flight, say. The owner of the queue
// looks with one atomic load when it has nothing better to do.
type asks struct {
	head   atomic.Pointer[ask]
	closed atomic.Bool
	broken atomic.Bool   // the host broke the ring
	done   chan struct{} // closed when Serve has returned

	mu    sync.Mutex // guards event against the end of the ring; not for the owner
	event int        // eventfd that the owner sleeps on; -1: the ring is gone
}

func (a *asks) init(event int) {
	a.done = make(chan struct{})
	a.event = event
}

func (a *asks) ended() bool { return a.closed.Load() || a.broken.Load() }

type ask struct {
	ready func() bool // called on the queue's thread
	yes   chan struct{}
	next  *ask
}

// wait returns nil once ready was true, or when the queue's Serve has ended.
func (a *asks) wait(ctx context.Context, ready func() bool) error {
	n := &ask{ready: ready, yes: make(chan struct{})}
	for {
		n.next = a.head.Load()
		if a.head.CompareAndSwap(n.next, n) {
			break
		}
	}
	a.kick()
	select {
	case <-n.yes:
		return nil
	case <-a.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// answer runs on the queue's thread. Asks that are not ready stay.
func (a *asks) answer() {
	n := a.head.Swap(nil)
	for n != nil {
		next := n.next
		if n.ready() {
			close(n.yes)
		} else {
			a.putBack(n)
		}
		n = next
	}
}

func (a *asks) putBack(n *ask) {
	for {
		n.next = a.head.Load()
		if a.head.CompareAndSwap(n.next, n) {
			return
		}
	}
}

func (a *asks) pending() bool { return a.head.Load() != nil }

// close makes Serve end.
func (a *asks) close() {
	a.closed.Store(true)
	a.kick()
}

// kick wakes the owner, whether it asked for it or not.
func (a *asks) kick() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.event >= 0 {
		one := [8]byte{1}
		_, _ = unix.Write(a.event, one[:])
	}
}

// removeEvent is called before the ring is closed: its descriptor may come back as
// something else.
func (a *asks) removeEvent() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.event = -1
}
