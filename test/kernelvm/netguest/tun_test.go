package netguest

import (
	"strings"
	"testing"
	"time"
)

// TestBO18_BondOverTUN: the driver takes interfaces of the type InfiniBand, in
// the one mode that it allows them, and takes over their type. It sends no ARP
// there; the daemon does, for the addresses of the bond.
func TestBO18_BondOverTUN(t *testing.T) {
	one, two := newNetwork(t)
	twoCables(one)
	one.start("rnbd-net run --port 10.0.0.1=10.0.0.2 --port 10.1.0.1=10.0.0.2")
	two.start("rnbd-net run --port 10.0.0.2=10.0.0.1,10.1.0.1")
	two.run("ip addr add " + peerIP + "/24 dev ib0 && ip link set ib0 up")
	out := one.run("PRIMARY=ib0 " + script("kbond-up.sh") + " bond0 " + bondIP + "/24 ib0 ib1")
	if !strings.Contains(out, "active-backup) (fail_over_mac active)") {
		t.Errorf("kbond-up.sh says %s", out)
	}
	if got := one.run("cat /sys/class/net/bond0/type; ip link show bond0"); !strings.HasPrefix(got, "32\n") || !strings.Contains(got, "MULTICAST") || !strings.Contains(got, "NOARP") {
		t.Errorf("the bond is %s", got)
	}
	one.waitActive("ib0")
	addrs := map[string]string{"ib0": one.linkAddress("rnbd-net", "ib0"), "ib1": one.linkAddress("rnbd-net", "ib1")}
	capture := two.capture(t)
	udp, tcp := newEcho(one, two, bondIP+":7000", peerIP+":7000"), newStream(one, two, peerIP+":7001")
	udp.flows()
	two.knows(t, addrs["ib0"])
	for range 2 {
		begin := time.Now()
		one.cut(0, true)
		one.waitActive("ib1")
		two.knows(t, addrs["ib1"])
		udp.flows()
		t.Logf("fail-over: %v without datagrams", udp.gap(begin))
		begin = time.Now()
		one.cut(0, false)
		one.waitActive("ib0")
		two.knows(t, addrs["ib0"])
		udp.flows()
		t.Logf("fail-back: %v without datagrams", udp.gap(begin))
	}
	udp.once()
	if err := tcp.end(); err != nil {
		t.Error(err)
	}
	if n := capture(); n[addrs["ib0"]] == 0 || n[addrs["ib1"]] == 0 {
		t.Errorf("gratuitous ARP by sender: %v, want some of %v", n, addrs)
	}
}

// TestBO18_Refusals are those of the driver, with its words.
func TestBO18_Refusals(t *testing.T) {
	one, _ := newNetwork(t)
	one.wrap("rnbd-net-b")
	one.start("rnbd-net run --port 10.0.0.1=10.0.0.2")
	one.start("rnbd-net-b run --device tap --port 10.1.0.1=10.1.0.2")
	one.run("ip link add bond0 type bond mode active-backup miimon 100")
	one.run("ip link add bond1 type bond mode balance-rr miimon 100")
	refuse := func(what, line, words string) {
		t.Helper()
		out, err := one.try(line)
		if err == nil || !strings.Contains(out, words) {
			t.Errorf("%s: %v: %q, want %q", what, err, out, words)
		}
		t.Logf("%s: %s", what, strings.TrimSpace(out))
	}
	one.run("ip link set ib0 up")
	refuse("a slave that is up", "ip link set ib0 master bond0", "Device can not be enslaved while up")
	one.run("ip link set ib0 down")
	refuse("another mode", "ip link set ib0 master bond1", "Only active-backup mode is supported for infiniband slaves")
	one.run("ip link set ib0 master bond0")
	refuse("the other type", "ip link set ib1 master bond0", "Device type is different from other slaves")
	one.run("ip link set ib0 nomaster")
	one.run("ip link set ib1 master bond0")
	refuse("the other type, the other way round", "ip link set ib0 master bond0", "Device type is different from other slaves")
	if got := one.run("cat /sys/class/net/bond0/type /sys/class/net/bond0/bonding/slaves"); got != "1\nib1\n" {
		t.Errorf("type and slaves after the refusals: %q", got)
	}
}
