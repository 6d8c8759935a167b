package rtrs

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The paths of a session: to add, list and remove them, and to have them connected again.

// AddPath connects one more path and returns its id. When the session has lost
// all its paths this revives it. EEXIST: the session has a path with these
// addresses, connected or not.
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
	s.publishLinks(func() { p.setState(PathConnected, nil) })
	s.listPath(p)
	return p.id, nil
}

// AddPathLater adds a path that need not work yet, and returns its id: it is
// tried at once, and then like one that was lost. It is for paths that worked
// once. It makes the session only while no other path is connected: its address
// may now lead to another server than theirs. EEXIST: the session has a path
// with these addresses. If the source is chosen by the system, that may turn
// out when the path connects: then it goes.
func (s *Session) AddPathLater(addr PathAddr) (id int, err error) {
	p, err := s.beginAdd(addr)
	if err != nil {
		return 0, err
	}
	defer s.adding.Done()
	p.later = true
	s.listPath(p)
	return p.id, nil
}

// removePath takes p out of the list.
func (s *Session) removePath(p *path) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.paths = slices.DeleteFunc(s.paths, func(o *path) bool { return o == p })
}

// listPath adds a path to the session; the path exists for its users from now on.
func (s *Session) listPath(p *path) {
	s.mu.Lock()
	i, _ := slices.BinarySearchFunc(s.paths, p.id, func(o *path, id int) int { return o.id - id })
	s.paths = slices.Insert(s.paths, i, p)
	if s.closed {
		p.setIntent(wantDead)
	}
	s.mu.Unlock()
	go p.run()
}

// beginAdd makes a path with the next id. A caller that gets one calls
// adding.Done.
func (s *Session) beginAdd(addr PathAddr) (*path, error) {
	if addr.Device == nil {
		return nil, fmt.Errorf("rtrs: session %s: add path to %s: no device: %w", s.name, addr.Dst, syscall.EINVAL)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fmt.Errorf("rtrs: session %s: add path %s: %w", s.name, addr, ErrClosed)
	}
	p := newPath(s, s.lastID+1, addr)
	if err := s.checkTwin(p, addr.Src); err != nil {
		return nil, fmt.Errorf("rtrs: session %s: add path %s: %w", s.name, addr, err)
	}
	s.adding.Add(1)
	s.lastID++
	return p, nil
}

// checkTwin refuses p if another path of the session has its addresses. p is
// being added; src is its source. A server accepts the second one while the
// first is lost, and refuses the first from then on. The caller holds mu.
func (s *Session) checkTwin(p *path, src netip.Addr) error {
	for _, o := range s.paths {
		if from, removed := o.sourceAddr(); o != p && !removed && o.leadsTo(from, src, p.addr) {
			return fmt.Errorf("path %d of the session has these addresses and is %v: reconnect that one, or remove it first: %w", o.id, o.State(), syscall.EEXIST)
		}
	}
	for _, l := range s.links { // of paths that are not listed yet
		if o := l.path; o != p && o.leadsTo(l.conns[0].qp.LocalAddr().Addr(), src, p.addr) {
			return fmt.Errorf("path %d of the session has these addresses and is being added: %w", o.id, syscall.EEXIST)
		}
	}
	return nil
}

// sourceAddr returns the source address of p, or its last one; invalid: not known.
// removed: the path is being removed.
func (p *path) sourceAddr() (from netip.Addr, removed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.addr.Src.IsValid() {
		return p.addr.Src, p.intent == wantDead
	}
	return p.lastSrc, p.intent == wantDead
}

// leadsTo reports whether p, with the source from, has the addresses of a path
// from src to addr.
func (p *path) leadsTo(from, src netip.Addr, addr PathAddr) bool {
	return from.IsValid() && src.IsValid() && plainAddr(from) == plainAddr(src) &&
		plainAddr(p.addr.Dst.Addr()) == plainAddr(addr.Dst.Addr()) && p.addr.Dst.Port() == addr.Dst.Port() &&
		p.addr.Device.Info().Fabric == addr.Device.Info().Fabric
}

// plainAddr returns the form of an address for comparison: a GID that is an
// IPv4 address equals that.
func plainAddr(a netip.Addr) netip.Addr {
	if verbs.IsGID(a) {
		a = a.WithZone("")
	}
	return a.Unmap()
}

// pathByID finds a path by id.
func (s *Session) pathByID(id int) (*path, error) {
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
		infos = append(infos, p.pathInfo())
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
	p, err := s.pathByID(id)
	if err != nil {
		return PathDetails{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.currentDetails(), nil
}

// ResetStats sets the given counts of a path to zero. The data path is not
// disturbed.
func (s *Session) ResetStats(id int, kinds StatKind) error {
	p, err := s.pathByID(id)
	if err != nil {
		return err
	}
	p.resetStats(kinds)
	return nil
}

// RemovePath closes a path and forgets it. A session without paths stays, not
// connected.
func (s *Session) RemovePath(ctx context.Context, id int) error {
	p, err := s.pathByID(id)
	if err != nil {
		return err
	}
	p.setIntent(wantDead)
	select {
	case <-p.ended:
	case <-ctx.Done():
		return fmt.Errorf("rtrs: session %s: remove path %s: %w", s.name, p.addr, context.Cause(ctx))
	}
	s.removePath(p)
	return nil
}

// DisconnectPath closes a path until it is reconnected by hand, and waits until
// it is closed.
func (s *Session) DisconnectPath(ctx context.Context, id int) error {
	p, err := s.pathByID(id)
	if err != nil {
		return err
	}
	p.setIntent(wantClosed)
	err = p.awaitCondition(ctx, func() bool { return p.state == PathClosed || p.state == PathDead })
	if err != nil {
		return fmt.Errorf("rtrs: session %s: disconnect path %s: %w", s.name, p.addr, err)
	}
	return nil
}

// ReconnectPath connects a path again at once and waits for the first result.
func (s *Session) ReconnectPath(ctx context.Context, id int) error {
	p, err := s.pathByID(id)
	if err != nil {
		return err
	}
	if err := p.reconnectPath(ctx); err != nil {
		return fmt.Errorf("rtrs: session %s: reconnect path %s: %w", s.name, p.addr, err)
	}
	return nil
}
