package main

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
)

// TestTAP runs a daemon whose interfaces are Ethernet to the kernel, and one whose
// are not.
func TestTAP(t *testing.T) {
	a, b := cabled(t, [2][]string{{"--device=tap", "--port=10.9.0.1=10.9.0.2"}, {"--port=10.9.0.2=10.9.0.1"}}, nil)
	for i, n := range []*node{a, b} {
		run(t, "ip", "-n", n.ns, "addr", "add", []string{"192.168.50.1/24", "192.168.50.2/24"}[i], "dev", "ib0")
		run(t, "ip", "-n", n.ns, "link", "set", "ib0", "up")
	}
	eventually(t, "both know their neighbour", func() bool {
		nsCommand(a.ns, "bash", "-c", "echo hello > /dev/udp/192.168.50.2/9").Run()
		nsCommand(b.ns, "bash", "-c", "echo hello > /dev/udp/192.168.50.1/9").Run()
		peers, _ := b.net("peers", "ib0")
		return strings.Contains(run(t, "ip", "-n", a.ns, "neigh", "show", "192.168.50.2"), "REACHABLE") && strings.Contains(peers, "192.168.50.1  REACHABLE")
	})
	out, _ := a.net("-o", "json", "peers", "ib0")
	var peers []peerInfo
	if err := json.Unmarshal([]byte(out), &peers); err != nil || len(peers) != 1 || peers[0].Address != strings.TrimSpace(b.read("class/net/ib0/address")) {
		t.Fatalf("peers: %v: %s", err, out)
	}
	if got := run(t, "ip", "-n", a.ns, "neigh", "show", "192.168.50.2"); !strings.Contains(got, peers[0].MAC) {
		t.Errorf("ip neigh %q, want %s", got, peers[0].MAC)
	}
	if got := a.read("class/net/ib0/type") + a.read("class/net/ib0/addr_len") + a.read("class/net/ib0/broadcast"); got != "1\n6\nff:ff:ff:ff:ff:ff\n" {
		t.Errorf("type, length, broadcast: %q", got)
	}
	if got, want := a.read("class/net/ib0/address"), run(t, "ip", "netns", "exec", a.ns, "cat", "/sys/class/net/ib0/address"); got != want {
		t.Errorf("address %q, in the kernel %q", got, want)
	}
	if got := a.read("class/net/ib0/ipoib/address"); !strings.HasPrefix(got, "00:") || len(got) != 60 {
		t.Errorf("address on the link %q", got)
	}
	if out, code := a.net("run", "--device", "tun+ethernet", "--port", "10.9.0.1"); code != 2 || !strings.Contains(out, "want tun") {
		t.Errorf("another device: %d: %s", code, out)
	}
	if err := a.write("class/net/ib0/create_child", "0x8001"); err != nil || a.read("class/net/ib0.8001/type") != "1\n" {
		t.Errorf("child: %v, type %q", err, a.read("class/net/ib0.8001/type"))
	}
}

func nsCommand(ns string, args ...string) *exec.Cmd {
	return exec.Command("ip", append([]string{"netns", "exec", ns}, args...)...)
}
