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
)

// ClientConfig says how a session works. Pollers and OnDone are needed.
type ClientConfig struct {
	// Pollers carry the connections: I/O queue i, which is connection i+1 of
	// each path, lives on Pollers[i % n], connection 0 on Pollers[0]. Their
	// owners must run until the session is closed.
	Pollers []*Poller
	// Queues is the number of I/O connections per path; 0: one per poller.
	Queues int
	Timing Timing // zero: DefaultTiming
	Policy Policy
	Logger *slog.Logger // nil: slog.Default

	// OnDone reports the end of a Write or Read, on the queue's owner. errno
	// is 0 or positive; ECONNABORTED when no path was left. It must not block;
	// it may submit.
	OnDone func(queue int, tag uint64, errno int)
	// OnPermit says that a queue which got ErrNoPermit may try again, on the
	// queue's owner. It may come for no reason. May be nil.
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
	maxIOSize atomic.Int64

	// Lock order: mu, then path.mu. Nobody waits for an owner while holding mu.
	mu       sync.Mutex
	uuid     rtrswire.UUID
	paths    []*path // in the order of ids, not those under way
	links    []*link // connected, in path order
	draining int     // links lost but not settled
	lost     []*link // links with unanswered requests that have not ended
	renew    bool    // see startAnew
	up       bool    // SessionUp was the last news
	downs    uint64  // SessionDown events
	slots    *slots
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

// Connected tells whether requests are taken.
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

// AddPath connects one more path and returns its id. When the session has lost
// all its paths this revives it.
func (s *Session) AddPath(ctx context.Context, addr PathAddr) (id int, err error) {
	return s.addPath(ctx, addr, len(s.Paths()) == 0)
}

func (s *Session) addPath(ctx context.Context, addr PathAddr, first bool) (id int, err error) {
	p, err := s.beginAdd(addr)
	if err != nil {
		return 0, err
	}
	defer s.adding.Done()
	p.firstConn = first
	if err := p.connectFenced(ctx); err != nil {
		return 0, err
	}
	s.publish(func() { p.setState(PathConnected, nil) })
	s.list(p)
	return p.id, nil
}

// AddPathLater adds a path that need not work yet, and returns its id: it is
// tried at once, and then like one that was lost. It is for paths that worked
// once. It makes the session only while no other path is connected: what its
// address leads to now need not be the server that the others have. It goes when
// the server says that the session has a path with its addresses.
func (s *Session) AddPathLater(addr PathAddr) (id int, err error) {
	p, err := s.beginAdd(addr)
	if err != nil {
		return 0, err
	}
	defer s.adding.Done()
	p.later = true
	s.list(p)
	return p.id, nil
}

// forget takes p out of the list.
func (s *Session) forget(p *path) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.paths = slices.DeleteFunc(s.paths, func(o *path) bool { return o == p })
}

// list gives the session a path, which lives from now on.
func (s *Session) list(p *path) {
	s.mu.Lock()
	i, _ := slices.BinarySearchFunc(s.paths, p.id, func(o *path, id int) int { return o.id - id })
	s.paths = slices.Insert(s.paths, i, p)
	if s.closed {
		p.want(wantDead)
	}
	s.mu.Unlock()
	go p.run()
}

// beginAdd makes a path with the next id. Who gets one calls adding.Done.
func (s *Session) beginAdd(addr PathAddr) (*path, error) {
	if addr.Device == nil {
		return nil, fmt.Errorf("rtrs: session %s: add path to %s: no device: %w", s.name, addr.Dst, syscall.EINVAL)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fmt.Errorf("rtrs: session %s: add path %s: %w", s.name, addr, ErrClosed)
	}
	s.adding.Add(1)
	s.lastID++
	return newPath(s, s.lastID, addr), nil
}

// path finds a path by id.
func (s *Session) path(id int) (*path, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.paths {
		if p.id == id {
			return p, nil
		}
	}
	return nil, fmt.Errorf("rtrs: session %s: path %d: %w", s.name, id, syscall.ENOENT)
}

// Paths describes the paths, in the order of their ids.
func (s *Session) Paths() []PathInfo {
	s.mu.Lock()
	paths := slices.Clone(s.paths)
	s.mu.Unlock()
	infos := make([]PathInfo, 0, len(paths))
	for _, p := range paths {
		infos = append(infos, p.info())
	}
	return infos
}

// Stats sums over the paths that the session has.
func (s *Session) Stats() (sum PathStats) {
	for _, i := range s.Paths() {
		sum.Add(i.Stats)
	}
	return sum
}

// PathDetails returns all counts of a path.
func (s *Session) PathDetails(id int) (PathDetails, error) {
	p, err := s.path(id)
	if err != nil {
		return PathDetails{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.details(), nil
}

// ResetStats starts the given counts of a path anew. The data path does not
// notice.
func (s *Session) ResetStats(id int, kinds StatKind) error {
	p, err := s.path(id)
	if err != nil {
		return err
	}
	p.resetStats(kinds)
	return nil
}

// RemovePath closes a path and forgets it. A session without paths stays, not
// connected.
func (s *Session) RemovePath(ctx context.Context, id int) error {
	p, err := s.path(id)
	if err != nil {
		return err
	}
	p.want(wantDead)
	select {
	case <-p.ended:
	case <-ctx.Done():
		return fmt.Errorf("rtrs: session %s: remove path %s: %w", s.name, p.addr, context.Cause(ctx))
	}
	s.forget(p)
	return nil
}

// DisconnectPath closes a path until it is reconnected by hand, and waits until
// it is closed.
func (s *Session) DisconnectPath(ctx context.Context, id int) error {
	p, err := s.path(id)
	if err != nil {
		return err
	}
	p.want(wantClosed)
	err = p.await(ctx, func() bool { return p.state == PathClosed || p.state == PathDead })
	if err != nil {
		return fmt.Errorf("rtrs: session %s: disconnect path %s: %w", s.name, p.addr, err)
	}
	return nil
}

// ReconnectPath makes the connections of a path anew, now, and waits for the
// first result.
func (s *Session) ReconnectPath(ctx context.Context, id int) error {
	p, err := s.path(id)
	if err != nil {
		return err
	}
	if err := p.reconnect(ctx); err != nil {
		return fmt.Errorf("rtrs: session %s: reconnect path %s: %w", s.name, p.addr, err)
	}
	return nil
}

// Close ends the session. Requests in flight end with ECONNABORTED before it
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
	for _, p := range s.cfg.Pollers { // what was handed to the owners is done after this
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
		if p, err := s.path(i.ID); err == nil {
			p.want(wantDead)
		}
	}
}

// freeMemory ends all registrations.
func (s *Session) freeMemory() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var first error
	for r := range s.regions {
		if err := r.release(); err != nil && first == nil {
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

// slotsFor returns the requests for a link with the given sizes: those that
// the session has, or new ones if no link uses those any more.
func (s *Session) slotsFor(lp *linkParams) (*slots, error) {
	s.mu.Lock()
	sl, inUse := s.slots, len(s.links) > 0
	s.mu.Unlock()
	switch {
	case sl != nil && sl.depth == lp.queueDepth:
		return sl, nil
	case inUse:
		return nil, protocolErrorf("queue depth %d is not the session's %d", lp.queueDepth, sl.depth)
	}
	headers, err := s.Register(make([]byte, lp.queueDepth*slotHeaderLen))
	if err != nil {
		return nil, err
	}
	return newSlots(lp.queueDepth, len(s.queues), headers, s.wakeQueue), nil
}

// wakeQueue tells a queue that found no permit to try again. Any goroutine.
func (s *Session) wakeQueue(cid int) {
	q := s.queues[cid]
	q.poller.Do(q.onPermit)
}

// addLink makes l one of the connected links. publish shows it to the data
// path.
func (s *Session) addLink(l *link) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.renew || l.group != s.uuid:
		return protocolErrorf("the session is made anew")
	case len(s.links) > 0 && s.links[0].slots != l.slots:
		return protocolErrorf("queue depth %d is not the session's %d", l.slots.depth, s.links[0].slots.depth)
	}
	if err := s.compareIncarnation(l); err != nil {
		return err
	}
	s.slots, l.epoch = l.slots, s.downs
	if l.fences {
		l.slots.permits.keepSpares()
	}
	if now := s.maxIOSize.Load(); len(s.links) == 0 || int64(l.maxIOSize) < now {
		s.maxIOSize.Store(int64(l.maxIOSize))
	}
	i, _ := slices.BinarySearchFunc(s.links, l.path.id, func(o *link, id int) int { return o.path.id - id })
	s.links = slices.Insert(s.links, i, l)
	l.startBeats(time.Now())
	return nil
}

// checkIncarnation is compareIncarnation for who does not hold mu.
func (s *Session) checkIncarnation(l *link) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.compareIncarnation(l)
}

// compareIncarnation keeps l from joining links of another incarnation of the
// server's session: what the consumer knows of that one, as the ids of devices,
// means nothing here. Either the server has started anew and those links do not
// know it yet, or l leads to another server. They are asked: when none of them is
// left the session is down, and the next attempt brings it up. mu is held.
func (s *Session) compareIncarnation(l *link) error {
	if len(s.links) == 0 || s.links[0].incarnation == l.incarnation {
		return nil
	}
	for _, o := range s.links {
		o.probe()
	}
	return protocolErrorf("the server has the session anew, or is another one")
}

// publish shows the connected links to the data path, and then lets news tell of
// the latest: who hears of it can use it.
func (s *Session) publish(news func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.show()
	news()
	s.tell()
}

func (s *Session) publishLocked() {
	s.show()
	s.tell()
}

// show gives the data path the connected links. After total loss that waits
// until nothing of a lost link can run late any more. mu is held.
func (s *Session) show() {
	switch {
	case len(s.links) == 0:
		s.live.Store(nil)
	case s.up || s.draining == 0 && s.allFenced():
		s.live.Store(&liveSet{slices.Clone(s.links), s.links[0].slots})
	}
}

// tell says whether the session is up, if that has changed. mu is held.
func (s *Session) tell() {
	if up := s.live.Load() != nil; up != s.up {
		s.up = up
		kind := SessionUp
		if !up {
			kind = SessionDown
			s.downs++
		}
		s.log.Info("rtrs: " + kind.String())
		s.events.add(Event{Kind: kind, Session: s})
	}
}

// linkDown takes l from the data path. It counts as draining until settle.
func (s *Session) linkDown(l *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.links = slices.DeleteFunc(s.links, func(o *link) bool { return o == l })
	s.draining++
	s.publishLocked()
	if len(s.links) == 0 {
		s.abortLost()
	}
	for _, q := range s.queues {
		q.poller.Do(q.resume) // what waits for this path must not
	}
}
