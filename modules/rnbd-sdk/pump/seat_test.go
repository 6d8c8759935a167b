package pump

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// seatRig is a client with one request in flight, and the time: a client on the
// pump's CPU comes back in 10 us, one on another CPU in 50.
type seatRig struct {
	Seat
	cpu, client int
	moves       int
	now         int64
	near, far   int64 // ns until the client comes back
	busy        int   // a CPU on which a request takes ten times as long; -1: none
}

func newSeatRig(cpus ...int) *seatRig {
	r := &seatRig{cpu: cpus[0], client: cpus[0], near: 10_000, far: 50_000, now: 1, busy: -1}
	r.Choose(cpus, func() int { return r.cpu }, func(cpu int) { r.moves++; r.cpu = cpu })
	return r
}

// run serves the client for some time, in nanoseconds, and returns how much of it
// the client was on the pump's CPU.
func (r *seatRig) run(ns int64) (near float64) {
	var good int64
	for end := r.now + ns; r.now < end; {
		request, gap := int64(30_000), r.far
		if r.cpu == r.busy {
			request = 300_000
		}
		if r.cpu == r.client {
			gap = r.near
			good += request + gap
		}
		r.now += request
		r.Left(r.now)
		r.now += gap
		r.Came(r.now)
	}
	return float64(good) / float64(ns)
}

func TestSeatFollowsTheClient(t *testing.T) {
	for _, cpus := range [][]int{{0, 1}, {2, 3, 7}} {
		r := newSeatRig(cpus...)
		for _, client := range append(cpus[1:], cpus[0]) {
			r.client = client
			r.run(500e6)
			if near := r.run(100e6); near < 0.99 {
				t.Errorf("CPUs %v: the client is on CPU %d, the pump on %d, %.2f of the time together", cpus, client, r.cpu, near)
			}
		}
	}
}

// A client that is as slow on every CPU costs a change and the way back in a
// while.
func TestSeatGivesUp(t *testing.T) {
	r := newSeatRig(0, 1)
	r.near = r.far
	if first := r.run(1e9); first < 0.95 || r.moves < 2 || r.moves > 40 {
		t.Errorf("%d changes in a second, %.2f of it on the first CPU", r.moves, first)
	}
}

// Neither a CPU on which the pump hardly runs is chosen, nor one on which the
// client does not come back.
func TestSeatAvoidsABusyCPU(t *testing.T) {
	r := newSeatRig(0, 1)
	r.client, r.busy = 1, 1
	if away := 1 - r.run(1e9); away < 0.95 || r.moves < 2 {
		t.Errorf("%d changes in a second, %.2f of it on the other CPU", r.moves, away)
	}
	r = newSeatRig(0, 1)
	for r.cpu == 0 { // until a try begins
		r.near = r.far
		r.run(1e6)
	}
	r.far = 1e9 // longer than what counts
	if r.run(3e9); r.cpu != 0 {
		t.Error("a try does not end when the client takes its time")
	}
}

func TestSeatLeavesTheSchedulerAlone(t *testing.T) {
	for name, change := range map[string]func(*seatRig){
		"the client is soon back":        func(r *seatRig) { r.far = r.near },
		"the client does something else": func(r *seatRig) { r.near, r.far = 300_000, 300_000 },
		"one CPU":                        func(r *seatRig) { *r = *newSeatRig(5); r.near = r.far },
		"many CPUs":                      func(r *seatRig) { *r = *newSeatRig(0, 1, 2, 3, 4); r.near = r.far },
		"the CPU is unknown":             func(r *seatRig) { r.cpu = -1 },
	} {
		r := newSeatRig(0, 1)
		change(r)
		if r.run(100e6); r.moves != 0 {
			t.Errorf("%s: %d changes", name, r.moves)
		}
	}
}

// Where the thread may run is the same after a change, and it has changed.
func TestMoveTo(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, after unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		t.Fatal(err)
	}
	for cpu := range 64 {
		if !before.IsSet(cpu) {
			continue
		}
		arrived := false
		for range 100 { // the scheduler may move it on at once
			if moveTo(cpu); currentCPU() == cpu {
				arrived = true
				break
			}
		}
		if !arrived {
			t.Errorf("the thread is never on CPU %d", cpu)
		}
	}
	moveTo(1000)
	if err := unix.SchedGetaffinity(0, &after); err != nil || after != before {
		t.Errorf("may run on %d CPUs, before on %d: %v", after.Count(), before.Count(), err)
	}
}

func TestSeatAllocatesNothing(t *testing.T) {
	r := newSeatRig(0, 1)
	r.near = r.far
	if n := testing.AllocsPerRun(10, func() { r.run(20e6) }); n != 0 || r.moves == 0 {
		t.Errorf("%v allocations, %d changes", n, r.moves)
	}
}
