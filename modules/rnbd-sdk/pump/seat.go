package pump

import (
	"slices"

	"golang.org/x/sys/unix"
)

const (
	seatRound = 32      // requests that are averaged
	seatSoon  = 15_000  // ns: a client that comes back so soon is not worth a change
	seatLate  = 200_000 // ns: a client that comes back so late has done something else
	// Changes are tried seatPause apart at least, and twice as far apart after each
	// that did not help, up to seatPauseMax.
	seatPause    = 10_000_000  // ns
	seatPauseMax = 100_000_000 // ns
	// On a host with more CPUs the scheduler chooses.
	seatCPUs = 4
)

// Seat chooses the CPU of a thread that answers a client with one request in
// flight. Such a client sleeps until the reply wakes it. If it sleeps on another
// CPU, that one has to be interrupted: on a virtual machine this took the thread
// 14 us, and the client 16 us and more after that before it ran
// (docs/results/limits.md). On the same CPU it runs as soon as the thread finds
// no work. The thread cannot see where its client is, but it sees how soon the
// next request comes. If that takes long, the seat changes the CPU, and stays if a
// request and the wait for the next one take less time there.
//
// The zero value leaves the CPU to the scheduler, and so does a thread that may run
// on more than four CPUs. All methods are called on the thread, and allocate nothing.
type Seat struct {
	cpus []int         // that the thread may run on; nil: none is chosen
	at   func() int    // the CPU that it runs on
	move func(cpu int) // takes it to a CPU; from there the scheduler may move it on

	last  int64 // time of the last request; 0: none yet
	freed int64 // time of the reply that left nothing in flight; 0: something is

	gaps    int64 // ns from replies to requests, of a round
	periods int64 // ns from requests to requests
	n       int
	was     int64 // the mean period on the CPU that was left for a try; 0: none is under way
	from    int   // that CPU
	next    int64 // time from which on a change may be tried
	pause   int64
}

// Take begins to choose, among the CPUs that the thread may run on.
func (s *Seat) Take() {
	var all unix.CPUSet
	if unix.SchedGetaffinity(0, &all) != nil {
		return
	}
	var cpus []int
	for cpu := 0; len(cpus) < all.Count(); cpu++ {
		if all.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	s.Choose(cpus, currentCPU, moveTo)
}

// moveTo takes the thread to a CPU, if it may run there. Where it may run stays as
// it is: an administrator may have changed that meanwhile.
func moveTo(cpu int) {
	var all, one unix.CPUSet
	if unix.SchedGetaffinity(0, &all) != nil || !all.IsSet(cpu) {
		return
	}
	one.Set(cpu)
	if unix.SchedSetaffinity(0, &one) == nil {
		_ = unix.SchedSetaffinity(0, &all)
	}
}

// Choose makes the seat choose among cpus, by functions that a test may pretend:
// at returns the CPU that the thread is on, move takes it to another one, from
// where the scheduler may move it on.
func (s *Seat) Choose(cpus []int, at func() int, move func(int)) {
	if len(cpus) < 2 || len(cpus) > seatCPUs {
		return
	}
	s.cpus, s.at, s.move, s.pause = cpus, at, move, seatPause
}

// Chooses reports whether the seat needs to know when the client has nothing in
// flight.
func (s *Seat) Chooses() bool { return s.cpus != nil }

// Left notes that the last reply has been sent and the client has nothing in
// flight. The time is in nanoseconds, from any origin.
func (s *Seat) Left(now int64) { s.freed = now }

// Came is called with each request. It counts the time since the last reply, and
// since the last request. A try is over as soon as it cannot turn out well any
// more: the other CPU may be a busy one.
func (s *Seat) Came(now int64) {
	gap, period := now-s.freed, now-s.last
	counts := s.cpus != nil && s.freed != 0 && s.last != 0
	s.last, s.freed = now, 0
	if !counts || gap > seatLate && s.was == 0 {
		return
	}
	s.gaps += gap
	s.periods += period
	if s.n++; s.n == seatRound || s.was != 0 && s.periods > s.was*seatRound {
		s.judge(s.gaps/int64(s.n), s.periods/int64(s.n), now)
		s.gaps, s.periods, s.n = 0, 0, 0
	}
}

// judge keeps or changes the CPU after a round.
func (s *Seat) judge(gap, period, now int64) {
	switch {
	case s.was != 0 && period < s.was*3/4: // better: stay
		s.was, s.pause = 0, seatPause
		s.next = now + s.pause
	case s.was != 0:
		s.was = 0
		s.move(s.from)
		s.pause = min(2*s.pause, seatPauseMax)
		s.next = now + s.pause
	case gap > seatSoon && now >= s.next:
		s.try(period)
	}
}

// try leaves the CPU for the next one.
func (s *Seat) try(period int64) {
	if i := slices.Index(s.cpus, s.at()); i >= 0 {
		s.was, s.from = period, s.cpus[i]
		s.move(s.cpus[(i+1)%len(s.cpus)])
	}
}
