package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/rnbd-go/rnbd/test/lab"
)

// The network of limited paths: two namespaces as two hosts, with a cable for
// each path. Both ends of a cable send no faster than pathRate, so that one
// path is the limit and CPUs are not.
const (
	pathCount = 4
	pathRate  = "600mbit"
)

// cable i leads from clientEnd(i) to serverEnd(i).
func clientEnd(i int) string { return fmt.Sprintf("10.77.%d.1", i) }
func serverEnd(i int) string { return fmt.Sprintf("10.77.%d.2", i) }

// addPaths adds the library over one, two and four paths to servers of their
// own.
func (s *site) addPaths(context.Context) error {
	if !s.wants(paths(1), paths(2), paths(4)) || !s.have("limited paths", "ip", "tc") {
		return nil
	}
	if os.Geteuid() != 0 {
		s.skip("limited paths", fmt.Errorf("a network namespace needs root"))
		return nil
	}
	server, client, err := s.cables()
	if err != nil {
		s.skip("limited paths", err)
		return nil
	}
	for _, n := range []int{1, 2, 4} {
		if err := s.addLimited(n, server, client); err != nil {
			return fmt.Errorf("%s: %w", paths(n), err)
		}
	}
	return nil
}

// cables makes the two namespaces. They end with the site.
func (s *site) cables() (server, client string, err error) {
	server, client = fmt.Sprintf("rnbd-bench-%d-s", os.Getpid()), fmt.Sprintf("rnbd-bench-%d-c", os.Getpid())
	for _, name := range []string{server, client} {
		if err := ip("netns", "add", name); err != nil {
			return "", "", err
		}
		s.stops = append(s.stops, func() { ip("netns", "del", name) })
		if err := ip("-n", name, "link", "set", "lo", "up"); err != nil {
			return "", "", err
		}
	}
	for i := range pathCount {
		cable := fmt.Sprintf("cable%d", i)
		if err := ip("-n", server, "link", "add", "name", cable, "type", "veth", "peer", "name", cable, "netns", client); err != nil {
			return "", "", err
		}
		for ns, addr := range map[string]string{server: serverEnd(i), client: clientEnd(i)} {
			if err := plug(ns, cable, addr); err != nil {
				return "", "", err
			}
		}
	}
	return server, client, nil
}

// plug makes the end of a cable usable, at the rate of a path.
func plug(ns, cable, addr string) error {
	if err := ip("-n", ns, "address", "add", addr+"/24", "dev", cable); err != nil {
		return err
	}
	if err := ip("-n", ns, "link", "set", cable, "up"); err != nil {
		return err
	}
	return command("tc", "-n", ns, "qdisc", "add", "dev", cable, "root", "tbf", "rate", pathRate, "burst", "256kb", "latency", "50ms")
}

func ip(args ...string) error { return command("ip", args...) }

func command(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// addLimited starts a server in one namespace and `rnbd bench` in the other, with
// n paths between them.
func (s *site) addLimited(n int, server, client string) error {
	if !s.wants(paths(n)) {
		return nil
	}
	port := fmt.Sprint(1234 + n)
	var listen, addrs []string
	for i := range n {
		addr := serverEnd(i) + ":" + port
		listen, addrs = append(listen, "--listen", addr), append(addrs, clientEnd(i)+"@"+addr)
	}
	d, err := s.memoryServer(s.Size, lab.ServerOptions{Prefix: inside(server)}, listen...)
	if err != nil {
		return err
	}
	c := library(addrs, true, "ram")
	c.prefix = inside(client)
	_, _, err = s.addOurs(paths(n), c, s.Size, d.PID())
	return err
}

// inside runs a program in a network namespace.
func inside(ns string) []string { return []string{"ip", "netns", "exec", ns} }
