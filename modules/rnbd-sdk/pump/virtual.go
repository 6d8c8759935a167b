package pump

import (
	"bytes"
	"runtime"
	"strconv"
	"time"
)

// A virtual pump sleeps on Go's timers instead of descriptors, so that it can run
// in a bubble of testing/synctest: time advances there only while all goroutines
// wait for something that the runtime knows, and a system call is not. Its sources'
// descriptors are not watched. They are looked at whenever a function is posted,
// and after naps that grow while there is nothing to do.

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
	timer *time.Timer // of the goroutine that runs the pump; used again and again
	// runner is the goroutine that runs the pump. It is looked up once: that costs
	// more than all else that a turn does.
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

// goroutineID names the calling goroutine. The runtime tells it in stack traces only.
// Virtual pumps are not locked to threads, since a change of goroutines that are costs
// two changes of threads, and simulations consist of little else.
func goroutineID() int32 {
	var b [64]byte
	_, rest, _ := bytes.Cut(b[:runtime.Stack(b[:], false)], []byte("goroutine "))
	id, _, _ := bytes.Cut(rest, []byte(" "))
	n, _ := strconv.ParseInt(string(id), 10, 64)
	return int32(n)
}

// worked makes the next nap a short one.
func (n *nap) worked() { n.next = firstNap }
