package rtrs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/google/uuid"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// PathAddr says how a path reaches the server.
type PathAddr struct {
	Device verbs.Device // a verbs.Chooser is asked at each attempt
	Src    netip.Addr   // zero: chosen by the system
	Dst    netip.AddrPort
}

func (a PathAddr) String() string {
	dst := verbs.AddrPortString(a.Dst) + "%" + a.Device.Info().Fabric
	if !a.Src.IsValid() {
		return dst
	}
	return verbs.AddrString(a.Src) + "@" + dst
}

// path is one way to the server. From its first connection on it is run by one
// goroutine. No other changes its state.
type path struct {
	session *Session
	id      int // grows in the order of adding
	addr    PathAddr
	uuid    rtrswire.UUID // session's mu; changes only while no connection is being made
	log     *slog.Logger
	kick    chan struct{} // intent has changed
	ended   chan struct{} // closed when run has returned

	// Of the goroutine that runs the path.
	link        *link  // while connected
	reconCnt    uint16 // attempts
	firstConn   bool   // the server may make the session
	later       bool   // not connected since AddPathLater
	twin        bool   // another path has its addresses
	queueDepth  int    // of the last connection, 0: none
	noReconnect bool   // until a manual reconnect
	failures    int    // failed attempts since the path was lost
	skipDelay   bool   // a manual reconnect wants the next attempt now

	connecting bool          // session's mu; no FENCE for this path may start
	failovers  atomic.Uint64 // requests taken over from other paths

	mu      sync.Mutex // below the session's mu
	state   PathState
	err     error // why the path is not connected
	intent  pathIntent
	cancel  func(cause error) // ends the attempt under way
	results uint64            // attempts that ended, with success or not, and closings
	changed chan struct{}     // closed and replaced when the state changes
	stats   PathDetails       // of earlier links
	base    PathDetails       // at the last resets
	current *link             // for statistics
	lastSrc netip.Addr        // of the last connection
	lastDev verbs.Device      // likewise
}

// pathIntent is the state that the user wants a path to be in.
type pathIntent uint8

const (
	wantUp        pathIntent = iota
	wantReconnect            // wantUp, with a new connection now
	wantClosed
	wantDead
)

func newPath(s *Session, id int, addr PathAddr) *path {
	return &path{
		session: s,
		id:      id,
		addr:    addr,
		uuid:    rtrswire.UUID(uuid.New()),
		log:     s.log.With("path", addr.String()),
		kick:    make(chan struct{}, 1),
		ended:   make(chan struct{}),
		changed: make(chan struct{}),
	}
}

// setState moves the path on. A move that the diagram does not have is refused.
func (p *path) setState(next PathState, cause error) bool {
	p.mu.Lock()
	from := p.state
	if !from.mayBecome(next) {
		p.mu.Unlock()
		p.log.Error("rtrs: path state move refused", "from", from.String(), "to", next.String())
		return false
	}
	p.state = next
	switch {
	case next == PathConnected, next == PathClosing && p.intent >= wantClosed:
		p.err = nil
	case cause != nil:
		p.err = cause
	}
	if from == PathConnecting || next == PathClosed {
		p.results++
	}
	close(p.changed)
	p.changed = make(chan struct{})
	p.mu.Unlock()
	p.logMove(from, next, cause)
	p.session.events.add(Event{Kind: PathChanged, Session: p.session, Path: p.id, State: next, Err: cause})
	return true
}

// logMove logs that the path is in another state. The attempts to connect a path
// that is lost are for debugging: its loss and its return are news.
func (p *path) logMove(from, to PathState, cause error) {
	level := slog.LevelInfo
	if to == PathConnecting || to == PathConnectingErr || to == PathReconnecting && from == PathConnectingErr {
		level = slog.LevelDebug
	}
	attrs := []slog.Attr{slog.String("from", from.String())}
	if cause != nil {
		attrs = append(attrs, slog.Any("cause", cause))
	}
	p.log.LogAttrs(context.Background(), level, "rtrs: path "+to.String(), attrs...)
}

// want sets the user's intent for the path's goroutine.
func (p *path) want(i pathIntent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wantLocked(i)
}

func (p *path) wantLocked(i pathIntent) {
	if p.intent == wantDead {
		return
	}
	p.intent = i
	if p.cancel != nil && i >= wantClosed {
		p.cancel(nil)
	}
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// takeIntent returns the user's intent; a reconnect is returned once.
func (p *path) takeIntent() pathIntent {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := p.intent
	if i == wantReconnect {
		p.intent = wantUp
	}
	return i
}

// closing reports whether the user wants the path closed or removed.
func (p *path) closing() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.intent >= wantClosed
}

// run is the path's life, from where it is when the session lists it until it is
// dead.
func (p *path) run() {
	defer close(p.ended)
	for {
		switch p.state { // only this goroutine writes it
		case PathConnecting:
			p.attempt()
		case PathConnected:
			p.serve()
		case PathConnectingErr:
			p.afterFailure()
		case PathReconnecting:
			p.waitTurn()
		case PathClosing:
			p.endLink()
			p.setState(PathClosed, nil)
		case PathClosed:
			p.rest()
		case PathDead:
			if p.twin {
				p.session.removePath(p)
			}
			return
		}
	}
}

// serve waits for the end of a connected path.
func (p *path) serve() {
	select {
	case <-p.link.failed:
		p.setState(PathReconnecting, p.link.cause)
	case <-p.link.route.Changed:
		p.failures, p.skipDelay = 0, true
		p.setState(PathReconnecting, ErrAddrChange)
	case <-p.kick:
		switch p.takeIntent() {
		case wantReconnect:
			p.failures, p.noReconnect, p.skipDelay = 0, false, true
			p.setState(PathReconnecting, nil)
		case wantClosed, wantDead:
			p.setState(PathClosing, nil)
		}
	}
}

// waitTurn removes the remains of the lost link and waits until the next
// attempt is due.
func (p *path) waitTurn() {
	p.endLink()
	timing := p.session.Timing()
	manual := p.skipDelay
	p.skipDelay = false
	giveUp := p.noReconnect || !manual && !timing.mayReconnect(p.failures)
	delay := timing.reconnectDelay(p.failures)
	if manual || giveUp {
		delay = 0
	}
	p.sleep(delay)
	if giveUp || p.closing() {
		p.setState(PathClosing, nil)
		return
	}
	p.setState(PathConnecting, nil)
}

// sleep waits until a manual reconnect or a close cuts it short.
func (p *path) sleep(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			return
		case <-p.kick:
			if p.takeIntent() == wantReconnect || p.closing() {
				return
			}
		}
	}
}

// attempt connects the path once.
func (p *path) attempt() {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	p.setCancel(cancel)
	defer p.setCancel(nil)
	if err := p.connectFenced(ctx); err != nil {
		p.finishAttempt(err)
		return
	}
	p.session.publish(func() { p.finishAttempt(nil) })
}

// connectFenced connects while no FENCE for this path is under way: that would
// close the new connection. The server accepts a path it knows only when
// everything of its last connection has ended, so success is a fence too.
func (p *path) connectFenced(ctx context.Context) error {
	s := p.session
	if err := s.beginConnect(ctx, p); err != nil {
		return err
	}
	l, err := p.connect(ctx)
	switch {
	case err == nil:
		err = p.adopt(l)
	case context.Cause(ctx) == errInterrupted:
		err = fmt.Errorf("%w: %w", errInterrupted, err)
	}
	s.endConnect(p, err == nil)
	return err
}

// adopt makes l the link of the path.
func (p *path) adopt(l *link) error {
	if err := p.session.addLink(l); err != nil {
		l.fail(err)
		l.close()
		return fmt.Errorf("rtrs: session %s: connect path %s: %w", p.session.name, p.addr, err)
	}
	p.link, p.later = l, false
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current, p.lastSrc, p.lastDev = l, l.conns[0].qp.LocalAddr().Addr(), l.dev.dev
	if verbs.IsGID(p.addr.Dst.Addr()) { // and the fabric may use the IP addresses that the GIDs are
		p.lastSrc = verbs.GID(p.lastSrc)
	}
	return nil
}

// setCancel makes cancel the way to end the attempt.
func (p *path) setCancel(cancel func(cause error)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cancel = cancel
	if cancel != nil && p.intent >= wantClosed {
		cancel(nil)
	}
}

// errInterrupted ends an attempt that will be repeated soon.
var errInterrupted error = &sentinel{"the path's last connections are fenced first", syscall.ECONNRESET}

// interrupt ends the attempt under way, for another one to follow. It does not
// wait.
func (p *path) interrupt() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cancel != nil {
		p.cancel(errInterrupted)
	}
}

// finishAttempt notes the result and moves on.
func (p *path) finishAttempt(err error) {
	p.countAttempt(err == nil)
	switch {
	case err == nil:
		p.failures = 0
		p.setState(PathConnected, nil)
	case p.closing():
		p.setState(PathClosing, err)
	case p.later && errors.Is(err, syscall.EEXIST):
		p.twin = true
		p.want(wantDead)
		p.setState(PathClosing, err)
	default:
		p.failures++
		p.setState(PathConnectingErr, err)
	}
}

func (p *path) countAttempt(ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ok {
		p.stats.Reconnects++
	} else {
		p.stats.ReconnectsFailed++
	}
}

// afterFailure decides between another attempt and the end.
func (p *path) afterFailure() {
	if p.closing() {
		p.setState(PathClosing, nil)
		return
	}
	p.setState(PathReconnecting, nil)
}

// rest waits in state closed for the user's next intent.
func (p *path) rest() {
	for {
		switch p.takeIntent() {
		case wantReconnect:
			p.failures, p.noReconnect, p.skipDelay, p.queueDepth = 0, false, true, 0
			p.setState(PathReconnecting, nil)
			return
		case wantDead:
			p.setState(PathDead, nil)
			return
		}
		<-p.kick
	}
}

// endLink ends the link of the path, if any: no new requests, nothing on
// the wire, then the requests in flight are failed over or fail.
func (p *path) endLink() {
	l := p.link
	if l == nil {
		return
	}
	p.link = nil
	l.fail(ErrConnLost)
	p.session.linkDown(l)
	l.close()
	p.mu.Lock()
	l.addDetails(&p.stats)
	p.current = nil
	p.mu.Unlock()
	p.session.onDrained(l)
}

// await waits until done says so, or ctx ends. done is called with mu held.
func (p *path) await(ctx context.Context, done func() bool) error {
	for {
		p.mu.Lock()
		ok, changed := done(), p.changed
		p.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// reconnectPatience is how long a manual reconnect goes on when it is refused:
// longer than our server needs to notice a dead path.
const reconnectPatience = 6 * time.Second

// reconnect connects the path again, or joins the attempt in progress, and waits
// for the result. A server that still ends the old connections refuses the new
// ones, so later automatic attempts count too, for a while.
func (p *path) reconnect(ctx context.Context) error {
	patience := time.Now().Add(min(reconnectPatience, p.session.Timing().ConnectTimeout))
	p.mu.Lock()
	n := p.results
	if p.state != PathConnecting {
		p.wantLocked(wantReconnect)
	}
	p.mu.Unlock()
	for {
		var result error
		over := false
		err := p.await(ctx, func() bool {
			result, over = p.err, p.state == PathClosed || p.state == PathDead
			if p.state == PathConnected {
				result, over = nil, true
			}
			done := p.results > n
			if done {
				n = p.results
			}
			return done || p.state == PathDead
		})
		switch {
		case err != nil:
			return err
		case over && result == nil && p.State() != PathConnected:
			return fmt.Errorf("path is %v: %w", p.State(), syscall.ECONNRESET)
		case over, !mayPass(result), time.Now().After(patience):
			return result
		}
	}
}

// mayPass reports whether an attempt failed for a passing reason: the server
// refused it, or accepted and closed it, since it was still ending the path's
// last connections (a FENCE about these may arrive late, on another path).
func mayPass(err error) bool {
	return errors.Is(err, errRefused) || errors.Is(err, ErrConnLost) || errors.Is(err, errInterrupted)
}

// State returns the state of the path.
func (p *path) State() PathState {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state
}

// PathInfo describes a path.
type PathInfo struct {
	ID     int
	Addr   PathAddr
	Src    netip.Addr // in use, or that of the last connection
	Fabric string
	Device string // in use, or of the last connection; the fabric's name before
	Port   int    // of Device
	State  PathState
	// Security is how the path is protected; zero: not at all, or not connected.
	Security verbs.Security
	Err      error // why the path is not connected, nil if that was asked for
	Stats    PathStats
}

func (p *path) info() PathInfo {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := PathInfo{
		ID: p.id, Addr: p.addr, Src: p.addr.Src, Fabric: p.addr.Device.Info().Fabric,
		State: p.state, Err: p.err, Stats: p.details().PathStats,
	}
	if p.current != nil {
		i.Security = verbs.SecurityOf(p.current.conns[0].qp)
	}
	dev := p.addr.Device.Info()
	if p.lastDev != nil {
		dev = p.lastDev.Info()
	}
	i.Device, i.Port = dev.Name, dev.Port
	if p.lastSrc.IsValid() {
		i.Src = p.lastSrc
	}
	return i
}

// total are all counts since the path was made. mu is held.
func (p *path) total() (d PathDetails) {
	d.add(&p.stats)
	d.Failovers = p.failovers.Load()
	if l := p.current; l != nil {
		l.addDetails(&d)
		d.Latency = l.hb.lastLatency()
	}
	return d
}

// details are the counts since the last resets. mu is held.
func (p *path) details() PathDetails {
	d := p.total()
	d.since(&p.base)
	return d
}

// resetStats sets the given counts to zero.
func (p *path) resetStats(kinds StatKind) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.total()
	p.base.reset(kinds, &now)
}
