package server

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// Hand-over: another process of the server goes on with its clients.
//
//	tell     clients that listen hold back their requests, and say so
//	settle   their requests in flight end
//	close    sessions, devices and listeners; the locks of the nodes are free
//
// Serve, in this process or in the other one, takes the clients back. Clients
// that do not listen, as those of the kernel, see the loss of their paths and
// connect again.

const (
	// HandOverGrace is the time for which clients that were told hold back their
	// requests. After it they do what their loss policy says.
	HandOverGrace = 10 * time.Second

	// notifyTime is for clients to say that they hold back, deliveryTime for their
	// requests, closeTime for the sessions to close. Together they leave a part of
	// the grace to the next process.
	notifyTime   = 500 * time.Millisecond
	deliveryTime = time.Second
	closeTime    = 2 * time.Second
)

// HandOver closes all sessions, their devices and the listeners, for another
// process to serve them. Plugins go on running. waiting is the number of open
// devices of clients that hold back their requests: they come back at once. On an
// error the server serves as before, or Serve makes it do so: it must follow if
// closed is true.
func (s *Server) HandOver(ctx context.Context) (waiting int, closed bool, err error) {
	s.leaving.Store(true) // before the check: an OPEN that it does not find sees this
	defer func() {
		if !closed {
			s.leaving.Store(false)
		}
	}()
	if err := s.mayHandOver(); err != nil {
		return 0, false, err
	}
	s.notifyHandOver(HandOverGrace)
	if err := s.awaitDelivery(ctx); err != nil {
		s.notifyHandOver(0)
		return 0, false, err
	}
	waiting = s.countMappings((*session).isHeld)
	defer s.incarnation.abandon() // sessions and their devices are closed, or closing
	ctx, cancel := context.WithTimeout(ctx, closeTime)
	defer cancel()
	s.endExtents()
	f := s.front.Load()
	if err := f.rtrs.Close(ctx); err != nil {
		return waiting, true, fmt.Errorf("sessions do not end: %w", err)
	}
	return waiting, true, s.releaseFabrics(ctx, f)
}

// endExtents ends the EXTENTS that are under way. Their paths would wait for them.
func (s *Server) endExtents() {
	for i := range s.sessions {
		if sess := s.sessions[i].Load(); sess != nil {
			for _, m := range sess.openMappings() {
				m.endExtents()
			}
		}
	}
}

// releaseFabrics closes the completion queues of the fabrics, for their addresses to be
// free.
func (s *Server) releaseFabrics(ctx context.Context, f *listeners) error {
	var errs []error
	for _, dev := range s.listenDevices() {
		for _, p := range s.pumps {
			errs = append(errs, p.poller.Release(ctx, dev))
		}
	}
	s.front.Store(&listeners{rtrs: f.rtrs})
	return errors.Join(errs...)
}

// mayHandOver returns the reason why another process cannot go on with an open
// device.
func (s *Server) mayHandOver() error {
	if len(s.boundAddresses()) == 0 {
		return fmt.Errorf("the server does not serve: %w", syscall.EBUSY)
	}
	for _, d := range s.openDevices() {
		switch {
		case d.plugin.info().Crash == plugin.LosesAll:
			return fmt.Errorf("device %q is open, and its plugin %s keeps writes in its memory only, they would be lost: %w", d.path, d.plugin.cfg.Name, syscall.EBUSY)
		case d.currentState() != devOpen, d.retired.Load() > 0:
			return fmt.Errorf("device %q is %s, or has requests that do not end: %w", d.path, d.currentState(), syscall.EBUSY)
		}
	}
	return nil
}

// awaitDelivery waits until clients that listen have seen the events, and then until those
// that hold back their requests have none in flight.
func (s *Server) awaitDelivery(ctx context.Context) error {
	told, cancel := context.WithTimeout(ctx, notifyTime)
	defer cancel()
	pollUntil(told, func() bool { return s.unnotifiedSession() == nil })
	quiet, cancel := context.WithTimeout(ctx, deliveryTime)
	defer cancel()
	if pollUntil(quiet, func() bool { return s.busyMapping() == nil }) {
		return nil
	}
	if m := s.busyMapping(); m != nil {
		return fmt.Errorf("requests of device %q do not end within %s: %w", m.dev.path, deliveryTime, syscall.EBUSY)
	}
	return nil
}

// unnotifiedSession returns a session with a client that has not seen the event, or nil. One
// that is late is not waited for longer than notifyTime.
func (s *Server) unnotifiedSession() *session {
	for i := range s.sessions {
		sess := s.sessions[i].Load()
		if sess != nil && !sess.ended.Load() && sess.hasEvents() {
			return sess
		}
	}
	return nil
}

// busyMapping returns a device with requests of a client that holds back further ones, or
// nil.
func (s *Server) busyMapping() *mapping {
	for i := range s.sessions {
		sess := s.sessions[i].Load()
		if sess == nil || sess.ended.Load() || !sess.isHeld() {
			continue
		}
		if m := sess.busyMapping(); m != nil {
			return m
		}
	}
	return nil
}

// Devices returns the number of devices that clients have open.
func (s *Server) Devices() int { return s.countMappings(func(*session) bool { return true }) }

// countMappings counts the open devices of sessions that match.
func (s *Server) countMappings(match func(*session) bool) (n int) {
	for i := range s.sessions {
		if sess := s.sessions[i].Load(); sess != nil && match(sess) {
			n += len(sess.openMappings())
		}
	}
	return n
}

// deliveryPause is the time between two checks for requests in flight.
const deliveryPause = 500 * time.Microsecond

// pollUntil looks until done returns true, or ctx ends.
func pollUntil(ctx context.Context, done func() bool) bool {
	tick := time.NewTicker(deliveryPause)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}
