package rtrs

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
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

// path is one path of a session. From its first connection on one goroutine runs
// it, and no other changes its state.
type path struct {
	session *Session
	id      int // grows in the order of adding
	addr    PathAddr
	uuid    rtrswire.UUID // guarded by the session's mu; changes only while no connection is being made
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

	connecting bool          // guarded by the session's mu; no FENCE for this path may start
	failovers  atomic.Uint64 // requests taken over from other paths

	mu      sync.Mutex // below the session's mu
	state   PathState
	err     error // why the path is not connected
	intent  pathIntent
	cancel  func(cause error) // ends the attempt under way
	results uint64            // attempts that ended, with success or not, and closings
	changed chan struct{}     // closed and replaced when the state changes
	stats   PathDetails       // of earlier links
	base    PathDetails       // counts at the last resets
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
	p.session.events.addEvent(Event{Kind: PathChanged, Session: p.session, Path: p.id, State: next, Err: cause})
	return true
}

// logMove logs that the path is in another state. The loss of a path and its return
// are logged at level info, the attempts between them at level debug.
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

// setIntent sets the user's intent for the path's goroutine.
func (p *path) setIntent(i pathIntent) {
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

// takeIntent returns the user's intent. It returns wantReconnect once.
func (p *path) takeIntent() pathIntent {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := p.intent
	if i == wantReconnect {
		p.intent = wantUp
	}
	return i
}

// closeWanted reports whether the user wants the path closed or removed.
func (p *path) closeWanted() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.intent >= wantClosed
}

// run takes the path from state to state until it is dead. It begins with the state
// that the path has when the session starts run.
func (p *path) run() {
	defer close(p.ended)
	for {
		switch p.state { // only this goroutine writes it
		case PathConnecting:
			p.connectOnce()
		case PathConnected:
			p.awaitLoss()
		case PathConnectingErr:
			p.afterFailure()
		case PathReconnecting:
			p.waitTurn()
		case PathClosing:
			p.endLink()
			p.setState(PathClosed, nil)
		case PathClosed:
			p.awaitIntent()
		case PathDead:
			if p.twin {
				p.session.removePath(p)
			}
			return
		}
	}
}

// awaitLoss waits for the end of a connected path.
func (p *path) awaitLoss() {
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
	expected := p.session.isExpected()
	giveUp := p.noReconnect || !manual && !expected && !timing.mayReconnect(p.failures)
	delay := timing.reconnectDelay(p.failures)
	switch {
	case manual, giveUp:
		delay = 0
	case expected:
		delay = min(delay, returnPause)
	}
	p.sleepFor(delay)
	if giveUp || p.closeWanted() {
		p.setState(PathClosing, nil)
		return
	}
	p.setState(PathConnecting, nil)
}

// sleepFor waits for d. A manual reconnect or a close ends it early.
func (p *path) sleepFor(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			return
		case <-p.kick:
			if p.takeIntent() == wantReconnect || p.closeWanted() {
				return
			}
		}
	}
}

// afterFailure decides between another attempt and the end.
func (p *path) afterFailure() {
	if p.closeWanted() {
		p.setState(PathClosing, nil)
		return
	}
	p.setState(PathReconnecting, nil)
}

// awaitIntent waits in state closed for the user's next intent.
func (p *path) awaitIntent() {
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

// endLink ends the link of the path, if there is one. First the data path sends
// nothing on it any more, then its connections end. After that the requests in
// flight are failed over or fail.
func (p *path) endLink() {
	l := p.link
	if l == nil {
		return
	}
	p.link = nil
	l.failLink(ErrConnLost)
	p.session.linkDown(l)
	l.close()
	p.mu.Lock()
	l.addDetails(&p.stats)
	p.current = nil
	p.mu.Unlock()
	p.session.onDrained(l)
}

// State returns the state of the path.
func (p *path) State() PathState {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state
}
