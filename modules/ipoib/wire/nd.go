package wire

import "net/netip"

// Neighbour discovery (RFC 4861) with the link-layer option of IPoIB (RFC 4391,
// section 9.3).

// Types of neighbour discovery messages in ICMPv6.
const (
	NDRouterSolicit    = 133
	NDRouterAdvert     = 134
	NDNeighborSolicit  = 135
	NDNeighborAdvert   = 136
	NDRedirect         = 137
	ndMessageLen       = 24 // of solicitations and advertisements, without options
	ndHopLimit         = 255
	optionSource       = 1
	optionTarget       = 2
	linkLayerOptionLen = 24 // type, length, 2 octets of padding, address
)

// Flags of a neighbour advertisement.
const (
	NDRouter    = 0x80
	NDSolicited = 0x40
	NDOverride  = 0x20
)

// ND is an IPv6 packet with a neighbour solicitation or advertisement.
type ND []byte

// NDFields are the fields of a neighbour solicitation or advertisement.
type NDFields struct {
	Type     byte // NDNeighborSolicit or NDNeighborAdvert
	Flags    byte // of an advertisement
	Src, Dst netip.Addr
	Target   netip.Addr
	// LinkLayer is the address in the source option of a solicitation, or the
	// target option of an advertisement. HasLinkLayer reports whether it is there.
	LinkLayer    Address
	HasLinkLayer bool
}

// NDType returns the type of the neighbour discovery message in an IPv6 packet
// without extension headers, 0 if there is none.
func NDType(packet []byte) byte {
	if len(packet) <= ipv6Len || packet[0]>>4 != 6 || packet[6] != protocolICMPv6 {
		return 0
	}
	if t := packet[ipv6Len]; t >= NDRouterSolicit && t <= NDRedirect {
		return t
	}
	return 0
}

// Valid reports whether p is a solicitation or an advertisement that a receiver
// may use (RFC 4861, sections 7.1.1 and 7.1.2): type, lengths, hop limit,
// checksum, target, options.
func (p ND) Valid() bool {
	t := NDType(p)
	if t != NDNeighborSolicit && t != NDNeighborAdvert || len(p) < ipv6Len+ndMessageLen {
		return false
	}
	if int(be.Uint16(p[4:])) != len(p)-ipv6Len || p[7] != ndHopLimit || p[ipv6Len+1] != 0 {
		return false
	}
	src, dst := netip.AddrFrom16([16]byte(p[8:])), netip.AddrFrom16([16]byte(p[24:]))
	if sumICMPv6(src, dst, p[ipv6Len:]) != 0xffff {
		return false
	}
	if netip.AddrFrom16([16]byte(p[ipv6Len+8:])).IsMulticast() || src.IsMulticast() {
		return false
	}
	var option [1]Address
	has, ok := p.options(&option)
	if t == NDNeighborSolicit && src.IsUnspecified() {
		return ok && !has && dst == SolicitedNode(p.target())
	}
	return ok
}

func (p ND) target() netip.Addr { return netip.AddrFrom16([16]byte(p[ipv6Len+8:])) }

// options looks for the link-layer option that belongs to the message. It
// reports whether the option is there, and whether all options are well formed.
func (p ND) options(out *[1]Address) (has, ok bool) {
	want := byte(optionSource)
	if p[ipv6Len] == NDNeighborAdvert {
		want = optionTarget
	}
	for o := p[ipv6Len+ndMessageLen:]; len(o) > 0; {
		if len(o) < 2 || o[1] == 0 || len(o) < int(o[1])*8 {
			return false, false
		}
		n := int(o[1]) * 8
		if o[0] == want {
			if n != linkLayerOptionLen {
				return false, false
			}
			out[0], has = Address(o[4:24]), true
		}
		o = o[n:]
	}
	return has, true
}

// Fields returns the fields of a valid message.
func (p ND) Fields() NDFields {
	f := NDFields{Type: p[ipv6Len], Flags: p[ipv6Len+4], Target: p.target(),
		Src: netip.AddrFrom16([16]byte(p[8:])), Dst: netip.AddrFrom16([16]byte(p[24:]))}
	if f.Type == NDNeighborSolicit {
		f.Flags = 0
	}
	var option [1]Address
	if f.HasLinkLayer, _ = p.options(&option); f.HasLinkLayer {
		f.LinkLayer = option[0]
	}
	return f
}

// NewND makes the IPv6 packet of a solicitation or an advertisement.
func NewND(f NDFields) ND {
	size := ndMessageLen
	if f.HasLinkLayer {
		size += linkLayerOptionLen
	}
	p := make(ND, ipv6Len+size)
	p[0], p[6], p[7] = 0x60, protocolICMPv6, ndHopLimit
	be.PutUint16(p[4:], uint16(size))
	src, dst, target := f.Src.As16(), f.Dst.As16(), f.Target.As16()
	copy(p[8:], src[:])
	copy(p[24:], dst[:])
	m := p[ipv6Len:]
	m[0] = f.Type
	copy(m[8:], target[:])
	option := byte(optionSource)
	if f.Type == NDNeighborAdvert {
		m[4], option = f.Flags, optionTarget
	}
	if f.HasLinkLayer {
		o := m[ndMessageLen:]
		o[0], o[1] = option, linkLayerOptionLen/8
		copy(o[4:], f.LinkLayer[:])
	}
	be.PutUint16(m[2:], ^sumICMPv6(f.Src, f.Dst, m))
	return p
}
