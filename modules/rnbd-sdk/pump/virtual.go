package pump

import (
	"bytes"
	"runtime"
	"strconv"
	"time"
)

// A virtual pump sleeps on Go's timers instead of descriptors, so that it can run
// in a bubble of testing/synctest. Time advances there only while all goroutines
// wait in ways that the runtime knows; a system call is none of these. The
// descriptors of its sources are not watched. The pump polls its sources when a
// function is posted, and after naps that grow while there is nothing to do.

const (
	firstNap = time.Millisecond
	// maxNap bounds the delay after which a virtual pump notices an event of a
	// source.
	maxNap = 10 * time.Millisecond
)

// nap is how a virtual pump sleeps.
type nap struct {
	bell  chan struct{} // of one place; nil: the pump is not virtual
	next  time.Duration
	timer *time.Timer // of the goroutine that runs the pump; reset for each nap
	// runner is the number of the goroutine that runs the pump. It is looked up once,
	// because that costs more than the rest of a turn.
	runner int32
}

func (p *Pump) virtual() bool { return p.nap.bell != nil }

// ring wakes the pump.
func (n *nap) ring() {
	select {
	case n.bell <- struct{}{}:
	default:
	}
}

// wait returns after the next nap, or when the bell rings.
func (n *nap) wait() {
	if n.timer == nil {
		n.timer = time.NewTimer(n.next)
	} else {
		n.timer.Reset(n.next)
	}
	select {
	case <-n.bell:
		n.timer.Stop()
	case <-n.timer.C:
	}
	n.next = min(16*n.next, maxNap)
}

// worked makes the next nap a short one.
func (n *nap) worked() { n.next = firstNap }

// goroutineID returns the number of the calling goroutine. Go shows it in stack
// traces only. The id of a thread would not do: virtual pumps are not locked to
// threads, because a change between locked goroutines costs two changes of threads,
// and simulations consist of little else.
func goroutineID() int32 {
	var b [64]byte
	_, rest, _ := bytes.Cut(b[:runtime.Stack(b[:], false)], []byte("goroutine "))
	id, _, _ := bytes.Cut(rest, []byte(" "))
	n, _ := strconv.ParseInt(string(id), 10, 64)
	return int32(n)
}
