package pump

import (
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A Caller waits for results of the pump's work. Instead of waiting for the thread,
// it does that work on its own thread: it drives the pump. This saves two changes of
// threads per request.
//
// The pump is in one of three modes. The driving thread holds p.owner.
//
//	           nothing to do: sources are armed
//	awake --------------------------------------> asleep
//	 ^  ^                                          |  |
//	 |  '---- kick: an event, Do, Stop ------------'  |  a caller drives: disarm, work, arm again.
//	 |        or the driver left work behind          |  Then the mode is asleep again.
//	 |
//	 |        a caller wants it: nothing is armed
//	awake --------------------------------------> lent
//	    ^                                          |  |
//	    '---- kick: Do, Stop, Recall, the driver --'  |  a caller drives: work only.
//	          gives it back, or no caller drove it    |  Then the mode is lent again.
//	          it between two looks of the thread
//
// A drive of a sleeping pump costs a few system calls, because every source is armed
// again at its end. A loan has no such cost: the thread waits, and looks every
// millisecond whether the pump is still driven.
//
// Invariants, checked in a build with the tag pumpdebug:
//
//   - The loop, the sources and the mailbox are touched by the holder of p.owner only.
//   - The thread runs the loop in mode awake, callers in asleep or lent.
//   - Sources are armed in mode asleep while there is no drive, and at no other time.
//   - Requests published in mode lent are followed by a drive or by Recall.

const (
	modeAwake  uint32 = iota // the thread owns the pump, or is about to
	modeAsleep               // the thread sleeps in the kernel until it is woken
	modeLent                 // the thread waits for callers to stop driving
)

const (
	// lendLook is the interval at which the thread looks whether a lent pump is
	// driven: work that a caller left undone waits up to twice as long.
	lendLook = time.Millisecond
	// lendAfter drives of a sleeping pump, each within soonAgain of the last, make
	// the thread lend it.
	lendAfter = 16
	soonAgain = 200 * time.Microsecond
	// askFor is how long a caller waits for a pump that is awake.
	askFor = 50 * time.Microsecond
)

// callers is a pump's state about its callers.
type callers struct {
	look   time.Duration // lendLook
	wanted atomic.Bool   // the thread is asked to lend the pump

	waiting atomic.Int32 // callers in Wait
	crowded atomic.Int32 // calls of Wait left until one may borrow the pump; see enter
	combiner

	// Of the owner.
	all    []*Caller
	streak int   // drives of the sleeping pump that came soon after another
	last   int64 // end of the last one
}

// tryDrive runs work as the pump's owner, unless the pump is awake or another
// caller drives it, and reports whether it did. again announces that the caller
// will come back soon. work returns false to give a lent pump back to its
// thread; else the rest of the work is done by the next caller, or by the
// thread within two looks.
func (p *Pump) tryDrive(work func() (keep bool), again bool) bool {
	if p.virtual() || p.mode.Load() == modeAwake || !p.owner.TryLock() {
		return false
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p.ownerTID.Store(int32(unix.Gettid()))
	mode := p.mode.Load()
	if mode == modeAwake || p.quit.Load() {
		p.disown()
		return false
	}
	p.stats.drives.Add(1)
	p.timed = false
	if mode == modeAsleep {
		p.driveAsleep(work, again)
	} else {
		p.checkArmed(false)
		if !work() {
			p.endLoan()
		}
	}
	p.disown()
	return true
}

// borrow is tryDrive for a caller that drives again and again: the pump is lent to
// it, even if it is awake. It returns false if the thread does not lend the pump soon
// enough. A thread that has lent its pump keeps a place in Go's scheduler, so pumps of
// a process without SetProcs are not lent.
func (p *Pump) borrow(work func() (keep bool)) bool {
	lends := p.lends()
	if p.tryDrive(work, lends) {
		return true
	}
	if !lends {
		return false
	}
	for start := time.Now(); time.Since(start) < askFor; yield() {
		p.callers.wanted.Store(true) // the thread clears it at the end of a loan
		if p.tryDrive(work, true) {
			return true
		}
	}
	p.callers.wanted.Store(false) // so that the thread keeps the pump
	p.Recall()                    // it may have been lent before
	return false
}

// lends reports whether there are enough processors for the pump to be lent.
func (p *Pump) lends() bool { return !p.virtual() && pumps.Load() < procs.Load() }

// Recall ends a loan, if there is one. Whoever publishes work for the pump and does
// not drive it calls Recall afterwards: nothing is armed during a loan, and the thread
// would not see the work before its next look. Any goroutine.
func (p *Pump) Recall() {
	if p.mode.Load() == modeLent {
		p.endLoan()
	}
}

func (p *Pump) endLoan() {
	p.stats.givenBack.Add(1)
	p.kick()
}

// driveAsleep runs work while the thread sleeps, and arms the sources again. The
// thread is woken if something is left to do, or if it is to lend the pump.
func (p *Pump) driveAsleep(work func() (keep bool), again bool) {
	p.checkArmed(true)
	p.watchSources(false)
	p.disarmAll()
	work()
	if p.dirty {
		p.compact()
	}
	idle := p.armAll()
	if !idle { // often no more than a trace of events that were handled: look again
		p.turn()
		idle = p.armAll()
	}
	p.watchSources(true)
	if again && p.isStreak() {
		p.callers.wanted.Store(true)
		idle = false
	}
	if !idle {
		p.kick()
	}
}

// isStreak counts the drives that follow one another soon, and reports whether they
// are many.
func (p *Pump) isStreak() bool {
	now := p.tick()
	soon := time.Duration(now-p.callers.last) < soonAgain
	p.callers.last = now
	if p.callers.streak++; !soon {
		p.callers.streak = 0
	}
	return p.callers.streak >= lendAfter
}

// lend lends the pump until it is not driven for a while or is kicked. Others publish
// work and then load the mode (Recall), or clear callers.wanted and then load the mode
// (borrow). So that neither is missed, the thread stores the mode first and then looks
// for work and at callers.wanted.
func (p *Pump) lend() {
	p.callers.streak = 0
	p.stats.loops.Store(p.loops)
	p.watchSources(false)
	p.mode.Store(modeLent)
	p.turn()
	if p.callers.wanted.Load() && !p.pending.Load() && !p.quit.Load() {
		p.stats.loans.Add(1)
		p.disown()
		p.awaitCallers()
		p.mode.Store(modeAwake)
		p.own()
	}
	p.mode.Store(modeAwake)
	p.callers.wanted.Store(false)
	p.watchSources(true)
}

// awaitCallers returns when the pump was not driven between two looks, or was kicked.
// It does not tell Go's scheduler that it blocks: the runtime's monitor would look
// after each of these waits, every 20 us, on the CPUs that the callers need. A stop of
// the world waits for it, a millisecond at the most.
func (p *Pump) awaitCallers() {
	var events [2]unix.EpollEvent
	for drives := p.stats.drives.Load(); p.mode.Load() == modeLent; {
		if epollRaw(p.gate, events[:], p.callers.look) != 0 {
			continue
		}
		now := p.stats.drives.Load()
		if now == drives {
			return
		}
		drives = now
	}
}
