package frame

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var (
	eth = Link{Type: Ethernet, Address: []byte{2, 0, 0, 0, 0, 7}}
	ib  = Link{Type: InfiniBand, Address: unhex("80000048fe800000000000000002c90300a1b2c3")}

	ip4   = netip.MustParseAddr("10.5.0.1")
	ip6   = netip.MustParseAddr("fe80::202:c903:a1:b2c3")
	group = netip.MustParseAddr("239.1.2.3")
	mld   = netip.MustParseAddr("ff02::1:ff00:2")
)

func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}

func TestARP_Bytes(t *testing.T) {
	garp := ARP{Op: Request, SPA: ip4, TPA: ip4}
	garp.SHA = eth.Address
	want := unhex("ffffffffffff 020000000007 0806 0001 0800 06 04 0001 020000000007 0a050001 000000000000 0a050001")
	if got := eth.ARP(garp); !bytes.Equal(got, want) {
		t.Errorf("Ethernet:\n%x, want\n%x", got, want)
	}
	garp.SHA = ib.Address
	want = unhex("0806 0000 0020 0800 14 04 0001 80000048fe800000000000000002c90300a1b2c3 0a050001" + strings.Repeat("00", 20) + "0a050001")
	if got := ib.ARP(garp); !bytes.Equal(got, want) {
		t.Errorf("InfiniBand:\n%x, want\n%x", got, want)
	}
}

func TestARP_IsReadBack(t *testing.T) {
	for _, l := range []Link{eth, ib} {
		a := ARP{Op: Reply, SHA: l.Address, SPA: ip4, THA: bytes.Repeat([]byte{9}, len(l.Address)), TPA: netip.MustParseAddr("10.5.0.2")}
		etherType, p, ok := Split(l.Type, l.ARP(a))
		got, isARP := ParseARP(l.Type, p)
		if !ok || etherType != TypeARP || !isARP || got.Op != a.Op || got.SPA != a.SPA || got.TPA != a.TPA ||
			!bytes.Equal(got.SHA, a.SHA) || !bytes.Equal(got.THA, a.THA) {
			t.Errorf("type %d: %+v, want %+v", l.Type, got, a)
		}
		for cut := range len(p) {
			if _, ok := ParseARP(l.Type, p[:cut]); ok {
				t.Errorf("type %d: ARP of %d octets is accepted", l.Type, cut)
			}
		}
	}
}

func TestReports_AreReadBack(t *testing.T) {
	other := netip.MustParseAddr("224.0.0.251")
	for _, c := range []struct {
		name string
		f    []byte
		want []Membership
	}{
		{"IGMPv3", eth.Report(ip4, []netip.Addr{group, other}), []Membership{{Group: group, Join: true}, {Group: other, Join: true}}},
		{"MLDv2", eth.Report(ip6, []netip.Addr{mld}), []Membership{{Group: mld, Join: true}}},
		{"IGMPv2", eth.OldReport(ip4, group), []Membership{{Group: group, Join: true, Old: true}}},
		{"MLDv1", eth.OldReport(ip6, mld), []Membership{{Group: mld, Join: true, Old: true}}},
		{"ARP", eth.ARP(ARP{Op: Request, SPA: ip4, TPA: ip4}), nil},
		{"NA", eth.Advertisement(ip6), nil},
	} {
		etherType, p, _ := Split(Ethernet, c.f)
		if got := Reports(etherType, p); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestReports_Leaves(t *testing.T) {
	f := eth.Report(ip4, []netip.Addr{group})
	f[14+24+8] = recordToInclude
	if got := Reports(TypeIPv4, f[14:]); !slices.Equal(got, []Membership{{Group: group}}) {
		t.Errorf("TO_INCLUDE of no source: %v, want a leave", got)
	}
	f = eth.OldReport(ip4, group)
	f[14+24] = igmpV2Leave
	if got := Reports(TypeIPv4, f[14:]); !slices.Equal(got, []Membership{{Group: group, Old: true}}) {
		t.Errorf("IGMPv2 leave: %v", got)
	}
}

// TestBO12_TsharkReadsTheAnnouncements has tshark dissect the announcements to peers, as
// Ethernet and as IP over InfiniBand (link type 242).
func TestBO12_TsharkReadsTheAnnouncements(t *testing.T) {
	tshark, err := exec.LookPath("tshark")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("tshark is not installed")
		}
		t.Skip("tshark is not installed")
	}
	for _, c := range []struct {
		link     Link
		linkType uint32
		arp      map[string]string
		na       string
	}{
		{eth, 1, map[string]string{"arp.hw.type": "1", "arp.hw.size": "6", "arp.isgratuitous": "1", "arp.opcode": "1"}, "02:00:00:00:00:07"},
		{ib, 242, map[string]string{"arp.hw.type": "32", "arp.hw.size": "20", "arp.opcode": "1"}, "80:00:00:48:fe:80:00:00:00:00:00:00:00:02:c9:03:00:a1:b2:c3"},
	} {
		l := c.link
		file := filepath.Join(t.TempDir(), "announce.pcap")
		frames := [][]byte{
			l.ARP(ARP{Op: Request, SHA: l.Address, SPA: ip4, TPA: ip4}), l.Advertisement(ip6),
			l.Report(ip4, []netip.Addr{group}), l.Report(ip6, []netip.Addr{mld}), l.OldReport(ip4, group), l.OldReport(ip6, mld),
		}
		writePcap(t, file, c.linkType, frames)
		out, err := exec.Command(tshark, "-r", file, "-T", "json", "-o", "ip.check_checksum:TRUE").Output()
		if err != nil {
			t.Fatalf("tshark: %v", err)
		}
		var packets []struct {
			Source struct{ Layers map[string]any } `json:"_source"`
		}
		if err := json.Unmarshal(out, &packets); err != nil || len(packets) != len(frames) {
			t.Fatalf("tshark: %v, %d packets", err, len(packets))
		}
		arp := flat(packets[0].Source.Layers)
		for field, want := range c.arp {
			if arp[field] != want {
				t.Errorf("type %d: %s is %q, want %q", l.Type, field, arp[field], want)
			}
		}
		if arp["arp.src.proto_ipv4"] != "10.5.0.1" || arp["arp.dst.proto_ipv4"] != "10.5.0.1" {
			t.Errorf("type %d: sender and target are %q and %q", l.Type, arp["arp.src.proto_ipv4"], arp["arp.dst.proto_ipv4"])
		}
		na := flat(packets[1].Source.Layers)
		if na["icmpv6.type"] != "136" || na["icmpv6.checksum.status"] != "1" || na["icmpv6.nd.na.flag.o"] != "1" || na["icmpv6.nd.na.flag.s"] != "0" || na["ipv6.hlim"] != "255" {
			t.Errorf("type %d: advertisement %v", l.Type, na)
		}
		if len(l.Address) == 6 && na["icmpv6.opt.linkaddr"] != c.na {
			t.Errorf("link-layer address is %q, want %q", na["icmpv6.opt.linkaddr"], c.na)
		}
		if got, want := na["icmpv6.opt.length"], map[uint16]string{1: "1", 32: "3"}[l.Type]; got != want {
			t.Errorf("type %d: length of the option is %q, want %q", l.Type, got, want)
		}
		for i, want := range map[int][2]string{2: {"igmp.type", "0x22"}, 3: {"icmpv6.type", "143"}, 4: {"igmp.type", "0x16"}, 5: {"icmpv6.type", "131"}} {
			p := flat(packets[i].Source.Layers)
			sum := "igmp.checksum.status"
			if i%2 == 1 {
				sum = "icmpv6.checksum.status"
			}
			if p[want[0]] != want[1] || p[sum] != "1" || i%2 == 0 && p["ip.checksum.status"] != "1" {
				t.Errorf("type %d, report %d: %s is %q, want %q; checksums %q %q", l.Type, i, want[0], p[want[0]], want[1], p[sum], p["ip.checksum.status"])
			}
		}
	}
}

// flat are the leaves of a tree of tshark's, by name.
func flat(tree map[string]any) map[string]string {
	all := map[string]string{}
	for k, v := range tree {
		switch v := v.(type) {
		case string:
			all[k] = v
		case map[string]any:
			for k, v := range flat(v) {
				all[k] = v
			}
		}
	}
	return all
}

// writePcap writes frames of link type 1 or 242; the latter have 40 octets of
// a pseudo GRH in front.
func writePcap(t *testing.T, file string, linkType uint32, frames [][]byte) {
	t.Helper()
	le := binary.LittleEndian
	b := le.AppendUint32(nil, 0xa1b2c3d4)
	b = le.AppendUint32(b, 4<<16|2)
	b = le.AppendUint64(b, 0)
	b = le.AppendUint32(b, 65535)
	b = le.AppendUint32(b, linkType)
	for _, f := range frames {
		if linkType == 242 {
			f = append(make([]byte, 40), f...)
		}
		b = le.AppendUint64(b, 0)
		b = le.AppendUint32(b, uint32(len(f)))
		b = le.AppendUint32(b, uint32(len(f)))
		b = append(b, f...)
	}
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func FuzzARP(f *testing.F) {
	_, p, _ := Split(InfiniBand, ib.ARP(ARP{Op: Request, SHA: ib.Address, SPA: ip4, TPA: ip4}))
	f.Add(uint16(32), p)
	f.Fuzz(func(t *testing.T, linkType uint16, b []byte) {
		a, ok := ParseARP(linkType, b)
		if !ok {
			return
		}
		// A frame that is read and written again is the same.
		l := Link{Type: linkType, Address: a.SHA}
		_, again, _ := Split(linkType, l.ARP(a))
		if !bytes.Equal(again, b[:len(again)]) {
			t.Fatalf("%x is read as %+v, which is %x", b, a, again)
		}
	})
}

func FuzzReports(f *testing.F) {
	f.Add(uint16(TypeIPv4), eth.Report(ip4, []netip.Addr{group})[14:])
	f.Add(uint16(TypeIPv6), eth.Report(ip6, []netip.Addr{mld})[14:])
	f.Add(uint16(TypeIPv6), eth.OldReport(ip6, mld)[14:])
	f.Fuzz(func(t *testing.T, etherType uint16, p []byte) {
		for _, m := range Reports(etherType, p) {
			if !m.Group.IsMulticast() || m.Group.Is4() != (etherType == TypeIPv4) {
				t.Fatalf("group %v of a packet of type %x", m.Group, etherType)
			}
		}
	})
}
