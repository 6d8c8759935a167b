package frame

import (
	"encoding/binary"
	"net/netip"
)

const (
	igmpV1Report = 0x12
	igmpV2Report = 0x16
	igmpV2Leave  = 0x17
	igmpV3Report = 0x22

	mldV1Report = 131
	mldV1Done   = 132
	mldV2Report = 143

	recordIsInclude = 1
	recordIsExclude = 2
	recordToInclude = 3
	recordToExclude = 4
	recordAllow     = 5
)

var (
	igmpRouters = netip.MustParseAddr("224.0.0.22")
	mldRouters  = netip.MustParseAddr("ff02::16")

	routerAlert6 = []byte{0, 5, 2, 0, 0, 1, 0} // hop-by-hop options, RFC 2710
)

// Report returns one frame that reports membership of groups of one family, in the form of
// IGMPv3 (RFC 3376) or MLDv2 (RFC 3810): any source is wanted. src is an address of
// the sender of the same family; for IPv6 a link-local one or the unspecified.
func (l Link) Report(src netip.Addr, groups []netip.Addr) []byte {
	kind, dst := byte(igmpV3Report), igmpRouters
	if !src.Is4() {
		kind, dst = mldV2Report, mldRouters
	}
	m := make([]byte, 8, 8+20*len(groups))
	m[0] = kind
	binary.BigEndian.PutUint16(m[6:], uint16(len(groups)))
	for _, g := range groups {
		m = append(m, recordToExclude, 0, 0, 0)
		m = append(m, g.AsSlice()...)
	}
	if src.Is4() {
		return l.wrapIGMP(src, dst, m)
	}
	return l.wrapICMPv6(src, dst, 1, routerAlert6, m)
}

// OldReport returns a frame that reports membership of one group in the form of IGMPv2
// (RFC 2236) or MLDv1 (RFC 2710).
func (l Link) OldReport(src, group netip.Addr) []byte {
	if src.Is4() {
		m := append([]byte{igmpV2Report, 0, 0, 0}, group.AsSlice()...)
		return l.wrapIGMP(src, group, m)
	}
	m := append([]byte{mldV1Report, 0, 0, 0, 0, 0, 0, 0}, group.AsSlice()...)
	return l.wrapICMPv6(src, group, 1, routerAlert6, m)
}

// wrapIGMP fills in the checksum of an IGMP message and wraps it in IPv4 with the
// router alert option.
func (l Link) wrapIGMP(src, dst netip.Addr, m []byte) []byte {
	binary.BigEndian.PutUint16(m[2:], checksum(m, 0))
	h := make([]byte, 24)
	h[0] = 0x46
	h[1] = 0xc0 // internetwork control
	binary.BigEndian.PutUint16(h[2:], uint16(len(h)+len(m)))
	h[6] = 0x40 // do not fragment
	h[8], h[9] = 1, protoIGMP
	copy(h[12:], src.AsSlice())
	copy(h[16:], dst.AsSlice())
	copy(h[20:], []byte{0x94, 4, 0, 0})
	binary.BigEndian.PutUint16(h[10:], checksum(h, 0))
	f := l.newFrame(GroupMAC(dst), TypeIPv4, len(h)+len(m))
	return append(append(f, h...), m...)
}

// Membership is a report's statement about one group.
type Membership struct {
	Group netip.Addr
	Join  bool // else it is left
	Old   bool // told by IGMPv1, IGMPv2 or MLDv1
}

// Reports returns the memberships that an IP packet reports; nil if it is no
// report. It reads the packets of this host's own stack, so checksums are not
// looked at.
func Reports(etherType uint16, p []byte) []Membership {
	switch etherType {
	case TypeIPv4:
		if len(p) < 20 || p[9] != protoIGMP {
			return nil
		}
		if n := int(p[0]&0xf) * 4; n >= 20 && len(p) >= n+8 {
			return igmpReports(p[n:])
		}
	case TypeIPv6:
		// Reports have a hop-by-hop header of 8 octets, always.
		if len(p) >= 56 && p[6] == 0 && p[40] == protoICMPv6 && p[41] == 0 {
			return mldReports(p[48:])
		}
	}
	return nil
}

func igmpReports(m []byte) []Membership {
	switch m[0] {
	case igmpV1Report, igmpV2Report, igmpV2Leave:
		return multicastOnly([]Membership{{Group: netip.AddrFrom4([4]byte(m[4:])), Join: m[0] != igmpV2Leave, Old: true}})
	case igmpV3Report:
		return groupRecords(m, 4)
	}
	return nil
}

func mldReports(m []byte) []Membership {
	switch m[0] {
	case mldV1Report, mldV1Done:
		if len(m) < 24 {
			return nil
		}
		return multicastOnly([]Membership{{Group: netip.AddrFrom16([16]byte(m[8:])), Join: m[0] == mldV1Report, Old: true}})
	case mldV2Report:
		return groupRecords(m, 16)
	}
	return nil
}

// groupRecords reads the group records of IGMPv3 and MLDv2. They differ in the
// length of addresses.
func groupRecords(m []byte, addrLen int) (all []Membership) {
	count := int(binary.BigEndian.Uint16(m[6:]))
	m = m[8:]
	for range count {
		if len(m) < 4+addrLen {
			break
		}
		kind, aux, sources := m[0], int(m[1])*4, int(binary.BigEndian.Uint16(m[2:]))
		group, _ := netip.AddrFromSlice(m[4 : 4+addrLen])
		length := 4 + addrLen + sources*addrLen + aux
		if len(m) < length {
			break
		}
		m = m[length:]
		switch kind {
		case recordIsExclude, recordToExclude, recordAllow:
			all = append(all, Membership{Group: group, Join: true})
		case recordIsInclude, recordToInclude:
			all = append(all, Membership{Group: group, Join: sources > 0})
		}
	}
	return multicastOnly(all)
}

func multicastOnly(all []Membership) []Membership {
	kept := all[:0]
	for _, m := range all {
		if m.Group.IsMulticast() && !m.Group.Is4In6() {
			kept = append(kept, m)
		}
	}
	return kept
}
