package registry

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// Server serves a Table over TCP.
type Server struct {
	listener net.Listener
	log      *slog.Logger
	epoch    uint64
	done     chan struct{}
	wg       sync.WaitGroup

	mu    sync.Mutex
	table *Table
	conns map[*clientConn]bool
}

// clientConn is the connection of a client.
type clientConn struct {
	s    *Server
	conn net.Conn
	addr netip.Addr
	out  chan []byte // lines to be written

	begun     time.Time
	displaced bool     // closed in favour of a newer connection. Guarded by Server.mu
	gid       wire.GID // zero before hello. Guarded by Server.mu
}

// Limits of connections. Each port may have an old one and a new one. An address
// has one port; beyond its limit the oldest connection is closed.
const (
	maxSessions        = 2 * MaxPorts
	maxSessionsPerAddr = 8
)

// Serve starts a server on a listener, and closes the listener in the end.
func Serve(l net.Listener, cfg Config, log *slog.Logger) (*Server, error) {
	t, err := NewTable(cfg)
	if err != nil {
		return nil, err
	}
	s := &Server{listener: l, log: log, epoch: uint64(time.Now().UnixNano()), done: make(chan struct{}), table: t, conns: map[*clientConn]bool{}}
	s.wg.Add(2)
	go s.acceptLoop()
	go s.expireLeases()
	return s, nil
}

// Addr returns the address of the listener.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Close ends the server and its connections.
func (s *Server) Close() error {
	close(s.done)
	err := s.listener.Close()
	s.mu.Lock()
	for c := range s.conns {
		c.conn.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
	if err != nil {
		return fmt.Errorf("close registry: %w", err)
	}
	return nil
}

// Config returns the configuration, with the defaults filled in.
func (s *Server) Config() Config {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.table.cfg
	c.Partitions, c.Ports = slices.Clone(c.Partitions), maps.Clone(c.Ports)
	return c
}

// Ports lists the ports.
func (s *Server) Ports() []PortInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.table.Ports()
}

// Change replaces the configuration by what change makes of it. Each port is told
// its P_Key table, and joins its groups again.
func (s *Server) Change(change func(*Config) error) error {
	cfg := s.Config()
	if err := change(&cfg); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	changed, err := s.table.Configure(cfg)
	if err != nil {
		return err
	}
	for c := range s.conns {
		if c.gid != (wire.GID{}) {
			c.queueLine(encodeLine(Answer{Epoch: s.epoch, PKeys: s.table.cfg.portPKeys(c.addr)}))
		}
	}
	for _, mgid := range changed {
		s.notifySenders(mgid)
	}
	return nil
}

func (s *Server) acceptLoop() {
	defer s.wg.Done()
	for {
		conn, err := s.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.log.Warn("IPoIB registry does not accept", "err", err)
			select {
			case <-s.done:
				return
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		s.startConn(conn)
	}
}

func (s *Server) startConn(conn net.Conn) {
	from, ok := conn.RemoteAddr().(*net.TCPAddr)
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.done:
		ok = false
	default:
	}
	if !ok || len(s.conns) >= maxSessions {
		conn.Close()
		return
	}
	c := &clientConn{s: s, conn: conn, addr: from.AddrPort().Addr().Unmap(), begun: time.Now(), out: make(chan []byte, 256)}
	if oldest, n := s.sessionsOf(c.addr); n >= maxSessionsPerAddr {
		oldest.displaced = true
		oldest.conn.Close() // its reader removes it from s.conns
	}
	s.conns[c] = true
	s.wg.Add(2)
	go c.readLoop()
	go c.writeLoop()
}

// sessionsOf returns the oldest connection of an address that is not closed, and
// their number. s.mu is held.
func (s *Server) sessionsOf(addr netip.Addr) (oldest *clientConn, n int) {
	for c := range s.conns {
		if c.addr != addr || c.displaced {
			continue
		}
		n++
		if oldest == nil || c.begun.Before(oldest.begun) {
			oldest = c
		}
	}
	return oldest, n
}

// expireLeases ends leases.
func (s *Server) expireLeases() {
	defer s.wg.Done()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-s.done:
			return
		case now := <-tick.C:
			s.mu.Lock()
			for _, mgid := range s.table.Expire(now) {
				s.notifySenders(mgid)
			}
			s.mu.Unlock()
		}
	}
}

// notifySenders tells the senders of a group its members. s.mu is held.
func (s *Server) notifySenders(mgid wire.GID) {
	event := encodeLine(Answer{Epoch: s.epoch, MGID: mgid, Members: s.table.Members(mgid)})
	for _, gid := range s.table.Senders(mgid) {
		for c := range s.conns {
			if c.gid == gid {
				c.queueLine(event)
			}
		}
	}
}

// queueLine queues a line. A client that does not read loses its connection; it is
// told everything when it connects again. s.mu is held.
func (c *clientConn) queueLine(b []byte) {
	select {
	case c.out <- b:
	default:
		c.conn.Close()
	}
}

func (c *clientConn) writeLoop() {
	defer c.s.wg.Done()
	for b := range c.out {
		c.conn.SetWriteDeadline(time.Now().Add(10 * time.Second))
		if _, err := c.conn.Write(b); err != nil {
			c.conn.Close() // read ends, and closes out
		}
	}
}

func (c *clientConn) readLoop() {
	s := c.s
	defer s.wg.Done()
	lines := bufio.NewScanner(c.conn)
	lines.Buffer(make([]byte, 0, maxRequest), maxRequest)
	for {
		c.conn.SetReadDeadline(time.Now().Add(Lease))
		if !lines.Scan() {
			break
		}
		q, err := decodeRequest(lines.Bytes())
		if err != nil {
			s.log.Warn("IPoIB registry got what is no request", "client", c.addr, "err", err)
			break
		}
		c.onRequest(q)
	}
	c.conn.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	close(c.out) // only post sends, for sessions in conns
}

func (c *clientConn) onRequest(q Request) {
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
	a := Answer{ID: q.ID, Epoch: s.epoch}
	var err error
	var changed bool
	now := time.Now()
	switch q.Op {
	case opHello:
		if a.PKeys, err = s.table.Hello(now, q.GID, c.addr); err == nil {
			c.gid, a.Lease = q.GID, Lease.Milliseconds()
		}
	case opRenew:
		if !s.table.Renew(now, c.gid) {
			err = fmt.Errorf("renew: %s is not registered: %w", c.gid, syscall.ENOTCONN)
		}
	case opJoin:
		var g Group
		a.MGID = q.MGID
		if g, changed, err = s.table.Join(now, c.gid, q.MGID, q.SendOnly); err == nil {
			a.Group, a.Members = &g, s.table.Members(q.MGID)
		}
	case opLeave:
		a.MGID = q.MGID
		changed = s.table.Leave(c.gid, q.MGID)
	}
	if err != nil {
		a.Error = err.Error()
		a.Errno = syscall.EIO
		errors.As(err, &a.Errno)
		s.log.Info("IPoIB registry refuses", "client", c.addr, "err", err)
	}
	c.queueLine(encodeLine(a))
	if changed {
		s.notifySenders(q.MGID)
	}
}
