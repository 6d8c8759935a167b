package supervise

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// Config describes the plugin to run, and its owner's hooks. The hooks are
// called one at a time, from one goroutine, without a lock held; each may be
// nil.
type Config struct {
	Plugin  plugin.Config // one ring for each of its Pumps; OnExit is not used
	Launch  Launch        // nil: Exec
	NewRing func(entries int) (*shm.Ring, error)
	Entries int // of a ring; 0: shm.DefaultEntries

	Crash Limit
	// Apart is the least time from one restart to the next; 0: none. The first
	// death is followed by a start at once.
	Apart time.Duration
	// RetryFirst and RetryMost bound the pause after a failed start. It doubles
	// from one to the next; 0: 100 ms and 5 s.
	RetryFirst, RetryMost time.Duration
	// StartTimeout bounds each start, Joined included; 0: a minute. Without Patience it does
	// not bound the first.
	StartTimeout time.Duration
	// Patience is how long Start waits. A first process that does not run by then, or
	// that has failed, is tried again like later ones, unless plugin.IsMisfit says that
	// it never fits. 0: Start waits for the first process, and its failure ends the
	// supervisor.
	Patience time.Duration
	Logger   *slog.Logger     // nil: Plugin.Logger
	Journal  *journal.Journal // takes changes of state; nil: none does

	// Joined is called when the process has its rings. An error ends the
	// process; it counts as a start that failed.
	Joined func(ctx context.Context, in *Instance) error
	// Left is called once for each call of Joined, also after an error, when
	// the process has ended or is given up on. The next process is started
	// after it has returned.
	Left func(in *Instance, cause error)
	// GaveUp is called when the crash limit is reached.
	GaveUp func(cause error)
}

// Limit is how many crashes within a time are too many; Count 0: no number is.
type Limit struct {
	Count  int
	Window time.Duration
}

// Status is a supervisor's report about a plugin.
type Status struct {
	State        State
	Generation   uint32
	PID          int // 0: no process runs
	Restarts     int // processes after the first that were joined
	Crashes      int // within the window of the limit
	FailedStarts int // in a row
	LastStart    time.Time
	NextStart    time.Time // when Waiting
	LastError    string    // of the last death or failed start; "" : none
	// Confined is what the process may not do, in words; "": no process runs.
	Confined string
}

const (
	retryFirst   = 100 * time.Millisecond
	retryMost    = 5 * time.Second
	startTimeout = time.Minute
	// killWait bounds the wait for the end of a process that is killed.
	killWait = time.Second
	// askTimeout bounds calls that only ask or inform.
	askTimeout = 2 * time.Second
)

func (c Config) withDefaults() Config {
	if c.Launch == nil {
		c.Launch = Exec
	}
	if c.NewRing == nil {
		c.NewRing = shm.NewRing
	}
	if c.Entries == 0 {
		c.Entries = shm.DefaultEntries
	}
	if c.RetryFirst == 0 {
		c.RetryFirst = retryFirst
	}
	if c.RetryMost == 0 {
		c.RetryMost = retryMost
	}
	if c.StartTimeout == 0 {
		c.StartTimeout = startTimeout
	}
	if c.Logger == nil {
		c.Logger = c.Plugin.Logger
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Plugin.Name == "" {
		c.Plugin.Name = filepath.Base(c.Plugin.Path)
	}
	c.Plugin.Pumps = max(c.Plugin.Pumps, 1)
	c.Plugin.OnExit = nil
	return c
}

// Supervisor keeps one plugin process running. Its methods may be called from
// any goroutine, except that Start is called once, and hooks must not call
// Start, Stop or Await.
type Supervisor struct {
	cfg Config
	log *slog.Logger

	starts   context.Context // ends with NoRestart and Stop
	noStarts context.CancelFunc
	reset    chan struct{}        // capacity 1: ends a pause
	stop     chan context.Context // capacity 1: bounds the stop
	done     chan struct{}        // closed when the state is Stopped
	stopErr  error                // read after done

	mu      sync.Mutex // guards the rest; nothing but the journal is called with it held
	status  Status
	info    plugin.Info
	current *Instance
	crashes []time.Time
	joined  bool          // a process has run
	atOnce  bool          // the next start: Reset asked for it
	changed chan struct{} // closed and replaced at every move
}

// New returns a Supervisor that has started nothing yet.
func New(c Config) *Supervisor {
	c = c.withDefaults()
	s := &Supervisor{
		cfg: c, log: c.Logger.With("plugin", c.Plugin.Name),
		reset: make(chan struct{}, 1), stop: make(chan context.Context, 1),
		done: make(chan struct{}), changed: make(chan struct{}),
	}
	s.starts, s.noStarts = context.WithCancel(context.Background())
	return s
}

// Start starts the first process. ctx bounds the wait of Start, nothing later; see
// Config.Patience. After an error the supervisor is stopped.
func (s *Supervisor) Start(ctx context.Context) error {
	first, leave := make(chan error), make(chan struct{})
	var over <-chan time.Time
	if s.cfg.Patience > 0 {
		over = time.After(s.cfg.Patience)
	}
	go s.run(ctx, first, leave)
	var err error
	select {
	case err = <-first:
	case <-over:
		close(leave)
		s.log.Warn("plugin does not start, which is waited for no longer", "pause", s.cfg.Patience)
		return nil
	case <-ctx.Done():
		s.noStarts()
		err = <-first
	}
	if err != nil {
		<-s.done
	}
	return err
}

// Info returns the description that the first process gave of itself. It is empty while
// none has run.
func (s *Supervisor) Info() plugin.Info {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.info
}

// Current returns the process that runs. Else the error has EBUSY in its chain
// while one is started or awaited, EIO when the plugin is given up, ECANCELED
// when it is stopped.
func (s *Supervisor) Current() (*Instance, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.currentLocked()
}

func (s *Supervisor) currentLocked() (*Instance, error) {
	switch s.status.State {
	case Running:
		return s.current, nil
	case GivenUp:
		return nil, fmt.Errorf("plugin %s crashes too often: %w", s.cfg.Plugin.Name, syscall.EIO)
	case Stopping, Stopped:
		return nil, fmt.Errorf("plugin %s is stopped: %w", s.cfg.Plugin.Name, syscall.ECANCELED)
	}
	switch {
	case s.status.FailedStarts > 0:
		return nil, fmt.Errorf("plugin %s does not start, which is tried again: %s: %w", s.cfg.Plugin.Name, s.status.LastError, syscall.EBUSY)
	case !s.joined:
		return nil, fmt.Errorf("plugin %s is being started: %w", s.cfg.Plugin.Name, syscall.EBUSY)
	}
	return nil, fmt.Errorf("plugin %s is being restarted: %w", s.cfg.Plugin.Name, syscall.EBUSY)
}

// Await is Current that waits while a process is started or awaited.
func (s *Supervisor) Await(ctx context.Context) (*Instance, error) {
	for {
		s.mu.Lock()
		in, err := s.currentLocked()
		changed := s.changed
		s.mu.Unlock()
		if !errors.Is(err, syscall.EBUSY) {
			return in, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", err, context.Cause(ctx))
		}
	}
}

// State is that of the plugin.
func (s *Supervisor) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status.State
}

// Status is a snapshot.
func (s *Supervisor) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.status
	st.Crashes = len(s.recentCrashes())
	if s.current != nil {
		st.PID = s.current.PID()
		st.Confined = confinement(s.current.Process)
	}
	if st.State != Waiting {
		st.NextStart = time.Time{}
	}
	return st
}

// confinement asks a process that knows what holds for it. One without a process of
// its own has the daemon's rights.
func confinement(p Process) string {
	if c, ok := p.(interface{ Confined() *confine.Report }); ok {
		return c.Confined().String()
	}
	return (*confine.Report)(nil).String()
}

// Reset forgets crashes and failed starts. A plugin that is given up, or waits
// for its next start, is started at once; Await reports how that went.
// ECANCELED: it is stopped.
func (s *Supervisor) Reset() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.crashes = nil
	s.status.FailedStarts = 0
	switch s.status.State {
	case GivenUp:
		s.moveLocked(Waiting)
	case Waiting:
	case Stopping, Stopped:
		return fmt.Errorf("plugin %s is stopped: %w", s.cfg.Plugin.Name, syscall.ECANCELED)
	default:
		return nil
	}
	s.atOnce = true
	select {
	case s.reset <- struct{}{}:
	default:
	}
	return nil
}

// NoRestart lets no further process be started, and cancels a start that is
// under way. A process that runs goes on.
func (s *Supervisor) NoRestart() { s.noStarts() }

// Stop ends the process in order (drain, detach, end), or kills it when ctx
// ends. It returns after Left; Left is called at the latest a second after the
// end of ctx. An error reports that the process did not end in order. Calls
// after the first wait for its result.
func (s *Supervisor) Stop(ctx context.Context) error {
	select {
	case s.stop <- ctx:
	default:
	}
	s.noStarts()
	if s.stopIdle() {
		return nil
	}
	<-s.done
	return s.stopErr
}

// stopIdle stops a supervisor that was never started.
func (s *Supervisor) stopIdle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status.State != Idle {
		return false
	}
	s.moveLocked(Stopped)
	close(s.done)
	return true
}

// SetLog tells the process its log level, if one runs; the next one learns it at
// its start. It waits 2 s at most.
func (s *Supervisor) SetLog(ctx context.Context, level slog.Level) {
	in, err := s.Current()
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if err := in.SetLog(ctx, level); err != nil {
		s.log.Warn("plugin keeps its log level", "err", err)
	}
}

// Stats asks the process how long requests took, by device; nothing if none
// runs, or it does not answer within 2 s.
func (s *Supervisor) Stats(ctx context.Context) map[uint32]*latency.Snapshots {
	in, err := s.Current()
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	stats, err := in.Stats(ctx)
	if err != nil {
		s.log.Warn("plugin does not tell its statistics", "err", err)
	}
	return stats
}

// move sets the state.
func (s *Supervisor) move(to State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.moveLocked(to)
}

// moveLocked is move. Caller holds mu.
func (s *Supervisor) moveLocked(to State) {
	from := s.status.State
	if !slices.Contains(moves[from], to) {
		panic(fmt.Sprintf("supervise: plugin %s moves from %v to %v", s.cfg.Plugin.Name, from, to))
	}
	s.status.State = to
	s.cfg.Journal.Add(journal.Event{Kind: journal.Plugin, Plugin: s.cfg.Plugin.Name, From: from.String(), To: to.String(), Why: s.reason(from, to)})
	close(s.changed)
	s.changed = make(chan struct{})
}

// reason returns why the state changes to one that is not running. Caller holds mu.
func (s *Supervisor) reason(from, to State) string {
	if to == GivenUp || to == Waiting && from != GivenUp { // from there by Reset
		return s.status.LastError
	}
	return ""
}

// recentCrashes are those within the window. Caller holds mu.
func (s *Supervisor) recentCrashes() []time.Time {
	now := time.Now()
	return slices.DeleteFunc(slices.Clone(s.crashes), func(t time.Time) bool {
		return now.Sub(t) >= s.cfg.Crash.Window
	})
}
