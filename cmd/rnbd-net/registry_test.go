package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestRegistry runs a registry and two daemons that know each other by it alone.
func TestRegistry(t *testing.T) {
	a, b := cabled(t, [2][]string{{"--port=10.9.0.1", "--registry=10.9.0.1"}, {"--port=10.9.0.2", "--registry=10.9.0.1:4792"}}, func(a, b *node) {
		run(t, "ip", "-n", a.ns, "link", "set", "lo", "up") // for the connection to its own address
		r := a.command("registry", "run", "--listen", "10.9.0.1:4792", "--partition", "0x8005,mtu=4096,qkey=0x77", "--partition", "0x8006", "--port", "10.9.0.2=0x8005,0x0006")
		var log lockedBuffer
		r.Stderr = &log
		if err := r.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			r.Process.Signal(syscall.SIGTERM)
			if err := r.Wait(); err != nil || !strings.Contains(log.String(), "registry refuses") {
				t.Errorf("registry: %v\n%s", err, &log)
			}
		})
		eventually(t, "the registry is ready", func() bool { return strings.Contains(log.String(), "registry is ready") })
	})
	for i, n := range []*node{a, b} {
		run(t, "ip", "-n", n.ns, "addr", "add", []string{"192.168.50.1/24", "192.168.50.2/24"}[i], "dev", "ib0")
		run(t, "ip", "-n", n.ns, "link", "set", "ib0", "up")
		if got := n.read("class/net/ib0/pkey"); got != "0x8005\n" {
			t.Errorf("P_Key %q, want the first of the port's table", got)
		}
		eventually(t, "the MTU is the registry's", func() bool { return n.read("class/net/ib0/mtu") == "4092\n" })
	}
	eventually(t, "the neighbour is known", func() bool {
		nsCommand(a.ns, "bash", "-c", "echo hello > /dev/udp/192.168.50.2/9").Run()
		out, _ := a.net("peers", "ib0")
		return strings.Contains(out, "192.168.50.2  REACHABLE")
	})
	if err := b.write("class/net/ib0/create_child", "0x8006"); err != nil {
		t.Fatal(err)
	}
	run(t, "ip", "-n", b.ns, "link", "set", "ib0.8006", "up")
	eventually(t, "the limited member was refused", func() bool { return strings.Contains(b.log.String(), "limited member of partition 0x8006") })
	if out := run(t, "ip", "-n", b.ns, "link", "show", "ib0.8006"); !strings.Contains(out, "NO-CARRIER") {
		t.Errorf("a limited member has carrier: %s", out)
	}
	if out, code := a.net("registry", "set", "10.9.0.2", "0x8005,0x8006"); code != 0 {
		t.Errorf("registry set: %d: %s", code, out)
	}
	eventually(t, "the full member has carrier", func() bool { return b.carrier("ib0.8006") })
	for _, c := range []struct{ line, want string }{
		{"registry run --partition 0x8000", "P_Key"},
		{"registry run --partition 1,mtu=12", "MTU"},
		{"registry run --partition 1,colour=3", "colour"},
		{"registry run --port 10.0.0.1=0", "P_Key"},
		{"registry run --partition 1 --partition 0x8001", "twice"},
		{"run --port 10.9.0.1 --serve-registry 127.0.0.1:0 --partition 0", "P_Key"},
		{"registry run --port x=1", "x"},
	} {
		if out, code := a.net(strings.Fields(c.line)...); code != 2 || !strings.Contains(out, c.want) {
			t.Errorf("%s: %d: %s", c.line, code, out)
		}
	}
	if out, code := a.net("__complete", "link", "set", ""); code != 0 || !strings.Contains(out, "ib0\n") {
		t.Errorf("completion of interfaces: %d: %s", code, out)
	}
}

// TestMan: each command has a page with its options.
func TestMan(t *testing.T) {
	dir := t.TempDir()
	root := newRoot()
	root.SetArgs([]string{"man", dir})
	if err := root.Execute(); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		"rnbd-net.1": ".B registry", "rnbd-net-run.8": `\-\-registry`, "rnbd-net-registry-run.8": "hop\\-limit", "rnbd-net-pcap.1": `\-w, \-\-write file`,
		"rnbd-net-bond-enslave.1": "slave", "rnbd-net-link-add.1": "pkey 0x8001",
	} {
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil || !strings.Contains(string(b), want) || !strings.HasPrefix(string(b), ".TH RNBD") {
			t.Errorf("%s: %v: no %q in\n%s", file, err, want, b)
		}
	}
}
