package main

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// TestRegistry_Live: one of two daemons has the registry. Children run while the
// port is a full member of their partition. The commands that change the
// registry change nothing else.
func TestRegistry_Live(t *testing.T) {
	a, b := cabled(t, [2][]string{
		{"--port=10.9.0.1", "--serve-registry=10.9.0.1", "--partition=0xffff", "--partition=0x8006", "--port-pkeys=10.9.0.2=0xffff,0x0006"},
		{"--port=10.9.0.2", "--registry=10.9.0.1"},
	}, func(a, _ *node) { run(t, "ip", "-n", a.ns, "link", "set", "lo", "up") })
	for i, n := range []*node{a, b} {
		run(t, "ip", "-n", n.ns, "link", "set", "ib0", "up")
		if err := n.write("class/net/ib0/create_child", "0x8006"); err != nil {
			t.Fatal(err)
		}
		run(t, "ip", "-n", n.ns, "addr", "add", []string{"192.168.56.1/24", "192.168.56.2/24"}[i], "dev", "ib0.8006")
		run(t, "ip", "-n", n.ns, "link", "set", "ib0.8006", "up")
	}
	registry := func(line string, code int, want string) {
		t.Helper()
		if out, got := a.net(append([]string{"registry"}, strings.Fields(line)...)...); got != code || !strings.Contains(out, want) {
			t.Errorf("registry %s: exit code %d: %s\nwant %d, %q", line, got, out, code, want)
		}
	}
	reachable := func() {
		t.Helper()
		eventually(t, "the partition carries packets", func() bool {
			nsCommand(a.ns, "bash", "-c", "echo hello > /dev/udp/192.168.56.2/9").Run()
			out, _ := a.net("peers", "ib0.8006")
			return strings.Contains(out, "192.168.56.2  REACHABLE")
		})
	}
	for _, step := range []struct {
		line   string
		ca, cb bool // carriers of the children
	}{
		{"", true, false}, // a limited member
		{"set 10.9.0.2 0xffff,0x8006", true, true},
		{"set 10.9.0.2 0xffff", true, false},
		{"set 10.9.0.2 all", true, true},
		{"del 6", false, false},
		{"add 0x0006,mtu=4096,qkey=0x99", true, true},
	} {
		if step.line != "" {
			registry(step.line, 0, "")
		}
		eventually(t, "after "+step.line+" the carriers follow", func() bool {
			return a.carrier("ib0.8006") == step.ca && b.carrier("ib0.8006") == step.cb
		})
		if !a.carrier("ib0") || !b.carrier("ib0") {
			t.Errorf("%s: the main interface lost its carrier", step.line)
		}
		if step.ca && step.cb {
			reachable()
		}
	}
	if got := a.read("class/net/ib0.8006/mtu") + b.read("class/net/ib0.8006/mtu"); got != "4092\n4092\n" {
		t.Errorf("MTUs %q, want those of the new link", got)
	}
	var info registryInfo
	out, code := a.net("registry", "show", "-o", "json")
	if err := json.Unmarshal([]byte(out), &info); code != 0 || err != nil || len(info.Partitions) != 2 || info.Partitions[1].QKey != "0x99" || len(info.Ports) != 2 || info.Ports[0].Groups == 0 {
		t.Errorf("registry show: %d, %v: %s", code, err, out)
	}
	for _, c := range []struct {
		line string
		code int
		want string
	}{
		{"show", 0, "0x8006  0x99   4096"},
		{"add 0x8006", 4, "twice"},
		{"add 6", 4, "twice"},
		{"add 0x8000", 2, "P_Key"},
		{"add 0", 2, "P_Key"},
		{"add 0x10000", 2, "P_Key"},
		{"add 7,qkey=0x7fffffff,mtu=12", 2, "MTU"},
		{"del 7", 3, "no partition"},
		{"del 0", 2, "P_Key"},
		{"set 10.9.0.2 0x8006,0x8006", 2, "twice"},
		{"set 10.9.0.2 0x8000", 2, "P_Key"},
		{"set 10.9.0.2", 2, "usage"},
		{"set here 1", 2, "here"},
	} {
		registry(c.line, c.code, c.want)
	}
	var after registryInfo
	text, _ := a.net("registry", "show", "-o", "json")
	if err := json.Unmarshal([]byte(text), &after); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	for _, i := range []registryInfo{info, after} { // the hosts join and leave groups all the time
		for k := range i.Ports {
			i.Ports[k].Groups = 0
		}
	}
	if !reflect.DeepEqual(info, after) {
		t.Errorf("refused commands have changed the registry from\n%s\nto\n%s", out, text)
	}
	if out, code := b.net("registry", "show"); code != 3 || !strings.Contains(out, "--serve-registry") {
		t.Errorf("a daemon without a registry: %d: %s", code, out)
	}
}

// carrier reports whether an interface that is up has a carrier in the kernel.
func (n *node) carrier(name string) bool {
	n.t.Helper()
	return !strings.Contains(run(n.t, "ip", "-n", n.ns, "link", "show", name), "NO-CARRIER")
}
