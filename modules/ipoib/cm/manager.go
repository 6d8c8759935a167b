package cm

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Manager holds the connections of an interface. All methods may be called by
// any goroutine.
type Manager struct {
	cfg       Config
	pd        verbs.PD
	cq        verbs.CQ
	event     int // eventfd that wakes the owner
	listeners []verbs.Listener
	ctx       context.Context
	cancel    context.CancelFunc
	now       time.Time // used by the owner alone

	asleep         atomic.Bool
	sent, received atomic.Uint64 // messages

	// Locks that may be taken while Conn.mu is held.
	statsMu sync.Mutex
	stats   Stats
	markMu  sync.Mutex
	marked  []*Conn // connections with something to post

	mu     sync.Mutex // taken before Conn.mu
	conns  map[peerAddr]*Conn
	inward map[peerAddr]*passiveConn
	users  map[uint64]func(*verbs.WC) // functions for completions, by the context of the queue pair
	last   uint64                     // the last context given
	closed bool

	wg    sync.WaitGroup // all goroutines but the owner
	ended chan struct{}  // closed when the owner has ended
}

// Open listens at both service IDs of the interface and starts the owner.
func Open(cfg Config) (*Manager, error) {
	m, err := open(cfg.withDefaults())
	if err != nil {
		return nil, fmt.Errorf("open connected mode at %s: %w", cfg.Local, err)
	}
	return m, nil
}

func open(cfg Config) (_ *Manager, err error) {
	m := &Manager{cfg: cfg, event: -1, now: time.Now(), conns: map[peerAddr]*Conn{}, inward: map[peerAddr]*passiveConn{}, users: map[uint64]func(*verbs.WC){}, ended: make(chan struct{})}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			m.cancel()
			m.freeResources()
		}
	}()
	if m.pd, err = cfg.Fabric.AllocPD(); err != nil {
		return nil, err
	}
	if m.cq, err = cfg.Fabric.CreateCQ(1 << 12); err != nil {
		return nil, err
	}
	if m.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	for _, id := range []uint64{wire.ServiceIDLinux(cfg.QPN), wire.ServiceIDRFC(cfg.QPN)} {
		l, err := cfg.Fabric.ListenService(verbs.Service{Local: cfg.Local, ID: id, PKey: cfg.PKey})
		if err != nil {
			return nil, err
		}
		m.listeners = append(m.listeners, l)
	}
	for _, l := range m.listeners {
		m.wg.Add(1)
		go m.acceptLoop(l)
	}
	go m.runOwner()
	return m, nil
}

// freeResources frees the resources of open.
func (m *Manager) freeResources() error {
	var err error
	for _, l := range m.listeners {
		err = errors.Join(err, l.Close())
	}
	if m.cq != nil {
		err = errors.Join(err, m.cq.Close())
	}
	if m.pd != nil {
		err = errors.Join(err, m.pd.Close())
	}
	if m.event >= 0 {
		err = errors.Join(err, unix.Close(m.event))
	}
	return err
}

// Close ends all connections and waits until their memory is freed.
func (m *Manager) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return os.ErrClosed
	}
	m.closed = true
	m.mu.Unlock()
	m.cancel()
	var err error
	for _, l := range m.listeners {
		err = errors.Join(err, l.Close())
	}
	m.listeners = nil
	m.wg.Wait() // no connection is begun any more
	m.disconnectAll()
	<-m.ended
	return errors.Join(err, m.freeResources())
}

// disconnectAll starts to disconnect all connections.
func (m *Manager) disconnectAll() {
	m.mu.Lock()
	for _, c := range m.conns {
		if s, _ := c.State(); s == Up {
			c.qp.Disconnect()
		}
	}
	for _, p := range m.inward {
		p.qp.Disconnect()
	}
	m.mu.Unlock()
	m.wakeOwner()
}

// Stats returns the counters.
func (m *Manager) Stats() Stats {
	m.mu.Lock()
	n := len(m.inward)
	m.mu.Unlock()
	m.statsMu.Lock()
	defer m.statsMu.Unlock()
	s := m.stats
	s.Passive, s.TxMessages, s.RxMessages = n, m.sent.Load(), m.received.Load()
	return s
}

func (m *Manager) updateStats(f func(s *Stats)) {
	m.statsMu.Lock()
	defer m.statsMu.Unlock()
	f(&m.stats)
}

// Lookup returns the connection to the interface with the UD queue pair qpn at
// addr. If there is none it begins to make one. It returns nil after Close.
func (m *Manager) Lookup(addr netip.Addr, qpn uint32) *Conn {
	to := peerAddr{addr.Unmap(), qpn}
	m.mu.Lock()
	defer m.mu.Unlock()
	if c := m.conns[to]; c != nil || m.closed {
		return c
	}
	c := &Conn{m: m, to: to, room: make(chan struct{}, 1)}
	m.conns[to] = c
	m.wg.Add(1)
	go c.runConnect()
	return c
}

// removeConn removes c, so that Lookup makes another connection to its peer.
func (m *Manager) removeConn(c *Conn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.conns[c.to] == c {
		delete(m.conns, c.to)
	}
}

// addHandler returns the context of a new queue pair. f gets the completions of that
// queue pair.
func (m *Manager) addHandler(f func(*verbs.WC)) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last++
	m.users[m.last] = f
	return m.last
}

func (m *Manager) removeHandler(id uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.users, id)
}

// admitPassive lists a connection of a peer. An earlier connection of the same
// interface is stale and is disconnected. admit reports whether there is room.
func (m *Manager) admitPassive(p *passiveConn) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.hasRoom(p.from) {
		return false
	}
	if old := m.inward[p.from]; old != nil {
		old.qp.Disconnect()
	}
	m.inward[p.from] = p
	return true
}

// hasRoom reports whether a connection of a peer may be added. m.mu is held.
func (m *Manager) hasRoom(from peerAddr) bool {
	return !m.closed && (m.inward[from] != nil || len(m.inward) < m.cfg.MaxPassive)
}

// atLimit reports whether no connection of a peer may be added.
func (m *Manager) atLimit(from peerAddr) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.hasRoom(from)
}

func (m *Manager) removePassive(p *passiveConn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.users, p.id)
	if m.inward[p.from] == p {
		delete(m.inward, p.from)
	}
}

// markDirty adds c to the connections with something to post and wakes the owner.
func (m *Manager) markDirty(c *Conn) {
	m.markMu.Lock()
	m.marked = append(m.marked, c)
	m.markMu.Unlock()
	m.wakeOwner()
}

// wakeOwner wakes the owner if it sleeps.
func (m *Manager) wakeOwner() {
	if m.asleep.Swap(false) {
		unix.Write(m.event, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
}
