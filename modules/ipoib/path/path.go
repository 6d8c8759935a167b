// Package path maps the GIDs of ports to addresses of the fabric. On RoCEv2 a
// GID is an IP address; a port with another GID needs an entry.
package path

import (
	"fmt"
	"io"
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
	if !usableAddr(addr) {
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

// Endpoint returns the address of the port gid: that of its entry, or gid
// itself as an IP address.
func (t *Table) Endpoint(gid wire.GID) (netip.Addr, error) {
	t.mu.RLock()
	addr, ok := t.entries[gid]
	t.mu.RUnlock()
	if ok {
		return addr, nil
	}
	if addr = netip.AddrFrom16(gid).Unmap(); !usableAddr(addr) || addr.IsLinkLocalUnicast() && addr.Is6() {
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

// Write writes paths in the format of Linux's debugfs file ipoib/*_path. RoCEv2
// has no local identifier, service level and rate: they are 0.
func Write(w io.Writer, gids []wire.GID) error {
	for _, g := range gids {
		if _, err := fmt.Fprintf(w, "GID: %s\n  complete: %6s\n  DLID:     0x%04x\n  SL: %12d\n  rate: %8d.%d Gb/sec\n\n", g, "yes", 0, 0, 0, 0); err != nil {
			return fmt.Errorf("write paths: %w", err)
		}
	}
	return nil
}

// usableAddr reports whether addr can be the address of a host.
func usableAddr(addr netip.Addr) bool {
	return addr.IsValid() && !addr.IsUnspecified() && !addr.IsMulticast()
}
