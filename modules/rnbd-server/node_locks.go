package server

import (
	"context"
	"fmt"
	"syscall"
)

// Lock waits for the lock of id until ctx ends.
func (t *nodeLocks) Lock(ctx context.Context, id nodeID) (*nodeLock, error) {
	t.mu.Lock()
	n := t.nodes[id]
	if n == nil {
		if t.nodes == nil {
			t.nodes = map[nodeID]*nodeLock{}
		}
		n = &nodeLock{of: t, id: id, free: make(chan struct{}, 1)}
		n.free <- struct{}{}
		t.nodes[id] = n
	}
	n.users++
	t.mu.Unlock()
	select {
	case <-n.free:
		return n, nil
	case <-ctx.Done():
		n.release()
		return nil, context.Cause(ctx)
	}
}

// Unlock unlocks the node.
func (n *nodeLock) Unlock() {
	n.free <- struct{}{}
	n.release()
}

// release counts one user less; the last one removes the lock.
func (n *nodeLock) release() {
	n.of.mu.Lock()
	defer n.of.mu.Unlock()
	if n.users--; n.users == 0 {
		delete(n.of.nodes, n.id)
	}
}

// Bounds of concurrent lookups of names. A system call on a name can block
// while the server of a network file system is away. Then it occupies its
// place, and further OPENs of its session wait for another place.
const (
	maxLookUps        = 1024
	maxSessionLookUps = 8
)

// acquireLookUp takes a place for work on names of sess, and reports whether it had
// one before ctx ended. releaseLookUp must follow, when the file system has answered.
func (s *Server) acquireLookUp(ctx context.Context, sess *session) bool {
	for _, places := range []chan struct{}{sess.lookUps, s.lookUps} {
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			if places == s.lookUps {
				<-sess.lookUps
			}
			return false
		}
	}
	return true
}

func (s *Server) releaseLookUp(sess *session) {
	<-s.lookUps
	<-sess.lookUps
}

// lookUp opens name in the jail. ETIMEDOUT: the file system does not answer.
// EBUSY: names on such file systems occupy all places.
func (s *Server) lookUp(ctx context.Context, sess *session, name string) (*node, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.lookUpTimeout)
	defer cancel()
	fail := func(why string, errno syscall.Errno) (*node, error) {
		return nil, fmt.Errorf("open %q for session %q: %s: %w", name, sess.name, why, errno)
	}
	jail := s.jail
	if p, _ := jail.pool(name); p == nil {
		var err error
		if jail, err = jail.jailFor(sess.provedIdentity()); err != nil {
			return nil, fmt.Errorf("open %q for session %q: %w", name, sess.name, err)
		}
	}
	if !s.acquireLookUp(ctx, sess) {
		return fail("other names that were asked for do not resolve", syscall.EBUSY)
	}
	type found struct {
		n   *node
		err error
	}
	done := make(chan found) // unbuffered: if the caller has given up, the goroutine closes the node
	go func() {
		n, err := s.cfg.lookUp(jail, sess.name, name)
		s.releaseLookUp(sess)
		select {
		case done <- found{n, err}:
		case <-ctx.Done():
			if n != nil {
				n.close()
			}
		}
	}()
	select {
	case f := <-done:
		return f.n, f.err
	case <-ctx.Done():
		return fail("its file system does not answer", syscall.ETIMEDOUT)
	}
}
