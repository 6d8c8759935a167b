package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// A session is opened with its first device, or for a question to a server.

// openSession connects the paths of r and exchanges SESS_INFO. It fails unless
// all paths connect. For a mapping of the last daemon one path is enough.
func (c *Client) openSession(ctx context.Context, name string, r MapRequest) (*session, error) {
	addrs, err := c.pathAddresses(ctx, r.Paths)
	if err != nil {
		return nil, err
	}
	s := c.newSession(name, r, addrs)
	cfg, err := s.transportConfig(r.tuning)
	if err != nil {
		return nil, fmt.Errorf("session %q: %w", name, err)
	}
	if err := s.openTransport(ctx, addrs, cfg, r.identity != "" || r.AnyPath); err != nil {
		return nil, withPathHint(addrs, err)
	}
	if err := s.exchangeInfo(ctx); err != nil {
		s.closeUnused(ctx)
		return nil, err
	}
	s.mu.Lock()
	s.back = len(s.events) == 0 // otherwise the session was lost meanwhile
	s.ready.Store(s.back)
	s.mu.Unlock()
	s.redundancy.startWatch(s.transport.Paths())
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
		s.spelling.noteSpelling(a, r.Paths[i])
	}
	if s.port == 0 {
		s.port = DefaultPort
	}
	for _, p := range c.pumps {
		s.lanes = append(s.lanes, &sessionLane{session: s, pump: p})
	}
	return s
}

// transportConfig returns the configuration of the session's transport.
func (s *session) transportConfig(t sessionTuning) (rtrs.ClientConfig, error) {
	c := s.client
	cfg := rtrs.ClientConfig{
		Queues: max(c.cfg.Queues, len(c.pumps)), Timing: c.cfg.Timing, Policy: c.cfg.Policy, Logger: c.cfg.subsystemLogger("rtrs"),
		Protect: c.cfg.Protect, PeerName: c.cfg.PeerName, Resolver: c.cfg.Resolver,
		Auth: c.cfg.Auth, AuthMode: c.cfg.AuthMode,
		OnDone:   func(queue int, tag uint64, errno int) { c.pumps[queue%len(c.pumps)].onDone(tag, errno) },
		OnPermit: func(queue int) { s.lanes[queue%len(s.lanes)].resumeServe() },
		OnEvent:  s.onEvent,
	}
	for _, p := range c.pumps {
		cfg.Pollers = append(cfg.Pollers, p.poller)
	}
	err := t.applyTo(&cfg)
	return cfg, err
}

// openTransport opens the transport. It tries again while the server may still be
// ending a session of the same name.
func (s *session) openTransport(ctx context.Context, addrs []rtrs.PathAddr, cfg rtrs.ClientConfig, anyPath bool) (err error) {
	open := rtrs.Open
	if anyPath {
		open = openAny
	}
	s.transport, err = open(ctx, s.name, addrs, cfg)
	for err != nil && s.waitForName(ctx, err) {
		s.transport, err = open(ctx, s.name, addrs, cfg)
	}
	if err != nil {
		return err
	}
	for i, l := range s.lanes {
		l.queue = s.transport.Queue(i)
	}
	s.dividePermits()
	return nil
}

// openAny connects a session with the first path that works, for disks with
// users that wait already. Other paths may follow later.
func openAny(ctx context.Context, name string, addrs []rtrs.PathAddr, cfg rtrs.ClientConfig) (*rtrs.Session, error) {
	if len(addrs) < 2 {
		return rtrs.Open(ctx, name, addrs, cfg)
	}
	var errs []error
	for i := range addrs {
		try, cancel := shareOf(ctx, len(addrs)-i+1) // one share is for the rest of the open
		s, err := rtrs.Open(try, name, addrs[i:i+1], cfg)
		cancel()
		if err == nil {
			return addLater(ctx, s, slices.Delete(slices.Clone(addrs), i, i+1))
		}
		errs = append(errs, err)
	}
	return nil, fmt.Errorf("none of %d paths works: %w", len(addrs), errors.Join(errs...))
}

// addLater adds paths that may not work yet. It skips those that the session
// has already.
func addLater(ctx context.Context, s *rtrs.Session, addrs []rtrs.PathAddr) (*rtrs.Session, error) {
	for _, a := range addrs {
		if _, err := s.AddPathLater(a); err != nil && !errors.Is(err, syscall.EEXIST) {
			_ = s.Close(context.WithoutCancel(ctx))
			return nil, err
		}
	}
	return s, nil
}

// shareOf returns ctx with one of n equal parts of its time.
func shareOf(ctx context.Context, n int) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Until(end)/time.Duration(n))
}

// closeUnused closes a session that was never used.
func (s *session) closeUnused(ctx context.Context) {
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), forcedClose)
	defer cancel()
	s.transport.Close(closing)
	s.client.mu.Lock()
	s.client.ended.noteEnd(s.name)
	s.client.mu.Unlock()
}
