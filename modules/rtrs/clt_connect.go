package rtrs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/tally"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// How a path is established, on the path's goroutine: connection 0, its answer
// tells the sizes; the other connections one after the other; then one INFO
// exchange on connection 0.

const (
	serviceSends = 2*rtrswire.ServiceDepth + 2
	serviceRecvs = 2 * rtrswire.ServiceDepth // after the INFO_RSP
	cltMaxSGE    = 2                         // data and header
)

// connectLink makes one attempt. On failure nothing is left, and the error has the
// errno in its chain that the Linux client would report.
func (p *path) connectLink(ctx context.Context) (*link, error) {
	route, err := p.resolveRoute(ctx)
	if err != nil {
		return nil, fmt.Errorf("rtrs: session %s: connect path %s: %w", p.session.name, p.addr, err)
	}
	ctx, done := route.guardContext(ctx)
	defer done()
	dev, err := p.deviceFor(ctx, &route)
	if err != nil {
		route.releaseRoute()
		return nil, fmt.Errorf("rtrs: session %s: connect path %s: %w", p.session.name, p.addr, err)
	}
	p.reconCnt++
	l := newLink(p, dev, route)
	if err := l.establishConns(ctx); err != nil {
		l.failLink(err)
		l.close()
		return nil, fmt.Errorf("rtrs: session %s: connect path %s: %w", p.session.name, p.addr, err)
	}
	return l, nil
}

// deviceFor finds the device that leads to the server now.
func (p *path) deviceFor(ctx context.Context, route *Route) (*sessionDevice, error) {
	dev := p.addr.Device
	if c, ok := dev.(verbs.Chooser); ok {
		ctx, cancel := context.WithTimeout(ctx, p.session.Timing().ConnectTimeout)
		defer cancel()
		var err error
		if dev, err = c.DeviceFor(ctx, route.Src, route.Dst); err != nil {
			return nil, connectError(ctx, err)
		}
	}
	return p.session.deviceEntry(dev)
}

func (l *link) establishConns(ctx context.Context) error {
	for cid := range l.path.session.queues {
		release := func() {}
		if cid == 0 {
			release = l.path.session.takeTurn(ctx)
			if l.path.later {
				l.path.firstConn = !l.path.session.Connected()
			}
		}
		err := l.dialConn(ctx, cid)
		release()
		if err != nil {
			return fmt.Errorf("connection %d: %w", cid, err)
		}
		if cid == 0 {
			if err := l.prepareMemory(); err != nil {
				return err
			}
		}
	}
	return l.exchangeInfo(ctx)
}

// sessionTurn is how long a path waits for another one that may be making the
// session.
const sessionTurn = 3 * time.Second

// takeTurn waits until no other path of a session without connections is
// waiting for the answer to its connection 0. A server that has lost the
// session makes it then, and Linux's would make it twice, under one name, and
// crash. A path that gets no answer keeps the others back for sessionTurn.
func (s *Session) takeTurn(ctx context.Context) (release func()) {
	release = func() { <-s.turn }
	if s.Connected() { // no caller waits, but the last path may be lost meanwhile
		select {
		case s.turn <- struct{}{}:
			return release
		default:
			return func() {}
		}
	}
	timer := time.NewTimer(sessionTurn)
	defer timer.Stop()
	select {
	case s.turn <- struct{}{}:
		return release
	case <-timer.C:
	case <-ctx.Done(): // dial says so
	}
	return func() {}
}

// dialConn makes connection cid and waits until it is up.
func (l *link) dialConn(ctx context.Context, cid int) error {
	c, err := l.newConn(cid)
	if err != nil {
		return err
	}
	p := l.path
	ctx, cancel := context.WithTimeout(ctx, p.session.Timing().ConnectTimeout)
	defer cancel()
	cfg := &p.session.cfg
	if info := l.dev.dev.Info(); cfg.Protect && info.Caps&verbs.CapProtect == 0 {
		c.destroyQP()
		return fmt.Errorf("the session requires TLS, which %s of fabric %s does not have here: %w", info.Name, info.Fabric, syscall.EPROTONOSUPPORT)
	}
	request := l.connReq(cid)
	l.proofs.noteRequest(request)
	private, err := l.dev.dev.Connect(ctx, c.qp, verbs.ConnectParams{
		Src:      l.route.Src,
		Dst:      netip.AddrPortFrom(l.route.Dst, p.addr.Dst.Port()),
		Private:  request,
		Protect:  cfg.Protect,
		PeerName: cfg.PeerName,
	})
	if err != nil {
		c.destroyQP()
		return connectError(ctx, err)
	}
	if cfg.Protect && verbs.SecurityOf(c.qp).Peer == "" {
		c.destroyQP()
		return fmt.Errorf("the session requires TLS, and the connection has none: %w", syscall.EPROTO)
	}
	l.conns = append(l.conns, c)
	return l.checkResponse(cid, private)
}

// newConn makes the queue pair of connection cid. The receives of an I/O
// connection are posted before it is up.
func (l *link) newConn(cid int) (*cltConn, error) {
	q := l.path.session.queues[cid]
	c := &cltConn{link: l, queue: q, gone: make(chan struct{}), sized: cid > 0}
	cfg := connConfig{cid: cid, maxSGE: cltMaxSGE, prepost: !l.newRkey,
		sendQueue: serviceSends, recvQueue: serviceSends, interval: rtrswire.ServiceDepth}
	if cid > 0 {
		cfg.sendQueue = 4*l.queueDepth + 1
		cfg.recvQueue = 3*l.queueDepth + 1
		cfg.interval = min(l.queueDepth, rtrswire.ServiceDepth)
	}
	var err error
	if c.conn, err = newConn(q.poller, l.dev.dev, l.dev.pd, c, cfg); err != nil {
		return c, err
	}
	c.stats.migratedOff = make([]tally.Count, PossibleCPUs())
	c.stats.migratedTo = make([]tally.Count, PossibleCPUs())
	if cid == 0 {
		return c, nil
	}
	if err := l.postIORecvs(c); err != nil {
		c.destroyQP()
		return nil, err
	}
	return c, nil
}

// connReq is the private data of connection cid.
func (l *link) connReq(cid int) []byte {
	p, m := l.path, make([]byte, rtrswire.ConnReqLen)
	f := rtrswire.ConnReqFields{
		CID:       uint16(cid),
		CIDNum:    uint16(len(p.session.queues)),
		ReconCnt:  p.reconCnt,
		SessUUID:  l.uuid,
		PathsUUID: l.group,
		FirstConn: p.firstConn,
	}
	if l.proofs != nil {
		f.Features = rtrswire.FeatureProof
	}
	rtrswire.ConnReq(m).Put(&f)
	return m
}

// connectError gives a failed connection attempt the errno of the Linux client.
func connectError(ctx context.Context, err error) error {
	var rej *verbs.RejectError
	var errno syscall.Errno
	switch {
	case errors.As(err, &rej):
		return rejectError(rej)
	case ctx.Err() != nil:
		return fmt.Errorf("%w: %w", syscall.ETIMEDOUT, err)
	case errors.As(err, &errno) && (errno == syscall.EHOSTUNREACH || errno == syscall.ENETUNREACH || errno == syscall.EADDRNOTAVAIL):
		return fmt.Errorf("%w: %w", syscall.EHOSTUNREACH, err)
	case errors.As(err, &errno) && errno == syscall.ENODEV:
		return err // no device of the fabric leads there
	case errors.Is(err, verbs.ErrUnsupported):
		return fmt.Errorf("%w: %w", syscall.EOPNOTSUPP, err)
	}
	return fmt.Errorf("%w: %w", syscall.ECONNRESET, err)
}

// errRefused is in the chain of an error if the server refused the connection
// with ECONNRESET and gave no other reason: a server does so while it still
// closes an earlier connection of the path.
var errRefused error = &sentinelError{"refused by the server", syscall.ECONNRESET}

// rejectError is the errno that the server put in its refusal.
func rejectError(rej *verbs.RejectError) error {
	rsp := rtrswire.ConnRsp(rej.Private)
	if rsp.Check() != nil || rsp.Errno() >= 0 {
		return errRefused
	}
	if rsp.Errno() == -int16(syscall.ECONNRESET) {
		return withDescription(errRefused, syscall.ECONNRESET, rsp)
	}
	errno := syscall.Errno(-int(rsp.Errno()))
	switch {
	case errno == syscall.ENXIO && rsp.Features()&rtrswire.FeatureProof == 0:
		return fmt.Errorf("refused by the server, which has no session of this client: a second path leads to another server than the first one, or the server has just been restarted; all paths of a session lead to one server: %w", errno)
	case rsp.Features()&rtrswire.FeatureProof != 0:
		return fmt.Errorf("refused by the server: it requires a proof of this end's identity (--auth): %w", errno)
	}
	return withDescription(fmt.Errorf("refused by the server: %w", errno), errno, rsp)
}

// withDescription returns err, the error of a refused connection with errno, and the reason
// in the refusal if there is one.
func withDescription(err error, errno syscall.Errno, rsp rtrswire.ConnRsp) error {
	why := describeReason(rsp.Reason())
	if why == "" {
		return err
	}
	return &refusedError{"refused by the server", why, []error{errno, err}}
}

// checkResponse judges the private data of an accepted connection; that of
// connection 0 counts.
func (l *link) checkResponse(cid int, private []byte) error {
	rsp := rtrswire.ConnRsp(private)
	if err := rsp.Check(); err != nil {
		return fmt.Errorf("%w: %w", syscall.ECONNRESET, err)
	}
	if rsp.Errno() != 0 {
		return protocolErrorf("accepted with errno %d", rsp.Errno())
	}
	if cid > 0 {
		return nil
	}
	l.path.firstConn = true // any path may make the session from now on
	l.linkParams = linkParams{
		queueDepth: int(rsp.QueueDepth()),
		maxIOSize:  int(rsp.MaxIOSize()),
		maxHdrSize: int(rsp.MaxHdrSize()),
		chunkSize:  int(rsp.MaxIOSize()) + int(rsp.MaxHdrSize()),
		newRkey:    rsp.Flags()&rtrswire.FlagNewRkey != 0,
		fences:     rsp.Features()&rtrswire.FeatureFence != 0,
		beats:      rsp.Features()&rtrswire.FeatureBeats != 0,
		reasons:    rsp.Features()&rtrswire.FeatureReason != 0,

		incarnation: rsp.Incarnation(),
	}
	if err := l.path.checkParams(&l.linkParams); err != nil {
		return err
	}
	if err := l.proofs.noteResponse(rsp, l.path.session.cfg.AuthMode); err != nil {
		return err
	}
	return l.path.session.checkIncarnation(l)
}

// checkParams refuses sizes that cannot work. It refuses a queue depth that
// differs from the path's earlier one, and then also stops the automatic
// reconnects. A server of this project has another depth only in another
// incarnation of the session; that replaces the old one when the old one has no
// path left.
func (p *path) checkParams(lp *linkParams) error {
	if p.queueDepth != 0 && lp.queueDepth != p.queueDepth && lp.incarnation == (rtrswire.UUID{}) {
		p.noReconnect = true
		return protocolErrorf("queue depth changed from %d to %d; reconnect the path, or the session, by hand", p.queueDepth, lp.queueDepth)
	}
	if lp.queueDepth == 0 || lp.maxHdrSize < rtrswire.MaxReqHdrLen || lp.maxIOSize == 0 ||
		lp.chunkSize > 1<<rtrswire.ImmPayloadBits ||
		rtrswire.CeilLog2(lp.queueDepth)+rtrswire.CeilLog2(lp.chunkSize) > rtrswire.ImmPayloadBits {
		return protocolErrorf("impossible sizes: queue depth %d, max I/O %d, max header %d", lp.queueDepth, lp.maxIOSize, lp.maxHdrSize)
	}
	p.queueDepth = lp.queueDepth
	return nil
}

// prepareMemory allocates the memory of a link once its sizes are known.
func (l *link) prepareMemory() (err error) {
	if l.slots, err = l.path.session.slotsFor(&l.linkParams); err != nil {
		return err
	}
	l.shift = rtrswire.BufShift(l.queueDepth)
	l.mem = make([]byte, l.recvOffset(len(l.path.session.queues)))
	if l.mr, err = l.dev.pd.RegMR(l.mem, 0); err != nil {
		return fmt.Errorf("register message buffers: %w", err)
	}
	return nil
}

// The memory of a link holds the INFO_REQ, the INFO_RSP, and the receive
// buffers of the connections.

func (l *link) infoReqBuf() []byte { return l.mem[:rtrswire.InfoReqLen] }

func (l *link) infoRspBuf() []byte {
	return l.mem[rtrswire.InfoReqLen:l.recvOffset(0):l.recvOffset(0)]
}

// recvOffset is where the receive buffers of connection cid begin.
func (l *link) recvOffset(cid int) int {
	off := rtrswire.InfoReqLen + max(rtrswire.InfoRspLen(l.queueDepth), rtrswire.MaxReasonLen)
	if l.newRkey && cid > 0 {
		off += (serviceRecvs + (cid-1)*2*l.queueDepth) * rtrswire.RkeyRspLen
	}
	return off
}

// armRecvs gives the receives of c their buffers. Only NEW_RKEY needs them.
func (l *link) armRecvs(c *cltConn) {
	if l.newRkey {
		c.setRecvBuffers(l.mem[l.recvOffset(c.cid):l.recvOffset(c.cid+1)], rtrswire.RkeyRspLen, l.mr.LKey())
	}
}

func (l *link) postIORecvs(c *cltConn) error {
	l.armRecvs(c)
	return c.postRecvs(min(2*l.queueDepth, l.dev.dev.Info().MaxQPWR))
}

// exchangeInfo tells the name of the session and learns where the chunks are.
func (l *link) exchangeInfo(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, l.path.session.Timing().ConnectTimeout)
	defer cancel()
	c := l.conns[0]
	proof, err := l.challengeServer(ctx)
	if err != nil {
		return err
	}
	if err := c.poller.Call(ctx, func() { l.sendInfoReq(c, proof) }); err != nil {
		return fmt.Errorf("send INFO_REQ: %w: %w", syscall.ETIMEDOUT, err)
	}
	select {
	case rsp := <-l.info:
		return l.takeInfoRsp(rsp)
	case <-l.failed:
		return nameRefused{l.path.session.name, l.cause}
	case <-ctx.Done():
		return fmt.Errorf("wait for INFO_RSP: %w: %w", syscall.ETIMEDOUT, context.Cause(ctx))
	}
}

// sendInfoReq posts all receives of connection 0, the one for the INFO_RSP
// first, and then the PROOF, if there is one, and the INFO_REQ. Owner.
func (l *link) sendInfoReq(c *cltConn, proof []byte) {
	if c.down {
		return
	}
	c.sized = true
	c.prepost = !l.newRkey
	l.armRecvs(c)
	_, err := c.qp.PostRecv([]verbs.RecvWR{{ID: infoRecv, Buf: l.infoRspBuf(), LKey: l.mr.LKey()}})
	if err == nil {
		err = c.postRecvs(min(serviceRecvs, l.dev.dev.Info().MaxQPWR-1))
	}
	if err == nil && proof != nil {
		err = l.sendPart(c, proof)
	}
	if err == nil {
		rtrswire.InfoReq(l.infoReqBuf()).Put(l.path.session.name)
		if l.reasons {
			rtrswire.InfoReq(l.infoReqBuf()).Announce(rtrswire.FeatureReason)
		}
		err = c.postChain([]verbs.SendWR{{Op: verbs.OpSend, SGEs: []verbs.SGE{{Buf: l.infoReqBuf(), LKey: l.mr.LKey()}}}})
	}
	if err != nil {
		l.failLink(fmt.Errorf("connection 0: send INFO_REQ: %w", err))
	}
}

// takeInfoRsp checks the answer and fills the table of chunks.
func (l *link) takeInfoRsp(rsp rtrswire.InfoRsp) error {
	if l.reasons {
		if err := l.errorOfReason(rtrswire.ReasonMsg(rsp)); err != nil {
			return err
		}
	}
	if l.proofs != nil && l.proofs.asked {
		if err := refusalOf(rtrswire.Refusal(rsp)); err != nil {
			return err
		}
	}
	if err := rsp.Check(l.queueDepth, l.chunkSize); err != nil {
		return protocolErrorf("%v", err)
	}
	l.setBuffers(rsp)
	return nil
}
