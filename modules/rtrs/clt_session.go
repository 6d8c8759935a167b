package rtrs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/google/uuid"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// ClientConfig says how a session works. Pollers and OnDone are needed.
type ClientConfig struct {
	// Pollers carry the connections: I/O queue i (connection i+1 of each
	// path) uses Pollers[i % n], connection 0 uses Pollers[0]. Their owners
	// must run until the session is closed.
	Pollers []*Poller
	// Queues is the number of I/O connections per path; 0: one per poller.
	Queues int
	Timing Timing // zero: DefaultTiming
	Policy Policy
	// Protect asks for connections that are encrypted, and whose ends have proved
	// their identities. A path over a fabric that has none does not connect.
	// PeerName is what the server must be; empty: the default of the fabric.
	Protect  bool
	PeerName string
	// Auth has the keys for challenges, with which both ends prove their
	// identities on fabrics without TLS. AuthMode says when. PeerName is what the
	// server's certificate must be for; empty: the default of Auth, or else the
	// address of the path. It counts for nothing with Protect.
	Auth     verbs.Authenticator
	AuthMode AuthMode
	// Resolver returns the routes of paths. Nil: their addresses are the route.
	Resolver Resolver
	Logger   *slog.Logger // nil: slog.Default

	// OnDone reports the end of a Write or Read, on the queue's owner. errno
	// is 0, positive as the server answered, or Lost. It must not block;
	// it may submit.
	OnDone func(queue int, tag uint64, errno int)
	// OnPermit reports, on the queue's owner, that a queue that got
	// ErrNoPermit may try again. It may be called without a reason. May be
	// nil.
	OnPermit func(queue int)
	// OnEvent reports news in order, on a goroutine of the session. It may
	// block and may call the session, but not Close. May be nil. The events of
	// Open itself follow when Open has succeeded.
	OnEvent func(Event)
}

// Session is a client's relation with a server: a group of paths that share
// the server's chunks. Its methods are for any goroutine, those of its Queues
// for their owners.
type Session struct {
	name   string
	cfg    ClientConfig
	log    *slog.Logger
	queues []*Queue // by cid; 0 is for admin requests
	events *eventQueue
	turn   chan struct{} // full while a path may be making the session, see takeTurn

	// For the data path.
	live   atomic.Pointer[liveSet] // nil: not connected
	policy atomic.Uint32

	timing    atomic.Pointer[Timing]
	returns   atomic.Pointer[time.Time] // see ExpectReturn
	maxIOSize atomic.Int64

	// Lock order: mu, then path.mu. mu is never held while waiting for an owner.
	mu       sync.Mutex
	uuid     rtrswire.UUID
	paths    []*path // in the order of ids, not those under way
	links    []*link // connected, in path order
	draining int     // links lost but not settled
	lost     []*link // links with unanswered requests that have not ended
	renew    bool    // see startAnew
	up       bool    // SessionUp was the last news
	downs    uint64  // SessionDown events
	slots    *requestSlots
	devices  []*sessionDevice
	regions  map[*Region]struct{}
	lastID   int
	opened   bool // Open has succeeded: events are handed out
	closed   bool
	adding   sync.WaitGroup // paths under way; Add only with mu held and closed unset
}

// Open connects a new session with all paths, or fails. The error has the
// errno in its chain that the Linux client would report: that of the server's
// refusal, ECONNRESET, ETIMEDOUT, ...
func Open(ctx context.Context, name string, paths []PathAddr, cfg ClientConfig) (*Session, error) {
	s, err := newCltSession(name, cfg)
	if err == nil && len(paths) == 0 {
		err = fmt.Errorf("no paths: %w", syscall.EINVAL)
	}
	if err != nil {
		return nil, fmt.Errorf("rtrs: open session %q: %w", name, err)
	}
	for i, addr := range paths {
		if _, err := s.addPath(ctx, addr, i == 0); err != nil {
			_ = s.Close(context.WithoutCancel(ctx))
			return nil, err
		}
	}
	s.mu.Lock()
	s.opened = true
	s.mu.Unlock()
	go s.events.run(cfg.OnEvent)
	return s, nil
}

func newCltSession(name string, cfg ClientConfig) (*Session, error) {
	if cfg.Queues == 0 {
		cfg.Queues = len(cfg.Pollers)
	}
	if cfg.Timing == (Timing{}) {
		cfg.Timing = DefaultTiming()
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if err := checkConfig(name, &cfg); err != nil {
		return nil, err
	}
	s := &Session{
		name:    name,
		uuid:    rtrswire.UUID(uuid.New()),
		cfg:     cfg,
		log:     cfg.Logger.With("session", name),
		events:  newEventQueue(),
		regions: map[*Region]struct{}{},
		turn:    make(chan struct{}, 1),
	}
	s.policy.Store(uint32(cfg.Policy))
	s.timing.Store(&cfg.Timing)
	for cid := range cfg.Queues + 1 {
		s.queues = append(s.queues, newQueue(s, cid))
	}
	return s, nil
}

func checkConfig(name string, cfg *ClientConfig) error {
	switch {
	case name == "" || len(name) > rtrswire.MaxNameLen:
		return fmt.Errorf("the name has %d bytes, want 1 to %d: %w", len(name), rtrswire.MaxNameLen, syscall.EINVAL)
	case strings.ContainsAny(name, "/.\x00"):
		return fmt.Errorf("the name has a '/', a '.' or a NUL: %w", syscall.EINVAL)
	case len(cfg.Pollers) == 0 || slices.Contains(cfg.Pollers, nil):
		return errors.New("no pollers")
	case cfg.OnDone == nil:
		return errors.New("no OnDone")
	case cfg.Queues < 1 || cfg.Queues >= rtrswire.MaxCIDNum:
		return fmt.Errorf("%d queues, want 1 to %d: %w", cfg.Queues, rtrswire.MaxCIDNum-1, syscall.EINVAL)
	case int(cfg.Policy) >= len(policyNames):
		return fmt.Errorf("%v: %w", cfg.Policy, syscall.EINVAL)
	}
	if err := checkAuth(cfg.AuthMode, cfg.Auth); err != nil {
		return err
	}
	return cfg.Timing.Validate()
}

// Name returns the session's name.
func (s *Session) Name() string { return s.name }

// UUID names the session on the wire.
func (s *Session) UUID() [16]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.uuid
}

// Queues returns the number of I/O queues.
func (s *Session) Queues() int { return len(s.queues) - 1 }

// Queue returns I/O queue i.
func (s *Session) Queue(i int) *Queue { return s.queues[i+1] }

// Connected reports whether the session accepts requests.
func (s *Session) Connected() bool { return s.live.Load() != nil }

// MaxIOSize is the largest data length in bytes that the server takes on every
// path, as of the time when it was connected last. A server that comes back may
// take another one.
func (s *Session) MaxIOSize() int { return int(s.maxIOSize.Load()) }

// QueueDepth is the number of requests that can be in flight.
func (s *Session) QueueDepth() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slots == nil {
		return 0
	}
	return s.slots.depth
}

// Policy returns the path policy.
func (s *Session) Policy() Policy { return Policy(s.policy.Load()) }

// SetPolicy changes the path policy from the next request on.
func (s *Session) SetPolicy(p Policy) error {
	if int(p) >= len(policyNames) {
		return fmt.Errorf("rtrs: session %s: set %v: %w", s.name, p, syscall.EINVAL)
	}
	s.policy.Store(uint32(p))
	return nil
}

// Timing returns the timers.
func (s *Session) Timing() Timing { return *s.timing.Load() }

// SetTiming changes the timers. A wait under way goes on, and so does the
// current interval between two heartbeats.
func (s *Session) SetTiming(t Timing) error {
	if err := t.Validate(); err != nil {
		return fmt.Errorf("rtrs: session %s: %w: %w", s.name, syscall.EINVAL, err)
	}
	s.timing.Store(&t)
	return nil
}

// Close ends the session. Requests in flight end with Lost, or with ECONNABORTED if they are admin requests, before it
// returns; the memory of its regions is the caller's again. If ctx ends first
// the session goes on closing, and Close may be called again to wait.
func (s *Session) Close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	opened := s.opened
	s.mu.Unlock()
	s.adding.Wait()
	for _, i := range s.Paths() {
		if err := s.RemovePath(ctx, i.ID); err != nil && !errors.Is(err, syscall.ENOENT) {
			s.endPaths()
			return err
		}
	}
	for _, p := range s.cfg.Pollers { // functions handed to the owners are done after this
		if err := p.Call(ctx, func() {}); err != nil {
			return fmt.Errorf("rtrs: close session %s: %w", s.name, err)
		}
	}
	s.events.close()
	if opened {
		select {
		case <-s.events.done:
		case <-ctx.Done():
			return fmt.Errorf("rtrs: close session %s: events: %w", s.name, context.Cause(ctx))
		}
	}
	return s.freeMemory()
}

// endPaths lets all paths end, without waiting for it.
func (s *Session) endPaths() {
	for _, i := range s.Paths() {
		if p, err := s.pathByID(i.ID); err == nil {
			p.setIntent(wantDead)
		}
	}
}

// freeMemory ends all registrations.
func (s *Session) freeMemory() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var first error
	for r := range s.regions {
		if err := r.releaseKeys(); err != nil && first == nil {
			first = err
		}
	}
	clear(s.regions)
	for _, d := range s.devices {
		if err := d.pd.Close(); err != nil && first == nil {
			first = fmt.Errorf("rtrs: close session %s: %w", s.name, err)
		}
	}
	s.devices = nil
	return first
}
