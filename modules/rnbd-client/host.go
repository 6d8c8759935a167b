package client

import (
	"context"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
)

// host is one process of a front end, as attachments use it: from when it has
// its rings until it has ended.
type host struct {
	*supervise.Instance
	fe      *frontend
	sources []*source     // by pump
	turns   chan struct{} // a token for each call under way that is not late
}

const (
	// turnsAtOnce is how many attachments keep a process busy at a time.
	turnsAtOnce = 16
	// turnTime is when a call gives its turn to the next one although it has
	// not ended: what hangs keeps no other device waiting.
	turnTime = time.Second
)

func newHost(f *frontend, in *supervise.Instance) *host {
	return &host{Instance: in, fe: f, turns: make(chan struct{}, turnsAtOnce)}
}

// alive reports whether the process can be called.
func (h *host) alive() bool { return h != nil && h.Context().Err() == nil }

// turn waits until the process is not too busy. done ends the turn.
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

// corrupt is told by a pump that the process broke its ring: it is killed.
func (h *host) corrupt(err error) { h.Kill(err) }

// Requests of a process that is gone continue, and their answers are dropped.
// Their sources are orphans: out of the ring and out of the pump's turn, but in
// its list until the last request has ended, since RTRS's answers name them. Each
// request owns its slot until then, so its device is shown to the next process
// after that; other devices are shown at once.

// orphan ends the use of the rings. Requests that wait here end now.
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
			s.forget()
		} else {
			h.fe.orphans.Go(func() { h.fe.outlive(s, ended) })
		}
	}
	h.sources = nil
}

// outlive waits for the end of an orphan. That of the front end ends it too: its
// pumps stop then, and no answer comes any more.
func (f *frontend) outlive(s *source, ended <-chan struct{}) {
	select {
	case <-ended:
		s.forget()
	case <-f.life.Done():
	}
}

// forget gives the number of an orphan back, whose requests have ended.
func (s *source) forget() {
	s.pump.pump.Call(func() { s.pump.sources[s.index] = nil })
}

// settle is called by the pump when a request of an orphan has ended: its
// device may be shown again.
func (s *source) settle(d *Device) {
	if a := d.att.Load(); a != nil {
		a.poke()
	}
	if s.inflight == 0 && s.ended != nil {
		close(s.ended)
		s.ended = nil
	}
}
