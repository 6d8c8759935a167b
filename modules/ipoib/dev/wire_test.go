package dev

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// tshark prints fields of the packets of a capture file that match filter, a line
// for each packet.
func tshark(t *testing.T, file, filter string, fields ...string) []string {
	t.Helper()
	args := []string{"-r", file, "-Y", filter, "-T", "fields", "-E", "separator=|"}
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
	text := strings.TrimSuffix(string(out), "\n")
	if text == "" {
		return nil
	}
	return strings.Split(text, "\n")
}

func needTshark(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("tshark"); err != nil {
		t.Skip("tshark is not installed")
	}
}

// captureUnderlay records UDP port 4791 of the host until stop is called. stop
// returns the file.
func (h *host) captureUnderlay() (stop func() string) {
	h.t.Helper()
	needTshark(h.t)
	dir := h.t.TempDir()
	os.Chmod(dir, 0o777) // dumpcap drops its privileges
	file := filepath.Join(dir, "underlay.pcap")
	cmd := h.Command("dumpcap", "-i", "eth0", "-f", "udp port 4791 or udp port 9", "-w", file, "-P")
	var stderr buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	kill := func() {
		cmd.Process.Signal(os.Interrupt)
		<-ended
	}
	h.t.Cleanup(func() {
		select {
		case <-ended:
		default:
			cmd.Process.Kill()
		}
	})
	eventually(h.t, "dumpcap has started", func() bool { return bytes.Contains(stderr.bytes(), []byte("File: ")) })
	return func() string {
		// The file is complete when it has a packet that was sent later.
		h.t.Helper()
		const mark = "end of the capture"
		c := h.udp("udp4", h.port.String()+":0", nil)
		eventually(h.t, "the capture is written", func() bool {
			c.WriteToUDPAddrPort([]byte(mark), netip.AddrPortFrom(portB, 9))
			b, _ := os.ReadFile(file)
			return bytes.Contains(b, []byte(mark))
		})
		kill()
		return file
	}
}

// TestIP01_RFC4391 has tshark judge a conversation of two hosts by all that RFC 4391
// says of it: the packets of the fabric, UDP port 4791, and the frames of the interface.
// Connected mode is RFC 4755.
func TestIP01_RFC4391(t *testing.T) {
	a, b := hosts(t, 4200)
	for _, h := range []*host{a, b} {
		h.Run("ip", "link", "set", "eth0", "gso_max_segs", "1") // captures have packets, not segmented sends
	}
	stop := a.captureUnderlay()
	const pkey, qkey = 0x8001, 0x12345
	ia := a.open(Config{PKey: pkey, QKey: qkey}, "192.168.50.1/24", "fd50::1/64")
	var frames buffer
	if err := ia.Capture(&frames); err != nil {
		t.Fatal(err)
	}
	ib := b.open(Config{PKey: pkey, QKey: qkey}, "192.168.50.2/24", "fd50::2/64")
	a.ping("192.168.50.2")
	a.ping("fd50::2")
	a.Run("ip", "route", "add", "239.0.0.0/8", "dev", "ib0")
	group := netip.MustParseAddrPort("239.1.2.3:9")
	if _, err := a.udp("udp4", "192.168.50.1:0", nil).WriteToUDPAddrPort([]byte("to a group"), group); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the group was joined and the frame sent", func() bool { return bytes.Contains(frames.bytes(), []byte("to a group")) })
	ca, cb := a.udp("udp", "192.168.50.1:0", nil), b.udp("udp", "192.168.50.2:7000", nil)
	exchange(t, ca, "192.168.50.2:7000", cb, make([]byte, 8000))
	file := stop()

	packets, groups := dissect(t, file), groupsIn(t, &frames)
	t.Run("IP-13 UD is the transport", func(t *testing.T) {
		if len(packets) < 10 {
			t.Fatalf("%d packets", len(packets))
		}
		packets.all(t, "infiniband.bth.opcode", "100") // 0x64, UD SEND only
	})
	t.Run("W-07 P_Key", func(t *testing.T) { packets.all(t, "infiniband.bth.p_key", fmt.Sprint(pkey)) })
	t.Run("W-08 Q_Key", func(t *testing.T) { packets.all(t, "infiniband.deth.q_key", "0x0000000000012345") })
	arp := packets.with("arp.opcode")
	t.Run("W-02 ARP", func(t *testing.T) {
		arp.all(t, "arp.hw.type", "32")
		arp.all(t, "arp.hw.size", "20")
		arp.all(t, "arp.proto.type", "0x0800")
		arp.all(t, "arp.proto.size", "4")
	})
	t.Run("W-04 requests are broadcast", func(t *testing.T) {
		arp.has(t, packet{"ip.src": "10.9.0.1", "arp.opcode": "1", "infiniband.bth.destqp": "0xffffff",
			"arp.src.proto_ipv4": "192.168.50.1", "arp.dst.proto_ipv4": "192.168.50.2"})
	})
	t.Run("W-03 replies are unicast", func(t *testing.T) {
		arp.has(t, packet{"ip.src": "10.9.0.2", "ip.dst": "10.9.0.1", "arp.opcode": "2", "arp.src.proto_ipv4": "192.168.50.2",
			"infiniband.bth.destqp": fmt.Sprintf("0x%06x", ia.Address().QPN()), "infiniband.deth.srcqp": fmt.Sprintf("0x%08x", ib.Address().QPN())})
	})
	t.Run("W-14 gratuitous ARP at start", func(t *testing.T) {
		arp.has(t, packet{"ip.src": "10.9.0.1", "arp.opcode": "1", "arp.src.proto_ipv4": "192.168.50.1", "arp.dst.proto_ipv4": "192.168.50.1"})
	})
	t.Run("W-10 no payload is longer than MTU and header", func(t *testing.T) {
		longest := 0
		for _, p := range packets {
			n, err := strconv.Atoi(strings.Split(p["udp.length"], ",")[0])
			if err != nil {
				t.Fatal(err)
			}
			longest = max(longest, n-8-12-8-4) // UDP, BTH, DETH, ICRC
		}
		if longest > ia.MTU()+wire.EncapLen || longest < ia.MTU()-8 { // fragments have a multiple of 8 bytes
			t.Errorf("longest payload %d bytes, want almost %d", longest, ia.MTU()+wire.EncapLen)
		}
	})
	t.Run("W-01 the header in front of IP", func(t *testing.T) {
		types := map[string]bool{}
		for _, p := range packets {
			if raw := strings.Split(p["udp.payload"], ",")[0]; len(raw) > 48 {
				types[raw[40:48]] = true // behind BTH and DETH
			}
		}
		if len(types) != 3 || !types["08000000"] || !types["08060000"] || !types["86dd0000"] {
			t.Errorf("headers %v", types)
		}
	})
	t.Run("W-05 groups of IPv4", func(t *testing.T) {
		for _, g := range []string{"ff12:401b:8001::ffff:ffff", "ff12:401b:8001::f01:203"} { // broadcast; 239.1.2.3
			if !slices.Contains(groups, g) {
				t.Errorf("no frame to %s among %q", g, groups)
			}
		}
	})
	t.Run("W-06 groups of IPv6", func(t *testing.T) {
		if g := "ff12:601b:8001::1:ff00:2"; !slices.Contains(groups, g) { // solicited-node group of fd50::2
			t.Errorf("no frame to %s among %q", g, groups)
		}
	})
	t.Run("W-09 neighbour discovery", func(t *testing.T) {
		nd := packets.with("icmpv6.opt.length")
		nd.all(t, "icmpv6.opt.length", "3")
		nd.all(t, "icmpv6.checksum.status", "1") // good
		nd.has(t, packet{"icmpv6.type": "135", "infiniband.bth.destqp": "0xffffff"})
		nd.has(t, packet{"icmpv6.type": "136", "infiniband.bth.destqp": fmt.Sprintf("0x%06x", ia.Address().QPN())})
	})
}

// groupsIn returns the MGIDs of the groups that frames of a capture went to.
func groupsIn(t *testing.T, capture *buffer) []string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "ib0.pcap")
	if err := os.WriteFile(file, capture.bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return tshark(t, file, "ipoib && ipoib.dgid == ff00::/8", "ipoib.dgid")
}

// packet are the fields of a packet as tshark prints them.
type packet map[string]string

type packets []packet

// dissect has tshark read a capture of the underlying network.
func dissect(t *testing.T, file string) (out packets) {
	t.Helper()
	fields := []string{"ip.src", "ip.dst", "udp.length", "udp.payload", "infiniband.bth.opcode", "infiniband.bth.p_key", "infiniband.bth.destqp",
		"infiniband.deth.q_key", "infiniband.deth.srcqp", "arp.opcode", "arp.hw.type", "arp.hw.size", "arp.proto.type", "arp.proto.size",
		"arp.src.proto_ipv4", "arp.dst.proto_ipv4", "icmpv6.type", "icmpv6.opt.length", "icmpv6.checksum.status"}
	for _, l := range tshark(t, file, "udp.port==4791", fields...) {
		p := packet{}
		for i, v := range strings.Split(l, "|") {
			if v != "" {
				p[fields[i]] = v
			}
		}
		for _, f := range []string{"ip.src", "ip.dst"} { // the outer one
			p[f], _, _ = strings.Cut(p[f], ",")
		}
		out = append(out, p)
	}
	return out
}

// with returns those that have a field.
func (ps packets) with(field string) (out packets) {
	for _, p := range ps {
		if p[field] != "" {
			out = append(out, p)
		}
	}
	return out
}

// all fails if there is no packet, or the field of one has another value.
func (ps packets) all(t *testing.T, field, want string) {
	t.Helper()
	if len(ps) == 0 {
		t.Fatal("no packets")
	}
	for _, p := range ps {
		if p[field] != want {
			t.Fatalf("%s is %s, want %s: %v", field, p[field], want, p)
		}
	}
}

// has fails if there is none with all the values of want.
func (ps packets) has(t *testing.T, want packet) {
	t.Helper()
	if !slices.ContainsFunc(ps, func(p packet) bool {
		for f, v := range want {
			if p[f] != v {
				return false
			}
		}
		return true
	}) {
		t.Errorf("no packet with %v among\n%v", want, ps)
	}
}

// TestCapture_W05_W06: the interface's own capture names link-layer addresses, and
// groups by their MGID.
func TestCapture_W05_W06(t *testing.T) {
	needTshark(t)
	a, b := hosts(t, 4200)
	ia := a.open(Config{}, "192.168.50.1/24", "fd50::1/64")
	b.open(Config{}, "192.168.50.2/24", "fd50::2/64")
	var capture buffer
	if err := ia.Capture(&capture); err != nil {
		t.Fatal(err)
	}
	a.ping("192.168.50.2")
	a.ping("fd50::2")
	if err := ia.Capture(nil); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "ib0.pcap")
	if err := os.WriteFile(file, capture.bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	all := tshark(t, file, "ipoib", "ipoib.grh.sgid", "ipoib.dgid", "arp.opcode", "icmp.type", "icmpv6.type")
	for name, want := range map[string]string{
		"ARP request":  "::ffff:10.9.0.1|ff12:401b:ffff::ffff:ffff|1||",
		"ARP reply":    "::ffff:10.9.0.2|::ffff:10.9.0.1|2||",
		"echo":         "::ffff:10.9.0.1|::ffff:10.9.0.2||8|",
		"solicitation": "::ffff:10.9.0.1|ff12:601b:ffff::1:ff00:2|||135",
		"ICMPv6 reply": "::ffff:10.9.0.2|::ffff:10.9.0.1|||129",
	} {
		if !slices.Contains(all, want) {
			t.Errorf("%s: frames\n%s\nwant %s", name, strings.Join(all, "\n"), want)
		}
	}
}

// TestIP14_MTUOfTheInterface: the MTU is 4 less than that of the broadcast
// group, for all of InfiniBand and one between, and bounded by the underlying
// interface.
func TestIP14_MTUOfTheInterface(t *testing.T) {
	a, _ := hosts(t, 4200)
	small, _ := hosts(t, 1500)
	for _, tc := range []struct {
		host       *host
		link, want int
	}{
		{a, 256, 252}, {a, 512, 508}, {a, 1024, 1020}, {a, 2048, 2044}, {a, 4096, 4092}, {a, 0, 2044},
		{small, 0, 1020}, {small, 1448, 1444}, {small, 2048, 0}, {a, 4100, 0}, {a, 100, 0},
	} {
		i, err := tc.host.tryOpen(Config{LinkMTU: tc.link})
		if tc.want == 0 {
			if err == nil {
				t.Errorf("link MTU %d was accepted", tc.link)
				i.Close()
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if out := strings.TrimSpace(tc.host.Run("cat", "/sys/class/net/ib0/mtu")); i.MTU() != tc.want || out != fmt.Sprint(tc.want) {
			t.Errorf("link MTU %d: interface MTU %d, kernel shows %s; want %d", tc.link, i.MTU(), out, tc.want)
		}
		i.Close()
	}
}

// TestIP14_IPv6OnEthernet: an MTU between those of InfiniBand carries IPv6 over
// Ethernet's 1500 bytes.
func TestIP14_IPv6OnEthernet(t *testing.T) {
	a, b := hosts(t, 1500)
	a.open(Config{LinkMTU: 1448}, "fd50::1/64")
	b.open(Config{LinkMTU: 1448}, "fd50::2/64")
	ca, cb := a.udp("udp", "[fd50::1]:0", nil), b.udp("udp", "[fd50::2]:7000", nil)
	exchange(t, ca, "[fd50::2]:7000", cb, bytes.Repeat([]byte("x"), 1444-48))
}

// TestIP11_PartitionsIsolate: two partitions between the same ports, with the same
// IP addresses behind other interfaces.
func TestIP11_PartitionsIsolate(t *testing.T) {
	a, b := hosts(t, 4200)
	name1, name2 := ChildName("ib0", 0x8001), ChildName("ib0", 0x8002)
	a.open(Config{Name: name1, PKey: 0x8001}, "192.168.51.1/24")
	b.open(Config{Name: name1, PKey: 0x8001}, "192.168.51.2/24")
	a.open(Config{Name: name2, PKey: 0x8002}, "192.168.52.1/24")
	b2 := b.open(Config{Name: name2, PKey: 0x8002}, "192.168.53.2/24") // another network
	a.ping("192.168.51.2")
	// On a link of its own each interface has one neighbour at most: requests for
	// the address behind partition 1 do not get an answer in partition 2.
	a.Run("ip", "route", "add", "192.168.51.2/32", "dev", name2, "metric", "1")
	stranger := a.udp("udp4", "192.168.52.1:0", nil)
	dst := b.udp("udp4", "192.168.51.2:7004", nil)
	for range 5 {
		stranger.WriteToUDPAddrPort([]byte("other partition"), netip.MustParseAddrPort("192.168.51.2:7004"))
	}
	dst.SetReadDeadline(time.Now().Add(700 * time.Millisecond))
	if n, from, err := dst.ReadFromUDPAddrPort(make([]byte, 100)); err == nil {
		t.Errorf("%d bytes from %s crossed partitions", n, from)
	}

	// A forged datagram with the queue pair and Q_Key of the interface but another
	// P_Key is dropped and counted.
	var qp verbs.DatagramQP
	var err error
	a.Do(func() {
		qp, err = a.fabric.OpenDatagrams(verbs.DatagramConfig{Local: portA, PKey: 0x8001, QKey: DefaultQKey})
	})
	if err != nil {
		t.Fatal(err)
	}
	defer qp.Close()
	before := b2.Stats()
	if _, err := qp.Send([]verbs.Datagram{{Payload: []byte{8, 0, 0, 0}, Peer: portB, QPN: b2.Address().QPN(), QKey: DefaultQKey}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the datagram with a wrong P_Key is counted", func() bool { return b2.Stats().Fabric.PKey == before.Fabric.PKey+1 })
}

func TestNamesOfChildren(t *testing.T) {
	for _, tc := range []struct {
		parent string
		pkey   uint16
		want   string
	}{{"ib0", 0x8001, "ib0.8001"}, {"ib0", 1, "ib0.0001"}, {"a-long-parent-name", 0xffff, "a-long-par.ffff"}} {
		if got := ChildName(tc.parent, tc.pkey); got != tc.want {
			t.Errorf("child of %s in %04x is %s, want %s", tc.parent, tc.pkey, got, tc.want)
		}
	}
}
