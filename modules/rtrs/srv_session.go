package rtrs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/google/uuid"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// SrvSession is a client as the server sees it: a set of chunks and the paths
// that share them. It lives as long as it has paths.
type SrvSession struct {
	srv    *Server
	serial int // in order of making
	uuid   rtrswire.UUID
	life   atomic.Pointer[rtrswire.UUID] // its incarnation: another one since it went down
	payer  netip.Addr                    // counts for it
	mem    Memory
	chunks []byte
	ops    []Op
	ctx    atomic.Pointer[any]

	// events is a lock: a call of SessionUp or SessionDown puts its one token
	// in. These calls wait for storage, and no mutex may be held during that
	// wait. Taken before the mu of the server.
	events chan struct{}
	up     int // paths that are connected, or were and are not closed yet

	// changed rings when a path has come, begins to end or is gone, and when a
	// chunk was retired or given back.
	changed changeBell

	retireMu  sync.Mutex
	readers   atomic.Int32          // retired chunks: what is written to chunks is verified first, see guard
	retired   map[rtrswire.UUID]int // chunks, by their path; guarded by retireMu
	freeLater bool                  // the memory, after the last of them; guarded by retireMu

	// Guarded by the server's mu.
	name   string
	named  bool
	paths  []*srvPath
	lastID int
}

// sessionSerial numbers sessions.
var sessionSerial atomic.Int64

func newSrvSession(s *Server, name rtrswire.UUID) (*SrvSession, error) {
	depth, size := s.cfg.QueueDepth, s.cfg.QueueDepth*s.cfg.ChunkSize
	mem, err := s.cfg.Alloc(size)
	if err != nil {
		return nil, fmt.Errorf("allocate %d chunks of %d bytes: %w: %w", depth, s.cfg.ChunkSize, syscall.ENOMEM, err)
	}
	if len(mem.Bytes()) < size {
		_ = mem.Close()
		return nil, fmt.Errorf("allocate %d chunks: got %d bytes of %d: %w", depth, len(mem.Bytes()), size, syscall.ENOMEM)
	}
	sess := &SrvSession{
		srv:    s,
		serial: int(sessionSerial.Add(1)),
		uuid:   name,
		mem:    mem,
		chunks: mem.Bytes()[:size:size],
		ops:    make([]Op, depth),

		events:  make(chan struct{}, 1),
		retired: map[rtrswire.UUID]int{},
	}
	sess.newIncarnation()
	users := make([]byte, depth*firstUsrLen)
	for i := range sess.ops {
		op := &sess.ops[i]
		op.sess, op.chunk = sess, i
		op.mem = sess.chunks[i*s.cfg.ChunkSize:][:s.cfg.ChunkSize:s.cfg.ChunkSize]
		op.user = users[i*firstUsrLen:][:firstUsrLen:firstUsrLen]
	}
	return sess, nil
}

// newIncarnation gives the session another incarnation.
func (s *SrvSession) newIncarnation() {
	life := rtrswire.UUID(uuid.New())
	s.life.Store(&life)
}

// Name returns the name that the client gave the session.
func (s *SrvSession) Name() string {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	return s.name
}

// Memory returns the chunk memory; chunk i starts at byte i*ChunkSize.
func (s *SrvSession) Memory() Memory { return s.mem }

// ChunkSize returns the bytes of a chunk.
func (s *SrvSession) ChunkSize() int { return s.srv.cfg.ChunkSize }

// QueueDepth returns the number of chunks.
func (s *SrvSession) QueueDepth() int { return len(s.ops) }

// SetContext keeps a value of the consumer's.
func (s *SrvSession) SetContext(v any) { s.ctx.Store(&v) }

// Context returns the value of SetContext, nil before.
func (s *SrvSession) Context() any {
	if v := s.ctx.Load(); v != nil {
		return *v
	}
	return nil
}

// SrvPathInfo describes a path of a server's session.
type SrvPathInfo struct {
	ID             int
	State          SrvPathState
	Client, Server netip.AddrPort
	Fabric, Device string
	Port           int
	// Security is how the path is protected, with the identity of its client. The
	// zero value is a path without protection.
	Security     verbs.Security
	Conns        int  // connections that the client announced
	ChangingKeys bool // each request changes the key of its chunk
	Stats        PathStats
}

// Paths returns the paths in the order of their creation.
func (s *SrvSession) Paths() []SrvPathInfo {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	list := make([]SrvPathInfo, 0, len(s.paths))
	for _, p := range s.paths {
		list = append(list, p.pathInfo())
	}
	return list
}

// PathDetails returns all counts of a path.
func (s *SrvSession) PathDetails(id int) (PathDetails, error) {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	p, err := s.pathByID(id)
	if err != nil {
		return PathDetails{}, err
	}
	return p.currentDetails(), nil
}

// ResetStats sets the given counts of a path to zero. The data path is not
// disturbed.
func (s *SrvSession) ResetStats(id int, kinds StatKind) error {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	p, err := s.pathByID(id)
	if err != nil {
		return err
	}
	now := p.totalDetails()
	p.base.resetKinds(kinds, &now)
	return nil
}

// pathByID finds a path. Holds the server's mu.
func (s *SrvSession) pathByID(id int) (*srvPath, error) {
	for _, p := range s.paths {
		if p.id == id {
			return p, nil
		}
	}
	return nil, fmt.Errorf("path %d of session %q: %w", id, s.name, syscall.ENOENT)
}

// DisconnectPath closes a path; the client may connect it again. It does not
// wait.
func (s *SrvSession) DisconnectPath(id int) error {
	return s.EndPath(id, errors.New("disconnected by the administrator"))
}

// EndPath is DisconnectPath for another reason.
func (s *SrvSession) EndPath(id int, why error) error {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	p, err := s.pathByID(id)
	if err != nil {
		return err
	}
	p.close(fmt.Errorf("%w: %w", ErrClosed, why))
	return nil
}

// Close closes all paths and waits until the last of them is gone or ctx is
// done.
func (s *SrvSession) Close(ctx context.Context) error {
	s.srv.mu.Lock()
	paths := slices.Clone(s.paths)
	s.srv.mu.Unlock()
	for _, p := range paths {
		p.close(fmt.Errorf("%w: the session is closing", ErrClosed))
	}
	for _, p := range paths {
		if err := p.closeAndWait(ctx); err != nil {
			return fmt.Errorf("close session %q: %w", s.Name(), err)
		}
	}
	return nil
}

// pathFor returns the path that f names, a new one if there is none.
func (s *SrvSession) pathFor(dev verbs.Device, mode AuthMode, req verbs.ConnRequest, f *rtrswire.ConnReqFields) (*srvPath, error) {
	s.srv.mu.Lock()
	p := s.pathByUUID(f.SessUUID)
	var old *srvPath // that the new path succeeds
	if p != nil && p.isSucceededBy(f) {
		p, old = nil, p
	}
	count, taken := len(s.paths), s.sameAddrs(dev, req, old)
	var other error
	if !needsChallenge(mode, req, f) { // else the proof decides
		other = s.belongsTo(verbs.SecurityOf(req).Peer)
	}
	alone := !slices.ContainsFunc(s.paths, (*srvPath).isConnected)
	s.srv.mu.Unlock()
	switch {
	case other != nil: // whoever learns the identifiers of a session does not get into it
		return p, other
	case p != nil:
		return p, p.mayJoin(mode, req, f)
	case s.retiredOf(f.SessUUID) > 0: // or its client would take the path's last life for fenced
		return nil, fmt.Errorf("the path has %d chunks whose requests do not end: %w", s.retiredOf(f.SessUUID), syscall.EBUSY)
	case alone && s.Retired() > 0: // see awaitChunks
		return nil, fmt.Errorf("the session has %d chunks whose requests do not end: %w", s.Retired(), syscall.EBUSY)
	case old == nil && count >= rtrswire.MaxPaths:
		return nil, protocolErrorf("the session has %d paths already", count)
	case taken:
		return nil, fmt.Errorf("the session has a path from %s to %s already: %w", verbs.AddrString(req.RemoteAddr().Addr()), verbs.AddrString(req.LocalAddr().Addr()), syscall.EEXIST)
	}
	p, err := newSrvPath(s, dev, mode, req, f)
	if err != nil {
		return nil, err
	}
	p.predecessor = old
	s.srv.accounts.addUnfinished(p)
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	s.lastID++
	p.id = s.lastID
	s.paths = append(s.paths, p)
	return p, nil
}

// pathByUUID finds the newest path of that name. Holds mu.
func (s *SrvSession) pathByUUID(uuid rtrswire.UUID) *srvPath {
	for _, p := range slices.Backward(s.paths) {
		if p.uuid == uuid {
			return p
		}
	}
	return nil
}

// sameAddrs reports whether a path of the same fabric, other than old, has the
// addresses of req, whatever the ports. Holds mu.
func (s *SrvSession) sameAddrs(dev verbs.Device, req verbs.ConnRequest, old *srvPath) bool {
	for _, p := range s.paths {
		if p != old && p.dev.Info().Fabric == dev.Info().Fabric &&
			p.client.Addr().Unmap() == req.RemoteAddr().Addr().Unmap() &&
			p.server.Addr().Unmap() == req.LocalAddr().Addr().Unmap() {
			return true
		}
	}
	return false
}

// setName takes the name that a path brings. Where another session has it,
// holder is one of that session's paths: one that goes on if there is one.
func (s *SrvSession) setName(name string) (holder *srvPath, err error) {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	if s.named {
		if s.name != name {
			return nil, protocolErrorf("INFO_REQ names session %q, its other paths %q", name, s.name)
		}
		return nil, nil
	}
	for _, o := range s.srv.sessions {
		if o == s || !o.named || o.name != name {
			continue
		}
		holder := o.paths[0]
		if i := slices.IndexFunc(o.paths, (*srvPath).goesOn); i >= 0 {
			holder = o.paths[i]
		}
		return holder, withReason(rtrswire.ReasonName, "", protocolErrorf("INFO_REQ names session %q, which another client has", name))
	}
	s.name, s.named = name, true
	return nil, nil
}

// pathUp counts p and connects it; the first one brings the session up.
func (s *SrvSession) pathUp(p *srvPath) error {
	s.events <- struct{}{}
	defer func() { <-s.events }()
	switch {
	case p.State() != SrvPathConnecting:
		return ErrClosed
	case p.life != *s.life.Load(): // its client may believe that the session goes on
		return protocolErrorf("the session has ended since the path began")
	}
	if s.up == 0 {
		if err := s.srv.cfg.Handler.SessionUp(s); err != nil {
			return withReason(rtrswire.ReasonSession, "", fmt.Errorf("session %q is refused: %w", s.Name(), err))
		}
	} else if h, ok := s.srv.cfg.Handler.(PathAdmitter); ok {
		if err := h.PathUp(s, p.infoNow()); err != nil {
			return fmt.Errorf("path %d of session %q is refused: %w", p.id, s.Name(), err)
		}
	}
	if !p.counted {
		s.up++
		p.counted = true
	}
	if !p.state.CompareAndSwap(uint32(SrvPathConnecting), uint32(SrvPathConnected)) {
		return ErrClosed
	}
	if h, ok := s.srv.cfg.Handler.(PathWatcher); ok {
		p.watched = true
		h.PathConnected(s, p.infoNow())
	}
	s.changed.ringAll()
	return nil
}

// keepUp counts p before it is connected if the session is up, so that the
// session goes on when the predecessor of p ends.
func (s *SrvSession) keepUp(p *srvPath) {
	s.events <- struct{}{}
	defer func() { <-s.events }()
	if s.up > 0 && p.State() == SrvPathConnecting {
		s.up++
		p.counted = true
	}
}

// infoNow is info, with the lock that it needs.
func (p *srvPath) infoNow() SrvPathInfo {
	p.sess.srv.mu.Lock()
	defer p.sess.srv.mu.Unlock()
	return p.pathInfo()
}

// pathDown takes p out of the count; the last one takes the session down.
func (s *SrvSession) pathDown(p *srvPath) {
	s.events <- struct{}{}
	defer func() { <-s.events }()
	if !p.counted {
		return
	}
	p.counted = false
	if h, ok := s.srv.cfg.Handler.(PathWatcher); ok && p.watched {
		h.PathClosed(s, p.infoNow(), p.cause)
	}
	if s.up--; s.up == 0 {
		s.newIncarnation()
		s.srv.cfg.Handler.SessionDown(s)
	}
}

// removePath removes p, and the session with its last path. The chunks are
// freed before p is out of the list. Holds the server's accepting, so that no
// path is being made.
func (s *SrvSession) removePath(p *srvPath) {
	defer s.changed.ringAll()
	if s.pathCount() == 1 {
		s.freeChunks()
	}
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	s.paths = slices.DeleteFunc(s.paths, func(o *srvPath) bool { return o == p })
	if len(s.paths) == 0 {
		s.removeFromServer()
	}
}

// removeFromServer takes s off the server's list. The server's mu is held.
func (s *SrvSession) removeFromServer() {
	delete(s.srv.sessions, s.uuid)
	s.srv.accounts.discharge(s.payer, resourceAccount{sessions: 1})
}

// dropIfEmpty removes a session if its first path could not be made. Holds
// accepting.
func (s *SrvSession) dropIfEmpty() {
	if s.pathCount() > 0 {
		return
	}
	s.freeChunks()
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	s.removeFromServer()
}

func (s *SrvSession) pathCount() int {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	return len(s.paths)
}

func (s *SrvSession) closeMemory() {
	if err := s.mem.Close(); err != nil {
		s.srv.log.Warn("rtrs: free chunks", "session", s.Name(), "err", err)
	}
	s.srv.accounts.discharge(s.payer, resourceAccount{memory: int64(len(s.chunks))})
}
