package pump

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// Source is an object that a pump polls. Poll, Arm and the optional methods
// are called by the pump's owner only. Sources are compared by ==; use
// pointers.
type Source interface {
	// Poll handles all pending work and returns the number of events it
	// handled; 0 means idle.
	Poll() int
	// Arm makes FD readable at the next event. It returns false if there is work
	// already: the pump polls again and does not sleep.
	Arm() bool
	// FD is the descriptor to sleep on, the same for the source's life, or
	// negative for none. Add reads it on the caller's goroutine.
	FD() int
}

// A Source may also have any of these.
type (
	// disarmer is told that the pump is awake again and needs no signals.
	disarmer interface{ Disarm() }
	// largeIO reports whether the I/O that the last Poll handled was large
	// (256 KiB and more): the pump does not spin after it.
	largeIO interface{ LargeIO() bool }
	// eventMask replaces EPOLLIN as the epoll events to sleep on.
	eventMask interface{ Events() uint32 }
)

// DefaultSpin is how long a pump looks for work after its last event.
const DefaultSpin = 100 * time.Microsecond

// Config says how a pump runs. The zero value is fit for use.
type Config struct {
	Name string
	Spin time.Duration // 0: DefaultSpin; negative: never spin
	// CPU pins the thread to this CPU. 0 and below: not pinned; CPU 0 cannot
	// be chosen, because it serves most interrupts.
	CPU    int
	Logger *slog.Logger // nil: slog.Default()
	// Virtual is for simulations under testing/synctest: the pump sleeps on Go's
	// timers, looks at its sources every 10 ms at the latest, never spins, and
	// cannot be driven by callers.
	Virtual bool
}

// Stats are counters since New.
type Stats struct {
	Loops      uint64 // looks at all sources; brought up to date before each sleep
	Sleeps     uint64 // times the thread went to sleep
	Wakes      uint64 // times it woke; Sleeps-Wakes is 1 while it sleeps
	SpinHits   uint64 // spins that met work
	SpinMisses uint64
	Drives     uint64 // times a caller drove the pump
	Loans      uint64 // times the thread lent it to callers
	GivenBack  uint64 // loans that a caller ended
}

type entry struct {
	source Source
	disarm disarmer // nil when the source has none
	large  largeIO  // likewise
	fd     int
	gone   bool
}

// Pump polls sources. The package comment lists the methods that any goroutine
// may call.
type Pump struct {
	cfg Config
	log *slog.Logger

	// owner is held by whoever runs the loop. The pump's thread releases it
	// only while it sleeps: it is touched once per sleep, not per event.
	owner    sync.Mutex
	ownerTID atomic.Int32

	// Of the owner.
	sources []entry
	dirty   bool // some are gone
	spinner spinner
	loops   uint64
	now     int64 // see Now
	timed   bool  // now was read in this turn

	// Sleeping: the thread waits on gate. It holds wakeFD and, unless a
	// caller drives, sourcesFD, the epoll set of all sources.
	gate, sourcesFD, wakeFD int
	mode                    atomic.Uint32 // awake, asleep or lent: callers.go
	parking                 parking       // where it sleeps instead while there is little to do
	brisk                   int           // short sleeps in a row, up to briskAfter; of the owner
	parked                  bool          // the thread sleeps in the netpoller; of the owner
	rested                  bool          // every spin since the last long sleep met work; of the owner
	callers                 callers
	checks                  checks
	nap                     nap // of a virtual pump

	mu      sync.Mutex // guards the mailbox and the following fields
	mailbox []func()
	state   state
	pending atomic.Bool // mailbox is not empty
	quit    atomic.Bool
	done    chan struct{}

	stats struct{ loops, sleeps, wakes, hits, misses, drives, loans, givenBack atomic.Uint64 }
}

type state uint8

const (
	fresh   state = iota // not started; the mailbox fills
	running              // a thread empties the mailbox
	stopped              // descriptors are closed; Do and Call run in place
)

// New makes a pump that does not run yet.
func New(cfg Config) (*Pump, error) {
	if cfg.Spin == 0 {
		cfg.Spin = DefaultSpin
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	p := &Pump{cfg: cfg, log: cfg.Logger.With("pump", cfg.Name), done: make(chan struct{}),
		spinner: newSpinner(cfg.Spin), brisk: briskAfter, gate: -1, sourcesFD: -1, wakeFD: -1, parking: parking{fd: -1}, callers: callers{look: lendLook}}
	if cfg.Virtual {
		p.nap = nap{bell: make(chan struct{}, 1), next: firstNap}
		p.spinner = newSpinner(-1)
		return p, nil
	}
	if err := p.openFDs(); err != nil {
		p.closeFDs()
		return nil, fmt.Errorf("new pump %q: %w", cfg.Name, err)
	}
	return p, nil
}

// Start runs the pump on a thread of its own. Call it once, and not with Run.
func (p *Pump) Start() {
	p.begin()
	go func() {
		if !p.virtual() {
			runtime.LockOSThread() // for good: the thread ends with the goroutine
		}
		p.run(func() bool { return false })
	}()
}

// Run runs the pump on the caller's thread. It ends when until returns true, or by
// Stop, and stops the pump. until is called after every event and every wake-up.
// A pump that is pinned leaves the thread pinned.
func (p *Pump) Run(until func() bool) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p.begin()
	return p.run(until)
}

func (p *Pump) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state != fresh {
		panic("pump: started twice")
	}
	p.state = running
}

func (p *Pump) run(until func() bool) error {
	pumps.Add(1)
	defer pumps.Add(-1)
	p.pin()
	p.nap.runner = p.self()
	p.own()
	p.log.Debug("pump runs", "thread", unix.Gettid(), "spin", p.cfg.Spin)
	var err error
	for err == nil && !p.quit.Load() && !until() {
		switch worked := p.turn() > 0; {
		case p.callers.wanted.Load():
			p.lend()
		case worked:
			p.nap.worked()
		case p.spin():
		default:
			err = p.sleep()
		}
	}
	p.finish()
	if err != nil {
		err = fmt.Errorf("pump %q: %w", p.cfg.Name, err)
		p.log.Error("pump failed", "err", err)
	}
	return err
}

// pin binds the thread to its CPU. A refusal is logged: it costs speed only.
func (p *Pump) pin() {
	if p.cfg.CPU <= 0 {
		return
	}
	var set unix.CPUSet
	set.Set(p.cfg.CPU)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		p.log.Warn("pump is not pinned", "cpu", p.cfg.CPU, "err", err)
	}
}

// turn looks at everything once and returns the number of events handled.
func (p *Pump) turn() int {
	p.checkOwner()
	p.checkArmed(false)
	p.loops++
	n := 0
	if p.pending.Load() {
		n += p.runMailbox()
	}
	if p.dirty {
		p.compact()
	}
	large := false
	for i := 0; i < len(p.sources); i++ { // a source may add or remove sources
		if p.sources[i].gone {
			continue
		}
		k := p.sources[i].source.Poll()
		if k > 0 && p.sources[i].large != nil && p.sources[i].large.LargeIO() {
			large = true
		}
		n += k
	}
	if n > 0 {
		p.spinner.large = large
	}
	p.timed = false
	return n
}

// Now is a clock for durations, in nanoseconds. It stands still from its first
// use in a turn to the end of the turn: one look at the system's clock serves
// all events of the turn. It is the clock of package latency. Owner only.
func (p *Pump) Now() int64 {
	if !p.timed {
		return p.tick()
	}
	return p.now
}

// tick looks at the system's clock, for the turn to come as well.
func (p *Pump) tick() int64 {
	p.now, p.timed = latency.Now(), true
	return p.now
}

// spin looks at the sources until the budget is spent. It returns true if it found
// work, or if a caller wants the pump. A steady spinner has its budget extended once.
// Work that is found then counts as a miss in its history. After a long sleep the
// budget is Config.Spin or more, until a spin meets no work: rare events often come in
// groups. That miss is not recorded, because it says nothing about the spins of a busy
// pump.
func (p *Pump) spin() bool {
	budget := p.spinner.next()
	rested := p.rested && !p.spinner.large
	if rested {
		budget = max(budget, p.cfg.Spin)
	}
	if budget <= 0 {
		return false
	}
	hit, limit := false, NewLimit(latency.Now(), budget, !rested && p.spinner.steady())
	for !p.callers.wanted.Load() {
		yield()
		if hit = p.turn() > 0; hit || limit.Spent() {
			break
		}
	}
	if p.callers.wanted.Load() {
		return true
	}
	if hit || !rested {
		p.spinner.record(hit && !limit.Late())
	}
	p.rested = p.rested && hit
	if hit {
		p.stats.hits.Add(1)
	} else {
		p.stats.misses.Add(1)
	}
	return hit
}

// sleep arms every source and blocks until one of them, or a kick, wakes the
// thread. It returns at once when there is work.
func (p *Pump) sleep() error {
	p.stats.loops.Store(p.loops)
	park := p.mayPark()
	if !p.armAll() {
		return nil
	}
	p.mode.Store(modeAsleep)
	if p.pending.Load() || p.quit.Load() { // posted before the mode was seen
		p.mode.Store(modeAwake)
		p.disarmAll()
		return nil
	}
	p.stats.sleeps.Add(1)
	start := p.tick()
	err := p.block(park)
	p.stats.wakes.Add(1)
	p.slept(time.Duration(p.tick() - start))
	p.disarmAll()
	return err
}

// block sleeps without being the owner.
func (p *Pump) block(park bool) (err error) {
	if park {
		p.parked = true
		p.watchParking(true)
	}
	p.disown()
	switch {
	case p.virtual():
		p.nap.wait()
	case park:
		err = p.parking.conn.Read(p.parking.look)
	default:
		err = p.wait()
	}
	p.mode.Store(modeAwake)
	p.wakeUp()
	if park {
		p.parked = false
		p.watchParking(false)
	}
	return err
}

// armAll returns false, with nothing armed, if a source has work.
func (p *Pump) armAll() bool {
	p.checkOwner()
	for i := range p.sources {
		if e := &p.sources[i]; !e.gone && !e.source.Arm() {
			p.disarm(p.sources[:i])
			return false
		}
	}
	p.setArmed(true)
	return true
}

func (p *Pump) disarmAll() {
	p.checkOwner()
	p.setArmed(false)
	p.disarm(p.sources)
}

func (p *Pump) disarm(es []entry) {
	for i := range es {
		if es[i].disarm != nil && !es[i].gone {
			es[i].disarm.Disarm()
		}
	}
}

// Stop ends the pump's thread and waits for it, unless it is called on that
// thread. Functions posted before it still run. Sources are not touched
// afterwards.
func (p *Pump) Stop() {
	p.quit.Store(true)
	p.mu.Lock()
	st := p.state
	p.mu.Unlock()
	switch {
	case st == fresh:
		p.own()
		p.finish()
	case p.onThread():
		p.kick() // for a driving caller
	default:
		p.kick()
		<-p.done
	}
}

// finish empties the mailbox, closes the descriptors and gives ownership up.
func (p *Pump) finish() {
	for {
		p.runMailbox()
		p.mu.Lock()
		if len(p.mailbox) > 0 {
			p.mu.Unlock()
			continue
		}
		already := p.state == stopped
		p.state = stopped
		p.closeFDs()
		p.mu.Unlock()
		p.stats.loops.Store(p.loops)
		p.disown()
		if !already {
			p.log.Debug("pump stopped")
			close(p.done)
		}
		return
	}
}

// Name returns the name in the configuration.
func (p *Pump) Name() string { return p.cfg.Name }

// Stats returns the counters.
func (p *Pump) Stats() Stats {
	return Stats{
		Loops: p.stats.loops.Load(), Sleeps: p.stats.sleeps.Load(), Wakes: p.stats.wakes.Load(),
		SpinHits: p.stats.hits.Load(), SpinMisses: p.stats.misses.Load(),
		Drives: p.stats.drives.Load(), Loans: p.stats.loans.Load(), GivenBack: p.stats.givenBack.Load(),
	}
}

func (p *Pump) own() {
	p.owner.Lock()
	p.timed = false // the last owner may have left it
	p.ownerTID.Store(p.self())
}

// wakeUp is own for the goroutine that runs the pump. It does not look up the id of
// a virtual pump's goroutine again.
func (p *Pump) wakeUp() {
	if !p.virtual() {
		p.own()
		return
	}
	p.owner.Lock()
	p.timed = false
	p.ownerTID.Store(p.nap.runner)
}

func (p *Pump) disown() {
	p.ownerTID.Store(0)
	p.owner.Unlock()
}

// onThread reports whether the caller is the owner. An owner is locked to its
// thread, so no other goroutine can have that thread's id.
func (p *Pump) onThread() bool { return p.ownerTID.Load() == p.self() }

// self names the caller's thread; to a virtual pump, its goroutine.
func (p *Pump) self() int32 {
	if p.virtual() {
		return goroutineID()
	}
	return int32(unix.Gettid())
}

// DefaultPumps is the number of pumps that a daemon has unless its administrator says
// otherwise: 2 if there are CPUs for both and for as many threads beside them, those of
// plugins or of the application, which work at the same time. Else it is 1.
func DefaultPumps() int { return min(max(runtime.NumCPU()/2, 1), 2) }

// SetProcs sets GOMAXPROCS for a process with that many pumps: each takes one
// while it spins, and the rest of the process needs two to four more. Unless GOGC
// is set, it also halves the garbage that may pile up: a data path that allocates
// nothing starts no collection, so the garbage of the set-up would stay for good.
// In a process that does not call SetProcs, pumps neither park nor are lent.
func SetProcs(pumps int) {
	n := pumps + min(max(runtime.NumCPU(), 2), 4)
	runtime.GOMAXPROCS(n)
	procs.Store(int32(n))
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
}

// ErrStopped is returned by Add to a stopped pump.
var ErrStopped = errors.New("pump is stopped")
