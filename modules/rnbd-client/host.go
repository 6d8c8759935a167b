package client

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
)

const (
	// turnsAtOnce is the number of attachments that may make a call to a
	// process at a time.
	turnsAtOnce = 16
	// turnTime bounds the turn of one call. After it the next call may begin,
	// though the call goes on.
	turnTime = time.Second
)

func newHost(f *frontend, in *supervise.Instance) *host {
	return &host{Instance: in, fe: f, turns: make(chan struct{}, turnsAtOnce), parted: make(chan struct{})}
}

// alive reports whether the process can be called.
func (h *host) alive() bool { return h != nil && h.Context().Err() == nil }

// now returns the process to use, or nil. over reports that no further process
// will be started.
func (f *frontend) now() (h *host, over bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.host.alive() {
		h = f.host
	}
	return h, f.over
}

// alive reports whether a process can be used.
func (f *frontend) alive() bool {
	h, _ := f.now()
	return h != nil
}

// current returns the process to use. The error wraps EBUSY if it is being
// restarted.
func (f *frontend) current() (*host, error) {
	h, _ := f.now()
	if h == nil {
		return nil, f.notThere()
	}
	return h, nil
}

// fails reports whether the last attempt to start a process has failed.
func (f *frontend) fails() bool { return f.sup != nil && f.sup.Status().FailedStarts > 0 }

// notThere is the error of a front end without a process.
func (f *frontend) notThere() error {
	st := f.sup.Status()
	if st.FailedStarts > 0 {
		return fmt.Errorf("front end %s does not start, which is tried again: %s: %w", f.cfg.Name, st.LastError, syscall.EBUSY)
	}
	return fmt.Errorf("front end %s is being restarted: %w", f.cfg.Name, syscall.EBUSY)
}

// turn waits for a turn. done ends it.
func (h *host) turn(ctx context.Context) (done func(), err error) {
	select {
	case h.turns <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	var once sync.Once
	give := func() { once.Do(func() { <-h.turns }) }
	late := time.AfterFunc(turnTime, give)
	return func() {
		late.Stop()
		give()
	}, nil
}

// addSources joins the rings with the pumps.
func (h *host) addSources() error {
	for i, p := range h.fe.client.pumps {
		ring := h.Rings[i]
		s := newSource(p, h, ring.Completer(), ring.Entries())
		h.sources = append(h.sources, s)
		if err := p.add(s); err != nil {
			return err
		}
	}
	return nil
}

// Requests of a dead process continue, and their answers are dropped. Its
// sources become orphans: they leave the ring and are not polled, but stay in
// the pump's list until their last request has ended, because RTRS's answers
// refer to them. Until then each request owns its slot, so its device is shown
// to the next process afterwards. Other devices are shown at once.

// orphan ends the use of the rings. Requests that were not sent end now.
func (h *host) orphan() {
	for _, s := range h.sources {
		var ended chan struct{}
		s.pump.pump.Call(func() {
			s.orphaned = true
			s.Poll()
			if s.inflight > 0 {
				ended = make(chan struct{})
				s.ended = ended
			}
		})
		s.pump.pump.Remove(s)
		if ended == nil {
			s.giveIndex()
		} else {
			h.fe.orphans.Go(func() { h.fe.outlive(s, ended) })
		}
	}
	h.sources = nil
	h.fe.client.forgetAnswers(h.fe)
}

// outlive waits for the end of an orphan, or of the front end. The pumps stop
// after the front end, and no answer comes any more.
func (f *frontend) outlive(s *source, ended <-chan struct{}) {
	select {
	case <-ended:
		s.giveIndex()
	case <-f.life.Done():
	}
}

// giveIndex frees the number of an orphan, after its last request.
func (s *source) giveIndex() {
	s.pump.pump.Call(func() { s.pump.sources[s.index] = nil })
}
