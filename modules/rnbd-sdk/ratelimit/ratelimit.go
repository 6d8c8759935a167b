// Package ratelimit bounds the records that others can cause, so that they fill no
// disk and crowd out no other record.
//
// Of one subject, and of all together, some records pass in a window of time. The
// others are counted, and the last one and their number follow at the end of the
// window.
package ratelimit

import (
	"net/netip"
	"sync"
	"time"
)

// Limits are numbers of records. A subject may have Burst records at once, and
// PerWindow in each window after that, for those that it has used. TotalBurst and
// TotalPerWindow are the same for all subjects together.
type Limits struct {
	Window                     time.Duration // begins with a record
	Burst, PerWindow           int
	TotalBurst, TotalPerWindow int
}

// Refusals are the limits of records about peers that are refused.
var Refusals = Limits{Window: 10 * time.Second, Burst: 10, PerWindow: 10, TotalBurst: 50, TotalPerWindow: 50}

// Clients are the limits of records about what clients are allowed to do. A host that
// maps all its devices at once is within them.
var Clients = Limits{Window: 10 * time.Second, Burst: 2048, PerWindow: 100, TotalBurst: 16384, TotalPerWindow: 500}

// maxSubjects have a count of their own; the others share that of the zero subject.
const maxSubjects = 64

// Limiter passes on some of the records that it is given. Its methods may be called
// by any goroutine.
type Limiter[K comparable, T any] struct {
	limits Limits
	pass   func(subject K, record T, leftOut uint64)

	mu     sync.Mutex
	counts map[K]*count[T]
	used   int         // of limits.TotalBurst
	timer  *time.Timer // ends the window; nil: none is open
}

// count is what one subject has used.
type count[T any] struct {
	used    int // of limits.Burst
	leftOut uint64
	last    T // record that was left out
}

// New returns a Limiter that calls pass with each record that passes, leftOut being 0,
// and at the end of a window with the last one that was left out and their number.
// subject is the zero value if they are of several subjects. pass may be called by any
// goroutine.
func New[K comparable, T any](limits Limits, pass func(subject K, record T, leftOut uint64)) *Limiter[K, T] {
	return &Limiter[K, T]{limits: limits, pass: pass, counts: map[K]*count[T]{}}
}

// Add passes on a record about subject, or counts it. The zero subject is one like
// another.
func (l *Limiter[K, T]) Add(subject K, record T) {
	if l.allow(subject, record) {
		l.pass(subject, record, 0)
	}
}

// allow reports whether the record passes.
func (l *Limiter[K, T]) allow(subject K, record T) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer == nil {
		l.timer = time.AfterFunc(l.limits.Window, l.Flush)
	}
	c := l.countOf(subject)
	if c.used < l.limits.Burst && l.used < l.limits.TotalBurst {
		c.used++
		l.used++
		return true
	}
	c.leftOut++
	c.last = record
	return false
}

// countOf returns the count of subject. The caller holds mu.
func (l *Limiter[K, T]) countOf(subject K) *count[T] {
	if c := l.counts[subject]; c != nil {
		return c
	}
	if len(l.counts) >= maxSubjects {
		var zero K
		subject = zero
		if c := l.counts[subject]; c != nil {
			return c
		}
	}
	c := &count[T]{}
	l.counts[subject] = c
	return c
}

// Flush ends the window that is open, if one is.
func (l *Limiter[K, T]) Flush() {
	for subject, c := range l.endWindow() {
		l.pass(subject, c.last, c.leftOut)
	}
}

// endWindow returns the counts with records that were left out. It begins a window if
// a subject has used more than a window gives back.
func (l *Limiter[K, T]) endWindow() map[K]count[T] {
	l.mu.Lock()
	defer l.mu.Unlock()
	over := map[K]count[T]{}
	for subject, c := range l.counts {
		if c.leftOut > 0 {
			over[subject] = *c
			var zero T
			c.leftOut, c.last = 0, zero
		}
		if c.used -= min(c.used, l.limits.PerWindow); c.used == 0 {
			delete(l.counts, subject)
		}
	}
	l.used -= min(l.used, l.limits.TotalPerWindow)
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	if len(l.counts) > 0 || l.used > 0 {
		l.timer = time.AfterFunc(l.limits.Window, l.Flush)
	}
	return over
}

// Host returns the subject that an address counts as: an address of IPv6 stands for
// its /64.
func Host(a netip.Addr) netip.Addr {
	a = a.Unmap().WithZone("")
	if p, err := a.Prefix(64); err == nil && a.Is6() {
		return p.Addr()
	}
	return a
}
