package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// session is one RTRS session and the devices mapped through it.
type session struct {
	client    *Client
	name      string
	log       *slog.Logger
	transport *rtrs.Session
	lanes     []*lane // by pump
	window    atomic.Pointer[window]

	version uint8
	// features are the extensions of the server that is connected now.
	features atomic.Uint32
	writer   uint64 // number of the session's client for servers; the same for every transport
	// downs counts losses of the last path, see epoch.
	downs      atomic.Uint64
	redundancy redundancy
	unlisten   func() // ends listen
	// ready reports that the server has answered SESS_INFO since the session is
	// connected.
	ready atomic.Bool
	turns chan struct{} // tokens of devices that are being opened again

	port       uint16 // for paths that control files add
	pollQueues int
	fabric     string // of the first path
	spelling   pathSpelling
	tuning     tuned

	devices []*Device // guarded by Client.mu

	mu       sync.Mutex  // guards the fields below
	removing map[int]int // by id of a path, the number of its removals under way

	// opening is the number of OPENs under way. early has the news about
	// unknown devices that came meanwhile: see awaitOpen.
	opening int
	early   []rnbdwire.EventRspFields

	// closing are the CLOSEs that the server may still execute: see awaitClosed.
	closing map[*closing]struct{}

	recorded map[int]recorded // by id of a path; used by onEvent alone

	// News from RTRS. run handles them one by one.
	wasUp  bool
	back   bool // used by run alone: the state after the news handled so far
	news   []rtrs.EventKind
	signal chan struct{}
	done   chan struct{}
}

// openSession connects the paths of r and exchanges SESS_INFO. It fails unless
// all paths connect. For a mapping of the last daemon one path is enough.
func (c *Client) openSession(ctx context.Context, name string, r MapRequest) (*session, error) {
	addrs, err := c.addresses(ctx, r.Paths)
	if err != nil {
		return nil, err
	}
	s := c.newSession(name, r, addrs)
	cfg, err := s.transportConfig(r.tuning)
	if err != nil {
		return nil, fmt.Errorf("session %q: %w", name, err)
	}
	if err := s.connect(ctx, addrs, cfg, r.identity != "" || r.AnyPath); err != nil {
		return nil, refused(addrs, err)
	}
	if err := s.hello(ctx); err != nil {
		s.abort(ctx)
		return nil, err
	}
	s.mu.Lock()
	s.back = len(s.news) == 0 // otherwise the session was lost meanwhile
	s.ready.Store(s.back)
	s.mu.Unlock()
	s.redundancy.begin(s.transport.Paths())
	go s.run()
	return s, nil
}

// newSession returns a session without a transport.
func (c *Client) newSession(name string, r MapRequest, addrs []rtrs.PathAddr) *session {
	s := &session{
		client: c, name: name, log: c.log.With("session", name),
		writer: max(rand.Uint64(), 1),
		port:   r.Port, pollQueues: r.PollQueues, fabric: addrs[0].Device.Info().Fabric,
		signal: make(chan struct{}, 1), turns: make(chan struct{}, reopensAtOnce), done: make(chan struct{}), unlisten: func() {},
	}
	s.tuning.now = r.tuning
	s.redundancy.log = s.log
	for i, a := range addrs {
		s.spelling.note(a, r.Paths[i])
	}
	if s.port == 0 {
		s.port = DefaultPort
	}
	for _, p := range c.pumps {
		s.lanes = append(s.lanes, &lane{session: s, pump: p})
	}
	return s
}

// transportConfig returns the configuration of the session's transport.
func (s *session) transportConfig(t tuning) (rtrs.ClientConfig, error) {
	c := s.client
	cfg := rtrs.ClientConfig{
		Queues: max(c.cfg.Queues, len(c.pumps)), Timing: c.cfg.Timing, Policy: c.cfg.Policy, Logger: c.cfg.logger("rtrs"),
		Protect: c.cfg.Protect, PeerName: c.cfg.PeerName, Resolver: c.cfg.Resolver,
		OnDone:   func(queue int, tag uint64, errno int) { c.pumps[queue%len(c.pumps)].onDone(tag, errno) },
		OnPermit: func(queue int) { s.lanes[queue%len(s.lanes)].unblock() },
		OnEvent:  s.onEvent,
	}
	for _, p := range c.pumps {
		cfg.Pollers = append(cfg.Pollers, p.poller)
	}
	err := t.apply(&cfg)
	return cfg, err
}

// connect opens the transport. It tries again while the server may still be
// ending a session of the same name.
func (s *session) connect(ctx context.Context, addrs []rtrs.PathAddr, cfg rtrs.ClientConfig, anyPath bool) (err error) {
	open := rtrs.Open
	if anyPath {
		open = openAny
	}
	s.transport, err = open(ctx, s.name, addrs, cfg)
	for errors.Is(err, rtrs.ErrConnLost) && s.client.endedLately(s.name) && pauseFor(ctx, namePause) {
		s.transport, err = open(ctx, s.name, addrs, cfg)
	}
	if err != nil {
		return err
	}
	for i, l := range s.lanes {
		l.queue = s.transport.Queue(i)
	}
	s.divide()
	return nil
}

// abort closes a session that was never used.
func (s *session) abort(ctx context.Context) {
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), forcedClose)
	defer cancel()
	s.transport.Close(closing)
	s.client.mu.Lock()
	s.client.ended.note(s.name)
	s.client.mu.Unlock()
}

// hello exchanges SESS_INFO.
func (s *session) hello(ctx context.Context) error {
	msg := make(rnbdwire.SessInfo, rnbdwire.SessInfoSize)
	rnbdwire.SessInfoFields{Version: rnbdwire.Version}.Put(msg)
	rsp := make(rnbdwire.SessInfoRsp, rnbdwire.SessInfoRspSize)
	if err := s.transport.AdminRead(ctx, msg, rsp); err != nil {
		return fmt.Errorf("session %q: session info: %w", s.name, err)
	}
	if !rsp.IsValid() {
		return fmt.Errorf("session %q: the server's session info is malformed: %w", s.name, syscall.EPROTO)
	}
	s.version = min(rsp.Version(), rnbdwire.Version)
	s.features.Store(uint32(rsp.Features()))
	s.listen()
	return s.sayWriter(ctx)
}

// epoch returns the number of the current epoch, from 1. An epoch ends with
// the loss of the last path. Answers of the server, such as ids of devices,
// are valid in their epoch only.
func (s *session) epoch() uint64 { return s.downs.Load() + 1 }

func (s *session) onEvent(e rtrs.Event) {
	s.record(e)
	if e.Kind == rtrs.PathChanged {
		s.redundancy.look(e.Session.Paths())
	}
	if e.Kind == rtrs.SessionDown {
		s.downs.Add(1) // before onDown: an OPEN that onDown finds under way is void
	}
	s.mu.Lock()
	first := e.Kind == rtrs.SessionUp && !s.wasUp
	s.wasUp = s.wasUp || first
	if e.Kind == rtrs.PathChanged || first { // openSession handles the first connection
		s.mu.Unlock()
		return
	}
	s.news = append(s.news, e.Kind)
	s.mu.Unlock()
	s.poke()
	if e.Kind == rtrs.SessionDown {
		s.onDown(e.Session) // called directly: onDown does not block
	}
}

// run handles the news of the session until it is closed.
func (s *session) run() {
	for {
		var again <-chan time.Time
		if s.work() != nil {
			again = time.After(reopenDelay)
		}
		select {
		case <-s.done:
			return
		case <-s.signal:
		case <-again:
		}
	}
}

// reopenDelay is the pause before OPEN is tried again after a temporary
// failure, for instance of a server that has not found the device yet.
const reopenDelay = 500 * time.Millisecond

// work exchanges SESS_INFO with a server that is back, and starts to open
// closed devices again. After an error the caller tries again.
func (s *session) work() error {
	if !s.isBack() {
		return nil
	}
	if !s.ready.Load() {
		if err := s.greet(); err != nil {
			s.log.Warn("session is back, but does not answer", "err", err)
			return err
		}
	}
	devices := 0
	for _, d := range s.list() {
		d.onDenied()
		d.onRefused()
		if d.beginReopen() {
			devices++
			go d.reopenUntilOpen()
		}
	}
	if devices > 0 {
		s.log.Info("devices are opened again", "devices", devices)
	}
	return nil
}

// isBack handles the news since the last call and reports whether the session is
// connected.
func (s *session) isBack() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.news {
		s.ready.Store(false) // even if the loss is over already
		s.back = k == rtrs.SessionUp
	}
	s.news = nil
	return s.back
}

// greet exchanges SESS_INFO with a server that is back.
func (s *session) greet() error {
	ctx, cancel := context.WithTimeout(context.Background(), s.client.cfg.MapTimeout)
	defer cancel()
	epoch := s.epoch()
	if err := s.hello(ctx); err != nil {
		return err
	}
	s.log.Info("session is back")
	s.client.mu.Lock()
	s.divide() // the server may have another queue depth now
	s.client.mu.Unlock()
	s.ready.Store(epoch == s.epoch())
	return nil
}

// poke makes run check the devices.
func (s *session) poke() {
	select {
	case s.signal <- struct{}{}:
	default:
	}
}

// onDown closes the devices. lost is the transport: s.transport may not be
// set yet, because events come while connect still adds paths.
func (s *session) onDown(lost *rtrs.Session) {
	s.ready.Store(false)
	why := lossReason(lost.Paths())
	for _, d := range s.list() {
		d.onLost(why)
	}
	select {
	case <-s.done: // the session was closed
	default:
		s.log.Warn("session lost its last path")
	}
}

func (s *session) list() []*Device {
	s.client.mu.Lock()
	defer s.client.mu.Unlock()
	return append([]*Device(nil), s.devices...)
}

// divide gives each device its part of the permits. The caller holds Client.mu,
// or is the only user of the session.
func (s *session) divide() {
	s.window.Store(newWindow(s.transport.QueueDepth(), len(s.lanes), len(s.devices)))
}

func (s *session) close(ctx context.Context) error {
	close(s.done)
	s.redundancy.end()
	return s.transport.Close(ctx)
}
