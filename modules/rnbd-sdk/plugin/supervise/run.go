package supervise

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// run is the life of the plugin, from its first start to its end. first takes the result
// of the first start until Start leaves.
func (s *Supervisor) run(ctx context.Context, first chan<- error, leave <-chan struct{}) {
	tell := func(err error) (told bool) {
		select {
		case first <- err:
			return true
		case <-leave:
			return false
		}
	}
	if !s.begin() {
		tell(context.Canceled)
		return
	}
	defer func() {
		s.noStarts()
		s.move(Stopped)
		close(s.done)
	}()
	in, err := s.startFirst(ctx)
	switch {
	case err == nil:
		tell(nil)
	case s.cfg.Patience == 0 || ctx.Err() != nil || s.starts.Err() != nil || plugin.IsMisfit(err):
		s.note(err)
		if tell(err) || s.starts.Err() != nil {
			return
		}
		fallthrough
	default:
		s.failedStart(err)
		tell(nil)
		in = s.next()
	}
	for in != nil && s.watch(in) {
		in = s.next()
	}
}

// startFirst is the first start. With Patience it goes on when Start has returned.
func (s *Supervisor) startFirst(ctx context.Context) (*Instance, error) {
	if s.cfg.Patience == 0 {
		return s.start(ctx)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.StartTimeout)
	defer cancel()
	return s.start(ctx)
}

// begin reports whether Start comes before Stop.
func (s *Supervisor) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status.State != Idle {
		return false
	}
	s.moveLocked(Starting)
	return true
}

// watch waits for the end of in and returns when Left has returned. The
// instance runs when watch is called. False: no other process must be
// started.
func (s *Supervisor) watch(in *Instance) (another bool) {
	select {
	case <-in.Exited():
	case ctx := <-s.stop:
		s.stopRunning(ctx, in)
		return false
	}
	cause := in.cause()
	s.mu.Lock()
	s.current = nil
	s.status.LastError = cause.Error()
	s.crashes = append(s.recentCrashes(), time.Now())
	tooMany := s.cfg.Crash.Count > 0 && len(s.crashes) >= s.cfg.Crash.Count
	s.moveLocked(Waiting)
	s.mu.Unlock()
	s.log.Warn("plugin died", "err", cause)
	s.endInstance(in, cause)
	return s.starts.Err() == nil && (!tooMany || s.giveUp(cause))
}

// giveUp waits for Reset, false: for the end.
func (s *Supervisor) giveUp(cause error) bool {
	s.mu.Lock()
	crashes := len(s.crashes)
	if s.atOnce { // a Reset came meanwhile
		s.mu.Unlock()
		return true
	}
	s.moveLocked(GivenUp)
	s.mu.Unlock()
	s.log.Error("plugin crashes too often and is not started again", "crashes", crashes, "within", s.cfg.Crash.Window)
	if s.cfg.GaveUp != nil {
		s.cfg.GaveUp(cause)
	}
	for s.State() == GivenUp {
		select {
		case <-s.reset:
		case <-s.starts.Done():
			return false
		}
	}
	s.log.Info("plugin is started again on command")
	return true
}

// next starts processes until one runs; nil: none is wanted any more.
func (s *Supervisor) next() *Instance {
	for s.pause() {
		s.move(Starting)
		ctx, cancel := context.WithTimeout(s.starts, s.cfg.StartTimeout)
		in, err := s.start(ctx)
		cancel()
		if err == nil {
			return in
		}
		if s.starts.Err() != nil {
			return nil
		}
		s.failedStart(err)
	}
	return nil
}

// failedStart counts it; the first, second, fourth, eighth and so on of a row
// are logged.
func (s *Supervisor) failedStart(err error) {
	s.note(err)
	s.mu.Lock()
	s.status.FailedStarts++
	n := s.status.FailedStarts
	s.moveLocked(Waiting)
	s.mu.Unlock()
	if bits.OnesCount(uint(n)) == 1 {
		s.log.Error("plugin does not start, which is tried on", "tries", n, "err", err)
	}
}

func (s *Supervisor) note(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.LastError = err.Error()
}

// pause waits until the next start is due. False: there is none.
func (s *Supervisor) pause() bool {
	s.mu.Lock()
	wait := s.wait()
	s.status.NextStart = time.Now().Add(wait)
	s.mu.Unlock()
	if wait <= 0 {
		return s.starts.Err() == nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.reset:
	case <-s.starts.Done():
		return false
	}
	return s.starts.Err() == nil
}

// wait is how long to pause before the next start. Caller holds mu.
func (s *Supervisor) wait() (d time.Duration) {
	if s.atOnce {
		return 0
	}
	if n := s.status.FailedStarts; n > 0 {
		d = s.cfg.RetryMost
		if n < 32 {
			d = min(d, s.cfg.RetryFirst<<(n-1))
		}
	}
	if s.status.Restarts > 0 {
		d = max(d, time.Until(s.status.LastStart.Add(s.cfg.Apart)))
	}
	return d
}

// start brings up a process that has its rings and is joined with its owner.
// State: Starting, and after success Running.
func (s *Supervisor) start(ctx context.Context) (*Instance, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.starts, cancel)()
	s.mu.Lock()
	s.status.Generation++
	s.status.LastStart = time.Now()
	s.atOnce = false
	select {
	case <-s.reset: // this start does it
	default:
	}
	in := &Instance{Generation: s.status.Generation, log: s.log}
	s.mu.Unlock()
	var err error
	if in.Process, err = s.launch(ctx); err != nil {
		return nil, err
	}
	in.life, in.end = context.WithCancel(context.Background())
	go func() {
		select {
		case <-in.Exited():
			in.end()
		case <-in.life.Done():
		}
	}()
	if err := s.attachRings(ctx, in); err != nil {
		s.kill(in)
		in.end()
		in.closeRings()
		return nil, err
	}
	if s.cfg.Joined != nil {
		if err := s.cfg.Joined(ctx, in); err != nil {
			s.kill(in)
			s.endInstance(in, err)
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.current = in
	s.status.FailedStarts = 0
	if s.joined {
		s.status.Restarts++
	} else {
		s.joined, s.info = true, in.Info()
	}
	s.moveLocked(Running)
	return in, nil
}

// launch does not wait longer than ctx; a process that comes later is killed.
func (s *Supervisor) launch(ctx context.Context) (Process, error) {
	type result struct {
		p   Process
		err error
	}
	done := make(chan result, 1)
	go func() {
		p, err := s.cfg.Launch(ctx, s.cfg.Plugin)
		done <- result{p, err}
	}()
	select {
	case r := <-done:
		return r.p, r.err
	case <-ctx.Done():
	}
	select { // it may name the reason
	case r := <-done:
		return r.p, r.err
	case <-time.After(killWait):
	}
	go func() {
		if r := <-done; r.err == nil {
			r.p.Kill()
		}
	}()
	return nil, fmt.Errorf("start of plugin %s: %w", s.cfg.Plugin.Name, context.Cause(ctx))
}

func (s *Supervisor) attachRings(ctx context.Context, in *Instance) error {
	for i := range s.cfg.Plugin.Pumps {
		r, err := s.cfg.NewRing(s.cfg.Entries)
		if err != nil {
			return err
		}
		in.Rings = append(in.Rings, r)
		if err := in.AttachQueue(ctx, i, r); err != nil {
			return fmt.Errorf("plugin %s: ring %d: %w", s.cfg.Plugin.Name, i, err)
		}
	}
	return nil
}

// kill kills the process and waits a little for its end.
func (s *Supervisor) kill(in *Instance) {
	in.Process.Kill()
	select {
	case <-in.Exited():
	case <-time.After(killWait):
	}
}

// endInstance ends the owner's part of in.
func (s *Supervisor) endInstance(in *Instance, cause error) {
	in.end()
	if s.cfg.Left != nil {
		s.cfg.Left(in, cause)
	}
	in.closeRings()
}

// stopRunning ends in, at the latest a little after ctx.
func (s *Supervisor) stopRunning(ctx context.Context, in *Instance) {
	s.mu.Lock()
	s.current = nil
	s.moveLocked(Stopping)
	s.mu.Unlock()
	stopped := make(chan error, 1)
	go func() { stopped <- in.Process.Stop(ctx) }()
	var err error
	select {
	case err = <-stopped:
	case <-ctx.Done():
		in.Process.Kill()
		select {
		case err = <-stopped:
		case <-time.After(killWait):
			err = fmt.Errorf("stop of plugin %s: %w; it is killed, and its I/O keeps it", s.cfg.Plugin.Name, context.Cause(ctx))
		}
	}
	if in.isKilled() && errors.Is(err, plugin.ErrExited) {
		err = nil // it was to end before
	}
	s.stopErr = err
	cause := err
	if cause == nil {
		cause = plugin.ErrExited
	}
	s.endInstance(in, cause)
}
