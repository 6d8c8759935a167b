package rtrs

import (
	"context"
	"fmt"
	"slices"
	"syscall"
)

// The paths of a session: to add, list and remove them, and to have them connected again.

// AddPath connects one more path and returns its id. When the session has lost
// all its paths this revives it.
func (s *Session) AddPath(ctx context.Context, addr PathAddr) (id int, err error) {
	return s.addPath(ctx, addr, len(s.Paths()) == 0)
}

func (s *Session) addPath(ctx context.Context, addr PathAddr, first bool) (id int, err error) {
	p, err := s.beginAdd(addr)
	if err != nil {
		return 0, err
	}
	defer s.adding.Done()
	p.firstConn = first
	if err := p.connectFenced(ctx); err != nil {
		return 0, err
	}
	s.publish(func() { p.setState(PathConnected, nil) })
	s.list(p)
	return p.id, nil
}

// AddPathLater adds a path that need not work yet, and returns its id: it is
// tried at once, and then like one that was lost. It is for paths that worked
// once. It makes the session only while no other path is connected: what its
// address leads to now need not be the server that the others have. It goes when
// the server says that the session has a path with its addresses.
func (s *Session) AddPathLater(addr PathAddr) (id int, err error) {
	p, err := s.beginAdd(addr)
	if err != nil {
		return 0, err
	}
	defer s.adding.Done()
	p.later = true
	s.list(p)
	return p.id, nil
}

// forget takes p out of the list.
func (s *Session) forget(p *path) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.paths = slices.DeleteFunc(s.paths, func(o *path) bool { return o == p })
}

// list gives the session a path, which lives from now on.
func (s *Session) list(p *path) {
	s.mu.Lock()
	i, _ := slices.BinarySearchFunc(s.paths, p.id, func(o *path, id int) int { return o.id - id })
	s.paths = slices.Insert(s.paths, i, p)
	if s.closed {
		p.want(wantDead)
	}
	s.mu.Unlock()
	go p.run()
}

// beginAdd makes a path with the next id. Who gets one calls adding.Done.
func (s *Session) beginAdd(addr PathAddr) (*path, error) {
	if addr.Device == nil {
		return nil, fmt.Errorf("rtrs: session %s: add path to %s: no device: %w", s.name, addr.Dst, syscall.EINVAL)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fmt.Errorf("rtrs: session %s: add path %s: %w", s.name, addr, ErrClosed)
	}
	s.adding.Add(1)
	s.lastID++
	return newPath(s, s.lastID, addr), nil
}

// path finds a path by id.
func (s *Session) path(id int) (*path, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.paths {
		if p.id == id {
			return p, nil
		}
	}
	return nil, fmt.Errorf("rtrs: session %s: path %d: %w", s.name, id, syscall.ENOENT)
}

// Paths describes the paths, in the order of their ids.
func (s *Session) Paths() []PathInfo {
	s.mu.Lock()
	paths := slices.Clone(s.paths)
	s.mu.Unlock()
	infos := make([]PathInfo, 0, len(paths))
	for _, p := range paths {
		infos = append(infos, p.info())
	}
	return infos
}

// Stats sums over the paths that the session has.
func (s *Session) Stats() (sum PathStats) {
	for _, i := range s.Paths() {
		sum.Add(i.Stats)
	}
	return sum
}

// PathDetails returns all counts of a path.
func (s *Session) PathDetails(id int) (PathDetails, error) {
	p, err := s.path(id)
	if err != nil {
		return PathDetails{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.details(), nil
}

// ResetStats sets the given counts of a path to zero. The data path is not
// disturbed.
func (s *Session) ResetStats(id int, kinds StatKind) error {
	p, err := s.path(id)
	if err != nil {
		return err
	}
	p.resetStats(kinds)
	return nil
}

// RemovePath closes a path and forgets it. A session without paths stays, not
// connected.
func (s *Session) RemovePath(ctx context.Context, id int) error {
	p, err := s.path(id)
	if err != nil {
		return err
	}
	p.want(wantDead)
	select {
	case <-p.ended:
	case <-ctx.Done():
		return fmt.Errorf("rtrs: session %s: remove path %s: %w", s.name, p.addr, context.Cause(ctx))
	}
	s.forget(p)
	return nil
}

// DisconnectPath closes a path until it is reconnected by hand, and waits until
// it is closed.
func (s *Session) DisconnectPath(ctx context.Context, id int) error {
	p, err := s.path(id)
	if err != nil {
		return err
	}
	p.want(wantClosed)
	err = p.await(ctx, func() bool { return p.state == PathClosed || p.state == PathDead })
	if err != nil {
		return fmt.Errorf("rtrs: session %s: disconnect path %s: %w", s.name, p.addr, err)
	}
	return nil
}

// ReconnectPath connects a path again at once and waits for the first result.
func (s *Session) ReconnectPath(ctx context.Context, id int) error {
	p, err := s.path(id)
	if err != nil {
		return err
	}
	if err := p.reconnect(ctx); err != nil {
		return fmt.Errorf("rtrs: session %s: reconnect path %s: %w", s.name, p.addr, err)
	}
	return nil
}
