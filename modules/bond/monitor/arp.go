package monitor

import (
	"net/netip"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/core"
	"github.com/rnbd-go/rnbd/modules/bond/frame"
)

// Probes returns the ARP requests of one round: one for each target, from own,
// the bond's address in the target's network. Without an address the sender is
// 0.0.0.0. Hosts answer that too (RFC 5227).
func Probes(l frame.Link, targets []netip.Addr, own func(target netip.Addr) netip.Addr) (frames [][]byte) {
	for _, t := range targets {
		src := own(t)
		if !src.IsValid() {
			src = netip.IPv4Unspecified()
		}
		frames = append(frames, l.ARP(frame.ARP{Op: frame.Request, SHA: l.Address, SPA: src, TPA: t}))
	}
	return frames
}

// See returns the meaning of a received frame for the ARP monitor. A frame
// that claims to be ARP and is none is no sign of life; ok is false then.
func See(linkType uint16, f []byte, at time.Time) (s core.Seen, ok bool) {
	etherType, payload, ok := frame.Split(linkType, f)
	if !ok {
		return core.Seen{}, false
	}
	s.At = at
	if etherType != frame.TypeARP {
		return s, true
	}
	a, ok := frame.ParseARP(linkType, payload)
	if !ok || a.Op != frame.Request && a.Op != frame.Reply {
		return core.Seen{}, false
	}
	s.ARP, s.Reply, s.SPA, s.TPA = true, a.Op == frame.Reply, a.SPA, a.TPA
	return s, true
}
