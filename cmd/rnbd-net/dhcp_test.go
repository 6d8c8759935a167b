package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestTAP_DHCP: a client gets an address over interfaces that are Ethernet to
// the kernel. The server answers it by Ethernet address, or by broadcast if the
// client asks for that.
func TestTAP_DHCP(t *testing.T) {
	if _, err := exec.LookPath("busybox"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("busybox is not installed")
		}
		t.Skip("busybox is not installed")
	}
	a, b := cabled(t, [2][]string{{"--device=tap", "--port=10.9.0.1=10.9.0.2"}, {"--device=tap", "--port=10.9.0.2=10.9.0.1"}}, nil)
	for _, n := range []*node{a, b} {
		run(t, "ip", "-n", n.ns, "link", "set", "ib0", "up")
	}
	run(t, "ip", "-n", a.ns, "addr", "add", "192.168.50.1/24", "dev", "ib0")
	dir := t.TempDir()
	file := func(name, format string, args ...any) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, fmt.Appendf(nil, format, args...), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	leases := file("leases", "")
	server := nsCommand(a.ns, "busybox", "udhcpd", "-f", file("udhcpd.conf",
		"interface ib0\nstart 192.168.50.100\nend 192.168.50.100\nlease_file %s\npidfile %s/pid\nauto_time 1\nopt subnet 255.255.255.0\nopt router 192.168.50.1\nopt lease 600\n", leases, dir))
	var log lockedBuffer
	server.Stdout, server.Stderr = &log, &log
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		server.Process.Kill()
		server.Wait()
		if t.Failed() {
			t.Logf("udhcpd:\n%s", &log)
		}
	})
	script := file("script", "#!/bin/sh\ncase $1 in\nbound|renew) ip addr replace $ip/$mask dev $interface; ip route replace default via $router;;\ndeconfig) ip addr flush dev $interface;;\nesac\n")
	for _, c := range []struct {
		name string
		args []string
	}{{"answered by address", nil}, {"answered by broadcast", []string{"-B"}}} {
		t.Run(c.name, func(t *testing.T) {
			args := append([]string{"timeout", "60", "busybox", "udhcpc", "-i", "ib0", "-f", "-q", "-t", "20", "-T", "1", "-s", script}, c.args...)
			if out, err := nsCommand(b.ns, args...).CombinedOutput(); err != nil {
				t.Fatalf("udhcpc: %v\n%s\nudhcpd:\n%s", err, out, &log)
			}
			if got := run(t, "ip", "-n", b.ns, "addr", "show", "dev", "ib0"); !strings.Contains(got, "inet 192.168.50.100/24") {
				t.Errorf("the client has\n%s", got)
			}
		})
	}
	// The server has the client by the address of its device.
	mac := strings.TrimSpace(b.read("class/net/ib0/address"))
	eventually(t, "the lease is written down", func() bool {
		out, _ := exec.Command("busybox", "dumpleases", "-f", leases).CombinedOutput()
		return strings.Contains(string(out), mac) && strings.Contains(string(out), "192.168.50.100")
	})
	eventually(t, "the client is reached", func() bool {
		nsCommand(a.ns, "bash", "-c", "echo hello > /dev/udp/192.168.50.100/9").Run()
		return strings.Contains(run(t, "ip", "-n", a.ns, "neigh", "show", "192.168.50.100"), mac)
	})
}
