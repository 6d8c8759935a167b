package bond

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/dev"
	"github.com/rnbd-go/rnbd/modules/bond/frame"
	"github.com/rnbd-go/rnbd/modules/bond/netns"
	"github.com/rnbd-go/rnbd/modules/bond/tun"
	ipoib "github.com/rnbd-go/rnbd/modules/ipoib/dev"
	"github.com/rnbd-go/rnbd/modules/ipoib/neigh"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// ipoibSlave makes an IPoIB interface a slave. Its address cannot be set, and
// all that it receives is looked at by the bond.
type ipoibSlave struct{ *ipoib.Interface }

var (
	_ dev.Slave      = ipoibSlave{}
	_ dev.PrefixUser = ipoibSlave{}
)

func (s ipoibSlave) Attrs() dev.Attrs {
	local, all := s.Address(), s.Broadcast()
	return dev.Attrs{Type: frame.InfiniBand, Address: bytes.Clone(local[:]), Broadcast: bytes.Clone(all[:]), HeaderLen: 24, MTU: s.MTU()}
}

func (s ipoibSlave) Speed() (int, bool)           { return 0, false }
func (s ipoibSlave) SetsAddress() bool            { return false }
func (s ipoibSlave) SetAddress([]byte) error      { return syscall.EOPNOTSUPP }
func (s ipoibSlave) SetFilter(dev.RxFilter) error { return nil }
func (s ipoibSlave) Attach(c dev.Callbacks)       { s.Interface.Attach(ipoib.Above{Receive: c.Received}) }
func (s ipoibSlave) Detach()                      { s.Interface.Detach() }
func (s ipoibSlave) Send(f []byte) error          { return s.SendFrame(f) }

// newIPoIB makes three ports of one link, each in a namespace of its own on the
// switch: those of the bond's slaves in low0 and low1, that of the peer in peer.
func newIPoIB(t *testing.T, mode ipoib.Mode) (n *network, peer *ipoib.Interface) {
	t.Helper()
	n = &network{t: t, id: fmt.Sprintf("bond%d-%d-", os.Getpid(), made.Add(1)), peerDev: "ib0"}
	n.namespaces("up", "low0", "low1", "sw", "peer")
	n.ip("sw", "link add br0 mtu 4200 type bridge mcast_snooping 0")
	n.ip("sw", "link set br0 up")
	n.net = &dev.Net{Log: slog.New(slog.NewTextHandler(&logBuffer{t: t}, nil)),
		NewUpper: func(name string, c dev.UpperCallbacks) (dev.Upper, error) { return tun.Open(name, n.ns("up"), c) }}
	all := []netip.Addr{netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("10.9.0.2"), netip.MustParseAddr("10.9.0.3")}
	for k, p := range []struct{ port, ns, name string }{{"p0", "low0", "ib0"}, {"p1", "low1", "ib1"}, {"pp", "peer", "ib0"}} {
		n.ip("sw", "link add "+p.port+" mtu 4200 type veth peer name e0 netns "+n.name(p.ns))
		n.ip("sw", "link set "+p.port+" master br0 up")
		n.ip(p.ns, "link set e0 mtu 4200 up")
		n.ip(p.ns, "addr add "+all[k].String()+"/24 dev e0")
		i := n.port(p.ns, p.name, all[k], all, mode)
		if p.ns == "peer" {
			peer = i
			continue
		}
		if err := n.net.AddDevice(ipoibSlave{i}); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(n.net.Close) // before the ports
	n.ip("peer", "addr add 10.5.0.2/24 dev ib0")
	n.ip("peer", "link set ib0 up")
	return n, peer
}

// port opens a fabric and an interface in a namespace.
func (n *network) port(ns, name string, local netip.Addr, all []netip.Addr, mode ipoib.Mode) (i *ipoib.Interface) {
	n.t.Helper()
	err := netns.Do(n.ns(ns), func() error {
		log := slog.New(slog.DiscardHandler)
		d, err := rocev2.Open(rocev2.Config{Addrs: []netip.Addr{local}, Logger: log})
		if err != nil {
			return err
		}
		n.t.Cleanup(func() { d.Close() })
		i, err = ipoib.Open(ipoib.Config{Name: name, Fabric: d.(verbs.DatagramDevice), Local: local, Peers: all, Mode: mode, Logger: log})
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { i.Close() })
	return i
}

// TestBO02_IPoIBInterfacesAreEnslaved has a bond of interfaces of modules/ipoib, with
// the ARP monitor over type 32, cuts the active one off and lets it come back.
func TestBO02_IPoIBInterfacesAreEnslaved(t *testing.T) {
	n, peer := newIPoIB(t, ipoib.Datagram)
	n.bondOf([]string{"ib0", "ib1"}, "arp_interval 100", "arp_ip_target +10.5.0.2", "arp_validate all", "primary ib0")
	n.waitActive("ib0")
	st := n.bond.Status()
	if st.Attrs.Type != 32 || len(st.Attrs.Address) != 20 || st.Attrs.MTU != 2044 || n.bond.Show("fail_over_mac") != "active 1" {
		t.Errorf("the bond has %+v, fail_over_mac %s", st.Attrs, n.bond.Show("fail_over_mac"))
	}
	out, err := exec.Command("ip", "-n", n.name("up"), "link", "show", "bond0").Output()
	if err != nil || !strings.Contains(string(out), "link/infiniband") || !strings.Contains(string(out), "mtu 2044") {
		t.Errorf("the kernel shows %s, %v; want type infiniband and MTU 2044", out, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	tcp := n.tcp(ctx)
	flows := []*flow{tcp.flow, n.udp(ctx), n.multicast(ctx), n.icmp(ctx)}
	n.allFlow(flows, time.Now())
	peerKnows := func(slave string) func() bool {
		var want []byte
		for _, s := range st.Slaves {
			if s.Name == slave {
				want = s.Attrs.Address
			}
		}
		return func() bool {
			return slices.ContainsFunc(peer.Neighbors(), func(e neigh.Entry) bool {
				return e.IP == netip.MustParseAddr("10.5.0.1") && bytes.Equal(e.Address[1:], want[1:])
			})
		}
	}
	n.waitFor("the peer knows ib0", peerKnows("ib0"))
	file := filepath.Join(t.TempDir(), "peer.pcap")
	pcap, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer pcap.Close()
	if err := peer.Capture(pcap); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		start := time.Now()
		n.cut("silent", "p0")
		n.waitActive("ib1")
		n.waitFor("BO-12: the peer knows ib1", peerKnows("ib1"))
		n.allFlow(flows, time.Now())
		t.Logf("fail-over: UDP %v, TCP %v", flows[1].gap(start), tcp.gap(start))
		start = time.Now()
		n.heal("silent", "p0")
		n.waitActive("ib0")
		n.waitFor("BO-12: the peer knows ib0", peerKnows("ib0"))
		n.allFlow(flows, time.Now())
		t.Logf("fail-back: UDP %v, TCP %v", flows[1].gap(start), tcp.gap(start))
	}
	if err := peer.Capture(nil); err != nil {
		t.Fatal(err)
	}
	t.Run("BO-12 tshark sees gratuitous ARP of type 32", func(t *testing.T) { gratuitous(t, file, 4) })
	tcp.stop()
	select {
	case err := <-tcp.done:
		if err != nil {
			t.Errorf("the stream: %v", err)
		}
	case <-time.After(patience):
		t.Error("the stream does not end")
	}
	if err := n.net.Enslave(n.bond, "+ib0"); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("a slave twice: %v, want EBUSY", err)
	}
}

// TestBO02_ConnectedMode: the slaves are in connected mode. Datagrams of 60000 bytes
// cross the bond as one packet, before and after the active slave is cut off.
func TestBO02_ConnectedMode(t *testing.T) {
	n, peer := newIPoIB(t, ipoib.Connected)
	n.bondOf([]string{"ib0", "ib1"}, "arp_interval 100", "arp_ip_target +10.5.0.2", "arp_validate all", "primary ib0")
	n.waitActive("ib0")
	if mtu := n.bond.Status().Attrs.MTU; mtu != 65520 {
		t.Errorf("MTU of the bond %d, want 65520", mtu)
	}
	echo := in(n, "peer", func() (net.PacketConn, error) { return net.ListenPacket("udp4", "10.5.0.2:7000") })
	defer echo.Close()
	go func() {
		buf := make([]byte, 65535)
		for {
			k, from, err := echo.ReadFrom(buf)
			if err != nil {
				return
			}
			echo.WriteTo(buf[:k], from)
		}
	}()
	c := in(n, "up", func() (net.PacketConn, error) { return net.ListenPacket("udp4", "10.5.0.1:0") })
	defer c.Close()
	want, got := bytes.Repeat([]byte("0123456789"), 6000), make([]byte, 65535)
	crosses := func() bool {
		c.WriteTo(want, &net.UDPAddr{IP: net.IPv4(10, 5, 0, 2), Port: 7000})
		c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		k, _, err := c.ReadFrom(got)
		return err == nil && bytes.Equal(got[:k], want)
	}
	n.waitFor("60000 bytes cross the bond", crosses)
	n.cut("silent", "p0")
	n.waitActive("ib1")
	n.waitFor("60000 bytes cross the bond by ib1", crosses)
	if s := peer.Stats(); s.Conns.Accepts < 2 || s.Conns.RxMessages < 2 {
		t.Errorf("the peer has %+v, want a connection of each slave", s.Conns)
	}
}

// gratuitous wants so many gratuitous ARP requests of the bond in a capture, each with
// hardware type 32 and addresses of 20 octets.
func gratuitous(t *testing.T, file string, want int) {
	tshark, err := exec.LookPath("tshark")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("tshark is not installed")
		}
		t.Skip("tshark is not installed")
	}
	out, err := exec.Command(tshark, "-r", file, "-Y", "arp.src.proto_ipv4 == 10.5.0.1 && arp.dst.proto_ipv4 == 10.5.0.1",
		"-T", "fields", "-e", "arp.hw.type", "-e", "arp.hw.size", "-e", "arp.opcode").Output()
	if err != nil {
		t.Fatalf("tshark: %v", err)
	}
	lines := strings.Fields(strings.ReplaceAll(string(out), "\t", ","))
	if len(lines) < want {
		t.Errorf("%d gratuitous ARP, want %d", len(lines), want)
	}
	for _, l := range lines {
		if l != "32,20,1" {
			t.Errorf("hardware type, size and operation are %s, want 32,20,1", l)
		}
	}
}
