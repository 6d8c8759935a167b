package pump

import (
	"context"
	"fmt"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

// Do has the pump's owner run f soon. It is for the control path. f must not block.
// On a stopped pump f runs on the calling goroutine.
func (p *Pump) Do(f func()) {
	if p.post(f) == stopped {
		p.inPlace(f)
	}
}

// Call is Do, and waits until f has run. Called by the owner, it runs f at once.
// Called before Start, it waits for Start.
func (p *Pump) Call(f func()) {
	if p.onThread() {
		f()
		return
	}
	done := make(chan struct{})
	if p.post(func() { defer close(done); f() }) == stopped {
		p.inPlace(f)
		return
	}
	<-done
}

// Ping waits until the pump has run a function. The error is that of ctx: the
// pump's owner hangs.
func (p *Pump) Ping(ctx context.Context) error {
	done := make(chan struct{})
	p.Do(func() { close(done) })
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("pump %q makes no turn: %w", p.cfg.Name, ctx.Err())
	}
}

// Add has the pump poll s. It fails if s's descriptor cannot be watched.
func (p *Pump) Add(s Source) error {
	e := entry{source: s, fd: s.FD()}
	e.disarm, _ = s.(disarmer)
	e.large, _ = s.(largeIO)
	if err := p.watch(e.fd, s); err != nil {
		return fmt.Errorf("pump %q: watch descriptor %d: %w", p.cfg.Name, e.fd, err)
	}
	p.Do(func() { p.sources = append(p.sources, e) })
	return nil
}

// Remove removes s from the pump. After it has returned, the pump does not call s,
// unless s removes itself: its Poll then goes on. The descriptor of s must be open
// until Remove returns.
func (p *Pump) Remove(s Source) {
	if p.onThread() {
		p.markRemoved(s)
		return
	}
	done := make(chan struct{})
	switch p.post(func() { defer close(done); p.markRemoved(s) }) {
	case fresh: // the mailbox is emptied before the first Poll
	case running:
		<-done
	case stopped:
		p.inPlace(func() { p.markRemoved(s) })
	}
}

// markRemoved marks the entry of s and leaves it in the list, because the caller may
// be a source that turn polls.
func (p *Pump) markRemoved(s Source) {
	for i := range p.sources {
		if e := &p.sources[i]; e.source == s && !e.gone {
			e.gone, p.dirty = true, true
			p.unwatch(e.fd)
			return
		}
	}
}

// compact removes the marked entries.
func (p *Pump) compact() {
	p.sources = slices.DeleteFunc(p.sources, func(e entry) bool { return e.gone })
	p.dirty = false
}

// post puts f in the mailbox, unless the pump is stopped, and returns the
// state it found.
func (p *Pump) post(f func()) state {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == stopped {
		return stopped
	}
	p.mailbox = append(p.mailbox, f)
	p.pending.Store(true)
	if p.mode.Swap(modeAwake) != modeAwake {
		p.rouse()
	}
	return p.state
}

// kick wakes a sleeping thread.
func (p *Pump) kick() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == running {
		p.mode.Store(modeAwake)
		p.rouse()
	}
}

func (p *Pump) runMailbox() int {
	p.mu.Lock()
	fs := p.mailbox
	p.mailbox = nil
	p.pending.Store(false)
	p.mu.Unlock()
	for _, f := range fs {
		f()
	}
	return len(fs)
}

// inPlace runs f for a pump without a thread.
func (p *Pump) inPlace(f func()) {
	if p.onThread() {
		f()
		return
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p.own()
	defer p.disown()
	f()
}

// rouse ends the sleep of the pump's thread.
func (p *Pump) rouse() {
	if p.virtual() {
		p.nap.ring()
		return
	}
	signal(p.wakeFD)
}

func signal(fd int) { unix.Write(fd, one) }
