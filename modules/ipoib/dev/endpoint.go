package dev

import (
	"net/netip"
	"time"
)

// Endpoint returns the fabric's address of the port with the neighbour ip. If it
// is not known yet, ok is false and the neighbour is asked for. Calls keep the
// neighbour's entry in use.
func (i *Interface) Endpoint(ip netip.Addr) (addr netip.Addr, ok bool) {
	now, out := time.Now(), sendBatch{i: i}
	i.mu.Lock()
	a, known, frames := i.neigh.Ask(now, ip, nil)
	i.sendFrames(now, frames, &out)
	i.mu.Unlock()
	out.flush()
	i.wakeTimers()
	if !known {
		return netip.Addr{}, false
	}
	addr, err := i.paths.Endpoint(a.GID())
	return addr, err == nil
}
