package bond

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/dev"
	"github.com/rnbd-go/rnbd/modules/bond/ether"
	"github.com/rnbd-go/rnbd/modules/bond/netns/netnstest"
	"github.com/rnbd-go/rnbd/modules/bond/tap"
)

var made atomic.Int32

// network is the four namespaces and the bond.
type network struct {
	t    *testing.T
	id   string
	net  *dev.Net
	bond *dev.Bond

	peerDev string // of the peer, with 10.5.0.2
}

// ns is the path of one of the namespaces.
func (n *network) ns(which string) string { return "/run/netns/" + n.name(which) }

func (n *network) name(which string) string { return n.id + which }

// ip runs ip(8) in a namespace.
func (n *network) ip(ns, args string) {
	n.t.Helper()
	if out, err := exec.Command("ip", append([]string{"-n", n.name(ns)}, strings.Fields(args)...)...).CombinedOutput(); err != nil {
		n.t.Fatalf("ip -n %s %s: %v: %s", ns, args, err, out)
	}
}

func run(t *testing.T, line string) {
	t.Helper()
	f := strings.Fields(line)
	if out, err := exec.Command(f[0], f[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", line, err, out)
	}
}

// newNetwork makes the namespaces and the devices, and no bond.
func newNetwork(t *testing.T) *network {
	t.Helper()
	n := &network{t: t, id: fmt.Sprintf("bond%d-%d-", os.Getpid(), made.Add(1)), peerDev: "e0"}
	n.namespaces("up", "low", "sw", "peer")
	for _, which := range []string{"low", "sw"} { // no packets but those of the tests
		for _, conf := range []string{"all", "default"} { // where the kernel has IPv6
			exec.Command("ip", "netns", "exec", n.name(which), "sh", "-c", "echo 1 >/proc/sys/net/ipv6/conf/"+conf+"/disable_ipv6").Run()
		}
	}
	n.ip("sw", "link add br0 type bridge mcast_snooping 1")
	n.ip("sw", "link set br0 up")
	for _, l := range []struct{ port, ns, dev string }{{"p0", "low", "s0"}, {"p1", "low", "s1"}, {"pp", "peer", "e0"}} {
		n.ip("sw", "link add "+l.port+" type veth peer name "+l.dev+" netns "+n.name(l.ns))
		n.ip("sw", "link set "+l.port+" master br0")
		n.ip("sw", "link set "+l.port+" up")
	}
	n.ip("peer", "addr add 10.5.0.2/24 dev e0")
	n.ip("peer", "link set e0 up")
	n.net = &dev.Net{Log: slog.New(slog.NewTextHandler(&logBuffer{t: t}, nil)),
		NewUpper: func(name string, c dev.UpperCallbacks) (dev.Upper, error) { return tap.Open(name, n.ns("up"), c) }}
	t.Cleanup(n.net.Close)
	for _, s := range []string{"s0", "s1"} {
		d, err := ether.Open(s, n.ns("low"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			n.net.RemoveDevice(s)
			if err := d.Close(); err != nil {
				t.Errorf("close %s: %v", s, err)
			}
		})
		if err := n.net.AddDevice(d); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// namespaces makes namespaces and removes them when the test ends.
func (n *network) namespaces(all ...string) {
	n.t.Helper()
	netnstest.Need(n.t)
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		n.t.Skipf("needs TUN/TAP: %v", err)
	}
	for _, which := range all {
		run(n.t, "ip netns add "+n.name(which))
		n.t.Cleanup(func() { exec.Command("ip", "netns", "del", n.name(which)).Run() })
		run(n.t, "ip -n "+n.name(which)+" link set lo up")
	}
}

// logBuffer shows the bond's log with -v.
type logBuffer struct{ t *testing.T }

func (l *logBuffer) Write(p []byte) (int, error) {
	if testing.Verbose() && os.Getenv("BOND_LOG") != "" {
		os.Stderr.Write(p)
	}
	return len(p), nil
}

// newBond makes bond0 with "option value" settings and the slaves s0 and s1, and
// gives it its address.
func (n *network) newBond(options ...string) { n.bondOf([]string{"s0", "s1"}, options...) }

func (n *network) bondOf(slaves []string, options ...string) {
	n.t.Helper()
	b, err := n.net.Create("bond0")
	if err != nil {
		n.t.Fatal(err)
	}
	n.bond = b
	for _, o := range options {
		name, value, _ := strings.Cut(o, " ")
		if err := b.Set(name, value); err != nil {
			n.t.Fatalf("%s: %v", o, err)
		}
	}
	for _, s := range slaves {
		if err := n.net.Enslave(b, "+"+s); err != nil {
			n.t.Fatal(err)
		}
	}
	n.ip("up", "addr add 10.5.0.1/24 dev bond0")
	n.ip("up", "link set bond0 up")
	n.waitFor("the bond's address", func() bool {
		return len(b.Prefixes()) > 0 && b.Prefixes()[0] == netip.MustParsePrefix("10.5.0.1/24") && b.IsUp()
	})
}

const patience = 20 * time.Second

func (n *network) waitFor(what string, ok func() bool) {
	n.t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			n.t.Fatalf("timeout: %s; the bond is\n%+v", what, n.bond.Status())
		}
	}
}

func (n *network) waitActive(name string) {
	n.t.Helper()
	n.waitFor(name+" is active", func() bool { a, _ := n.bond.Active(); return a == name })
}

// query sends an IGMP general query from the peer. From then on the switch
// sends multicast only to the ports whose members were reported to it.
func (n *network) query() {
	n.t.Helper()
	c := in(n, "peer", func() (net.PacketConn, error) { return net.ListenPacket("ip4:2", "10.5.0.2") })
	defer c.Close()
	general := []byte{0x11, 1, 0, 0, 0, 0, 0, 0, 2, 125, 0, 0} // IGMPv3, answers within 0.1 s
	sum := uint16(0x1101 + 0x027d)
	general[2], general[3] = byte(^sum>>8), byte(^sum)
	if _, err := c.WriteTo(general, &net.IPAddr{IP: net.IPv4(224, 0, 0, 1)}); err != nil {
		n.t.Fatal(err)
	}
}

// members are the ports that the switch sends group to.
func (n *network) members(group string) (ports []string) {
	n.t.Helper()
	out, err := exec.Command("bridge", "-n", n.name("sw"), "mdb", "show").Output()
	if err != nil {
		n.t.Fatalf("bridge mdb: %v", err)
	}
	for _, m := range regexp.MustCompile(`port (\S+) grp (\S+)`).FindAllStringSubmatch(string(out), -1) {
		if m[2] == group {
			ports = append(ports, m[1])
		}
	}
	return ports
}

// cut takes a port of the switch away and heal brings it back.
func (n *network) cut(kind, port string) {
	if kind == "carrier" {
		n.ip("sw", "link set "+port+" down")
	} else {
		n.ip("sw", "link set "+port+" nomaster")
	}
}

func (n *network) heal(kind, port string) {
	if kind == "carrier" {
		n.ip("sw", "link set "+port+" up")
	} else {
		n.ip("sw", "link set "+port+" master br0")
	}
}
