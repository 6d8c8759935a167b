package pump

import (
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A caller may drive the pump instead of its thread. A drive of a pump that
// sleeps leaves it asleep: every source is armed again at its end, with a few
// system calls. For callers who drive all the time there are loans. The thread
// waits without having armed anything, and looks now and then whether the caller
// still drives.

const (
	// loanLook is how often the thread looks: what the caller leaves behind
	// waits up to twice as long.
	loanLook = time.Millisecond
	// loanAfter drives that end within soonAgain of one another make it worth while
	// to lend the pump.
	loanAfter = 16
	soonAgain = 200 * time.Microsecond
	// askFor is how long a caller waits for a pump that is awake.
	askFor = 50 * time.Microsecond
)

// loan is what a pump knows of its callers.
type loan struct {
	look   time.Duration // loanLook
	wanted atomic.Bool   // the thread is asked to lend the pump
	out    atomic.Bool   // the pump is lent, or about to be
	back   bool          // the caller has given it back; of the owner
	streak int           // drives soon after another; of the owner
	last   int64         // end of the last; of the owner
}

// TryDrive lets the caller do the pump's work inline, sparing the hand-over to
// another thread, if the pump's thread sleeps or has lent the pump: it runs once
// as the pump's owner and returns true. False: the pump is awake, use Do. Inside
// once the sources may be used and Turn may be called; before it, and after it,
// their wake-up flags are kept so that nobody signals the sleeping thread. Work
// that once leaves behind wakes the thread, or is done within 2 ms if the pump
// is lent.
func (p *Pump) TryDrive(once func()) bool { return p.tryDrive(once, false) }

// tryDrive is TryDrive; again: the caller is one who drives again and again.
func (p *Pump) tryDrive(once func(), again bool) bool {
	if p.virtual() || !p.asleep.Load() || !p.owner.TryLock() {
		return false
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p.ownerTID.Store(int32(unix.Gettid()))
	if !p.asleep.Load() || p.quit.Load() {
		p.disown()
		return false
	}
	p.stats.drives.Add(1)
	p.timed = false
	if p.loan.out.Load() {
		p.loan.back = false
		if once(); p.loan.back {
			p.stats.givenBack.Add(1)
			p.kick()
		}
	} else {
		p.driveAsleep(once, again)
	}
	p.disown()
	return true
}

// Drive is TryDrive for callers who drive again and again: the pump is lent to
// them, even if it is awake. False: it is not given away soon enough. A thread that
// has lent its pump keeps a place in Go's scheduler, so pumps of a process without
// SetProcs are not lent. A caller who is refused leaves no wish behind: the pump is
// with its thread, or soon will be.
func (p *Pump) Drive(once func()) bool {
	lends := p.Lends()
	if p.tryDrive(once, lends) {
		return true
	}
	if !lends {
		return false
	}
	for start := time.Now(); time.Since(start) < askFor; yield() {
		p.loan.wanted.Store(true) // another caller may have taken it back
		if p.tryDrive(once, true) {
			return true
		}
	}
	p.loan.wanted.Store(false) // nobody waits for it any more
	p.Recall()
	return false
}

// Recall ends a loan, if there is one, for who has published work and does not
// drive: nothing is armed during a loan, so that nobody would see it until the
// thread looks. Any goroutine.
func (p *Pump) Recall() {
	if p.loan.out.Load() {
		p.stats.givenBack.Add(1)
		p.kick()
	}
}

// Lends tells whether Drive may be lent the pump, as far as the process goes.
func (p *Pump) Lends() bool { return !p.virtual() && pumps.Load() < procs.Load() }

// driveAsleep runs once while the thread sleeps, and lets it sleep on.
func (p *Pump) driveAsleep(once func(), again bool) {
	p.watchSources(false)
	p.disarmAll()
	once()
	if p.dirty {
		p.compact()
	}
	idle := p.armAll()
	if !idle { // often but the trace of what was handled: look once more
		p.turn()
		idle = p.armAll()
	}
	p.watchSources(true)
	if again && p.isStreak() {
		p.loan.wanted.Store(true)
		idle = false
	}
	if !idle {
		p.kick()
	}
}

// isStreak counts the drives that follow one another soon, and tells when they
// are many.
func (p *Pump) isStreak() bool {
	now := p.tick()
	soon := time.Duration(now-p.loan.last) < soonAgain
	p.loan.last = now
	if p.loan.streak++; !soon {
		p.loan.streak = 0
	}
	return p.loan.streak >= loanAfter
}

// GiveBack ends a loan, for the function given to Drive: the caller does not come
// back soon, and what is under way must not wait until the thread finds that out.
func (p *Pump) GiveBack() { p.loan.back = true }

// Turn looks at everything once, for the function given to TryDrive, and
// returns the number of events handled.
func (p *Pump) Turn() int { return p.turn() }

// lend gives the pump away until nobody has driven it for a while, something was
// posted, or a caller ends it. Who publishes work for the thread looks afterwards
// whether the pump is out (Recall), who takes his wish back likewise: so the thread
// looks for both after it has said that it is.
func (p *Pump) lend() {
	p.loan.streak = 0
	p.stats.loops.Store(p.loops)
	p.watchSources(false)
	p.asleep.Store(true)
	p.loan.out.Store(true)
	p.turn()
	if p.loan.wanted.Load() && !p.pending.Load() && !p.quit.Load() {
		p.stats.loans.Add(1)
		p.disown()
		p.waitForCallers()
		p.asleep.Store(false)
		p.own()
	}
	p.asleep.Store(false)
	p.loan.wanted.Store(false)
	p.loan.out.Store(false)
	p.watchSources(true)
}

// waitForCallers returns when the pump was not driven between two looks, or the
// thread was kicked. It does not tell Go's scheduler that it blocks: the
// scheduler's monitor would look after each of these waits, every 20 us, on the
// CPUs that the callers need. A stop of the world waits for it, a millisecond at
// the most.
func (p *Pump) waitForCallers() {
	var events [2]unix.EpollEvent
	for drives := p.stats.drives.Load(); p.asleep.Load(); {
		if epollRaw(p.gate, events[:], p.loan.look) != 0 {
			continue
		}
		now := p.stats.drives.Load()
		if now == drives {
			return
		}
		drives = now
	}
}
