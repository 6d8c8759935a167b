package rtrs

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// One attempt to connect a path.

// connectOnce connects the path once.
func (p *path) connectOnce() {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	p.setCancel(cancel)
	defer p.setCancel(nil)
	if err := p.connectFenced(ctx); err != nil {
		p.finishAttempt(err)
		return
	}
	p.session.publishLinks(func() { p.finishAttempt(nil) })
}

// connectFenced connects the path while no FENCE for it is under way: the FENCE
// would close the new connection. The server accepts a path that it knows only
// when everything of the path's last connection has ended. So success is a fence
// too.
func (p *path) connectFenced(ctx context.Context) error {
	s := p.session
	if err := s.beginConnect(ctx, p); err != nil {
		return err
	}
	l, err := p.connectLink(ctx)
	switch {
	case err == nil:
		err = p.adoptLink(l)
	case context.Cause(ctx) == errInterrupted:
		err = fmt.Errorf("%w: %w", errInterrupted, err)
	}
	s.endConnect(p, err == nil)
	return err
}

// adoptLink makes l the link of the path.
func (p *path) adoptLink(l *link) error {
	if err := p.session.addLink(l); err != nil {
		l.failLink(err)
		l.close()
		return fmt.Errorf("rtrs: session %s: connect path %s: %w", p.session.name, p.addr, err)
	}
	p.link, p.later = l, false
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current, p.lastSrc, p.lastDev = l, l.conns[0].qp.LocalAddr().Addr(), l.dev.dev
	if verbs.IsGID(p.addr.Dst.Addr()) { // the fabric may report the IP address of the same 16 bytes
		p.lastSrc = verbs.GID(p.lastSrc)
	}
	return nil
}

// finishAttempt counts the result of an attempt and moves the path to its next state.
func (p *path) finishAttempt(err error) {
	p.countAttempt(err == nil)
	switch {
	case err == nil:
		p.failures = 0
		p.setState(PathConnected, nil)
	case p.closeWanted():
		p.setState(PathClosing, err)
	case p.later && errors.Is(err, syscall.EEXIST):
		p.twin = true
		p.setIntent(wantDead)
		p.setState(PathClosing, err)
	case p.session.isExpected(): // one failure at most counts
		p.failures = max(p.failures, 1)
		p.setState(PathConnectingErr, err)
	default:
		p.failures++
		p.setState(PathConnectingErr, err)
	}
}

func (p *path) countAttempt(ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ok {
		p.stats.Reconnects++
	} else {
		p.stats.ReconnectsFailed++
	}
}

// setCancel stores the function that ends the attempt under way. nil: there is no attempt.
func (p *path) setCancel(cancel func(cause error)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cancel = cancel
	if cancel != nil && p.intent >= wantClosed {
		cancel(nil)
	}
}

// errInterrupted ends an attempt that will be repeated soon.
var errInterrupted error = &sentinelError{"the path's last connections are fenced first", syscall.ECONNRESET}

// interruptAttempt ends the attempt under way, for another one to follow. It does not
// wait.
func (p *path) interruptAttempt() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cancel != nil {
		p.cancel(errInterrupted)
	}
}
