package registry

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// Partition is a partition with the parameters of its broadcast group. A zero
// field means the default named here.
type Partition struct {
	PKey     uint16
	QKey     uint32 // 0xb1b; the top bit is clear
	MTU      int    // of the link, in bytes; 2048
	Scope    byte   // of its groups; link-local
	SL       int
	Rate     int // in Gbit/s; 10
	HopLimit int
}

// Config describes the ports and partitions of a registry.
type Config struct {
	Partitions []Partition // default: 0xffff alone
	// Ports are the P_Key tables of ports, by their addresses. A port without one
	// is a full member of all partitions.
	Ports map[netip.Addr][]uint16
}

func (c Config) withDefaults() (Config, error) {
	if len(c.Partitions) == 0 {
		c.Partitions = []Partition{{PKey: 0xffff}}
	}
	c.Partitions = slices.Clone(c.Partitions)
	c.Ports = maps.Clone(c.Ports)
	seen := map[uint16]bool{}
	for k := range c.Partitions {
		p := &c.Partitions[k]
		p.QKey, p.MTU, p.Scope, p.Rate = cmp.Or(p.QKey, 0xb1b), cmp.Or(p.MTU, 2048), cmp.Or(p.Scope, wire.ScopeLinkLocal), cmp.Or(p.Rate, 10)
		switch {
		case p.PKey&0x7fff == 0:
			return c, fmt.Errorf("partition 0x%04x: no P_Key: %w", p.PKey, syscall.EINVAL)
		case p.QKey>>31 != 0:
			return c, fmt.Errorf("partition 0x%04x: Q_Key 0x%x has its top bit set, so only privileged senders may use it: %w", p.PKey, p.QKey, syscall.EINVAL)
		case p.MTU < 256 || p.MTU > 0xffff || p.Scope > 15 || p.SL < 0 || p.SL > 15 || p.HopLimit < 0 || p.HopLimit > 255 || p.Rate < 0:
			return c, fmt.Errorf("partition 0x%04x: a parameter is out of range: MTU %d, scope %d, SL %d, hop limit %d: %w", p.PKey, p.MTU, p.Scope, p.SL, p.HopLimit, syscall.EINVAL)
		}
		p.PKey |= 0x8000
		if seen[p.PKey] {
			return c, fmt.Errorf("partition 0x%04x is there twice: %w", p.PKey, syscall.ENOTUNIQ)
		}
		seen[p.PKey] = true
	}
	return c, nil
}

// groupParameters returns the parameters of the groups of a partition.
func (p *Partition) groupParameters() Group {
	return Group{PKey: p.PKey, QKey: p.QKey, MTU: p.MTU, SL: p.SL, Rate: p.Rate, HopLimit: p.HopLimit}
}

func (c Config) findPartition(pkey uint16) *Partition {
	for k := range c.Partitions {
		if c.Partitions[k].PKey == pkey|0x8000 {
			return &c.Partitions[k]
		}
	}
	return nil
}

// portPKeys returns the P_Key table of the port at addr.
func (c Config) portPKeys(addr netip.Addr) []uint16 {
	if t, ok := c.Ports[addr]; ok {
		return t
	}
	var out []uint16
	for _, p := range c.Partitions {
		out = append(out, p.PKey)
	}
	return out
}

// mayJoin returns the partition of a group that the port gid at addr may join.
func (c Config) mayJoin(gid wire.GID, addr netip.Addr, mgid wire.GID) (*Partition, error) {
	pkey, _ := wire.PKeyOf(mgid)
	p := c.findPartition(pkey)
	switch table := c.portPKeys(addr); {
	case p == nil || pkey&0x8000 == 0:
		return nil, fmt.Errorf("there is no partition 0x%04x: %w", pkey, syscall.ENOENT)
	case slices.Contains(table, pkey):
	case slices.Contains(table, pkey&0x7fff):
		return nil, fmt.Errorf("%s is a limited member of partition 0x%04x: %w", gid, pkey, syscall.EPERM)
	default:
		return nil, fmt.Errorf("%s is no member of partition 0x%04x: %w", gid, pkey, syscall.EACCES)
	}
	if mgid[1] != 0x10|p.Scope {
		return nil, fmt.Errorf("the groups of partition 0x%04x have scope %d: %w", pkey, p.Scope, syscall.EINVAL)
	}
	return p, nil
}

// Table holds the ports and their memberships, without I/O and clock.
type Table struct {
	cfg    Config
	ports  map[wire.GID]*registeredPort
	groups map[wire.GID]map[wire.GID]bool // members of each MGID; the value: sends only
}

type registeredPort struct {
	addr   netip.Addr
	until  time.Time
	groups map[wire.GID]bool
}

// NewTable makes an empty table.
func NewTable(cfg Config) (*Table, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	return &Table{cfg: cfg, ports: map[wire.GID]*registeredPort{}, groups: map[wire.GID]map[wire.GID]bool{}}, nil
}

// Hello registers the port gid at addr, which the client has connected from, and
// returns its P_Key table. A GID that is an IP address must be that address. The
// error is syscall.EADDRINUSE if another address has the GID, or the address
// another GID.
func (t *Table) Hello(now time.Time, gid wire.GID, addr netip.Addr) ([]uint16, error) {
	addr = addr.Unmap()
	if own := wire.AddrGID(addr); own != gid && (gid[0] != 0xfe || gid[1] != 0x80) {
		return nil, fmt.Errorf("GID %s is not that of %s, and not link-local: %w", gid, addr, syscall.EACCES)
	}
	for g, p := range t.ports {
		if (g == gid) != (p.addr == addr) {
			return nil, fmt.Errorf("GID %s at %s: %s is at %s: %w", gid, addr, g, p.addr, syscall.EADDRINUSE)
		}
	}
	if t.ports[gid] == nil {
		if len(t.ports) >= MaxPorts {
			return nil, fmt.Errorf("%d ports: %w", MaxPorts, syscall.ENOSPC)
		}
		t.ports[gid] = &registeredPort{addr: addr, groups: map[wire.GID]bool{}}
	}
	t.ports[gid].until = now.Add(Lease)
	return t.cfg.portPKeys(addr), nil
}

// Renew begins the lease of a port again. It reports whether the port is known.
func (t *Table) Renew(now time.Time, gid wire.GID) bool {
	p := t.ports[gid]
	if p != nil {
		p.until = now.Add(Lease)
	}
	return p != nil
}

// Join makes a port a member of a group. It reports whether the members of the
// group have changed. Errors: syscall.ENOTCONN if the port is not registered,
// ENOENT if there is no such partition, EACCES if the port is not in it, EPERM if
// it is a limited member, EINVAL for a group of another scope.
func (t *Table) Join(now time.Time, gid, mgid wire.GID, sendOnly bool) (g Group, changed bool, err error) {
	port := t.ports[gid]
	if port == nil {
		return g, false, fmt.Errorf("join %s: %s is not registered: %w", mgid, gid, syscall.ENOTCONN)
	}
	p, err := t.cfg.mayJoin(gid, port.addr, mgid)
	if err != nil {
		return g, false, fmt.Errorf("join %s: %w", mgid, err)
	}
	if len(port.groups) >= MaxGroups && !port.groups[mgid] {
		return g, false, fmt.Errorf("join %s: %d groups: %w", mgid, MaxGroups, syscall.ENOSPC)
	}
	if t.groups[mgid] == nil {
		t.groups[mgid] = map[wire.GID]bool{}
	}
	was, member := t.groups[mgid][gid]
	t.groups[mgid][gid], port.groups[mgid] = sendOnly, true
	changed = sendOnly != was
	if !member {
		changed = !sendOnly
	}
	return p.groupParameters(), changed, nil
}

// Configure changes the partitions and the P_Key tables of ports. It ends the
// memberships that are not allowed any more, and those in groups whose parameters
// are others now. It returns the groups whose members have changed.
func (t *Table) Configure(cfg Config) (changed []wire.GID, err error) {
	if cfg, err = cfg.withDefaults(); err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	before := t.cfg
	t.cfg = cfg
	for gid, port := range t.ports {
		for mgid := range port.groups {
			p, err := cfg.mayJoin(gid, port.addr, mgid)
			if err == nil && p.groupParameters() == before.findPartition(p.PKey).groupParameters() {
				continue
			}
			if t.Leave(gid, mgid) && !slices.Contains(changed, mgid) {
				changed = append(changed, mgid)
			}
		}
	}
	return changed, nil
}

// PortInfo describes a port that is registered, or has a P_Key table.
type PortInfo struct {
	Addr   netip.Addr
	GID    wire.GID // zero: not registered
	PKeys  []uint16
	Groups int // memberships
}

// Ports lists the ports in the order of their addresses.
func (t *Table) Ports() (out []PortInfo) {
	missing := maps.Clone(t.cfg.Ports)
	for gid, p := range t.ports {
		out = append(out, PortInfo{p.addr, gid, t.cfg.portPKeys(p.addr), len(p.groups)})
		delete(missing, p.addr)
	}
	for addr, keys := range missing {
		out = append(out, PortInfo{Addr: addr, PKeys: keys})
	}
	slices.SortFunc(out, func(a, b PortInfo) int { return a.Addr.Compare(b.Addr) })
	return out
}

// Leave ends a membership. It reports whether the members of the group have
// changed.
func (t *Table) Leave(gid, mgid wire.GID) bool {
	sendOnly, member := t.groups[mgid][gid]
	if !member {
		return false
	}
	delete(t.groups[mgid], gid)
	if len(t.groups[mgid]) == 0 {
		delete(t.groups, mgid)
	}
	if p := t.ports[gid]; p != nil {
		delete(p.groups, mgid)
	}
	return !sendOnly
}

// Expire removes the ports whose lease is over. It returns the groups whose
// members have changed.
func (t *Table) Expire(now time.Time) (changed []wire.GID) {
	for gid, p := range t.ports {
		if now.Before(p.until) {
			continue
		}
		for mgid := range p.groups {
			if t.Leave(gid, mgid) && !slices.Contains(changed, mgid) {
				changed = append(changed, mgid)
			}
		}
		delete(t.ports, gid)
	}
	return changed
}

// Members lists the ports that receive the datagrams of a group, in the order of
// their GIDs.
func (t *Table) Members(mgid wire.GID) []Member {
	out := []Member{}
	for gid, sendOnly := range t.groups[mgid] {
		if !sendOnly {
			out = append(out, Member{gid, t.ports[gid].addr})
		}
	}
	slices.SortFunc(out, func(a, b Member) int { return slices.Compare(a.GID[:], b.GID[:]) })
	return out
}

// Senders lists the ports that send to a group: its members, and those that
// only send.
func (t *Table) Senders(mgid wire.GID) (out []wire.GID) {
	for gid := range t.groups[mgid] {
		out = append(out, gid)
	}
	return out
}
