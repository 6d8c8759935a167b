package client

import (
	"context"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
)

// host is one process of a front end. Attachments use it from the time when
// it has its rings until it has ended.
type host struct {
	*supervise.Instance
	fe      *frontend
	sources []*source     // by pump
	given   bool          // it has the sockets; guarded by frontend.giving
	turns   chan struct{} // a token for each call under way that is not late
}

const (
	// turnsAtOnce is the number of attachments that may make a call to a
	// process at a time.
	turnsAtOnce = 16
	// turnTime bounds the turn of one call. After it the next call may begin,
	// though the call goes on.
	turnTime = time.Second
)

func newHost(f *frontend, in *supervise.Instance) *host {
	return &host{Instance: in, fe: f, turns: make(chan struct{}, turnsAtOnce)}
}

// alive reports whether the process can be called.
func (h *host) alive() bool { return h != nil && h.Context().Err() == nil }

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

// corrupt kills a process that broke its ring. A pump calls it.
func (h *host) corrupt(err error) { h.Kill(err) }

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

// onOrphanDone is called by the pump when a request of an orphan has ended: its
// device may be shown again.
func (s *source) onOrphanDone(d *Device) {
	if a := d.att.Load(); a != nil {
		a.poke()
	}
	if s.inflight == 0 && s.ended != nil {
		close(s.ended)
		s.ended = nil
	}
}
