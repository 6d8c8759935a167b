package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// bondNodes are two hosts on a cable: one with two ports for a bond, and its peer.
func bondNodes(t *testing.T) (a, b *node) {
	t.Helper()
	return cabled(t, [2][]string{
		{"--port=10.9.0.1=10.9.0.2", "--port=10.9.0.3=10.9.0.2"},
		{"--port=10.9.0.2=10.9.0.1,10.9.0.3"},
	}, func(a, _ *node) { run(t, "ip", "-n", a.ns, "addr", "add", "10.9.0.3/32", "dev", "eth0") })
}

// TestBond makes a bond by commands, and lets its active slave be cut off.
func TestBond(t *testing.T) {
	a, b := bondNodes(t)
	run(t, "ip", "-n", b.ns, "addr", "add", "192.168.50.2/24", "dev", "ib0")
	run(t, "ip", "-n", b.ns, "link", "set", "ib0", "up")
	for _, c := range []string{"add bond0", "set bond0 arp_interval 1000", "set bond0 arp_ip_target +192.168.50.2", "set bond0 arp_validate all", "set bond0 primary ib0",
		"enslave bond0 ib0", "enslave bond0 ib1"} {
		if out, code := a.net(append([]string{"bond"}, strings.Fields(c)...)...); code != 0 {
			t.Fatalf("bond %s: %d: %s", c, code, out)
		}
	}
	run(t, "ip", "-n", a.ns, "addr", "add", "192.168.50.1/24", "dev", "bond0")
	run(t, "ip", "-n", a.ns, "link", "set", "bond0", "up")
	active := func() string {
		out, _ := a.net("-o", "json", "bond", "show", "bond0")
		var list []bondInfo
		if json.Unmarshal([]byte(out), &list) != nil || len(list) != 1 {
			return out
		}
		return list[0].Active + " " + list[0].MII
	}
	eventually(t, "ib0 is active", func() bool { return active() == "ib0 up" })
	stop := a.capture(t, "bond0")
	if out, code := a.net("pcap", "ib1"); code != 5 {
		t.Errorf("a capture of a slave of a bond that is captured: exit code %d: %s", code, out)
	}
	peer := func() string {
		out, _ := b.net("peers", "ib0")
		return out
	}
	address := func(link string) string { return strings.TrimSpace(a.read("class/net/" + link + "/address")) }
	eventually(t, "the peer knows ib0", func() bool { return strings.Contains(peer(), address("ib0")) })
	sent := a.read("class/net/ib0/statistics/tx_packets")
	eventually(t, "ib0 asks for the address of the peer", func() bool { return a.read("class/net/ib0/statistics/tx_packets") != sent })
	if out := stop(); bytes.Count(out, []byte{0xd4, 0xc3, 0xb2, 0xa1}) != 1 || !bytes.Contains(out, []byte{0, 32, 8, 0, 20, 4, 0, 1}) {
		t.Errorf("%d bytes of capture of the bond without one header and an ARP request", len(out))
	}
	if out, code := a.net("pcap", "bond7"); code == 0 {
		t.Errorf("a capture of what is not there: %s", out)
	}
	for line, want := range map[string]string{"bond show": "bond0\n", "bond enslave bond0": "ib1\n", "bond release bond0": "ib1\n", "bond set bond0": "arp_interval\n",
		"link add x link": "ib0\n", "link set ib0": "mode\n", "mcg": "ib1\n"} {
		if out, code := a.net(append(append([]string{"__complete"}, strings.Fields(line)...), "")...); code != 0 || !strings.Contains(out, want) {
			t.Errorf("completion of %q: %d: %s", line, code, out)
		}
	}
	for _, c := range []struct {
		command string
		code    int
		words   string
	}{
		{"bond enslave bond0 ib0", 5, "Device is in use and cannot be enslaved"},
		{"bond enslave bond0 ib9", 3, "interface ib9 does not exist!"},
		{"bond set bond0 mode balance-rr", 1, "unable to set because the bond device has slaves"},
		{"bond set bond0 nothing 1", 3, "no such option"},
		{"bond add bond0", 4, "bond0 already exists"},
		{"bond show bond9", 3, "bond9"},
	} {
		if out, code := a.net(strings.Fields(c.command)...); code != c.code || !strings.Contains(out, c.words) {
			t.Errorf("%s: %d: %s, want %d %q", c.command, code, out, c.code, c.words)
		}
	}
	run(t, "ip", "-n", a.ns, "addr", "del", "10.9.0.1/24", "dev", "eth0")
	run(t, "ip", "-n", a.ns, "route", "replace", "10.9.0.0/24", "dev", "eth0", "src", "10.9.0.3")
	eventually(t, "ib1 is active", func() bool { return active() == "ib1 up" })
	eventually(t, "the peer knows ib1", func() bool { return strings.Contains(peer(), address("ib1")) })
	eventually(t, "the command shows what the file has", func() bool { // both go with the links
		text := a.read("proc/net/bonding/bond0")
		out, _ := a.net("bond", "show", "bond0")
		return out == text && strings.Contains(out, "Currently Active Slave: ib1\n")
	})
	eventually(t, "the slave's file says that it is active", func() bool { return a.read("class/net/ib1/bonding_slave/state") == "active\n" })
	if out, code := a.net("bond", "del", "bond0"); code != 0 {
		t.Errorf("bond del: %d: %s", code, out)
	}
	if out, _ := a.net("bond", "show"); strings.Contains(out, "bond0") {
		t.Errorf("the bond is still there: %s", out)
	}
}

// TestBond_Scripts runs the scripts that come with modules/bond over the control files.
func TestBond_Scripts(t *testing.T) {
	a, _ := bondNodes(t)
	scripts, err := filepath.Abs("../../modules/bond/scripts")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ line, want string }{
		{"bond-up.sh bond0 192.168.50.1/24 ib0 ib1", "bond0 is up, ib0 is active"},
		{"bond-failover.sh bond0", "bond0: ib0 -> ib1"},
		{"bond-down.sh bond0", "bond0 is gone"},
	} {
		f := strings.Fields(c.line)
		cmd := exec.Command(filepath.Join(scripts, f[0]), f[1:]...)
		cmd.Env = append(os.Environ(), "SYS="+a.tree+"/class/net", "IP=ip -n "+a.ns)
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), c.want) {
			t.Fatalf("%s: %v: %s, want %q", c.line, err, out, c.want)
		}
	}
}

// TestBond_SlaveIsNotRemoved shows that a child that is a slave stays.
func TestBond_SlaveIsNotRemoved(t *testing.T) {
	a, _ := bondNodes(t)
	for _, c := range []string{"link add x link ib0 pkey 0x8001", "bond add bond0", "bond enslave bond0 x"} {
		if out, code := a.net(strings.Fields(c)...); code != 0 {
			t.Fatalf("%s: %d: %s", c, code, out)
		}
	}
	if out, code := a.net("link", "del", "x"); code != 5 || !strings.Contains(out, "slave of bond0") {
		t.Errorf("link del of a slave: %d: %s, want 5", code, out)
	}
	for _, c := range []string{"link set x mode connected", "link set x mtu 1000"} {
		if out, code := a.net(strings.Fields(c)...); code != 5 || !strings.Contains(out, "slave of bond0") {
			t.Errorf("%s of a slave: %d: %s, want 5", c, code, out)
		}
	}
	for _, c := range []string{"bond release bond0 x", "link del x"} {
		if out, code := a.net(strings.Fields(c)...); code != 0 {
			t.Errorf("%s: %d: %s", c, code, out)
		}
	}
}
