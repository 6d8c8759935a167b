package rtrs

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// SrvPathState is the life of a path on the server:
//
//	connecting -> connected -> closing -> closed
//	connecting --------------> closing
type SrvPathState uint32

const (
	SrvPathConnecting SrvPathState = iota // connections arrive, INFO is missing
	SrvPathConnected                      // requests are served
	SrvPathClosing                        // connections and requests come to their end
	SrvPathClosed
)

func (s SrvPathState) String() string {
	return [...]string{"connecting", "connected", "closing", "closed"}[s]
}

// srvPath is one path of a session: its connections, and the session's chunks
// as registered for it.
type srvPath struct {
	sess           *SrvSession
	id             int // from 1, unique in the session for ever
	uuid           rtrswire.UUID
	life           rtrswire.UUID // the session's when the path began, as its client was told
	dev            verbs.Device
	client, server netip.AddrPort
	security       verbs.Security // guarded by the server's mu while known is not set
	known          bool           // security does not change any more; guarded by the server's mu
	auth           AuthMode       // of the listener
	proofs         *srvProofs     // nil: the client is not challenged
	infoTimer      *time.Timer    // calls expire; runs while the path is connecting

	takesReasons bool // the client has announced FeatureReason; owned by the goroutine of the INFO_REQ

	newRkey bool // keys change after each use, answers carry them
	canInv  bool // the fabric has SEND WITH INVALIDATE

	pd       verbs.PD
	mrs      []verbs.MR
	localKey uint32   // of the chunks, for local sends
	rkeys    []uint32 // newRkey: of each chunk; owned by the chunk's owner
	ctl      pathCtl

	state  atomic.Uint32
	conns  []*srvConn // by cid; guarded by the server's accepting, fixed once connected
	filled int        // conns that are not nil
	live   sync.WaitGroup
	hb     heartbeatTimer

	counted bool // in SrvSession.up; guarded by SrvSession.events
	watched bool // the PathWatcher was told of it; likewise

	reconCnt    uint16   // the client's attempt that made the path
	predecessor *srvPath // path of the same client that ends when this one connects; nil: none

	base PathDetails // counts at the last resets; guarded by the server's mu

	cause   error         // set before closing is closed
	closing chan struct{} // closed when the path begins to close
	closed  chan struct{} // closed when all is gone
}

// pathCtl is the registered memory of a path for all that is not data.
type pathCtl struct {
	key     uint32
	infoReq rtrswire.InfoReq
	infoRsp rtrswire.InfoRsp
	rkeyRsp []byte // RkeyRspLen for each chunk
}

func newSrvPath(s *SrvSession, dev verbs.Device, mode AuthMode, req verbs.ConnRequest, f *rtrswire.ConnReqFields) (*srvPath, error) {
	caps := dev.Info().Caps
	const rotation = verbs.CapKeyRotation | verbs.CapSendImm
	p := &srvPath{
		sess:     s,
		life:     *s.life.Load(),
		uuid:     f.SessUUID,
		reconCnt: f.ReconCnt,
		dev:      dev,
		client:   req.RemoteAddr(),
		server:   req.LocalAddr(),
		security: verbs.SecurityOf(req),
		known:    !needsChallenge(mode, req, f),
		auth:     mode,
		proofs:   newSrvProofs(mode, req, f),
		newRkey:  s.srv.cfg.AlwaysInvalidate && caps&rotation == rotation,
		canInv:   caps&verbs.CapSendInv != 0,
		conns:    make([]*srvConn, f.CIDNum),
		closing:  make(chan struct{}),
		closed:   make(chan struct{}),
	}
	if err := p.registerChunks(); err != nil {
		p.freeMemory()
		return nil, fmt.Errorf("register chunks on %s: %w", dev.Info().Name, err)
	}
	p.infoTimer = time.AfterFunc(s.srv.cfg.InfoTimeout, p.closeUnconnected)
	if s.srv.cfg.AlwaysInvalidate && !p.newRkey {
		p.logLine("rtrs: always_invalidate is off for this path: the device cannot change keys", "device", dev.Info().Name)
	}
	return p, nil
}

// registerChunks makes the chunks reachable: with changing keys one region for each,
// else one region for all.
func (p *srvPath) registerChunks() (err error) {
	s := p.sess
	if p.pd, err = p.dev.AllocPD(); err != nil {
		return err
	}
	access, regions := verbs.AccessRemoteWrite, 1
	if p.newRkey {
		access, regions = 0, len(s.ops)
	}
	all, err := p.regMR(s.chunks, access)
	if err != nil {
		return err
	}
	s.guard(all)
	p.localKey = all.LKey()
	if err := p.registerCtl(regions); err != nil {
		return err
	}
	if p.proofs != nil {
		if err := p.proofs.makeBuffers(p); err != nil {
			return err
		}
	}
	p.ctl.infoRsp.PutHeader(regions)
	if !p.newRkey {
		p.ctl.infoRsp.PutDesc(0, rtrswire.Desc{Addr: all.Addr(), Key: all.RKey(), Len: uint32(all.Len())})
		return nil
	}
	p.rkeys = make([]uint32, regions)
	for i := range s.ops {
		mr, err := p.regMR(s.ops[i].mem, verbs.AccessRemoteWrite|verbs.AccessRotate)
		if err != nil {
			return err
		}
		s.guard(mr)
		p.rkeys[i] = mr.RKey()
		p.ctl.infoRsp.PutDesc(i, rtrswire.Desc{Addr: mr.Addr(), Key: mr.RKey(), Len: uint32(mr.Len())})
	}
	return nil
}

func (p *srvPath) registerCtl(regions int) error {
	rsp := rtrswire.InfoRspLen(regions)
	mem := make([]byte, rtrswire.InfoReqLen+rsp+rtrswire.RkeyRspLen*len(p.sess.ops))
	mr, err := p.regMR(mem, 0)
	if err != nil {
		return err
	}
	p.ctl = pathCtl{
		key:     mr.LKey(),
		infoReq: mem[:rtrswire.InfoReqLen],
		infoRsp: mem[rtrswire.InfoReqLen:][:rsp:rsp],
		rkeyRsp: mem[rtrswire.InfoReqLen+rsp:],
	}
	return nil
}

func (p *srvPath) regMR(mem []byte, access verbs.Access) (verbs.MR, error) {
	mr, err := p.pd.RegMR(mem, access)
	if err == nil {
		p.mrs = append(p.mrs, mr)
	}
	return mr, err
}

// State returns the state of the path.
func (p *srvPath) State() SrvPathState { return SrvPathState(p.state.Load()) }

// isConnected reports whether requests are served.
func (p *srvPath) isConnected() bool { return p.state.Load() == uint32(SrvPathConnected) }

// goesOn reports whether the path is connecting or connected.
func (p *srvPath) goesOn() bool { return p.State() < SrvPathClosing }

// close begins the end of the path. Only its first call has an effect. Any
// goroutine may call it; it never blocks.
func (p *srvPath) close(cause error) {
	for {
		s := p.state.Load()
		if s >= uint32(SrvPathClosing) {
			return
		}
		if p.state.CompareAndSwap(s, uint32(SrvPathClosing)) {
			break
		}
	}
	p.cause = p.proofs.endOf(cause)
	p.infoTimer.Stop()
	p.sess.srv.accounts.removeUnfinished(p)
	close(p.closing)
	go p.endPath()
}

// closeUnconnected closes the path if it is not connected within Config.InfoTimeout.
func (p *srvPath) closeUnconnected() {
	if p.State() == SrvPathConnecting {
		p.sess.srv.accounts.timedOut()
		p.close(protocolErrorf("not connected within %s", p.sess.srv.cfg.InfoTimeout))
	}
}

// closeAndWait closes the path and waits until it is gone.
func (p *srvPath) closeAndWait(ctx context.Context) error {
	p.close(ErrClosed)
	select {
	case <-p.closed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("path %s: %w", p.client, context.Cause(ctx))
	}
}

// endPath ends a path in state closing, in which no request is accepted. Its
// connections end. The requests under way finish without an answer, or their
// chunks are retired. Then the memory is deregistered. The session goes down with
// its last path.
func (p *srvPath) endPath() {
	p.logLine("rtrs: path closing", "cause", p.cause)
	p.sess.changed.ringAll()
	srv := p.sess.srv
	if h, ok := srv.cfg.Handler.(PathLossWatcher); ok {
		h.PathLost(p.sess)
	}
	srv.accepting.Lock()
	var conns []*srvConn
	for _, c := range p.conns {
		if c != nil {
			conns = append(conns, c)
		}
	}
	srv.accepting.Unlock()
	for _, c := range conns {
		c.qp.Disconnect()
	}
	p.awaitRequests(conns)
	for _, c := range conns {
		p.destroyConn(c)
	}
	p.freeMemory()
	p.sess.pathDown(p)
	p.logLine("rtrs: path closed")
	srv.accepting.Lock()
	p.state.Store(uint32(SrvPathClosed))
	p.sess.removePath(p)
	srv.accepting.Unlock()
	close(p.closed)
}

// freeMemory deregisters the path's memory.
func (p *srvPath) freeMemory() {
	for _, mr := range p.mrs {
		if err := mr.Close(); err != nil {
			p.sess.srv.log.Warn("rtrs: deregister memory", "err", err)
		}
	}
	if p.pd == nil {
		return
	}
	if err := p.pd.Close(); err != nil {
		p.sess.srv.log.Warn("rtrs: free protection domain", "err", err)
	}
}

// pathInfo describes the path. The caller holds the server's mu.
func (p *srvPath) pathInfo() SrvPathInfo {
	dev := p.dev.Info()
	return SrvPathInfo{
		ID: p.id, State: p.State(), Client: p.client, Server: p.server,
		Fabric: dev.Fabric, Device: dev.Name, Port: dev.Port, Conns: len(p.conns),
		Security: p.security, ChangingKeys: p.newRkey, Stats: p.currentDetails().PathStats,
	}
}

// totalDetails returns all counts of a connected path. The caller holds the server's mu.
func (p *srvPath) totalDetails() (d PathDetails) {
	if p.State() != SrvPathConnected { // connections come or go
		return d
	}
	for _, c := range p.conns {
		d.addConn(&c.stats, c.pollerIndex, len(p.sess.srv.cfg.Pollers))
	}
	d.Latency = p.hb.lastLatency()
	return d
}

// currentDetails returns the counts since the last resets. The caller holds the server's mu.
func (p *srvPath) currentDetails() PathDetails {
	d := p.totalDetails()
	if p.State() == SrvPathConnected {
		d.subtractCounts(&p.base)
	}
	return d
}

// logConnected logs that the path is connected. It names the peer if the fabric
// has proved it.
func (p *srvPath) logConnected() {
	if p.security == (verbs.Security{}) {
		p.logLine("rtrs: path connected")
		return
	}
	p.logLine("rtrs: path connected", "identity", p.security.Peer, "cipher", p.security.Cipher)
}

// logLine writes one line about the path.
func (p *srvPath) logLine(msg string, args ...any) {
	p.sess.srv.log.Info(msg, append([]any{"session", p.sess.Name(), "client", verbs.AddrPortString(p.client), "server", verbs.AddrPortString(p.server)}, args...)...)
}
