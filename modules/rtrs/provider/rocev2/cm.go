package rocev2

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The connection manager. One goroutine of each port receives its messages. They,
// the timers and the callers of Connect, Accept and Disconnect hold one lock. A
// message is answered with at most one message of the same length, so that forged
// addresses do not make it flood another host.

// connState is the state of a connection.
//
//	active:  reqSent ---REP--> established --Disconnect--> dreqSent --DREP--> timeWait
//	passive: reqReceived --Accept--> repSent --RTU--> established
//	                     --Reject--> timeWait         --DREQ--> timeWait
//	         repSent --Disconnect--> left --RTU--> dreqSent
type connState uint8

const (
	connReqSent     connState = iota // this end has asked
	connReqReceived                  // the consumer has to answer
	connRepSent                      // accepted; the peer may not have the answer yet
	connLeft                         // as connRepSent, and this end has disconnected
	connEstablished
	connDreqSent // this end has disconnected, the peer has to answer
	connTimeWait // ended; late messages are still answered
)

const (
	firstRepeat = 200 * time.Millisecond // until a message without an answer is repeated; doubled each time
	lastRepeat  = 2 * time.Second
	rtuRepeat   = 100 * time.Millisecond
	rtuRepeats  = 5
	dreqRepeats = 6
	timeWait    = 2 * time.Second
	maxMRA      = time.Minute
	mraCode     = 24 // 4.096 us * 2^24 = 68 s, as the kernel's
)

// cmConn is a connection as the manager sees it. manager.mu guards it.
type cmConn struct {
	m     *connManager
	state connState
	port  *udpPort
	peer  netip.Addr // with zone

	local, remote       uint32 // communication ids
	tid                 uint64
	guid                uint64 // of the peer
	localQPN, remoteQPN uint32
	fixedID             bool // the peer can fix the identification

	q      *qp // while the connection is asked for or live
	last   mad // repeated by the timer, or when the peer repeats itself
	timer  *time.Timer
	wait   time.Duration
	tries  int
	answer chan connResult // active side: the end of Connect

	suspect uint32      // path MTU that may have made the connection fail; 0: none
	heard   atomic.Bool // a data packet of the peer has come
	// succeeds reports that the peer's queue pair had another connection when this one
	// was accepted, which ends when the peer shows that it has this one.
	succeeds atomic.Bool
}

type connResult struct {
	private []byte
	err     error
}

// peerKey names a connection by the ids of its peer.
type peerKey struct {
	addr netip.Addr
	guid uint64
	id   uint32
}

// connManager implements the connection manager of a device.
type connManager struct {
	dev   *Device
	guid  uint64
	stats queueCounters

	displaced atomic.Uint64 // handshakes ended to make room for newer ones

	mu         sync.Mutex // taken before cq.mu
	conns      map[uint32]*cmConn
	byPeer     map[peerKey]*cmConn                 // passive ones
	byQPN      map[peerKey]*cmConn                 // live ones, id is the peer's queue pair number
	listeners  map[uint64][]*listener              // by service ID
	handshakes softverbs.HandshakeLimiter[*cmConn] // handshakes that others began, see handshake_limiter.go
	learned    map[netip.Addr]learnedMTU           // path MTUs, by peer; see mtu.go
	psn        uint32
	stopped    bool
}

func (m *connManager) init(d *Device, guid uint64) {
	m.dev, m.guid, m.handshakes = d, guid, newHandshakeLimiter(&d.cfg)
	m.conns, m.byPeer, m.byQPN = map[uint32]*cmConn{}, map[peerKey]*cmConn{}, map[peerKey]*cmConn{}
	m.listeners, m.learned = map[uint64][]*listener{}, map[netip.Addr]learnedMTU{}
}

// random32 and random64 return numbers that a peer must repeat. They cannot be
// guessed without seeing the packets.
func random32() uint32 { return uint32(random64()) }

func random64() uint64 {
	var b [8]byte
	rand.Read(b[:]) // never fails
	return be.Uint64(b[:])
}

// newConn makes a connection with an id of its own. m.mu is held.
func (m *connManager) newConn(p *udpPort, peer netip.Addr, state connState) *cmConn {
	id := random32()
	for id == 0 || m.conns[id] != nil {
		id = random32()
	}
	c := &cmConn{m: m, state: state, port: p, peer: peer, local: id}
	m.conns[c.local] = c
	return c
}

func (c *cmConn) peerKey() peerKey { return peerKey{c.peer, c.guid, c.remote} }
func (c *cmConn) qpnKey() peerKey  { return peerKey{c.peer, c.guid, c.remoteQPN} }

// run receives the messages of a port until it is closed.
func (p *udpPort) run() {
	defer close(p.done)
	m := &p.dev.cm
	b := make([]byte, maxPacket+1)
	for {
		n, from, err := p.control.ReadFromUDPAddrPort(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond) // a passing failure
			continue
		}
		if why := m.receivePacket(p, from, b[:n]); why != dropNone {
			m.stats.dropped[why].Add(1)
		}
	}
}

// receivePacket checks a packet for queue pair 1 and handles its message.
func (m *connManager) receivePacket(p *udpPort, from netip.AddrPort, b []byte) dropReason {
	msg, why := parseDatagram(b)
	if why != dropNone {
		return why
	}
	peer := from.Addr().Unmap()
	ps := newPseudo(peer, p.addr, from.Port())
	if !ps.checkPacket(b, nil, 0) {
		return dropICRC
	}
	if f := m.dev.faults.Load(); f != nil && f.control != nil && !f.control(msg) {
		return dropNone
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stopped {
		return dropState
	}
	return m.handleMessage(p, peer, msg, bth(b).fixedID())
}

// handleMessage handles a message by its kind. fixedID reports whether the sender can
// fix the identification of a connection. m.mu is held.
func (m *connManager) handleMessage(p *udpPort, peer netip.Addr, msg mad, fixedID bool) dropReason {
	if msg.attribute() == attrREQ {
		return m.onREQ(p, peer, msg, fixedID)
	}
	c := m.conns[msg.receiver()]
	if c != nil && (c.peer != peer || c.port != p) {
		return dropAddress
	}
	switch msg.attribute() {
	case attrREJ:
		return m.onREJ(c, peer, msg)
	case attrDREQ:
		return m.onDREQ(c, p, peer, msg)
	}
	if c == nil {
		if msg.attribute() == attrRTU && fixedID {
			m.answerProbe(p, peer, msg)
		}
		return dropState
	}
	switch msg.attribute() {
	case attrREP:
		return m.onREP(c, msg, fixedID)
	case attrRTU:
		return m.onRTU(c, msg)
	case attrMRA:
		return m.onMRA(c, msg)
	case attrDREP:
		return m.onDREP(c, msg)
	}
	return dropMAD
}

// sendMessage transmits a message. m.mu is held.
func (m *connManager) sendMessage(p *udpPort, peer netip.Addr, msg mad) {
	b := make([]byte, cmPacketLen)
	putDatagram(b, msg, m.psn)
	b[8] |= cmFixedID
	m.psn++
	ps := newPseudo(p.addr, peer, roceUDPPort)
	ps.sealPacket(b, 0)
	if _, err := p.control.WriteToUDPAddrPort(b, netip.AddrPortFrom(peer, roceUDPPort)); err != nil {
		m.dev.cfg.Logger.Debug("rocev2 message was not sent", "peer", peer, "err", err)
	}
}

// sendKept sends a message and keeps it to be repeated.
func (c *cmConn) sendKept(msg mad) {
	c.last = msg
	c.m.sendMessage(c.port, c.peer, msg)
}

// scheduleRepeat sends the last message again after wait, then at doubled intervals, at
// most tries times.
func (c *cmConn) scheduleRepeat(wait time.Duration, tries int) {
	c.wait, c.tries = wait, tries
	c.setTimer(wait)
}

// setTimer calls expire after d, in place of an earlier call.
func (c *cmConn) setTimer(d time.Duration) {
	if c.timer != nil {
		c.timer.Stop()
	}
	var t *time.Timer
	t = time.AfterFunc(d, func() {
		c.m.mu.Lock()
		defer c.m.mu.Unlock()
		if c.timer == t && !c.m.stopped {
			c.onTimer()
		}
	})
	c.timer = t
}

func (c *cmConn) onTimer() {
	switch c.state {
	case connTimeWait:
		c.removeTraces()
	case connRepSent:
		if !c.heard.Load() {
			c.endByPeer(peerLost)
		}
	case connLeft:
		c.removeTraces()
	case connEstablished:
		if c.heard.Load() {
			return
		}
		c.repeatLast()
	case connReqSent:
		c.repeatLast() // Connect has its own limit
	case connDreqSent:
		if !c.repeatLast() {
			c.removeTraces()
		}
	}
}

// repeatLast repeats the last message. It returns false if no repetition is left.
func (c *cmConn) repeatLast() bool {
	if c.tries == 0 {
		return false
	}
	c.tries--
	c.m.sendMessage(c.port, c.peer, c.last)
	c.wait = min(2*c.wait, lastRepeat)
	c.setTimer(c.wait)
	return true
}

// removeTraces removes every trace of the connection.
func (c *cmConn) removeTraces() {
	c.m.removeHandshake(c)
	if c.timer != nil {
		c.timer.Stop()
		c.timer = nil // it may have fired, and wait for the lock
	}
	delete(c.m.conns, c.local)
	if c.m.byPeer[c.peerKey()] == c {
		delete(c.m.byPeer, c.peerKey())
	}
	c.notLive()
}

// notLive takes the connection from the list of those that carry data. What is left
// answers late messages and has no use for the queue pair, whose queues are large.
func (c *cmConn) notLive() {
	c.q = nil
	if c.m.byQPN[c.qpnKey()] == c {
		delete(c.m.byQPN, c.qpnKey())
	}
}

// enterLinger ends the connection and keeps its state for a while. Late messages are
// answered with last, unless it is nil.
func (c *cmConn) enterLinger(last mad) {
	c.state, c.last = connTimeWait, last
	c.notLive()
	c.setTimer(timeWait)
}

// endByPeer ends a connection for a reason that came from its peer.
func (c *cmConn) endByPeer(why endReason) {
	q := c.q
	c.enterLinger(nil)
	if q != nil && q.peerGone.CompareAndSwap(0, uint32(why)) {
		q.cq.Submit(q)
	}
}

// sendDisconnect tells the peer that this end has disconnected. It does not before
// the peer has shown that it has received the answer, because its address may
// be forged. suspect is the path MTU if that may be the cause, else 0. Any
// goroutine may call it.
func (m *connManager) sendDisconnect(c *cmConn, suspect uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	c.suspect = suspect
	switch {
	case m.stopped:
	case c.state == connRepSent && !c.heard.Load():
		c.notLive()
		c.state = connLeft // the timer goes on
	case c.state == connRepSent, c.state == connEstablished:
		c.sayDREQ()
	}
}

func (c *cmConn) sayDREQ() {
	c.notLive()
	c.state = connDreqSent
	c.sendKept(newDREQ(random64(), c.local, c.remote, c.remoteQPN))
	c.scheduleRepeat(firstRepeat, dreqRepeats)
}

// establishConn hands the connection to the owner of q's completion queue. m.mu is
// held.
func (m *connManager) establishConn(c *cmConn, q *qp, l *connAgreement, hold bool) error {
	q.conn = c
	q.initHalves(l)
	q.req.hold = hold
	if !q.Move(softverbs.Connecting, softverbs.Up) {
		return fmt.Errorf("queue pair was destroyed: %w", verbs.ErrClosed)
	}
	c.q, c.localQPN = q, q.qpn
	if m.byQPN[c.qpnKey()] == nil {
		m.byQPN[c.qpnKey()] = c
	} else {
		c.succeeds.Store(true)
	}
	q.cq.Submit(q)
	return nil
}

// endPredecessor ends the connection that the peer's queue pair had before c: the peer has shown
// that it has c, so it has forgotten that one. A request alone shows nothing, since its
// address may be forged. m.mu is held.
func (m *connManager) endPredecessor(c *cmConn) {
	if !c.succeeds.Swap(false) || c.q == nil {
		return
	}
	if old := m.byQPN[c.qpnKey()]; old != nil {
		old.endByPeer(peerStale)
	}
	m.byQPN[c.qpnKey()] = c
}

// onREJ handles the refusal of a request or of an answer of this end. It also
// handles the end of a request that the peer has given up.
func (m *connManager) onREJ(c *cmConn, peer netip.Addr, msg mad) dropReason {
	f := decodeREJ(msg)
	if c == nil && f.reason == reasonTimeout && len(f.ari) >= 8 {
		c = m.byPeer[peerKey{peer, be.Uint64(f.ari), msg.sender()}]
	}
	if c == nil || !c.matchesReject(msg, &f) {
		return dropState
	}
	if msg.receiver() == c.local {
		m.removeHandshake(c)
	}
	switch c.state {
	case connReqSent:
		c.answer <- connResult{err: f.err()}
		c.removeTraces()
	case connReqReceived, connLeft:
		c.enterLinger(nil)
	default:
		c.endByPeer(peerStale)
	}
	return dropNone
}

// matchesReject reports whether a REJ fits the messages before it: it belongs to the
// same exchange, comes from the same end and names a message that is still
// unanswered. An established connection ends with a DREQ. A REJ ends it only if
// the peer has lost its state, or may not have established it.
func (c *cmConn) matchesReject(msg mad, f *rejFields) bool {
	if msg.tid() != c.tid {
		return false
	}
	sender := msg.sender() == c.remote
	switch c.state {
	case connReqSent: // a peer that refuses at once has no id
		return f.about != aboutREP && (sender || msg.sender() == 0 || c.remote == 0)
	case connReqReceived:
		return sender && f.about == aboutOther
	case connRepSent, connLeft:
		return sender && f.about != aboutREQ
	case connEstablished:
		return sender && f.about != aboutREQ && (f.reason == reasonStale || c.answer != nil && !c.heard.Load())
	}
	return false
}

// err returns the error of Connect.
func (f *rejFields) err() error {
	if f.reason == reasonConsumer {
		return &verbs.RejectError{Private: append([]byte(nil), f.private...)}
	}
	if f.reason == reasonInvalidMTU && len(f.ari) > 0 && f.ari[0] >= minMTUCode {
		return &mtuError{f.ari[0]}
	}
	if f.reason == reasonInvalidService {
		return fmt.Errorf("connection refused: %s: %w", f.reason, verbs.ErrNoService)
	}
	return fmt.Errorf("connection refused: %s", f.reason)
}

// probePeer asks the peer whether it still knows the connection: a peer that does
// ignores the RTU, one that was started again since then answers with a REJ. Only ends of
// ours do. Any goroutine may call it.
func (m *connManager) probePeer(c *cmConn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	known := c.state == connEstablished || c.state == connRepSent && c.heard.Load()
	if known && c.fixedID && !m.stopped {
		m.sendMessage(c.port, c.peer, newMAD(attrRTU, c.tid, c.local, c.remote))
	}
}

// answerProbe refuses an RTU of an unknown connection. The answer is as long as the
// RTU, and the peer takes it only with the ids and the transaction of the connection,
// which the RTU has brought. m.mu is held.
func (m *connManager) answerProbe(p *udpPort, peer netip.Addr, msg mad) {
	no := rejFields{about: aboutREP, reason: reasonStale}
	m.sendMessage(p, peer, no.encode(msg.tid(), msg.receiver(), msg.sender()))
}

// onDREQ handles a request to disconnect. If the connection is unknown it is
// answered, too, so that the peer stops repeating it.
func (m *connManager) onDREQ(c *cmConn, p *udpPort, peer netip.Addr, msg mad) dropReason {
	answer := newMAD(attrDREP, msg.tid(), msg.receiver(), msg.sender())
	if c == nil {
		m.sendMessage(p, peer, answer)
		return dropNone
	}
	if msg.sender() != c.remote || msg.dreqQPN() != c.localQPN {
		return dropState
	}
	switch c.state {
	case connRepSent, connEstablished:
		c.endByPeer(peerLeft)
	case connDreqSent, connLeft:
		c.onPeerAnswer()
		c.enterLinger(nil)
	case connTimeWait:
	default:
		return dropState
	}
	c.sendKept(answer)
	return dropNone
}

func (m *connManager) onDREP(c *cmConn, msg mad) dropReason {
	if c.state != connDreqSent || msg.sender() != c.remote || msg.tid() != c.last.tid() {
		return dropState
	}
	c.onPeerAnswer()
	c.enterLinger(nil)
	return dropNone
}

// onPeerAnswer records that the peer answers. So if the connection failed because
// packets of full size did not arrive, their size was the reason.
func (c *cmConn) onPeerAnswer() {
	if c.suspect != 0 {
		c.m.onPacketsLost(c.peer, c.suspect)
		c.suspect = 0
	}
}

// endAll ends all connections. The ports are closed.
func (m *connManager) endAll() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stopped = true
	for _, c := range m.conns {
		if c.state == connReqSent && len(c.answer) == 0 {
			c.answer <- connResult{err: verbs.ErrClosed}
		}
		c.removeTraces()
	}
}
