package announce

import (
	"net/netip"
	"testing"

	"github.com/rnbd-go/rnbd/modules/bond/frame"
)

var link = frame.Link{Type: frame.Ethernet, Address: []byte{2, 0, 0, 0, 0, 1}}

func addrs(all ...string) (list []netip.Addr) {
	for _, a := range all {
		list = append(list, netip.MustParseAddr(a))
	}
	return list
}

func TestPeers_OneFrameForEachAddress(t *testing.T) {
	fs := Peers(link, addrs("10.0.0.1", "::ffff:10.0.0.2", "fe80::1%eth0", "2001:db8::1"))
	var types []uint16
	for _, f := range fs {
		et, _, _ := frame.Split(1, f)
		types = append(types, et)
	}
	want := []uint16{frame.TypeARP, frame.TypeARP, frame.TypeIPv6, frame.TypeIPv6}
	if len(types) != 4 || types[0] != want[0] || types[1] != want[1] || types[2] != want[2] || types[3] != want[3] {
		t.Errorf("frames of types %x, want %x", types, want)
	}
}

func TestGroups(t *testing.T) {
	var groups []Group
	for i := range 25 {
		groups = append(groups, Group{Addr: netip.AddrFrom4([4]byte{239, 0, 0, byte(i + 1)})})
	}
	groups = append(groups, Group{Addr: AllHosts}, Group{Addr: AllNodes},
		Group{Addr: netip.MustParseAddr("239.9.9.9"), Old: true}, Group{Addr: netip.MustParseAddr("ff02::fb")})
	told := map[netip.Addr]int{}
	fs := Groups(link, addrs("2001:db8::1", "10.0.0.1", "fe80::1"), groups)
	for _, f := range fs {
		et, p, _ := frame.Split(1, f)
		if et == frame.TypeIPv4 && netip.AddrFrom4([4]byte(p[12:16])).String() != "10.0.0.1" {
			t.Errorf("IGMP is sent from %v", netip.AddrFrom4([4]byte(p[12:16])))
		}
		if et == frame.TypeIPv6 && netip.AddrFrom16([16]byte(p[8:24])).String() != "fe80::1" {
			t.Errorf("MLD is sent from %v", netip.AddrFrom16([16]byte(p[8:24])))
		}
		for _, m := range frame.Reports(et, p) {
			told[m.Group]++
		}
	}
	if len(told) != 27 || told[AllHosts] != 0 || told[AllNodes] != 0 {
		t.Errorf("%d groups are reported, want 27 and neither all-hosts nor all-nodes", len(told))
	}
	if len(fs) != 5 { // 3 of IGMPv3, 1 of IGMPv2, 1 of MLDv2
		t.Errorf("%d frames, want 5", len(fs))
	}
}
