package server

import (
	"context"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// When keys, CAs or lists of revoked certificates have changed, the proofs of clients'
// identities are looked at again. A path is closed after a grace time if its client
// would not be let in any more. A client with another certificate by then connects
// again with it.

// unprovedPath is a path that its client could not connect any more.
type unprovedPath struct {
	sess *session
	path rtrs.SrvPathInfo
	why  error
}

// RecheckIdentities closes after grace the paths of clients that could not prove their identities
// any more, unless they can by then. It does not wait for that.
func (s *Server) RecheckIdentities(grace time.Duration) {
	for _, d := range s.unprovedPaths() {
		s.log.Warn("the identity of a client does not hold any more, its path is closed after the grace time", "session", d.sess.name,
			"client", d.path.Client, "identity", d.path.Security.Peer, "pause", grace, "err", d.why)
	}
	go func() { // also for clients that are about to connect
		select {
		case <-time.After(grace):
			s.closeUnproved()
		case <-s.admins.Done():
		}
	}()
}

// unprovedPaths lists the paths that their clients could not connect any more.
func (s *Server) unprovedPaths() (out []unprovedPath) {
	for i := range s.sessions {
		sess := s.sessions[i].Load()
		if sess == nil || sess.ended.Load() {
			continue
		}
		for _, p := range sess.transport.Paths() {
			if p.Security.Proof == nil || p.State != rtrs.SrvPathConnected {
				continue
			}
			if err := p.Security.Proof.Holds(); err != nil {
				out = append(out, unprovedPath{sess, p, err})
			}
		}
	}
	return out
}

func (s *Server) closeUnproved() {
	bySession := map[*session][]unprovedPath{}
	for _, d := range s.unprovedPaths() {
		bySession[d.sess] = append(bySession[d.sess], d)
	}
	var wg sync.WaitGroup
	for sess, all := range bySession {
		wg.Go(func() { s.closePaths(sess, all) })
	}
	wg.Wait()
}

// closePaths closes paths of a session. If it has no other, its client is told to hold
// back its requests until it has connected again, as at a hand-over: one that has
// another certificate loses none.
func (s *Server) closePaths(sess *session, all []unprovedPath) {
	connected := 0
	for _, p := range sess.transport.Paths() {
		if p.State == rtrs.SrvPathConnected {
			connected++
		}
	}
	if connected == len(all) {
		s.notifyOne(sess, func(in *eventQueue) { in.leave, in.grace = in.last, HandOverGrace })
		told, cancel := context.WithTimeout(s.admins, notifyTime)
		pollUntil(told, func() bool { return !sess.hasEvents() })
		cancel()
		quiet, cancel := context.WithTimeout(s.admins, deliveryTime)
		pollUntil(quiet, func() bool { return !sess.isHeld() || sess.busyMapping() == nil })
		cancel()
	}
	for _, d := range all {
		s.log.Warn("a path is closed: the identity of its client does not hold any more", "session", sess.name, "client", d.path.Client, "identity", d.path.Security.Peer, "err", d.why)
		if err := sess.transport.EndPath(d.path.ID, d.why); err == nil {
			s.auditForced(sess, d.path, d.why)
		}
	}
}
