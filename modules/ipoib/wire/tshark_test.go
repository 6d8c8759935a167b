package wire

import (
	"bytes"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// decode has tshark dissect records of link type 242, and returns the values of
// fields, a line each.
func decode(t *testing.T, records []byte, fields ...string) []string {
	t.Helper()
	if _, err := exec.LookPath("tshark"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skip("tshark is not installed")
	}
	file := filepath.Join(t.TempDir(), "capture.pcap")
	if err := os.WriteFile(file, append(PcapHeader(), records...), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"-r", file, "-T", "fields", "-E", "separator=|"}
	for _, f := range fields {
		args = append(args, "-e", f)
	}
	cmd := exec.Command("tshark", args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("tshark: %v: %s", err, stderr.String())
	}
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
}

// TestW02_W05_W06_W09_Tshark: tshark decodes the packets of this package.
func TestW02_W05_W06_W09_Tshark(t *testing.T) {
	link := Link{PKey: 0x8001, Scope: ScopeLinkLocal}
	broadcast := MulticastAddress(link.Broadcast())
	arp := NewARP(ARPFields{Op: ARPRequest, SenderHW: alice, SenderIP: addr("192.168.1.1"), TargetIP: addr("192.168.1.2")})
	ns := NDFields{Type: NDNeighborSolicit, Src: addr("fe80::1"), Dst: SolicitedNode(addr("fe80::2")), Target: addr("fe80::2"), LinkLayer: alice, HasLinkLayer: true}
	na := NDFields{Type: NDNeighborAdvert, Flags: NDOverride, Src: addr("fe80::2"), Dst: netip.IPv6LinkLocalAllNodes(), Target: addr("fe80::2"), LinkLayer: bob, HasLinkLayer: true}
	group, err := link.Multicast(ns.Dst)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1700000000, 0)
	var b []byte
	b = AppendPcapRecord(b, now, alice, broadcast, AppendFrame(nil, TypeARP, arp))
	b = AppendPcapRecord(b, now, alice, MulticastAddress(group), AppendFrame(nil, TypeIPv6, NewND(ns)))
	b = AppendPcapRecord(b, now, bob, MulticastAddress(group), AppendFrame(nil, TypeIPv6, NewND(na)))
	got := decode(t, b, "ipoib.grh.sgid", "ipoib.dgid", "ipoib.type", "ipoib.reserved", "ipoib.grh.sqpn",
		"arp.hw.type", "arp.hw.size", "arp.opcode", "arp.src.proto_ipv4",
		"icmpv6.type", "icmpv6.checksum.status", "icmpv6.nd.ns.target_address", "icmpv6.opt.type", "icmpv6.opt.length", "_ws.malformed")
	want := []string{
		"::ffff:10.0.0.1|ff12:401b:8001::ffff:ffff|0x0806|0x0000|0x000456|32|20|1|192.168.1.1||||||",
		"::ffff:10.0.0.1|ff12:601b:8001::1:ff00:2|0x86dd|0x0000|0x000456|||||135|1|fe80::2|1|3|",
		"::ffff:10.0.0.2|ff12:601b:8001::1:ff00:2|0x86dd|0x0000|0xabcdef|||||136|1||2|3|",
	}
	if !slices.Equal(got, want) {
		t.Errorf("tshark reads\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
