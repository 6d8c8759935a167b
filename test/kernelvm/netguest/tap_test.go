package netguest

import (
	"encoding/binary"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

const (
	bondIP = "192.168.50.1"
	peerIP = "192.168.50.2"
)

// TestBO17_BondOverTAP runs the README's recipe for the kernel's bonding driver
// over Ethernet interfaces of ours, with traffic through the bond, while cables
// lose their carrier and get it back.
func TestBO17_BondOverTAP(t *testing.T) {
	one, two := newNetwork(t)
	recipe(t, map[string]*host{"one": one, "two": two}, readme(t, "Ethernet", 0))
	one.waitActive("ib0")
	if got := one.proc(); !strings.Contains(got, "fault-tolerance (active-backup)") || strings.Count(got, "MII Status: up") != 3 {
		t.Errorf("the driver says\n%s", got)
	}
	addrs := map[string]string{"ib0": one.linkAddress("rnbd-net", "ib0"), "ib1": one.linkAddress("rnbd-net", "ib1")}
	capture := two.capture(t)
	udp, tcp := newEcho(one, two, bondIP+":7000", peerIP+":7000"), newStream(one, two, peerIP+":7001")
	udp.flows()
	two.knows(t, addrs["ib0"])

	begin := time.Now()
	one.cut(0, true)
	one.waitActive("ib1")
	two.knows(t, addrs["ib1"])
	udp.flows()
	t.Logf("fail-over: %v without datagrams", udp.gap(begin))

	one.cut(0, false)
	one.run("ip link set bond0 type bond primary ib0")
	begin = time.Now()
	one.waitActive("ib0") // the recipe names no primary; with one the bond goes back
	two.knows(t, addrs["ib0"])
	udp.flows()
	t.Logf("fail-back: %v without datagrams", udp.gap(begin))

	udp.once()
	if err := tcp.end(); err != nil {
		t.Error(err)
	}
	if n := capture(); n[addrs["ib0"]] == 0 || n[addrs["ib1"]] == 0 {
		t.Errorf("gratuitous ARP by sender: %v, want some of %v", n, addrs)
	}
}

// TestBO17_FailOverMAC: the driver moves its Ethernet address between the
// interfaces, since fail_over_mac is none where kbond-up.sh makes the bond. Each
// interface has a daemon of its own, and one is killed. Then it is started again
// and its interface becomes a slave once more.
func TestBO17_FailOverMAC(t *testing.T) {
	one, two := newNetwork(t)
	twoCables(one)
	one.wrap("rnbd-net-b")
	a := one.start("rnbd-net run --device tap --port 10.0.0.1=10.0.0.2")
	one.start("rnbd-net-b run --device tap --port 10.1.0.1=10.0.0.2")
	two.start("rnbd-net run --port 10.0.0.2=10.0.0.1,10.1.0.1")
	two.run("ip addr add " + peerIP + "/24 dev ib0 && ip link set ib0 up")
	out := one.run("PRIMARY=ib0 " + script("kbond-up.sh") + " bond0 " + bondIP + "/24 ib0 ib1")
	if !strings.Contains(out, "bond0 is up") || !strings.Contains(out, "Slave Interface: ib1") {
		t.Errorf("kbond-up.sh says %s", out)
	}
	one.waitActive("ib0")
	udp, tcp := newEcho(one, two, bondIP+":7000", peerIP+":7000"), newStream(one, two, peerIP+":7001")
	udp.flows()
	ib1 := one.linkAddress("rnbd-net-b", "ib1")

	begin := time.Now()
	a.kill()
	one.waitActive("ib1")
	two.knows(t, ib1)
	udp.flows()
	t.Logf("fail-over after the death of the daemon: %v without datagrams", udp.gap(begin))

	one.start("rnbd-net run --device tap --port 10.0.0.1=10.0.0.2")
	begin = time.Now()
	one.run("ip link set ib0 master bond0")
	one.waitActive("ib0") // it is the primary
	two.knows(t, one.linkAddress("rnbd-net", "ib0"))
	udp.flows()
	t.Logf("fail-back to the new daemon: %v without datagrams", udp.gap(begin))

	udp.once()
	if err := tcp.end(); err != nil {
		t.Error(err)
	}
	if out := one.run(script("bond-failover.sh") + " bond0 ib1"); !strings.Contains(out, "ib0 -> ib1") {
		t.Errorf("bond-failover.sh says %s", out)
	}
	udp.flows()
	one.run(script("bond-down.sh") + " bond0")
}

// twoCables lets what the second port of host one sends leave by the second
// cable, as the README does.
func twoCables(one *host) {
	one.run("ip rule add from 10.1.0.1 table 101")
	one.run("ip route add 10.0.0.2 via 10.1.0.2 dev e1 table 101")
}

func script(name string) string { return filepath.Join(*root, "modules/bond/scripts", name) }

// knows waits until the host has a link-layer address for the bond.
func (h *host) knows(t *testing.T, addr string) {
	t.Helper()
	var last string
	eventually(t, h.name+" knows the bond by "+addr, func() bool {
		last = h.run("rnbd-net peers")
		for line := range strings.Lines(last) {
			// The flags in the first octet may differ.
			if strings.Contains(line, bondIP) && strings.Contains(line, addr[2:]) {
				return true
			}
		}
		return false
	}, func() string { return last })
}

// capture records the frames of ib0. The function that it returns ends that, and
// returns the number of gratuitous ARP requests of the bond by link-layer
// address.
func (h *host) capture(t *testing.T) func() map[string]int {
	t.Helper()
	file := filepath.Join(t.TempDir(), h.name+".pcap")
	cmd := h.command("exec rnbd-net pcap ib0 -w " + file)
	cmd.Stderr = &h.log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop := func() {
		cmd.Process.Signal(os.Interrupt)
		cmd.Wait()
	}
	eventually(t, "the capture begins", func() bool {
		i, err := os.Stat(file)
		return err == nil && i.Size() > 0
	})
	return func() map[string]int {
		t.Helper()
		stop()
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return gratuitous(t, b)
	}
}

func gratuitous(t *testing.T, pcap []byte) map[string]int {
	t.Helper()
	const fileHeader, recordHeader, pseudo = 24, 16, 40
	found, ip := map[string]int{}, netip.MustParseAddr(bondIP)
	for b := pcap[min(fileHeader, len(pcap)):]; len(b) >= recordHeader; {
		n := int(binary.LittleEndian.Uint32(b[8:]))
		if len(b) < recordHeader+n { // the end of the file was not written
			break
		}
		f := wire.Frame(b[recordHeader+pseudo : recordHeader+n])
		b = b[recordHeader+n:]
		if !f.Valid() || f.Type() != wire.TypeARP || !wire.ARP(f.Payload()).Valid() {
			continue
		}
		// Valid is of hardware type 32, with addresses of 20 octets.
		if a := wire.ARP(f.Payload()).Fields(); a.Op == wire.ARPRequest && a.SenderIP == ip && a.TargetIP == ip {
			found[a.SenderHW.String()]++
		}
	}
	return found
}
