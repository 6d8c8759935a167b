package wire

import "net/netip"

// ndBody returns the length of a neighbour discovery message without options,
// 0 for another type.
func ndBody(kind byte) int {
	switch kind {
	case NDRouterSolicit:
		return 8
	case NDRouterAdvert:
		return 16
	case NDNeighborSolicit, NDNeighborAdvert:
		return ndMessageLen
	case NDRedirect:
		return 40
	}
	return 0
}

// MapLinkLayer rewrites the link-layer options of a neighbour discovery packet,
// an IPv6 packet of the type NDType: each option of size bytes is replaced by the
// result of f. Lengths and checksum follow. The result is false if the packet is
// malformed, has a link-layer option of another size, or f refuses one.
func MapLinkLayer(p []byte, size int, f func(option []byte) ([]byte, bool)) ([]byte, bool) {
	kind := NDType(p)
	body := ndBody(kind)
	if body == 0 || len(p) < ipv6Len+body || int(be.Uint16(p[4:])) != len(p)-ipv6Len || p[7] != ndHopLimit {
		return nil, false
	}
	src, dst := netip.AddrFrom16([16]byte(p[8:])), netip.AddrFrom16([16]byte(p[24:]))
	if sumICMPv6(src, dst, p[ipv6Len:]) != 0xffff {
		return nil, false
	}
	out := append(make([]byte, 0, len(p)+32), p[:ipv6Len+body]...)
	for o := p[ipv6Len+body:]; len(o) > 0; {
		if len(o) < 2 || o[1] == 0 || len(o) < int(o[1])*8 {
			return nil, false
		}
		option := o[:int(o[1])*8]
		o = o[len(option):]
		if option[0] == optionSource || option[0] == optionTarget {
			ok := len(option) == size
			if ok {
				option, ok = f(option)
			}
			if !ok {
				return nil, false
			}
		}
		out = append(out, option...)
	}
	be.PutUint16(out[4:], uint16(len(out)-ipv6Len))
	m := out[ipv6Len:]
	m[2], m[3] = 0, 0
	be.PutUint16(m[2:], ^sumICMPv6(src, dst, m))
	return out, true
}
