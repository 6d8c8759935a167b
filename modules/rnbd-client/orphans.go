package client

import (
	"slices"
	"sync"
	"time"
)

// Requests of a front end's process that is gone go on, with nobody to answer.
// Their sources are orphans: out of the ring and out of the pump's turn, but in
// its list until the last request has ended, since RTRS's answers name them.

const (
	settlePause = time.Millisecond      // while the next process waits
	orphanPause = 20 * time.Millisecond // while nobody does
)

// detach ends the rings of a process that is gone. It returns when the requests
// of the devices that the next process is shown have ended: their slots are free
// then. Those of unmapped devices, whose memory nobody else gets (Client.retire),
// may go on. Requests that wait for a session end now.
func (f *frontend) detach() {
	for _, s := range f.sources {
		s.pump.pump.Call(func() { s.orphaned = true })
		s.pump.pump.Remove(s)
	}
	for _, r := range f.rings {
		r.Close()
	}
	left := settle(f.sources)
	f.sources, f.rings = nil, nil
	for f.busy() {
		time.Sleep(settlePause)
		left = settle(left)
	}
	if len(left) > 0 {
		f.orphans.Go(func() { f.outlive(left) })
	}
}

// busy: requests of a device that the next process is shown are under way.
func (f *frontend) busy() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stopping { // there will be none
		return false
	}
	for _, d := range f.devices {
		if d.inflight() > 0 {
			return true
		}
	}
	return false
}

// outlive sees to the end of orphans. That of the front end ends it too: its
// pumps stop then, and no answer comes any more.
func (f *frontend) outlive(left []*source) {
	for left = settle(left); len(left) > 0; left = settle(left) {
		select {
		case <-f.life.Done():
			return
		case <-time.After(orphanPause):
		}
	}
}

// settle sends what orphans still have to send, and returns those with requests
// under way.
func settle(orphans []*source) []*source {
	return slices.DeleteFunc(orphans, func(s *source) (ended bool) {
		s.pump.pump.Call(func() {
			s.Poll()
			if ended = s.inflight == 0; ended {
				s.pump.sources[s.index] = nil
			}
		})
		return ended
	})
}

// await waits for a group, at most for limit.
func await(group *sync.WaitGroup, limit time.Duration) {
	done := make(chan struct{})
	go func() {
		group.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(limit):
	}
}
