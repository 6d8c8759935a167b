package main

import "sort"

// state is what a thread does.
type state uint8

const (
	asleep    state = iota
	working         // on a CPU
	scheduler       // on a CPU, in a call that waits: about to leave, or just back
	wakeUp          // woken, on a CPU that was idle
	noCore          // runnable, another thread has the CPU
	states
)

// history are the states of one thread.
type history struct {
	at    []int64
	state []state
	call  int // that it is in; below 0: none or not known
}

func (h *history) set(at int64, s state) {
	if n := len(h.state); n == 0 || h.state[n-1] != s {
		h.at, h.state = append(h.at, at), append(h.state, s)
	}
}

// running is the state of a thread on a CPU.
func (h *history) running() state {
	if known[h.call].call == waits {
		return scheduler
	}
	return working
}

// now is the latest state; asleep if there was none.
func (h *history) now() state {
	if len(h.state) == 0 {
		return asleep
	}
	return h.state[len(h.state)-1]
}

// times are nanoseconds by state.
type times [states]float64

// between adds up the states from one moment to another.
func (h *history) between(from, to int64) (t times) {
	if h == nil {
		return t
	}
	for i := max(0, h.index(from)); i < len(h.at) && h.at[i] < to; i++ {
		end := to
		if i+1 < len(h.at) {
			end = min(to, h.at[i+1])
		}
		t[h.state[i]] += float64(max(0, end-max(from, h.at[i])))
	}
	return t
}

// index is the place of the state at a moment, below 0 before all of them.
func (h *history) index(at int64) int {
	return sort.Search(len(h.at), func(i int) bool { return h.at[i] > at }) - 1
}

// is returns the state at a moment.
func (h *history) is(at int64) state {
	if i := h.index(at); i >= 0 {
		return h.state[i]
	}
	return asleep
}

// firstWork returns the first moment from which the thread works, at most limit.
func (h *history) firstWork(from, limit int64) int64 {
	for i := max(0, h.index(from)); i < len(h.at) && h.at[i] < limit; i++ {
		if h.state[i] == working {
			return max(from, h.at[i])
		}
	}
	return limit
}

// histories follows all threads.
func histories(events []event) map[int]*history {
	all := map[int]*history{}
	of := func(tid int) *history {
		if all[tid] == nil {
			all[tid] = &history{call: -1}
		}
		return all[tid]
	}
	on := map[int]int{} // the thread of each CPU
	for i := range events {
		e := &events[i]
		h := of(e.tid)
		switch e.kind {
		case enterCall:
			h.call = e.call
			h.set(e.at, h.running())
		case exitCall:
			h.call = -1
			h.set(e.at, working)
		case waking:
			if w := of(e.woken); w.now() == asleep {
				if running, seen := on[e.target]; seen && running == 0 {
					w.set(e.at, wakeUp)
				} else {
					w.set(e.at, noCore)
				}
			}
		case switchTo:
			on[e.cpu] = e.next
			h.set(e.at, asleep)
			if e.stays {
				h.set(e.at, noCore)
			}
			next := of(e.next)
			next.set(e.at, next.running())
		}
		if e.kind != switchTo {
			on[e.cpu] = e.tid
		}
	}
	return all
}
