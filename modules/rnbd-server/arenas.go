package server

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// attachSession shows the session's chunks to the running process, once, for one
// more mapping. During a restart it waits for the next process. leaveSession follows if
// it succeeds.
func (p *ioPlugin) attachSession(ctx context.Context, s *session) error {
	if err := s.checkAlive(); err != nil {
		return err
	}
	in, err := p.sup.Await(ctx)
	if err == nil {
		err = p.addUse(ctx, s)
	}
	if err != nil {
		return err
	}
	if err := p.showArena(ctx, in, s, false); err != nil {
		p.leaveSession(s)
		return fmt.Errorf("plugin %s: memory of session %q: %w", p.cfg.Name, s.name, err)
	}
	return nil
}

// addUse counts one more mapping of s. If the last one before has just been closed, it
// waits until the process no longer knows the arena's number.
func (p *ioPlugin) addUse(ctx context.Context, s *session) error {
	for {
		p.mu.Lock()
		leaving := p.leaving[s]
		if leaving == nil {
			p.mappings[s]++
			p.mu.Unlock()
			return nil
		}
		p.mu.Unlock()
		select {
		case <-leaving:
		case <-ctx.Done():
			return fmt.Errorf("plugin %s: it still releases memory of session %q: %w", p.cfg.Name, s.name, context.Cause(ctx))
		}
	}
}

// leaveSession undoes attachSession, after the mapping's last request. The last
// mapping takes the arena away from the process: it maps the memory of sessions that
// have a device with it. The memory stays the session's. leaveSession does not wait.
func (p *ioPlugin) leaveSession(s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mappings[s]--; p.mappings[s] > 0 {
		return
	}
	delete(p.mappings, s)
	last := p.shown[s]
	delete(p.shown, s)
	if last == nil || last.in == nil {
		return
	}
	done := make(chan struct{})
	p.leaving[s] = done
	go func() {
		p.takeAway(last, s)
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.leaving, s)
		close(done)
	}()
}

// showAll shows a new process the arenas that the process before it had.
func (p *ioPlugin) showAll(ctx context.Context, in *supervise.Instance) error {
	p.mu.Lock()
	var sessions []*session
	for s := range p.shown {
		sessions = append(sessions, s)
	}
	p.mu.Unlock()
	for _, s := range sessions {
		if err := p.showArena(ctx, in, s, true); err != nil {
			return fmt.Errorf("memory of session %q: %w", s.name, err)
		}
	}
	return nil
}

// showArena shows s's arena to in, unless in has it. If again is true it does so
// only if the arena is still listed. An arena is listed before the first try,
// so that the next process is shown it whenever this one dies. No lock is held
// during the call to the process; a separate handle keeps the memory.
func (p *ioPlugin) showArena(ctx context.Context, in *supervise.Instance, s *session, again bool) error {
	p.mu.Lock()
	last := p.shown[s]
	if last == nil && again {
		p.mu.Unlock()
		return nil
	}
	if last != nil && last.in == in {
		p.mu.Unlock()
		select {
		case <-last.done:
			return last.err
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	now := &arenaShow{in: in, done: make(chan struct{})}
	p.shown[s] = now
	p.mu.Unlock()
	now.err = p.attachArena(ctx, in, s)
	close(now.done)
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case now.err == nil || p.shown[s] != now:
	case last == nil:
		delete(p.shown, s)
	default:
		p.shown[s] = &arenaShow{}
	}
	return now.err
}

// attachArena shows the arena to in. The arena of a session that has ended may be
// gone; then there is nothing to show, since no further request uses it.
func (p *ioPlugin) attachArena(ctx context.Context, in *supervise.Instance, s *session) error {
	a, err := s.keepArena()
	if err != nil || a == nil {
		return err
	}
	defer a.Close()
	return in.AttachArena(ctx, s.index, a)
}

// keepArena returns another handle of the session's arena, or nil if the
// session has ended.
func (s *session) keepArena() (*shm.Arena, error) {
	s.arenaMu.Lock()
	defer s.arenaMu.Unlock()
	if s.ended.Load() {
		return nil, nil
	}
	fd, err := unix.FcntlInt(uintptr(s.arena.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate an arena's descriptor: %w", err)
	}
	return shm.OpenArena(fd, s.arena.Size())
}

// detachSession takes s's arena away from the process, if it has it. It returns
// when the process no longer knows the arena's number. The session has ended.
func (p *ioPlugin) detachSession(s *session) {
	p.mu.Lock()
	last, leaving := p.shown[s], p.leaving[s]
	delete(p.shown, s)
	p.mu.Unlock()
	if leaving != nil {
		<-leaving
	}
	if last != nil && last.in != nil {
		p.takeAway(last, s)
	}
}

// takeAway takes s's arena away from the process that was shown it.
func (p *ioPlugin) takeAway(last *arenaShow, s *session) {
	select {
	case <-last.done:
	case <-last.in.Context().Done():
		return
	}
	if last.err == nil {
		p.detachArena(last.in, s)
	}
}

// Pauses between tries to detach an arena.
const (
	detachFirst = 10 * time.Millisecond
	detachMost  = 5 * time.Second
)

// detachArena tries until the process has detached the arena or has ended.
func (p *ioPlugin) detachArena(in *supervise.Instance, s *session) {
	for pause, told := detachFirst, false; ; pause = min(2*pause, detachMost) {
		ctx, cancel := context.WithTimeout(in.Context(), callTimeout)
		err := in.DetachArena(ctx, s.index)
		cancel()
		if err == nil || errors.Is(err, syscall.ENOENT) || !sleepFor(in.Context(), pause) {
			return
		}
		if !told {
			p.log.Warn("plugin does not release a session's memory, which is tried on", "session", s.name, "err", err)
			told = true
		}
	}
}

// sleepFor waits for pause. It returns false if ctx ends before.
func sleepFor(ctx context.Context, pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
