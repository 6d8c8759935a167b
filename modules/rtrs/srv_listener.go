package rtrs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Memory is the chunk memory of one session. The caller of the server brings
// it, so that other users of the bytes can share it.
type Memory interface {
	Bytes() []byte
	Close() error
}

// ServerHandler is the consumer of a server's requests.
type ServerHandler interface {
	// SessionUp is called when the first path of a session is about to be
	// connected: before the client can send requests. An error refuses it. Any
	// goroutine, may block.
	SessionUp(s *SrvSession) error
	// SessionDown is called after the last path was closed and its last Op
	// finished or was retired; SessionUp may follow if a new path is already being made. Any
	// goroutine, may block; never at the same time as SessionUp of s.
	SessionDown(s *SrvSession)
	// Request takes op, to be answered with op.Respond now or later. It is
	// called on the owner of the op's poller and must not block.
	Request(op *Op)
}

// PathAdmitter is a ServerHandler that decides about the paths that join a
// session. PathUp is called before the client can send requests on the path, when
// the session has another one that is connected, and the path is in
// SrvSession.Paths. An error refuses the path. Any goroutine, may block; never at
// the same time as SessionUp or SessionDown of s.
type PathAdmitter interface {
	PathUp(s *SrvSession, p SrvPathInfo) error
}

// PathWatcher is a ServerHandler that learns of the paths of its sessions.
// PathConnected is called when the client's requests are about to be served, after
// SessionUp or PathUp. PathClosed is called once for each of these paths, before
// SessionDown; cause is nil if nothing is known. Any goroutine, may block; never two
// of these calls at a time for one session.
type PathWatcher interface {
	PathConnected(s *SrvSession, p SrvPathInfo)
	PathClosed(s *SrvSession, p SrvPathInfo, cause error)
}

// PathLossWatcher is a ServerHandler that learns at once that a path begins to close.
// PathLost is called before the path's requests are waited for: the client sends
// nothing more on the path, SrvSession.Paths does not show it as connected, and its
// requests may still run. Any goroutine; may not block.
type PathLossWatcher interface {
	PathLost(s *SrvSession)
}

// RefusalWatcher is a ServerHandler that learns of the clients that are refused for
// their identity, or for the protection of their connection, before their session is
// up. Any goroutine; may not block. Strangers can cause any number of refusals.
type RefusalWatcher interface {
	Refused(r Refusal)
}

// Refusal describes a client that has proved no identity, where it must, or not the
// one that it claims.
type Refusal struct {
	Client, Server netip.AddrPort
	Fabric         string
	Session        string // name that the client gives its session; empty: it gave none
	Claimed        string // identity that the client claims; empty: unknown
	Handshake      bool   // the protection of the connection has failed; else the proof of an identity
	Err            error
}

// ServerConfig are the arguments of NewServer. See DefaultServerConfig.
type ServerConfig struct {
	// Pollers serve the connections: cid c >= 1 is on poller (c-1) mod n for
	// life, cid 0 on the first.
	Pollers    []*Poller
	QueueDepth int // chunks of a session, 1 to 65535
	ChunkSize  int // bytes, at least 8192; 4096 of them are for headers
	// AlwaysInvalidate gives each chunk another key after each use, where the
	// fabric can.
	AlwaysInvalidate bool
	Timing           Timing
	Logger           *slog.Logger
	// Alloc returns the chunk memory of a session, at least size bytes.
	Alloc   func(size int) (Memory, error)
	Handler ServerHandler
	// RetireAfter is how long a path that closes waits for requests that the
	// consumer has not answered; then their chunks are retired, see
	// Retirer. 0: for ever.
	RetireAfter time.Duration
	// Limits bound the resources that clients hold.
	Limits Limits
	// InfoTimeout bounds the time from the first connection of a path until
	// the path is connected. Its INFO_REQ asks for that.
	InfoTimeout time.Duration
	// Admit reports whether a client may connect. Nil admits all.
	Admit func(remote netip.AddrPort) bool
	// Auth has the keys for challenges, with which both ends prove their
	// identities where no TLS does. AuthMode is what listeners of Listen do about
	// them. Clients of a Linux kernel cannot take part.
	Auth     verbs.Authenticator
	AuthMode AuthMode
}

// DefaultServerConfig returns the defaults of the Linux kernel's server.
func DefaultServerConfig() ServerConfig {
	return ServerConfig{
		QueueDepth:       512,
		ChunkSize:        128 << 10,
		AlwaysInvalidate: true,
		Timing:           DefaultTiming(),
		Logger:           slog.Default(),
		RetireAfter:      5 * time.Second,
		Limits:           DefaultLimits(),
		InfoTimeout:      30 * time.Second,
	}
}

const (
	// maxHdrSize of each chunk is for the user message and the header.
	maxHdrSize   = 4096
	minChunkSize = 8192
	// defaultNameGrace is the usual Server.nameGrace.
	defaultNameGrace = time.Second
	// acceptPause follows a failure to accept.
	acceptPause = 250 * time.Millisecond
)

func (c *ServerConfig) checkValues() error {
	switch {
	case len(c.Pollers) == 0:
		return fmt.Errorf("no pollers: %w", syscall.EINVAL)
	case c.Handler == nil || c.Alloc == nil:
		return fmt.Errorf("no handler or no allocator: %w", syscall.EINVAL)
	case c.QueueDepth < 1 || c.QueueDepth > rtrswire.MaxQueueDepth:
		return fmt.Errorf("queue depth %d is not in 1..%d: %w", c.QueueDepth, rtrswire.MaxQueueDepth, syscall.EINVAL)
	case c.ChunkSize < minChunkSize || c.ChunkSize%maxHdrSize != 0:
		return fmt.Errorf("chunk size %d is not a multiple of %d from %d: %w", c.ChunkSize, maxHdrSize, minChunkSize, syscall.EINVAL)
	case rtrswire.CeilLog2(c.QueueDepth)+rtrswire.CeilLog2(c.ChunkSize) > rtrswire.ImmPayloadBits:
		return fmt.Errorf("%d chunks of %d bytes do not fit in an immediate: %w", c.QueueDepth, c.ChunkSize, syscall.EINVAL)
	case c.InfoTimeout <= 0:
		return fmt.Errorf("time to connect a path %s is not positive: %w", c.InfoTimeout, syscall.EINVAL)
	}
	if err := c.Limits.checkValues(); err != nil {
		return err
	}
	if err := checkAuth(c.AuthMode, c.Auth); err != nil {
		return err
	}
	return c.Timing.Validate()
}

// Server accepts sessions.
type Server struct {
	cfg    ServerConfig
	log    *slog.Logger
	shift  uint // of the chunk in a request's immediate
	timing atomic.Pointer[Timing]

	// nameGrace bounds the wait for the end of a session if another client
	// connects with its name.
	nameGrace time.Duration

	accepts sync.WaitGroup // goroutines of listeners

	accounts accountTable

	// accepting serialises connection requests and the closing of a path for
	// further ones. Taken before mu.
	accepting sync.Mutex

	mu        sync.Mutex
	sessions  map[rtrswire.UUID]*SrvSession
	listeners []verbs.Listener
	closed    bool
}

// NewServer makes a server that listens nowhere yet. The pollers must be
// polled from before Listen until after Close.
func NewServer(cfg ServerConfig) (*Server, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if err := cfg.checkValues(); err != nil {
		return nil, fmt.Errorf("rtrs server: %w", err)
	}
	s := &Server{
		cfg:      cfg,
		log:      cfg.Logger,
		shift:    rtrswire.BufShift(cfg.QueueDepth),
		sessions: map[rtrswire.UUID]*SrvSession{},

		nameGrace: defaultNameGrace,
		accounts:  accountTable{limits: cfg.Limits, of: map[netip.Addr]*resourceAccount{}, waiting: map[netip.Addr]int{}},
	}
	s.timing.Store(&cfg.Timing)
	return s, nil
}

// Timing returns the timers in use.
func (s *Server) Timing() Timing { return *s.timing.Load() }

// SetTiming changes the timers of all sessions; a heartbeat interval counts
// from the end of the current one.
func (s *Server) SetTiming(t Timing) error {
	if err := t.Validate(); err != nil {
		return fmt.Errorf("rtrs server: %w: %w", syscall.EINVAL, err)
	}
	s.timing.Store(&t)
	return nil
}

// Listen accepts connections at addr and returns the address with its port.
func (s *Server) Listen(dev verbs.Device, addr netip.AddrPort) (netip.AddrPort, error) {
	return s.ListenAuth(dev, addr, s.cfg.AuthMode)
}

// ListenAuth is Listen with a mode of its own for challenges.
func (s *Server) ListenAuth(dev verbs.Device, addr netip.AddrPort, mode AuthMode) (netip.AddrPort, error) {
	if err := checkAuth(mode, s.cfg.Auth); err != nil {
		return addr, fmt.Errorf("listen on %s: %w", addr, err)
	}
	if info := dev.Info(); info.Caps&verbs.CapWriteImm == 0 {
		return addr, fmt.Errorf("listen on %s: fabric %s has no RDMA WRITE WITH IMM: %w", addr, info.Fabric, verbs.ErrUnsupported)
	}
	l, err := dev.Listen(addr)
	if err != nil {
		return addr, fmt.Errorf("listen on %s: %w", addr, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = l.Close()
		return addr, fmt.Errorf("listen on %s: %w", addr, ErrClosed)
	}
	if r, ok := l.(verbs.Refuser); ok {
		fabric := dev.Info().Fabric
		r.WatchRefused(func(no verbs.Refused) {
			s.tellRefusal(Refusal{Client: no.Client, Server: no.Server, Fabric: fabric, Claimed: no.Claimed, Handshake: true, Err: no.Err})
		})
	}
	s.listeners = append(s.listeners, l)
	s.accepts.Add(1)
	go s.run(dev, l, mode)
	s.log.Info("rtrs: listening", "address", l.Addr(), "fabric", dev.Info().Fabric, "device", dev.Info().Name)
	return l.Addr(), nil
}

func (s *Server) run(dev verbs.Device, l verbs.Listener, mode AuthMode) {
	defer s.accepts.Done()
	for {
		req, err := l.Accept()
		switch {
		case err == nil:
			s.onConnRequest(dev, mode, req)
		case errors.Is(err, verbs.ErrClosed):
			return
		default:
			s.log.Warn("rtrs: accept", "address", l.Addr(), "err", err)
			time.Sleep(acceptPause)
		}
	}
}

// errDeviceGone refuses a connection request if the device was removed after
// the request came.
var errDeviceGone error = &sentinelError{"the device was removed", syscall.ENODEV}

// onConnRequest answers one connection request.
func (s *Server) onConnRequest(dev verbs.Device, mode AuthMode, req verbs.ConnRequest) {
	s.accepting.Lock()
	defer s.accepting.Unlock()
	if r, ok := req.(verbs.DeviceRequest); ok {
		dev = r.Device()
	}
	err := errDeviceGone
	if dev != nil {
		err = s.acceptPath(dev, mode, req)
	}
	if err == nil {
		return
	}
	s.log.Warn("rtrs: connection refused", "client", verbs.AddrPortString(req.RemoteAddr()), "server", verbs.AddrPortString(req.LocalAddr()), "err", err)
	var rsp [rtrswire.ConnRspLen]byte
	f := rtrswire.ConnRspFields{Errno: int16(-ErrnoOf(err))}
	if errors.Is(err, errNoProof) {
		f.Features = rtrswire.FeatureProof
		s.tellRefusal(Refusal{Client: req.RemoteAddr(), Server: req.LocalAddr(), Fabric: dev.Info().Fabric, Err: err})
	}
	code, text := reasonOf(err)
	if code != rtrswire.ReasonOther || text != "" {
		f.Features |= rtrswire.FeatureReason
	}
	rtrswire.ConnRsp(rsp[:]).Put(&f)
	if f.Features&rtrswire.FeatureReason != 0 {
		rtrswire.ConnRsp(rsp[:]).PutReason(code, text)
	}
	if err := req.Reject(rsp[:]); err != nil {
		s.log.Debug("rtrs: reject", "client", req.RemoteAddr(), "err", err)
	}
}

// acceptPath finds or makes the session and the path of req and adds the
// connection. The errno of the error goes to the client.
func (s *Server) acceptPath(dev verbs.Device, mode AuthMode, req verbs.ConnRequest) error {
	m := rtrswire.ConnReq(req.Private())
	if err := m.Check(); err != nil {
		return protocolErrorf("%v", err)
	}
	if s.cfg.Admit != nil && !s.cfg.Admit(req.RemoteAddr()) {
		return withReason(rtrswire.ReasonAddress, "", fmt.Errorf("client %s is not admitted: %w", verbs.AddrPortString(req.RemoteAddr()), syscall.EACCES))
	}
	f := m.Fields()
	if err := mustProve(mode, req, &f); err != nil {
		return err
	}
	sess, err := s.sessionFor(accountedAddr(req.RemoteAddr()), &f)
	if err != nil {
		return err
	}
	p, err := sess.pathFor(dev, mode, req, &f)
	if err != nil {
		sess.dropIfEmpty()
		return err
	}
	return p.addConn(req, int(f.CID))
}

// sessionFor returns the session that f names, a new one, for a client at addr,
// if f allows that.
func (s *Server) sessionFor(addr netip.Addr, f *rtrswire.ConnReqFields) (*SrvSession, error) {
	s.mu.Lock()
	sess, closed := s.sessions[f.PathsUUID], s.closed
	s.mu.Unlock()
	switch {
	case closed:
		return nil, withReason(rtrswire.ReasonClosing, "", protocolErrorf("the server is closing"))
	case sess != nil:
		return sess, nil
	case !f.FirstConn:
		return nil, withReason(rtrswire.ReasonNoSession, "", fmt.Errorf("unknown session, and not its first connection: %w", syscall.ENXIO))
	}
	memory := int64(s.cfg.QueueDepth) * int64(s.cfg.ChunkSize)
	if err := s.accounts.takeSession(addr, memory); err != nil {
		return nil, err
	}
	sess, err := newSrvSession(s, f.PathsUUID)
	if err != nil {
		s.accounts.discharge(addr, resourceAccount{sessions: 1, memory: memory})
		return nil, err
	}
	sess.payer = addr
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sessions[f.PathsUUID] = sess
	return sess, nil
}

// Sessions returns the sessions that have a name. A session gets it when its
// first path is connected.
func (s *Server) Sessions() []*SrvSession {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []*SrvSession
	for _, sess := range s.sessions {
		if sess.named {
			list = append(list, sess)
		}
	}
	slices.SortFunc(list, func(a, b *SrvSession) int { return a.serial - b.serial })
	return list
}

// DisconnectPath closes a path of the session with the given name; the client
// may connect it again. It does not wait.
func (s *Server) DisconnectPath(session string, path int) error {
	for _, sess := range s.Sessions() {
		if sess.Name() == session {
			return sess.DisconnectPath(path)
		}
	}
	return fmt.Errorf("session %q: %w", session, syscall.ENOENT)
}

// Close closes the listeners and all paths and waits until the last session
// is gone or ctx is done.
func (s *Server) Close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	listeners := s.listeners
	s.listeners = nil
	s.mu.Unlock()
	for _, l := range listeners {
		_ = l.Close()
	}
	s.accepts.Wait()
	for {
		p := s.anyPath()
		if p == nil {
			break
		}
		if err := p.closeAndWait(ctx); err != nil {
			return fmt.Errorf("close rtrs server: %w", err)
		}
	}
	return nil
}

func (s *Server) anyPath() *srvPath {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sess := range s.sessions {
		for _, p := range sess.paths {
			p.close(fmt.Errorf("%w: the server is closing", ErrClosed))
		}
	}
	for _, sess := range s.sessions {
		for _, p := range sess.paths {
			return p
		}
	}
	return nil
}
