package cm

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// reapEvery is the interval at which the owner looks for idle connections.
const reapEvery = time.Second

// runOwner is the owner: it polls the completion queue until the manager is closed
// and all queue pairs have ended.
func (m *Manager) runOwner() {
	defer close(m.ended)
	var wcs [64]verbs.WC
	var marked []*Conn
	reap := time.Now().Add(reapEvery)
	for {
		m.now = time.Now()
		if !m.now.Before(reap) {
			m.reapIdle(m.now)
			reap = m.now.Add(reapEvery)
		}
		marked = m.takeMarked(marked[:0])
		for _, c := range marked {
			c.postPieces()
		}
		n := m.cq.Poll(wcs[:])
		for k := range wcs[:n] {
			m.dispatch(&wcs[k])
		}
		if n > 0 || len(marked) > 0 {
			continue
		}
		if m.drained() {
			return
		}
		m.sleepUntil(reap)
	}
}

func (m *Manager) dispatch(wc *verbs.WC) {
	m.mu.Lock()
	f := m.users[wc.QP]
	m.mu.Unlock()
	if f != nil {
		f(wc)
	}
}

func (m *Manager) takeMarked(b []*Conn) []*Conn {
	m.markMu.Lock()
	defer m.markMu.Unlock()
	b = append(b, m.marked...)
	clear(m.marked)
	m.marked = m.marked[:0]
	return b
}

// drained reports whether the manager is closed and has no queue pair left.
func (m *Manager) drained() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.closed && len(m.users) == 0
}

// sleepUntil waits until there is something to do, at most until the time given.
func (m *Manager) sleepUntil(until time.Time) {
	m.asleep.Store(true)
	m.markMu.Lock()
	busy := len(m.marked) > 0
	m.markMu.Unlock()
	if busy || m.isClosed() || !m.cq.Arm() {
		m.asleep.Store(false)
		if m.isClosed() {
			time.Sleep(time.Millisecond) // the rest of the queue pairs ends without an event
		}
		return
	}
	fds := []unix.PollFd{{Fd: int32(m.event), Events: unix.POLLIN}, {Fd: int32(m.cq.FD()), Events: unix.POLLIN}}
	unix.Poll(fds, int(max(time.Until(until), 0)/time.Millisecond)+1) // an error is like a wake-up
	m.asleep.Store(false)
	if fds[0].Revents != 0 {
		var b [8]byte
		unix.Read(m.event, b[:])
	}
}

func (m *Manager) isClosed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.closed
}

// reapIdle disconnects idle connections and removes refusals that have expired.
func (m *Manager) reapIdle(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for to, c := range m.conns {
		disconnect, forget := c.idleAction(now, m.cfg.Idle)
		if disconnect {
			c.qp.Disconnect()
		}
		if forget {
			delete(m.conns, to)
		}
	}
	for _, p := range m.inward {
		if now.Sub(p.used) >= m.cfg.Idle {
			p.qp.Disconnect()
		}
	}
}
