package cm

import (
	"errors"
	"net/netip"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// State of a connection to a peer.
type State uint8

const (
	Connecting State = iota
	Up
	Refused // the peer takes datagrams only, for a while
	Gone
)

// String returns the name of the state.
func (s State) String() string { return [...]string{"connecting", "up", "refused", "gone"}[s] }

// Conn is a connection that this end sends on. All methods may be called by any
// goroutine.
type Conn struct {
	m  *Manager
	to peerAddr

	// Used by the owner alone once the connection is up.
	id uint64
	qp verbs.QP
	mr verbs.MR

	mu      sync.Mutex
	state   State
	mtu     int       // longest message that the peer receives
	until   time.Time // end of state Refused
	used    time.Time
	ring    sendRing
	marked  bool          // the connection is in Manager.marked
	posted  int           // pieces of ring that are posted to the queue pair
	waiting [][]byte      // frames that wait for the connection, the oldest first
	room    chan struct{} // has a token when space in ring was freed
}

// peerAddr names an interface.
type peerAddr struct {
	addr netip.Addr
	qpn  uint32 // of its UD queue pair
}

// State returns the state of the connection and, if it is Up, the longest
// message that the peer receives, in bytes, with the encapsulation header.
func (c *Conn) State() (State, int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state, c.mtu
}

// Wait keeps a copy of frame until the connection is up, one of three at most.
// It reports whether it did: the connection is Connecting.
func (c *Conn) Wait(frame []byte) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != Connecting {
		return false
	}
	if len(c.waiting) >= connecting {
		c.m.updateStats(func(s *Stats) { s.TxDrop++ })
		c.waiting = c.waiting[1:] // drop the oldest
	}
	c.waiting = append(c.waiting, append([]byte(nil), frame...))
	return true
}

// Send copies frame into the ring to be sent. It waits for space in the ring
// for at most patience. It reports whether the frame was taken. A frame that
// was taken may still be lost with the connection.
func (c *Conn) Send(frame []byte, patience time.Duration) bool {
	var timeout <-chan time.Time
	for {
		ok, mark, why := c.trySend(frame)
		if mark {
			c.m.markDirty(c)
		}
		if ok {
			return true
		}
		if patience <= 0 || why != Up {
			break
		}
		if timeout == nil {
			timeout = time.After(patience)
		}
		select {
		case <-c.room:
			continue
		case <-timeout:
		}
		break
	}
	c.m.updateStats(func(s *Stats) { s.TxDrop++ })
	return false
}

// trySend copies frame into the ring. ok reports whether there was room. If
// mark is true the caller must call Manager.markDirty.
func (c *Conn) trySend(frame []byte) (ok, mark bool, _ State) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != Up || len(frame) > c.mtu || len(c.ring.pieces) >= sendQueue {
		return false, false, c.state
	}
	if _, ok = c.ring.push(frame); !ok {
		return false, false, c.state
	}
	mark, c.marked = !c.marked, true
	c.used = time.Now()
	return true, mark, c.state
}

// runConnect makes the connection. It runs in its own goroutine.
func (c *Conn) runConnect() {
	defer c.m.wg.Done()
	err := c.dialPeer()
	if err == nil {
		return
	}
	c.m.removeHandler(c.id)
	c.freeResources()
	c.m.cfg.Logger.Debug("IPoIB connection was refused", "peer", c.to.addr, "qpn", c.to.qpn, "err", err)
	c.mu.Lock()
	lost := uint64(len(c.waiting))
	c.state, c.until, c.waiting = Refused, time.Now().Add(c.m.cfg.Retry), nil
	c.ring = sendRing{} // the peer may refuse for long, and nothing is sent meanwhile
	c.mu.Unlock()
	c.m.updateStats(func(s *Stats) { s.Refused++; s.TxDrop += lost })
}

// dialPeer connects to the service ID of Linux, and if nothing listens there to
// that of the RFC.
func (c *Conn) dialPeer() (err error) {
	m := c.m
	c.ring.buf = make([]byte, m.cfg.SendBuffer)
	if c.mr, err = m.pd.RegMR(c.ring.buf, 0); err != nil {
		return err
	}
	private := wire.NewCMPrivate(m.cfg.QPN, uint32(m.cfg.ReceiveMTU))
	for _, id := range []uint64{wire.ServiceIDLinux(c.to.qpn), wire.ServiceIDRFC(c.to.qpn)} {
		c.id = m.addHandler(c.onCompletion)
		if c.qp, err = m.cfg.Fabric.CreateQP(m.pd, verbs.QPConfig{CQ: m.cq, Context: c.id, SendQueue: sendQueue, RecvQueue: 1, MaxSGE: 1}); err != nil {
			return err
		}
		var answer []byte
		answer, err = m.cfg.Fabric.ConnectService(m.ctx, c.qp, verbs.Service{Local: m.cfg.Local, ID: id, PKey: m.cfg.PKey}, c.to.addr, private)
		if err == nil {
			return c.onConnected(answer)
		}
		if !errors.Is(err, verbs.ErrNoService) {
			return err
		}
		c.qp.Destroy()
		c.qp = nil
		m.removeHandler(c.id)
	}
	return err
}

// onConnected handles the private data of the peer's answer and brings the
// connection up.
func (c *Conn) onConnected(answer []byte) error {
	p := wire.CMPrivate(answer)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !p.Valid() || p.QPN() != c.to.qpn {
		c.qp.Disconnect()
		c.m.updateStats(func(s *Stats) { s.BadRequests++ })
		c.state, c.until, c.waiting = Refused, time.Now().Add(c.m.cfg.Retry), nil
		c.m.cfg.Logger.Debug("IPoIB connection has no use: the answer of the peer has wrong private data", "peer", c.to.addr, "qpn", c.to.qpn)
		return nil // the completion of the disconnect releases it
	}
	c.state, c.mtu, c.used = Up, int(min(p.ReceiveMTU(), uint32(len(c.ring.buf)))), time.Now()
	for _, f := range c.waiting {
		if len(f) <= c.mtu {
			c.ring.push(f)
		}
	}
	c.waiting = nil
	c.m.updateStats(func(s *Stats) { s.Connects++; s.Active++ })
	c.m.cfg.Logger.Debug("IPoIB connection is up", "peer", c.to.addr, "qpn", c.to.qpn, "mtu", c.mtu)
	if c.marked = len(c.ring.pieces) > 0; c.marked {
		c.m.markDirty(c)
	}
	return nil
}

// postPieces posts the pieces of ring that are not posted yet. Called by the owner.
func (c *Conn) postPieces() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.marked = false
	for c.state == Up && c.posted < len(c.ring.pieces) {
		p := c.ring.pieces[c.posted]
		sge := [1]verbs.SGE{{Buf: c.ring.buf[p.at : p.at+p.n], LKey: c.mr.LKey()}}
		wr := [1]verbs.SendWR{{Op: verbs.OpSend, Signaled: true, SGEs: sge[:]}}
		if n, err := c.qp.PostSend(wr[:]); n < 1 {
			if err != nil && !errors.Is(err, verbs.ErrQueueFull) {
				c.qp.Disconnect()
			}
			return
		}
		c.posted++
	}
}

// onCompletion handles a completion. Called by the owner.
func (c *Conn) onCompletion(wc *verbs.WC) {
	if wc.Op == verbs.OpDisconnected {
		c.onEnd()
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.posted == 0 {
		return
	}
	c.ring.popOldest()
	c.posted--
	if wc.Status == verbs.StatusOK {
		c.m.sent.Add(1)
	} else {
		c.m.updateStats(func(s *Stats) { s.TxDrop++ })
	}
	select {
	case c.room <- struct{}{}:
	default:
	}
}

// onEnd frees the connection and removes it from the manager. The next frame to
// the peer makes another one. Called by the owner.
func (c *Conn) onEnd() {
	c.mu.Lock()
	wasUp := c.state == Up
	if wasUp {
		c.state = Gone
	}
	lost := uint64(len(c.ring.pieces))
	c.mu.Unlock()
	c.m.removeHandler(c.id)
	c.freeResources()
	c.m.updateStats(func(s *Stats) {
		s.TxDrop += lost
		if wasUp {
			s.Active--
			s.Broken++
		}
	})
	if wasUp {
		c.m.removeConn(c)
	}
	select {
	case c.room <- struct{}{}:
	default:
	}
}

// freeResources frees the queue pair and the memory region.
func (c *Conn) freeResources() {
	if c.qp != nil {
		c.qp.Destroy()
	}
	if c.mr != nil {
		c.mr.Close()
	}
}

// idleAction reports whether the connection is to be disconnected because it was
// idle, and whether its refusal is to be removed because the peer may be asked
// again.
func (c *Conn) idleAction(now time.Time, idle time.Duration) (disconnect, forget bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.state {
	case Up:
		return now.Sub(c.used) >= idle && len(c.ring.pieces) == 0, false
	case Refused:
		return false, !now.Before(c.until)
	}
	return false, false
}
