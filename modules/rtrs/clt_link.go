package rtrs

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// link is one incarnation of a path: its connections, and the server's memory
// as this incarnation may reach it. A path that is lost and made again gets a
// new link. Nothing of it changes after it was published, but for counters and
// the rkeys of bufs.
type link struct {
	path  *path
	slots *requestSlots
	dev   *sessionDevice
	route Route
	conns []*cltConn // by cid, those that were established

	linkParams
	shift uint     // of the buffer id in a request's immediate
	mem   []byte   // INFO messages and receive buffers, see clt_connect.go
	mr    verbs.MR // of mem

	// bufs are the server's chunks by permit. The rkey of a chunk belongs to
	// the queue that holds the permit.
	bufs []remoteBuf

	hb   heartbeatTimer
	info chan []byte // takes the INFO_RSP

	proofs *cltProofs // nil: no challenge is wanted

	failOnce sync.Once
	failed   chan struct{} // closed when the link is lost
	cause    error         // set before failed is closed

	uuid  rtrswire.UUID // of the path when this was connected
	group rtrswire.UUID // of the session, likewise

	unanswered atomic.Int64 // requests found in flight when the connections ended
	calls      atomic.Int64 // admin requests among them
	ended      atomic.Bool  // nothing of it can use a chunk of the server any more

	// Guarded by the session's mu.
	epoch   uint64        // the session's, when it was connected
	fencing chan struct{} // while a FENCE for this link is under way; closed at its end
	pausing bool          // fenceLater will come
	busy    bool          // lost requests were sent again, but the link has not ended
	aborted bool          // lost requests were aborted
}

// linkParams are the server's parameters, from its answer to connection 0.
type linkParams struct {
	queueDepth int
	chunkSize  int  // bytes
	maxIOSize  int  // bytes
	maxHdrSize int  // bytes
	newRkey    bool // every answer carries the buffer's next rkey
	fences     bool // the server answers FENCE
	beats      bool // the server answers HB_MSG on every connection
	reasons    bool // the server tells why it refuses a session

	// incarnation of the server's session; zero: not told
	incarnation rtrswire.UUID
}

// remoteBuf is where a chunk of the server is.
type remoteBuf struct {
	addr uint64
	rkey uint32
}

func newLink(p *path, dev *sessionDevice, route Route) *link {
	p.session.mu.Lock()
	defer p.session.mu.Unlock()
	return &link{
		path:   p,
		dev:    dev,
		route:  route,
		uuid:   p.uuid,
		group:  p.session.uuid,
		info:   make(chan []byte, 1),
		failed: make(chan struct{}),
		proofs: newCltProofs(&p.session.cfg),
	}
}

// failLink marks the link as lost; the first cause counts. It never blocks. Any
// goroutine.
func (l *link) failLink(cause error) {
	l.failOnce.Do(func() {
		l.cause = cause
		close(l.failed)
	})
}

// isLost reports whether fail has been called.
func (l *link) isLost() bool {
	select {
	case <-l.failed:
		return true
	default:
		return false
	}
}

// close disconnects all connections in the order of their cids, waits until
// nothing of them can touch memory any more, and frees them. Not for owners.
func (l *link) close() {
	for _, c := range l.conns {
		c.qp.Disconnect()
	}
	for _, c := range l.conns {
		<-c.gone
	}
	for _, c := range l.conns {
		c.destroyQP()
	}
	if l.mr != nil {
		_ = l.mr.Close() // not in use: all queue pairs are gone
	}
	l.proofs.close()
	l.route.releaseRoute()
}

// startBeats begins the heartbeats. Before the link is published.
func (l *link) startBeats(now time.Time) {
	c := l.conns[0]
	l.hb.startBeats(now, l.path.session.Timing().Heartbeat)
	l.hb.alarm.f = l.sendBeat
	c.poller.Do(func() {
		if !c.down {
			c.poller.alarms.setAlarm(&l.hb.alarm, l.hb.next)
		}
	})
}

// sendBeat is called when a heartbeat is due. Owner of connection 0.
func (l *link) sendBeat(now time.Time) {
	t := l.path.session.Timing()
	heard := false
	for _, c := range l.conns {
		h := c.stats.takeHeard()
		heard = heard || h
		if !l.watchConn(c, h, t.HeartbeatMisses) {
			return
		}
	}
	switch l.hb.onTick(now, heard, t.Heartbeat, t.HeartbeatMisses) {
	case hbSend:
		l.hb.sendOn(l.conns[0].conn)
	case hbDead:
		l.failLink(ErrHeartbeat)
		return
	}
	l.conns[0].poller.alarms.setAlarm(&l.hb.alarm, l.hb.next)
}

// watchConn looks after one connection: the others may live while the network, or
// the server's thread, has lost this one. While it has requests in flight and is
// silent it gets an HB_MSG of its own in each interval; a slow disk does not
// keep the server from answering that. After as many intervals as the path has,
// the path is given up, and watch returns false. Owner of connection 0.
func (l *link) watchConn(c *cltConn, heard bool, misses int) bool {
	if c.cid == 0 || !l.beats {
		return true
	}
	if heard || c.stats.inFlightCount() == 0 {
		c.silent = 0
		return true
	}
	if c.silent++; c.silent > misses+1 {
		l.failLink(fmt.Errorf("%w on connection %d", ErrHeartbeat, c.cid))
		return false
	}
	c.poller.Do(func() {
		if !c.down {
			c.postImm(rtrswire.HeartbeatImm)
		}
	})
	return true
}

// probeServer gives the server one interval to show that it knows the link. Any
// goroutine.
func (l *link) probeServer() {
	c := l.conns[0]
	c.poller.Do(func() {
		if c.down {
			return
		}
		for _, c := range l.conns {
			c.stats.takeHeard()
		}
		t := l.path.session.Timing()
		if l.hb.probePeer(time.Now(), t.Heartbeat, t.HeartbeatMisses) {
			l.hb.sendOn(c.conn)
			c.poller.alarms.setAlarm(&l.hb.alarm, l.hb.next)
		}
	})
}

func (l *link) latencyCost() int64 { return l.hb.latency.Load() }

// inflightCount sums over the queues; each part is exact for its queue.
func (l *link) inflightCount() (sum int64) {
	for _, c := range l.conns {
		sum += c.stats.inFlightCount()
	}
	return sum
}

// linkSecurity returns how the link is protected.
func (l *link) linkSecurity() verbs.Security {
	if p := l.proofs; p != nil && p.security.Peer != "" {
		return p.security
	}
	return verbs.SecurityOf(l.conns[0].qp)
}

// setBuffers fills the table of chunks from a checked INFO_RSP.
func (l *link) setBuffers(rsp rtrswire.InfoRsp) {
	l.bufs = make([]remoteBuf, 0, l.queueDepth)
	for i := range rsp.Count() {
		d := rsp.Desc(i)
		for off := 0; off < int(d.Len); off += l.chunkSize {
			l.bufs = append(l.bufs, remoteBuf{d.Addr + uint64(off), d.Key})
		}
	}
}

// addDetails adds all that the connections count to d.
func (l *link) addDetails(d *PathDetails) {
	pollers := len(l.path.session.cfg.Pollers)
	for _, c := range l.conns {
		d.addConn(&c.stats, max(c.cid-1, 0)%pollers, pollers)
	}
}

// liveSet is a list of links that take requests, in path order, never empty.
// It is replaced as a whole: the data path loads it once per request.
type liveSet struct {
	links []*link
	slots *requestSlots
}
