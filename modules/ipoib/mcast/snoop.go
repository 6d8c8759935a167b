package mcast

import (
	"encoding/binary"
	"net/netip"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

var be = binary.BigEndian

// Change is a membership that the IP stack has reported.
type Change struct {
	Group netip.Addr
	Join  bool // else it has left
}

// Types of reports.
const (
	igmpV1Report = 0x12
	igmpV2Report = 0x16
	igmpLeave    = 0x17
	igmpV3Report = 0x22
	mldV1Report  = 131
	mldDone      = 132
	mldV2Report  = 143
)

// Types of the records in a report of IGMPv3 or MLDv2 (RFC 3376, 4.2.12).
const (
	modeIsInclude   = 1
	modeIsExclude   = 2
	changeToInclude = 3
	changeToExclude = 4
	allowNew        = 5
)

// Snoop returns the memberships that a packet reports by IGMP or MLD; none for
// any other packet. It is meant for packets of the local IP stack.
func Snoop(etherType uint16, packet []byte) []Change {
	switch {
	case etherType == wire.TypeIPv4 && len(packet) >= 20 && packet[9] == 2:
		if n := int(packet[0]&0xf) * 4; n >= 20 && len(packet) >= n+8 {
			return parseIGMP(packet[n:])
		}
	case etherType == wire.TypeIPv6 && len(packet) >= 48 && packet[6] == 0 && packet[40] == 58:
		if n := 48 + int(packet[41])*8; len(packet) >= n+8 { // behind the router alert
			return parseMLD(packet[n:])
		}
	}
	return nil
}

func parseIGMP(m []byte) []Change {
	group := netip.AddrFrom4([4]byte(m[4:]))
	switch m[0] {
	case igmpV1Report, igmpV2Report:
		return validChanges(Change{group, true})
	case igmpLeave:
		return validChanges(Change{group, false})
	case igmpV3Report:
		return parseRecords(m[8:], int(be.Uint16(m[6:])), 4)
	}
	return nil
}

func parseMLD(m []byte) []Change {
	switch m[0] {
	case mldV1Report, mldDone:
		if len(m) < 24 {
			return nil
		}
		return validChanges(Change{netip.AddrFrom16([16]byte(m[8:])), m[0] == mldV1Report})
	case mldV2Report:
		return parseRecords(m[8:], int(be.Uint16(m[6:])), 16)
	}
	return nil
}

func validChanges(c Change) []Change {
	if !c.Group.IsMulticast() {
		return nil
	}
	return []Change{c}
}

// parseRecords reads n records with addresses of size bytes.
func parseRecords(b []byte, n, size int) (out []Change) {
	for ; n > 0 && len(b) >= 4+size; n-- {
		sources := int(be.Uint16(b[2:]))
		group, _ := netip.AddrFromSlice(b[4 : 4+size])
		length := 4 + size + sources*size + int(b[1])*4
		if len(b) < length {
			break
		}
		switch b[0] {
		case modeIsExclude, changeToExclude:
			out = append(out, validChanges(Change{group, true})...)
		case modeIsInclude, changeToInclude, allowNew:
			if sources > 0 || b[0] == changeToInclude {
				out = append(out, validChanges(Change{group, sources > 0})...)
			}
		}
		b = b[length:]
	}
	return out
}
