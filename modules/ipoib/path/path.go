// Package path maps the GIDs of ports to the addresses of the fabric that reach
// them. On RoCEv2 a GID is an IP address; a port with another GID has an entry.
package path

import (
	"fmt"
	"net/netip"
	"sync"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// Table holds the entries. All methods may be called by any goroutine. The zero
// Table is ready for use.
type Table struct {
	mu      sync.RWMutex
	entries map[wire.GID]netip.Addr
	reverse map[netip.Addr]wire.GID
}

// Set makes gid reachable at addr, in the place of an earlier address.
func (t *Table) Set(gid wire.GID, addr netip.Addr) error {
	addr = addr.Unmap()
	if gid.IsMulticast() || gid == (wire.GID{}) {
		return fmt.Errorf("path to %s: not the GID of a port", gid)
	}
	if !usable(addr) {
		return fmt.Errorf("path to %s by %s: not the address of a host", gid, addr)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.entries == nil {
		t.entries, t.reverse = map[wire.GID]netip.Addr{}, map[netip.Addr]wire.GID{}
	}
	if old, ok := t.entries[gid]; ok {
		delete(t.reverse, old)
	}
	if old, ok := t.reverse[addr]; ok {
		delete(t.entries, old)
	}
	t.entries[gid], t.reverse[addr] = addr, gid
	return nil
}

// Endpoint returns the address that reaches the port gid: that of its entry, or
// the IP address that gid is.
func (t *Table) Endpoint(gid wire.GID) (netip.Addr, error) {
	t.mu.RLock()
	addr, ok := t.entries[gid]
	t.mu.RUnlock()
	if ok {
		return addr, nil
	}
	if addr = netip.AddrFrom16(gid).Unmap(); !usable(addr) || addr.IsLinkLocalUnicast() && addr.Is6() {
		return netip.Addr{}, fmt.Errorf("path to %s: the GID is no IP address of a host and has no entry", gid)
	}
	return addr, nil
}

// GID returns the GID of the port at addr.
func (t *Table) GID(addr netip.Addr) wire.GID {
	addr = addr.Unmap()
	t.mu.RLock()
	gid, ok := t.reverse[addr]
	t.mu.RUnlock()
	if ok {
		return gid
	}
	return wire.AddrGID(addr)
}

// usable reports whether addr may be that of a host.
func usable(addr netip.Addr) bool {
	return addr.IsValid() && !addr.IsUnspecified() && !addr.IsMulticast()
}
