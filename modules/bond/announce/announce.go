// Package announce makes the frames that tell peers, switches and routers of a
// bond's new active slave: gratuitous ARP, unsolicited neighbour
// advertisements, and reports of the multicast groups. How often they are sent
// is up to num_grat_arp, peer_notif_delay and resend_igmp, see package core.
package announce

import (
	"net/netip"
	"slices"

	"github.com/rnbd-go/rnbd/modules/bond/frame"
)

// Peers returns the frames that tell peers the link-layer address of l for each
// of the bond's addresses: for IPv4 a gratuitous ARP request, with the address
// as sender and target, and for IPv6 an unsolicited advertisement.
func Peers(l frame.Link, addrs []netip.Addr) (frames [][]byte) {
	for _, a := range addrs {
		switch a = a.Unmap().WithZone(""); {
		case a.Is4():
			frames = append(frames, l.ARP(frame.ARP{Op: frame.Request, SHA: l.Address, SPA: a, TPA: a}))
		case a.Is6():
			frames = append(frames, l.Advertisement(a))
		}
	}
	return frames
}

// Group is a multicast group that the users of a bond have joined.
type Group struct {
	Addr netip.Addr
	Old  bool // reported by IGMPv2 or MLDv1, since routers know nothing newer
}

// maxRecords is how many groups one report carries, so that it fits every MTU.
const maxRecords = 10

// Groups returns the frames that report groups again. addrs are the bond's
// addresses: IGMP is sent from the first one, MLD from the first link-local one
// or the unspecified address. All-hosts and all-nodes are never reported.
func Groups(l frame.Link, addrs []netip.Addr, groups []Group) (frames [][]byte) {
	src4, src6 := netip.IPv4Unspecified(), netip.IPv6Unspecified()
	for _, a := range slices.Backward(addrs) {
		switch a = a.Unmap().WithZone(""); {
		case a.Is4():
			src4 = a
		case a.IsLinkLocalUnicast():
			src6 = a
		}
	}
	var v4, v6 []netip.Addr
	for _, g := range groups {
		src, list := src4, &v4
		if g.Addr.Is6() {
			src, list = src6, &v6
		}
		switch {
		case g.Addr == AllHosts || g.Addr == AllNodes:
		case g.Old:
			frames = append(frames, l.OldReport(src, g.Addr))
		default:
			*list = append(*list, g.Addr)
		}
	}
	for some := range slices.Chunk(v4, maxRecords) {
		frames = append(frames, l.Report(src4, some))
	}
	for some := range slices.Chunk(v6, maxRecords) {
		frames = append(frames, l.Report(src6, some))
	}
	return frames
}

// Groups that every host is in and none reports.
var (
	AllHosts = netip.MustParseAddr("224.0.0.1")
	AllNodes = netip.MustParseAddr("ff02::1")
)
