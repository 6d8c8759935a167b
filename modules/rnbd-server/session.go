package server

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// markEnded marks the session as ended. From then on no mapping is added, and no
// plugin is shown the arena. The arena is freed after the last request.
func (s *session) markEnded() {
	s.arenaMu.Lock()
	defer s.arenaMu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended.Store(true)
	s.wakeListeners()
}

// provedIdentity returns the identity that the client has proved, empty for none. All paths of a
// session have the same.
func (s *session) provedIdentity() string {
	for _, p := range s.transport.Paths() {
		if p.Security.Peer != "" && p.State <= rtrs.SrvPathConnected {
			return p.Security.Peer
		}
	}
	return ""
}

// isCut reports whether no path of the session is connected: the client can send
// nothing, and requests may still be in flight.
func (s *session) isCut() bool {
	for _, p := range s.transport.Paths() {
		if p.State == rtrs.SrvPathConnected {
			return false
		}
	}
	return true
}

// checkAlive returns an error if the session has ended, else nil.
func (s *session) checkAlive() error {
	if s.ended.Load() {
		return fmt.Errorf("session %q has ended: %w", s.name, syscall.ENOTCONN)
	}
	return nil
}

// newMapping makes a mapping of dev. No pump sees it yet.
func (s *session) newMapping(dev *device, name string, mode blk.AccessMode) *mapping {
	m := &mapping{name: name, mode: mode, dev: dev, session: s, flows: make([]mappingFlow, len(dev.loads))}
	m.writer = s.writer.Load()
	if m.named = m.writer != 0; !m.named {
		m.writer = rand.Uint64()
	}
	for i, q := range dev.plugin.queues {
		f := &m.flows[i]
		f.lane, f.load, f.head, f.tail = &s.lanes[q.index], &dev.loads[i], -1, -1
	}
	return m
}

// inFlight returns the number of requests in flight on all pumps.
func (m *mapping) inFlight() (n int64) {
	for i := range m.flows {
		n += m.flows[i].inflight.Load()
	}
	return n
}

// mappingByID returns the mapping with id, or nil. Any pump may call it.
func (s *session) mappingByID(id uint32) *mapping {
	t := s.table.Load()
	if t == nil || uint64(id) >= uint64(len(*t)) {
		return nil
	}
	m := (*t)[id]
	if m == nil || m.closed.Load() {
		return nil
	}
	return m
}

// allMappings returns all mappings with an id, closed or not.
func (s *session) allMappings() (out []*mapping) {
	if t := s.table.Load(); t != nil {
		for _, m := range *t {
			if m != nil {
				out = append(out, m)
			}
		}
	}
	return out
}

// openMappings returns the open mappings. The caller holds mu or accepts a
// snapshot.
func (s *session) openMappings() (out []*mapping) {
	if t := s.table.Load(); t != nil {
		for _, m := range *t {
			if m != nil && !m.closed.Load() {
				out = append(out, m)
			}
		}
	}
	return out
}

// byName returns the open mapping of exactly that name. The caller holds mu or
// accepts a snapshot.
func (s *session) byName(name string) *mapping {
	for _, m := range s.openMappings() {
		if m.name == name {
			return m
		}
	}
	return nil
}

// addMapping shows m to the pumps. It fails if the session has ended, since m would
// never be closed. It fails with EBUSY if the name was opened at the same
// time and led elsewhere. It calls room with the number of mappings and
// returns its error.
func (s *session) addMapping(m *mapping, room func(n int) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.checkAlive(); err != nil {
		return err
	}
	if s.byName(m.name) != nil {
		return fmt.Errorf("the name has just been opened, and led to another node: %w", syscall.EBUSY)
	}
	if err := room(len(s.openMappings())); err != nil {
		return err
	}
	s.reserveID(m)
	return nil
}

// freshIDs is the number of ids that a listening client gets before one is used
// again. Otherwise an event of a closed device could be taken for an event of
// another one.
const freshIDs = 4096

// reserveID gives m the lowest free id and shows it to the pumps. A mapping
// that was closed by force keeps its id, so that the id is not used again in
// this session. The caller holds mu.
func (s *session) reserveID(m *mapping) {
	var old []*mapping
	if t := s.table.Load(); t != nil {
		old = *t
	}
	id := len(old)
	for i, o := range old {
		if o == nil && (!s.events.listens || len(old) >= freshIDs) {
			id = i
			break
		}
	}
	next := make([]*mapping, max(len(old), id+1))
	copy(next, old)
	m.id = uint32(id)
	next[id] = m
	s.table.Store(&next)
}

// releaseID frees m's id. The caller holds mu.
func (s *session) releaseID(m *mapping) {
	old := *s.table.Load()
	next := make([]*mapping, len(old))
	copy(next, old)
	next[m.id] = nil
	s.table.Store(&next)
}

// hasEvents reports whether the client of s has not seen that it is to hold back its
// requests. One that does not listen has none.
func (s *session) hasEvents() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.events.listens && s.events.seen < s.events.leave
}

// isHeld reports whether the client of s holds back its requests.
func (s *session) isHeld() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.events.holds
}

// busyMapping returns a device of s with requests in flight, or nil.
func (s *session) busyMapping() *mapping {
	for _, m := range s.allMappings() {
		if m.inFlight() > 0 {
			return m
		}
	}
	return nil
}

// wakeListeners wakes the callers of awaitEventSeen. The caller holds mu.
func (s *session) wakeListeners() {
	if s.events.heard != nil {
		close(s.events.heard)
		s.events.heard = nil
	}
}

// accessClient describes the session for the rules, with the paths that are connected
// and with the one that has the id joining.
func (s *session) accessClient(joining int) access.Client {
	c := access.Client{Session: s.name}
	for _, p := range s.transport.Paths() {
		if p.State != rtrs.SrvPathConnected && (p.State != rtrs.SrvPathConnecting || p.ID != joining) {
			continue // a path that is refused, or has gone
		}
		if id := p.Security.Peer; id != "" && len(c.Identities) == 0 {
			c.Identities = []string{id} // the transport admits no path with another identity
		}
		c.Paths = append(c.Paths, access.Path{Addr: p.Client.Addr(), Fabric: p.Fabric})
	}
	return c
}

// admittedClient returns the client by the paths that were admitted.
func (s *session) admittedClient() access.Client {
	s.rulesMu.Lock()
	defer s.rulesMu.Unlock()
	return s.accessClient(s.admitted)
}

func (s *Server) sessionAt(i uint32) *session {
	if i >= MaxSessions {
		return nil
	}
	return s.sessions[i].Load()
}

func (s *Server) sessionByName(name string) (*session, error) {
	for i := range s.sessions {
		if sess := s.sessions[i].Load(); sess != nil && sess.name == name && !sess.ended.Load() {
			return sess, nil
		}
	}
	return nil, fmt.Errorf("there is no session %q: %w", name, syscall.ENOENT)
}

// openDevices returns the devices that sessions have open, sorted by path.
func (s *Server) openDevices() (out []*device) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.devices {
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b *device) int { return strings.Compare(a.path, b.path) })
	return out
}

// cutFabric splits "fabric://rest".
func cutFabric(s string) (fabric, rest string, ok bool) { return strings.Cut(s, "://") }
