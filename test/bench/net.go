package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// The networks that are compared, with -net. Each has two network namespaces as
// two hosts, a veth pair between them, and where it needs one a daemon on each.
const (
	datagram  = "IPoIB, datagram mode, MTU 2044"
	connected = "IPoIB, connected mode, MTU 65520"
	wireguard = "wireguard-go, MTU 1420"
	plainVeth = "veth alone, MTU 4200"

	cableMTU = "4200" // carries the largest path MTU of RoCEv2

	// Addresses of the two hosts on the cable, and on the network on top.
	nearEnd, farEnd   = "10.78.0.1", "10.78.0.2"
	nearHost, farHost = "192.168.78.1", "192.168.78.2"

	iperfPort, echoPort = "5201", "5202"
)

// network is a pair of hosts.
type network struct {
	name      string
	near, far string // namespaces
	addr      string // of the far host
	daemons   []int
}

// addNetworks adds the networks.
func (s *site) addNetworks(ctx context.Context) error {
	if !s.have("networks", "ip", "iperf3") {
		return nil
	}
	if os.Geteuid() != 0 {
		s.skip("networks", errors.New("a network namespace needs root"))
		return nil
	}
	peer, err := s.program("netpeer")
	if err != nil {
		return err
	}
	for i, n := range []struct {
		name string
		open func(*network) error
	}{
		{datagram, s.ipoib("datagram")},
		{connected, s.ipoib("connected")},
		{wireguard, s.wireguard(peer)},
		{plainVeth, func(n *network) error { n.addr = farEnd; return nil }},
	} {
		if !s.wants(n.name) {
			continue
		}
		w := &network{name: n.name, near: fmt.Sprintf("rnbd-net-%d-%da", os.Getpid(), i), far: fmt.Sprintf("rnbd-net-%d-%db", os.Getpid(), i), addr: farHost}
		err := s.cable(w)
		if err == nil {
			err = n.open(w)
		}
		if err == nil {
			err = s.addNet(ctx, w, peer)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", n.name, err)
		}
	}
	return nil
}

// program builds a helper program from its folder in the tests.
func (s *site) program(folder string) (string, error) {
	name := filepath.Base(folder)
	path := filepath.Join(s.dir, name)
	cmd := exec.Command("go", "build", "-o", path, "./"+folder)
	cmd.Dir = filepath.Join(lab.Root(), "test")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w: %s", name, err, out)
	}
	return path, nil
}

// cable makes the namespaces and the veth pair of a network. They end with the
// site.
func (s *site) cable(n *network) error {
	for _, ns := range []string{n.near, n.far} {
		if err := ip("netns", "add", ns); err != nil {
			return err
		}
		s.stops = append(s.stops, func() { ip("netns", "del", ns) })
		if err := ip("-n", ns, "link", "set", "lo", "up"); err != nil {
			return err
		}
	}
	return errors.Join(
		ip("-n", n.near, "link", "add", "name", "cable", "mtu", cableMTU, "type", "veth", "peer", "name", "cable", "mtu", cableMTU, "netns", n.far),
		address(n.near, "cable", nearEnd), address(n.far, "cable", farEnd))
}

// address gives a device of a namespace an address, and sets it up.
func address(ns, device, addr string) error {
	return errors.Join(ip("-n", ns, "address", "add", addr+"/24", "dev", device), ip("-n", ns, "link", "set", device, "up"))
}

// appeared waits for a device, then gives it its address.
func (n *network) appeared(p *peer, ns, device, addr string) error {
	for end := time.Now().Add(30 * time.Second); ip("-n", ns, "link", "show", "dev", device) != nil; time.Sleep(20 * time.Millisecond) {
		select {
		case <-p.done:
			return fmt.Errorf("the daemon ended: %s", p.output())
		default:
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s does not appear: %s", device, p.output())
		}
	}
	return address(ns, device, addr)
}

// runIn starts a program in a namespace. It ends with the site.
func (s *site) runIn(ns, name string, argv ...string) (*peer, error) {
	p, err := start(s.ram, ns+"-"+name, append(inside(ns), argv...)...)
	if err == nil {
		s.stops = append(s.stops, p.stop)
	}
	return p, err
}

// ipoib returns a function that starts rnbd-net on both hosts.
func (s *site) ipoib(mode string) func(*network) error {
	return func(n *network) error {
		bin, err := lab.Bin()
		if err != nil {
			return err
		}
		for _, h := range [][4]string{{n.near, nearEnd, farEnd, nearHost}, {n.far, farEnd, nearEnd, farHost}} {
			p, err := s.runIn(h[0], "rnbd-net", filepath.Join(bin, "rnbd-net"), "run", "--port", h[1]+"="+h[2], "--mode", mode, "--socket", filepath.Join(s.ram, h[0]+".sock"))
			if err != nil {
				return err
			}
			n.daemons = append(n.daemons, p.pid())
			if err := n.appeared(p, h[0], "ib0", h[3]); err != nil {
				return err
			}
		}
		return nil
	}
}

// addNet adds the target of a network, when a round trip has succeeded.
func (s *site) addNet(ctx context.Context, n *network, netpeer string) error {
	server, err := s.runIn(n.far, "iperf3", "iperf3", "-s", "-p", iperfPort)
	if err != nil {
		return err
	}
	echo, err := s.runIn(n.far, "echo", netpeer, "echo", "0.0.0.0:"+echoPort)
	if err != nil {
		return err
	}
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		if _, err = n.ping(ctx, netpeer, "tcp", time.Millisecond); err == nil || ctx.Err() != nil || time.Now().After(end) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("no round trip: %w; %s", err, echo.output())
	}
	s.targets = append(s.targets, &target{name: n.name, servers: n.daemons,
		run: func(ctx context.Context, w workload, d time.Duration) (sample, error) {
			before := cpuOf([]int{server.pid(), echo.pid()})
			got, err := n.load(ctx, netpeer, w, d)
			got.processes += cpuOf([]int{server.pid(), echo.pid()}) - before
			return got, err
		}})
	return nil
}

// load makes one run. Round trips take a quarter of the time of a stream.
func (n *network) load(ctx context.Context, netpeer string, w workload, d time.Duration) (sample, error) {
	if w.Net == "stream" {
		seconds := max(1, int(d/time.Second))
		return iperfClient(ctx, inside(n.near), "-c", n.addr, "-p", iperfPort, "-P", fmt.Sprint(w.Jobs), "-t", fmt.Sprint(seconds), "-J")
	}
	return n.ping(ctx, netpeer, w.Net, d/4)
}

// ping makes round trips of 64 bytes, one after the other.
func (n *network) ping(ctx context.Context, netpeer, protocol string, d time.Duration) (sample, error) {
	ctx, cancel := context.WithTimeout(ctx, d+20*time.Second)
	defer cancel()
	argv := append(inside(n.near), netpeer, "ping", protocol, n.addr+":"+echoPort, d.String())
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	var trouble strings.Builder
	cmd.Stderr = &trouble
	out, err := cmd.Output()
	if err != nil {
		return sample{}, fmt.Errorf("netpeer ping: %w: %s", err, trouble.String())
	}
	s, err := parsePing(out)
	s.processes = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
	s.ClientCPU = s.processes
	return s, err
}

func parsePing(out []byte) (sample, error) {
	var r struct {
		Trips   uint64        `json:"trips"`
		Elapsed time.Duration `json:"elapsed_ns"`
		Mean    time.Duration `json:"mean_ns"`
		P50     time.Duration `json:"p50_ns"`
		P99     time.Duration `json:"p99_ns"`
	}
	if err := json.Unmarshal(out, &r); err != nil {
		return sample{}, fmt.Errorf("netpeer ping: %w", err)
	}
	if r.Trips == 0 {
		return sample{}, fmt.Errorf("netpeer ping: no answer came: %s", out)
	}
	us := func(d time.Duration) float64 { return float64(d) / 1e3 }
	return sample{IOs: r.Trips, Elapsed: r.Elapsed.Seconds(), Mean: us(r.Mean), P50: us(r.P50), P99: us(r.P99), raw: out}, nil
}
