package bond

import (
	"context"
	"net"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"
)

// peerHas is the link-layer address that the peer's kernel has for the bond.
func (n *network) peerHas() string {
	n.t.Helper()
	out, err := exec.Command("ip", "-n", n.name("peer"), "neigh", "show", "10.5.0.1").Output()
	if err != nil {
		n.t.Fatalf("ip neigh: %v", err)
	}
	_, addr, _ := strings.Cut(string(out), "lladdr ")
	addr, _, _ = strings.Cut(addr, " ")
	return addr
}

// greet makes the peer ask for the bond's address; the bond's users do not answer.
func (n *network) greet() {
	n.t.Helper()
	sink := in(n, "up", func() (net.PacketConn, error) { return net.ListenPacket("udp4", "10.5.0.1:9") })
	n.t.Cleanup(func() { sink.Close() })
	c := in(n, "peer", func() (net.Conn, error) { return net.Dial("udp4", "10.5.0.1:9") })
	defer c.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		n.t.Fatal(err)
	}
}

// TestBO12_PeersLearnTheNewAddress has no traffic that would tell them.
func TestBO12_PeersLearnTheNewAddress(t *testing.T) {
	for _, c := range []struct {
		option string
		learns bool
	}{{"num_grat_arp 1", true}, {"num_grat_arp 0", false}} {
		t.Run(c.option, func(t *testing.T) {
			n := newNetwork(t)
			n.newBond("miimon 20", "fail_over_mac active", c.option)
			n.waitActive("s0")
			n.greet()
			addr := n.slaveAddresses()
			n.waitFor("the peer knows s0", func() bool { return n.peerHas() == addr["s0"] })
			n.cut("carrier", "p0")
			n.waitActive("s1")
			if !c.learns {
				time.Sleep(300 * time.Millisecond)
				if got := n.peerHas(); got != addr["s0"] {
					t.Errorf("the peer has %s without an announcement, want that of s0", got)
				}
				return
			}
			n.waitFor("the peer knows s1", func() bool { return n.peerHas() == addr["s1"] })
		})
	}
}

func (n *network) slaveAddresses() map[string]string {
	all := map[string]string{}
	for _, s := range n.bond.Status().Slaves {
		var parts []string
		for _, b := range s.Attrs.Address {
			parts = append(parts, string("0123456789abcdef"[b>>4])+string("0123456789abcdef"[b&15]))
		}
		all[s.Name] = strings.Join(parts, ":")
	}
	return all
}

// TestBO05_SwitchLearnsTheGroups shows that resend_igmp tells the switch about the new port.
// The switch sends a group only to ports that reported it.
func TestBO05_SwitchLearnsTheGroups(t *testing.T) {
	for _, c := range []struct {
		option string
		want   []string
	}{{"resend_igmp 1", []string{"p1"}}, {"resend_igmp 0", nil}} {
		t.Run(c.option, func(t *testing.T) {
			n := newNetwork(t)
			n.newBond("miimon 20", "fail_over_mac active", c.option)
			n.waitActive("s0")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			n.multicast(ctx)
			time.Sleep(2500 * time.Millisecond) // the users' stack repeats its report for 2 s (RFC 3376, section 8.11)
			n.cut("carrier", "p0")
			n.waitActive("s1")
			if c.want == nil {
				time.Sleep(300 * time.Millisecond)
				if got := n.members("239.1.2.3"); len(got) != 0 {
					t.Errorf("the switch knows members at %v without a report", got)
				}
				return
			}
			n.waitFor("the switch knows the member", func() bool { return slices.Equal(n.members("239.1.2.3"), c.want) })
		})
	}
}
