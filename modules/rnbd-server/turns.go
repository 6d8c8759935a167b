package server

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"time"
)

// turns let the OPENs and CLOSEs of one node come one after another, those of
// different nodes at the same time. A turn is held over calls to the plugin: it is
// no lock, since it concerns one node and those who wait for it may give up.
type turns struct {
	mu    sync.Mutex
	nodes map[nodeID]*turn
}

// turn is that of one node.
type turn struct {
	of    *turns
	id    nodeID
	users int           // callers that have it or wait for it; guarded by turns.mu
	free  chan struct{} // holds one token while no caller has it
}

// take returns when the turn of id is the caller's, or ctx ends.
func (t *turns) take(ctx context.Context, id nodeID) (*turn, error) {
	t.mu.Lock()
	n := t.nodes[id]
	if n == nil {
		if t.nodes == nil {
			t.nodes = map[nodeID]*turn{}
		}
		n = &turn{of: t, id: id, free: make(chan struct{}, 1)}
		n.free <- struct{}{}
		t.nodes[id] = n
	}
	n.users++
	t.mu.Unlock()
	select {
	case <-n.free:
		return n, nil
	case <-ctx.Done():
		n.leave()
		return nil, context.Cause(ctx)
	}
}

// give ends the caller's turn.
func (n *turn) give() {
	n.free <- struct{}{}
	n.leave()
}

func (n *turn) leave() {
	n.of.mu.Lock()
	defer n.of.mu.Unlock()
	if n.users--; n.users == 0 {
		delete(n.of.nodes, n.id)
	}
}

// How many names are looked up at once. A system call on a name can hang for as long
// as the server of a network file system is away; then it keeps its place, and the
// OPENs of its session wait for another one.
const (
	maxLookUps        = 1024
	maxSessionLookUps = 8
)

// lookUpTimeout is how long an OPEN waits for the file system.
const lookUpTimeout = 10 * time.Second

// lookUp is the jail's open. ETIMEDOUT: the file system does not answer; EBUSY: all
// places are taken by names for which it does not.
func (s *Server) lookUp(ctx context.Context, sess *session, name string) (*node, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.lookUpTimeout)
	defer cancel()
	fail := func(why string, errno syscall.Errno) (*node, error) {
		return nil, fmt.Errorf("open %q for session %q: %s: %w", name, sess.name, why, errno)
	}
	for _, places := range []chan struct{}{sess.lookUps, s.lookUps} {
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			if places == s.lookUps {
				<-sess.lookUps
			}
			return fail("other names that were asked for do not resolve", syscall.EBUSY)
		}
	}
	type found struct {
		n   *node
		err error
	}
	done := make(chan found) // unbuffered: if the caller has given up, the node is closed here
	go func() {
		n, err := s.cfg.lookUp(s.jail, sess.name, name)
		<-s.lookUps
		<-sess.lookUps
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
