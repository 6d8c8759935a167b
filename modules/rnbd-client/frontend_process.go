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
	// callTime bounds one call. After it the next call may begin,
	// though the call goes on.
	callTime = time.Second
)

func newHost(f *frontend, in *supervise.Instance) *frontendProcess {
	return &frontendProcess{Instance: in, fe: f, callSlots: make(chan struct{}, turnsAtOnce), parted: make(chan struct{})}
}

// isAlive reports whether the process can be called.
func (h *frontendProcess) isAlive() bool { return h != nil && h.Context().Err() == nil }

// currentProcess returns the process to use, or nil. over reports that no further process
// will be started.
func (f *frontend) currentProcess() (h *frontendProcess, over bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.current.isAlive() {
		h = f.current
	}
	return h, f.over
}

// hasProcess reports whether a process can be used.
func (f *frontend) hasProcess() bool {
	h, _ := f.currentProcess()
	return h != nil
}

// requireProcess returns the process to use. The error wraps EBUSY if it is being
// restarted.
func (f *frontend) requireProcess() (*frontendProcess, error) {
	h, _ := f.currentProcess()
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

// acquireCall waits until the process may be called. done ends the call.
func (h *frontendProcess) acquireCall(ctx context.Context) (done func(), err error) {
	select {
	case h.callSlots <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	var once sync.Once
	give := func() { once.Do(func() { <-h.callSlots }) }
	late := time.AfterFunc(callTime, give)
	return func() {
		late.Stop()
		give()
	}, nil
}

// addSources joins the rings with the pumps.
func (h *frontendProcess) addSources() error {
	for i, p := range h.fe.client.pumps {
		ring := h.Rings[i]
		s := newSource(p, h, ring.Completer(), ring.Entries())
		h.sources = append(h.sources, s)
		if err := p.addSource(s); err != nil {
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

// endRings ends the use of the rings. Requests that were not sent end now.
func (h *frontendProcess) endRings() {
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
			s.freeIndex()
		} else {
			h.fe.orphans.Go(func() { h.fe.awaitOrphan(s, ended) })
		}
	}
	h.sources = nil
	h.fe.client.forgetAnswers(h.fe)
}

// awaitOrphan waits for the end of an orphan, or of the front end. The pumps stop
// after the front end, and no answer comes any more.
func (f *frontend) awaitOrphan(s *ringSource, ended <-chan struct{}) {
	select {
	case <-ended:
		s.freeIndex()
	case <-f.life.Done():
	}
}

// freeIndex frees the number of an orphan, after its last request.
func (s *ringSource) freeIndex() {
	s.pump.pump.Call(func() { s.pump.sources[s.index] = nil })
}
