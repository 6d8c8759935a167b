package iwarp

import (
	"net/netip"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
)

// A handshake of TLS costs a server some hundred microseconds of CPU time, and
// whoever reaches the port can ask for one. So the handshakes of a device compute
// one at a time, and while connections carry data they pause between: they get a
// share of the CPUs, not more. Hosts have turns one after the other, so one with
// many handshakes delays its own.

const (
	// effortShare is the part of all CPUs that handshakes get beside a load: one
	// of so many.
	effortShare = 16
	// maxPause bounds the pause after a turn. A turn is long if its thread had to
	// wait for a CPU.
	maxPause = 50 * time.Millisecond
)

// handshakeScheduler gives turns to handshakes.
type handshakeScheduler struct {
	moved func() uint64 // bytes that connections have carried so far

	mu    sync.Mutex
	taken bool // a handshake computes, or pauses
	began time.Time
	last  uint64 // of moved
	queue map[netip.Prefix][]*waitingHandshake
	hosts []netip.Prefix // of queue, in the order of their next turns
}

// waitingHandshake is a handshake that waits.
type waitingHandshake struct {
	host  netip.Prefix
	ready chan struct{} // closed when its turn has come
}

// acquire waits for a turn, until the deadline or until out is closed.
func (e *handshakeScheduler) acquire(from netip.Addr, deadline time.Time, out <-chan struct{}) error {
	t := e.enqueue(softverbs.HostOf(from))
	if t == nil {
		return nil
	}
	late := time.NewTimer(time.Until(deadline))
	defer late.Stop()
	err := errGaveWay
	select {
	case <-t.ready:
		return nil
	case <-out:
	case <-late.C:
		err = os.ErrDeadlineExceeded
	}
	if !e.cancel(t) { // its turn has come meanwhile
		e.release()
	}
	return err
}

// enqueue returns nil if the turn is the caller's at once.
func (e *handshakeScheduler) enqueue(host netip.Prefix) *waitingHandshake {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.taken {
		e.taken, e.began = true, time.Now()
		return nil
	}
	t := &waitingHandshake{host, make(chan struct{})}
	if e.queue == nil {
		e.queue = map[netip.Prefix][]*waitingHandshake{}
	}
	if len(e.queue[host]) == 0 {
		e.hosts = append(e.hosts, host)
	}
	e.queue[host] = append(e.queue[host], t)
	return t
}

// cancel takes t out of the queue and reports whether it was there.
func (e *handshakeScheduler) cancel(t *waitingHandshake) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	list := e.queue[t.host]
	for i, o := range list {
		if o == t {
			e.setQueue(t.host, append(list[:i:i], list[i+1:]...))
			return true
		}
	}
	return false
}

// setQueue sets the queue of a host. e.mu is held.
func (e *handshakeScheduler) setQueue(host netip.Prefix, list []*waitingHandshake) {
	if len(list) > 0 {
		e.queue[host] = list
		return
	}
	delete(e.queue, host)
	for i, h := range e.hosts {
		if h == host {
			e.hosts = append(e.hosts[:i], e.hosts[i+1:]...)
			return
		}
	}
}

// release ends a turn. The next one begins after a pause if connections have carried
// data since the last turn.
func (e *handshakeScheduler) release() {
	e.mu.Lock()
	defer e.mu.Unlock()
	pause := time.Duration(0)
	if now := e.moved(); now != e.last {
		e.last = now
		pause = min(time.Since(e.began)*time.Duration(max(effortShare-runtime.NumCPU(), 0))/time.Duration(runtime.NumCPU()), maxPause)
	}
	if pause == 0 {
		e.startNext()
		return
	}
	time.AfterFunc(pause, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.startNext()
	})
}

// startNext gives the turn to the first handshake of the next host. e.mu is held.
func (e *handshakeScheduler) startNext() {
	if len(e.hosts) == 0 {
		e.taken = false
		return
	}
	host := e.hosts[0]
	e.hosts = append(e.hosts[1:], host)
	list := e.queue[host]
	t := list[0]
	e.setQueue(host, list[1:])
	e.began = time.Now()
	close(t.ready)
}
