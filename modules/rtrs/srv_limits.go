package rtrs

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
)

// Limits bound the resources of a server that its clients hold, all together
// and per address. A client gets most of them before the server knows more of
// it than the address. 0: no limit.
//
// A request above a limit is refused with ENOMEM, as if the resource were used
// up; a path that is not connected yet is closed in favour of the next attempt.
// A path is not refused for the number of others that are not connected yet:
// one of those is closed at once. It is the oldest of the address at its limit,
// or else of the address with the most such paths; the addresses of one /64 of
// IPv6 count as one here.
type Limits struct {
	Sessions        int // with and without a name
	SessionsPerAddr int

	Connections        int // of all paths
	ConnectionsPerAddr int

	ChunkMemory        int64 // bytes; of sessions that have ended too, until it is freed
	ChunkMemoryPerAddr int64

	Unfinished        int // paths that are not connected yet
	UnfinishedPerAddr int // those of one address, or of one /64 of IPv6
}

// DefaultLimits returns limits that no honest client meets.
func DefaultLimits() Limits {
	return Limits{
		Sessions:           4096,
		SessionsPerAddr:    256,
		Connections:        16384,
		ConnectionsPerAddr: 4096,
		ChunkMemory:        256 << 30,
		ChunkMemoryPerAddr: 16 << 30,
		Unfinished:         1024,
		UnfinishedPerAddr:  128,
	}
}

func (l *Limits) checkValues() error {
	for _, n := range []int64{int64(l.Sessions), int64(l.SessionsPerAddr), int64(l.Connections), int64(l.ConnectionsPerAddr),
		l.ChunkMemory, l.ChunkMemoryPerAddr, int64(l.Unfinished), int64(l.UnfinishedPerAddr)} {
		if n < 0 {
			return fmt.Errorf("limit %d is negative: %w", n, syscall.EINVAL)
		}
	}
	return nil
}

// Usage counts the resources that the clients of a server hold now, and the
// refusals.
type Usage struct {
	Sessions    int
	Connections int
	ChunkMemory int64 // bytes
	Unfinished  int   // paths that are not connected yet
	Addresses   int   // that hold any of it

	RefusedSessions    uint64
	RefusedConnections uint64
	RefusedChunkMemory uint64
	GaveWay            uint64 // paths that were not connected yet, for newer ones
	TimedOut           uint64 // paths that were not connected in time
}

// resourceAccount counts the resources held by all clients or by one address.
type resourceAccount struct {
	sessions, conns int
	memory          int64
}

// accountTable enforce Limits.
type accountTable struct {
	limits Limits

	mu         sync.Mutex
	all        resourceAccount
	of         map[netip.Addr]*resourceAccount
	unfinished []*srvPath         // paths that are not connected yet, oldest first
	waiting    map[netip.Addr]int // their number, by neighbours
	counts     Usage              // past events only
}

// accountedAddr is the address that p's connections count for.
func accountedAddr(client netip.AddrPort) netip.Addr { return client.Addr().Unmap() }

// charge adds d to the account of addr if the limits allow it, and counts a
// refusal in refused if not.
func (a *accountTable) charge(addr netip.Addr, d resourceAccount, refused *uint64) error {
	a.mu.Lock()
	old, err := a.tryTake(addr, d)
	if err != nil {
		*refused++
	}
	a.mu.Unlock()
	if old != nil {
		old.close(errGaveWay)
	}
	return err
}

// tryTake is take. With an error it returns the path that gives way. mu is held.
func (a *accountTable) tryTake(addr netip.Addr, d resourceAccount) (old *srvPath, err error) {
	one, l := a.accountOf(addr), &a.limits
	for _, c := range []struct {
		what       string
		more       int64
		all, allOf int64
		one, oneOf int64
	}{
		{"sessions", int64(d.sessions), int64(a.all.sessions), int64(l.Sessions), int64(one.sessions), int64(l.SessionsPerAddr)},
		{"connections", int64(d.conns), int64(a.all.conns), int64(l.Connections), int64(one.conns), int64(l.ConnectionsPerAddr)},
		{"bytes of chunk memory", d.memory, a.all.memory, l.ChunkMemory, one.memory, l.ChunkMemoryPerAddr},
	} {
		switch {
		case c.more <= 0:
		case c.oneOf > 0 && c.one+c.more > c.oneOf:
			return a.giveWay(addressGroup(addr)), limitError(c.oneOf, c.what, fmt.Errorf("%s has %d of %d %s: %w", addr, c.one, c.oneOf, c.what, syscall.ENOMEM))
		case c.allOf > 0 && c.all+c.more > c.allOf:
			return a.giveWay(a.busiestGroup()), limitError(c.allOf, c.what, fmt.Errorf("clients have %d of %d %s: %w", c.all, c.allOf, c.what, syscall.ENOMEM))
		}
	}
	a.addTo(addr, d)
	return nil, nil
}

// accountOf returns the account of addr. mu is held.
func (a *accountTable) accountOf(addr netip.Addr) *resourceAccount {
	if one := a.of[addr]; one != nil {
		return one
	}
	return &resourceAccount{}
}

// addTo books d. mu is held.
func (a *accountTable) addTo(addr netip.Addr, d resourceAccount) {
	one := a.accountOf(addr)
	for _, to := range []*resourceAccount{&a.all, one} {
		to.sessions += d.sessions
		to.conns += d.conns
		to.memory += d.memory
	}
	if *one == (resourceAccount{}) {
		delete(a.of, addr)
	} else {
		a.of[addr] = one
	}
}

// takeSession books a session with its memory.
func (a *accountTable) takeSession(addr netip.Addr, memory int64) error {
	if err := a.charge(addr, resourceAccount{sessions: 1}, &a.counts.RefusedSessions); err != nil {
		return err
	}
	err := a.charge(addr, resourceAccount{memory: memory}, &a.counts.RefusedChunkMemory)
	if err != nil {
		a.discharge(addr, resourceAccount{sessions: 1})
	}
	return err
}

func (a *accountTable) takeConn(addr netip.Addr) error {
	return a.charge(addr, resourceAccount{conns: 1}, &a.counts.RefusedConnections)
}

// discharge subtracts d from the account of addr.
func (a *accountTable) discharge(addr netip.Addr, d resourceAccount) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.addTo(addr, resourceAccount{sessions: -d.sessions, conns: -d.conns, memory: -d.memory})
}

// addressGroup returns the group of addresses that share a limit of paths that
// are not connected yet: the addresses that one host may have.
func addressGroup(addr netip.Addr) netip.Addr {
	if addr.Is6() {
		if p, err := addr.WithZone("").Prefix(64); err == nil {
			return p.Addr()
		}
	}
	return addr
}

// addUnfinished adds a path that is not connected yet, and closes another one if a
// limit requires it.
func (a *accountTable) addUnfinished(p *srvPath) {
	from := addressGroup(accountedAddr(p.client))
	a.mu.Lock()
	var old *srvPath
	switch l := &a.limits; {
	case l.UnfinishedPerAddr > 0 && a.waiting[from] >= l.UnfinishedPerAddr:
		old = a.giveWay(from)
	case l.Unfinished > 0 && len(a.unfinished) >= l.Unfinished:
		old = a.giveWay(a.busiestGroup())
	}
	a.waiting[from]++
	a.unfinished = append(a.unfinished, p)
	a.mu.Unlock()
	if old != nil {
		old.close(errGaveWay)
	}
}

// busiestGroup returns the neighbours with the most paths that are not connected yet; of
// equal ones those with the oldest path. mu is held.
func (a *accountTable) busiestGroup() (from netip.Addr) {
	for _, p := range a.unfinished {
		if addr := addressGroup(accountedAddr(p.client)); a.waiting[addr] > a.waiting[from] {
			from = addr
		}
	}
	return from
}

// giveWay takes out and returns the oldest path that is not connected yet of
// those neighbours; nil: there is none. mu is held.
func (a *accountTable) giveWay(from netip.Addr) *srvPath {
	i := slices.IndexFunc(a.unfinished, func(p *srvPath) bool { return addressGroup(accountedAddr(p.client)) == from })
	if i < 0 {
		return nil
	}
	old := a.unfinished[i]
	a.counts.GaveWay++
	a.removeLocked(old)
	return old
}

// errGaveWay ends a path that is not connected when there are too many of them.
var errGaveWay = protocolErrorf("not connected yet, and newer paths need the room")

// removeUnfinished removes a path that is connected now, or closes. It may be called again.
func (a *accountTable) removeUnfinished(p *srvPath) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.removeLocked(p)
}

func (a *accountTable) removeLocked(p *srvPath) {
	i := slices.Index(a.unfinished, p)
	if i < 0 {
		return
	}
	a.unfinished = slices.Delete(a.unfinished, i, i+1)
	from := addressGroup(accountedAddr(p.client))
	if a.waiting[from]--; a.waiting[from] == 0 {
		delete(a.waiting, from)
	}
}

// timedOut counts a path that was not connected in time.
func (a *accountTable) timedOut() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.counts.TimedOut++
}

// Usage returns the resources that clients hold.
func (s *Server) Usage() Usage {
	a := &s.accounts
	a.mu.Lock()
	defer a.mu.Unlock()
	u := a.counts
	u.Sessions, u.Connections, u.ChunkMemory = a.all.sessions, a.all.conns, a.all.memory
	u.Unfinished, u.Addresses = len(a.unfinished), len(a.of)
	return u
}

// limitError gives err the reason that clients have n of what, or all memory.
func limitError(n int64, what string, err error) error {
	text := fmt.Sprintf("%d %s", n, what)
	if len(text) > rtrswire.MaxRefusalText {
		text = "memory of chunks"
	}
	return withReason(rtrswire.ReasonLimit, text, err)
}
