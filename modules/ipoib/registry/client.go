package registry

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/path"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// ClientConfig describes the client of a port. Zero fields mean the defaults
// named here.
type ClientConfig struct {
	Server   netip.AddrPort
	Local    netip.Addr    // of the port; the connection is made from it
	GID      wire.GID      // of the port; default that of Local
	Paths    *path.Table   // gets the ports whose GID is no IP address; default: a new one
	Patience time.Duration // how long a request waits for its answer; default 5 s
	Logger   *slog.Logger  // default slog.Default()
	// Dial makes the connection, in the network namespace that it wants. Default: a
	// net.Dialer from Local.
	Dial func(ctx context.Context) (net.Conn, error)
}

// Client is the client of a port. All methods may be called by any goroutine.
type Client struct {
	cfg    ClientConfig
	cancel context.CancelFunc
	ended  chan struct{}

	mu      sync.Mutex
	conn    net.Conn // nil: the registry is out of reach
	id      uint64
	pending map[uint64]chan Answer
	held    map[wire.GID]*heldGroup
	pkeys   []uint16
	epoch   uint64
	greeted chan struct{} // closed after the first hello
	tables  uint64        // P_Key tables that came without being asked for
	watches map[any]func()
	stats   Stats

	again chan struct{} // such a table came
}

// Stats are the counters of a client.
type Stats struct {
	Connects uint64 // connections that came up
	Epochs   uint64 // of them, to a server without memory of the port
	Lies     uint64 // answers that were not valid
}

// heldGroup is a group that users of the port are in.
type heldGroup struct {
	users   map[any]groupUser
	group   Group
	members []netip.Addr // but the port itself
}

type groupUser struct {
	sendOnly bool
	lost     func()
}

// sendOnly reports whether no user receives.
func (m *heldGroup) sendOnly() bool {
	for _, u := range m.users {
		if !u.sendOnly {
			return false
		}
	}
	return true
}

// ErrUnreachable is the error of a request while the registry is out of reach.
var ErrUnreachable = fmt.Errorf("the registry is out of reach: %w", syscall.ENETUNREACH)

// NewClient starts a client. It connects until Close.
func NewClient(cfg ClientConfig) *Client {
	if cfg.GID == (wire.GID{}) {
		cfg.GID = wire.AddrGID(cfg.Local)
	}
	cfg.Patience = cmp.Or(cfg.Patience, 5*time.Second)
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Paths == nil {
		cfg.Paths = &path.Table{}
	}
	if cfg.Dial == nil {
		d := net.Dialer{Timeout: cfg.Patience, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(cfg.Local, 0))}
		cfg.Dial = func(ctx context.Context) (net.Conn, error) { return d.DialContext(ctx, "tcp", cfg.Server.String()) }
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &Client{cfg: cfg, cancel: cancel, ended: make(chan struct{}), pending: map[uint64]chan Answer{}, held: map[wire.GID]*heldGroup{}, greeted: make(chan struct{}),
		watches: map[any]func(){}, again: make(chan struct{}, 1)}
	go c.run(ctx)
	return c
}

// Close ends the client. The server notices the end of the lease.
func (c *Client) Close() error {
	c.cancel()
	c.dropConn()
	<-c.ended
	return nil
}

// GID returns the GID of the port. Paths returns the table of ports.
func (c *Client) GID() wire.GID      { return c.cfg.GID }
func (c *Client) Paths() *path.Table { return c.cfg.Paths }

// Connected reports whether the registry is in reach.
func (c *Client) Connected() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.conn != nil
}

// Stats returns the counters.
func (c *Client) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stats
}

// PKeys waits for the first answer of the registry and returns the P_Key table
// of the port.
func (c *Client) PKeys(ctx context.Context) ([]uint16, error) {
	select {
	case <-c.greeted:
		c.mu.Lock()
		defer c.mu.Unlock()
		return slices.Clone(c.pkeys), nil
	case <-ctx.Done():
		return nil, fmt.Errorf("P_Keys of %s: %w", c.cfg.Local, ErrUnreachable)
	}
}

// run connects again and again.
func (c *Client) run(ctx context.Context) {
	defer close(c.ended)
	pause := 100 * time.Millisecond
	for ctx.Err() == nil {
		began := time.Now()
		err := c.runConn(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > time.Minute {
			pause = 100 * time.Millisecond
		}
		c.cfg.Logger.Warn("IPoIB registry is out of reach; what is known of it is kept", "server", c.cfg.Server, "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, 5*time.Second)
	}
}

// runConn runs one connection to its end.
func (c *Client) runConn(ctx context.Context) error {
	conn, err := c.cfg.Dial(ctx)
	if err != nil {
		return err
	}
	defer c.dropConn()
	defer conn.Close()
	c.mu.Lock()
	c.conn = conn
	c.mu.Unlock()
	if ctx.Err() != nil { // Close came before c.conn was set
		return ctx.Err()
	}
	failed := make(chan error, 1)
	go func() { failed <- c.readLines(conn) }()
	if err := c.registerPort(); err != nil {
		conn.Close()
		return errors.Join(err, <-failed)
	}
	renew := time.NewTicker(Lease / 3)
	defer renew.Stop()
	for {
		select {
		case err := <-failed:
			return err
		case <-c.again:
			if err := c.rejoinAll(); err != nil {
				conn.Close()
				return errors.Join(err, <-failed)
			}
		case <-renew.C:
			if _, err := c.roundTrip(Request{Op: opRenew}); err != nil {
				conn.Close()
				return errors.Join(err, <-failed)
			}
		}
	}
}

// registerPort registers the port and joins the held groups again.
func (c *Client) registerPort() error {
	a, err := c.roundTrip(Request{Op: opHello, GID: c.cfg.GID})
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.stats.Connects++
	if a.Epoch != c.epoch {
		c.stats.Epochs++
	}
	c.epoch, c.pkeys = a.Epoch, a.PKeys
	c.mu.Unlock()
	if err := c.rejoinAll(); err != nil {
		return err
	}
	select {
	case <-c.greeted:
	default:
		close(c.greeted)
	}
	return nil
}

// rejoinAll joins the held groups again. Watchers are called, since groups that
// were refused before may be allowed now.
func (c *Client) rejoinAll() error {
	c.mu.Lock()
	groups, watches := slices.Collect(maps.Keys(c.held)), slices.Collect(maps.Values(c.watches))
	c.mu.Unlock()
	for _, mgid := range groups {
		if err := c.rejoinGroup(mgid); errors.Is(err, ErrUnreachable) {
			return err
		}
	}
	for _, changed := range watches {
		changed()
	}
	return nil
}

// Watch calls changed when the P_Key table of the port, or the parameters of
// partitions, may have changed. A nil changed ends the calls for u.
func (c *Client) Watch(u any, changed func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if changed == nil {
		delete(c.watches, u)
		return
	}
	c.watches[u] = changed
}

// rejoinGroup joins a held group. If the registry refuses, or has other parameters,
// the users lose it.
func (c *Client) rejoinGroup(mgid wire.GID) error {
	c.mu.Lock()
	m := c.held[mgid]
	if m == nil || m.group.MTU == 0 { // Join is under way
		c.mu.Unlock()
		return nil
	}
	sendOnly := m.sendOnly()
	c.mu.Unlock()
	a, err := c.roundTrip(Request{Op: opJoin, MGID: mgid, SendOnly: sendOnly})
	if errors.Is(err, ErrUnreachable) {
		return err
	}
	c.mu.Lock()
	if err == nil && a.Group != nil && *a.Group == m.group {
		c.mu.Unlock()
		return nil
	}
	users := m.users
	delete(c.held, mgid)
	c.mu.Unlock()
	for _, u := range users {
		u.lost()
	}
	return err
}

// readLines reads the lines of the server.
func (c *Client) readLines(conn net.Conn) error {
	lines := bufio.NewScanner(conn)
	lines.Buffer(nil, maxAnswer)
	for lines.Scan() {
		a, err := decodeAnswer(lines.Bytes(), c.cfg.Local)
		c.mu.Lock()
		if err != nil {
			c.stats.Lies++
			c.mu.Unlock()
			conn.Close()
			c.dropConn()
			return err
		}
		if a.ID == 0 && a.MGID == (wire.GID{}) {
			c.pkeys = a.PKeys
			c.tables++
			select {
			case c.again <- struct{}{}:
			default:
			}
		}
		if m := c.held[a.MGID]; m != nil && a.Errno == 0 && (a.ID == 0 || a.Group != nil) {
			c.storeMembers(m, a.Members)
		}
		answer := c.pending[a.ID]
		delete(c.pending, a.ID)
		c.mu.Unlock()
		if answer != nil {
			answer <- a
		}
	}
	c.dropConn()
	return cmp.Or(lines.Err(), error(net.ErrClosed))
}

// storeMembers stores the members of a group. c.mu is held.
func (c *Client) storeMembers(m *heldGroup, members []Member) {
	m.members = nil // readers have the old slice
	for _, p := range members {
		if p.Addr == c.cfg.Local {
			continue
		}
		m.members = append(m.members, p.Addr)
		if p.GID != wire.AddrGID(p.Addr) {
			if err := c.cfg.Paths.Set(p.GID, p.Addr); err != nil {
				c.stats.Lies++
			}
		}
	}
}

// dropConn forgets the connection. Requests under way fail.
func (c *Client) dropConn() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
	for id, answer := range c.pending {
		close(answer)
		delete(c.pending, id)
	}
}

// roundTrip sends a request and waits for its answer.
func (c *Client) roundTrip(q Request) (Answer, error) {
	answer := make(chan Answer, 1)
	c.mu.Lock()
	if c.conn == nil {
		c.mu.Unlock()
		return Answer{}, ErrUnreachable
	}
	c.id++
	q.ID = c.id
	c.pending[q.ID] = answer
	c.conn.SetWriteDeadline(time.Now().Add(c.cfg.Patience))
	_, err := c.conn.Write(encodeLine(q))
	c.mu.Unlock()
	if err != nil {
		c.dropConn()
		return Answer{}, fmt.Errorf("%w: %w", ErrUnreachable, err)
	}
	timer := time.NewTimer(c.cfg.Patience)
	defer timer.Stop()
	select {
	case a, ok := <-answer:
		switch {
		case !ok:
			return Answer{}, ErrUnreachable
		case a.Errno != 0:
			return a, fmt.Errorf("the registry refuses: %s: %w", a.Error, a.Errno)
		}
		return a, nil
	case <-timer.C:
		c.dropConn()
		return Answer{}, fmt.Errorf("%w: %w", ErrUnreachable, os.ErrDeadlineExceeded)
	}
}

// Join makes a user of the port a member of a group and returns the group's
// parameters. It waits for the registry. If the membership is lost later, lost is
// called; the user has to join again. A user that joins twice is one member.
func (c *Client) Join(u any, mgid wire.GID, sendOnly bool, lost func()) (Group, error) {
	c.mu.Lock()
	m := c.held[mgid]
	had := m != nil
	if !had {
		m = &heldGroup{users: map[any]groupUser{}}
		c.held[mgid] = m // before the answer, which may be followed by an event
	}
	asked := had && (sendOnly || !m.sendOnly())
	before, was := m.users[u]
	m.users[u] = groupUser{sendOnly, lost}
	group := m.group
	c.mu.Unlock()
	if asked && group.MTU != 0 {
		return group, nil
	}
	g, err := c.joinGroup(mgid, sendOnly, m)
	if err == nil {
		return g, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(m.users, u)
	if was {
		m.users[u] = before
	}
	if len(m.users) == 0 && c.held[mgid] == m {
		delete(c.held, mgid)
	}
	return Group{}, err
}

// joinGroup asks for a membership and stores the parameters of the group in m. It asks
// again if the P_Key table has changed meanwhile: the answer may be older.
func (c *Client) joinGroup(mgid wire.GID, sendOnly bool, m *heldGroup) (Group, error) {
	for range 10 {
		c.mu.Lock()
		tables := c.tables
		c.mu.Unlock()
		a, err := c.roundTrip(Request{Op: opJoin, MGID: mgid, SendOnly: sendOnly})
		if err == nil && (a.Group == nil || a.MGID != mgid) {
			err = errLie
		}
		if err != nil {
			return Group{}, fmt.Errorf("join %s: %w", mgid, err)
		}
		c.mu.Lock()
		if tables == c.tables {
			m.group = *a.Group
			c.mu.Unlock()
			return *a.Group, nil
		}
		c.mu.Unlock()
	}
	return Group{}, fmt.Errorf("join %s: the P_Key table changes all the time: %w", mgid, syscall.EAGAIN)
}

// Leave ends the membership of a user.
func (c *Client) Leave(u any, mgid wire.GID) {
	c.mu.Lock()
	m := c.held[mgid]
	if m == nil {
		c.mu.Unlock()
		return
	}
	delete(m.users, u)
	last := len(m.users) == 0
	if last {
		delete(c.held, mgid)
	}
	c.mu.Unlock()
	if last {
		c.roundTrip(Request{Op: opLeave, MGID: mgid}) // else the lease ends it
	}
}

// Members returns the addresses of the members of a group, but for the port
// itself. The slice must not be changed.
func (c *Client) Members(mgid wire.GID) []netip.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.held[mgid]; m != nil {
		return m.members
	}
	return nil
}
