package vm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
)

// Net is the network of a guest: NoNet, Tap or Pair.
type Net struct {
	taps bool
	peer *Guest
}

// NoNet: the guest is alone.
var NoNet = Net{}

// Tap joins the guest's eth0 and eth1 with br0 and br1 of a network namespace
// of the host. Guest.InNetns runs programs in that. Addresses are in HostAddr
// and GuestAddr.
var Tap = Net{taps: true}

// Pair puts the guest into the network of another one with Tap: three parties
// on two links.
func Pair(with *Guest) Net { return Net{taps: true, peer: with} }

// linkMTU: link 0 is ordinary Ethernet, link 1 has jumbo frames. The guest has to set
// the same: Linux accepts a RoCE connection with a larger path MTU than its interface has,
// and then cannot send.
func linkMTU(link int) string {
	if link == 1 {
		return "9000"
	}
	return "1500"
}

// links is how many networks Tap makes.
const links = 2

// network is the host's side of a guest's network.
type network struct {
	ns     string
	number int // of the guest in the namespace: address 1 is the host's
	owner  bool
	guests *atomic.Int32
}

var namespaces atomic.Int32

func (n Net) setUp(g *Guest) (args []string, err error) {
	switch {
	case !n.taps:
		return nil, nil
	case n.peer == nil:
		name := fmt.Sprintf("rnbdvm-%d-%d", os.Getpid(), namespaces.Add(1))
		g.net = network{ns: name, owner: true, guests: new(atomic.Int32)}
		if err := g.net.make(); err != nil {
			return nil, err
		}
	case n.peer.net.ns == "":
		return nil, errors.New("the peer has no network")
	default:
		g.net = network{ns: n.peer.net.ns, guests: n.peer.net.guests}
	}
	g.net.number = int(g.net.guests.Add(1)) + 1
	for link := range links {
		tap := fmt.Sprintf("tap%d-%d", g.net.number, link)
		if err := g.net.ip("tuntap", "add", "dev", tap, "mode", "tap"); err != nil {
			return nil, err
		}
		if err := g.net.ip("link", "set", tap, "mtu", linkMTU(link), "master", fmt.Sprintf("br%d", link), "up"); err != nil {
			return nil, err
		}
		id := fmt.Sprintf("net%d", link)
		args = append(args, "-netdev", "tap,script=no,downscript=no,id="+id+",ifname="+tap,
			"-device", fmt.Sprintf("virtio-net-pci,romfile=,netdev=%s,mac=52:54:00:09:%02x:%02x", id, link, g.net.number))
	}
	return args, nil
}

func (n network) make() error {
	if out, err := exec.Command("ip", "netns", "add", n.ns).CombinedOutput(); err != nil {
		return fmt.Errorf("ip netns add: %w: %s", err, out)
	}
	steps := [][]string{{"link", "set", "lo", "up"}}
	for link := range links {
		br := fmt.Sprintf("br%d", link)
		steps = append(steps,
			[]string{"link", "add", br, "type", "bridge"},
			[]string{"link", "set", br, "up"},
			[]string{"addr", "add", HostAddr(link) + "/24", "dev", br},
			[]string{"addr", "add", HostAddr6(link) + "/64", "dev", br, "nodad"})
	}
	for _, s := range steps {
		if err := n.ip(s...); err != nil {
			return err
		}
	}
	return nil
}

func (n network) ip(args ...string) error {
	out, err := exec.Command("ip", append([]string{"-n", n.ns}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

func (n network) tearDown() {
	if n.owner {
		_ = exec.Command("ip", "netns", "del", n.ns).Run() // a namespace more does no harm
	}
}

// HostAddr is the host's IPv4 address in the namespace, on link 0 or 1.
func HostAddr(link int) string { return fmt.Sprintf("10.9.%d.1", link) }

// HostAddr6 is the host's IPv6 address in the namespace.
func HostAddr6(link int) string { return fmt.Sprintf("fd00:9:%d::1", link) }

// Addr is the address for the guest on a link; SetUpLink gives it.
func (g *Guest) Addr(link int) string { return fmt.Sprintf("10.9.%d.%d", link, g.net.number) }

// Addr6 is the same in IPv6.
func (g *Guest) Addr6(link int) string { return fmt.Sprintf("fd00:9:%d::%d", link, g.net.number) }

// InNetns is the beginning of a command line that runs a program of the host in the
// guest's network; empty without one.
func (g *Guest) InNetns() []string { return g.inNamespace() }

func (g *Guest) inNamespace() []string {
	if g.net.ns == "" {
		return nil
	}
	return []string{"ip", "netns", "exec", g.net.ns}
}

// CutLink takes the guest's link away, or gives it back: packets are lost
// without a word, as when a cable is pulled behind a switch.
func (g *Guest) CutLink(link int, cut bool) error {
	state := "up"
	if cut {
		state = "down"
	}
	return g.net.ip("link", "set", fmt.Sprintf("tap%d-%d", g.net.number, link), state)
}
