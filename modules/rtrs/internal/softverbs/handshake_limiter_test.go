package softverbs

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// Where no host has too many, the oldest handshake of the hosts with the most
// gives way.
func TestCrowd_WhoGivesWay(t *testing.T) {
	for _, tt := range []struct {
		name string
		who  []string // unfinished handshakes, oldest first; "+": settled
		next string
		want int
	}{
		{"nobody where there is room", []string{"10.0.0.1", "10.0.0.2"}, "10.0.0.3", -1},
		{"the oldest of the host at its limit", []string{"10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.2"}, "10.0.0.2", 1},
		{"the oldest of the largest group", []string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.2", "10.0.0.4", "10.0.0.5"}, "10.0.0.6", 1},
		{"the oldest of all where each has one", []string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.7"}, "10.0.0.6", 0},
		{"the oldest of a network of IPv6", []string{"10.0.0.1", "2001:db8::1", "2001:db8::2", "2001:db8::3"}, "2001:db8::4", 1},
		{"the oldest that is not settled", []string{"10.0.0.1", "10.0.0.2+", "10.0.0.2", "10.0.0.2"}, "10.0.0.2", 2},
		{"nobody where all are settled", []string{"10.0.0.1", "10.0.0.2+", "10.0.0.2+", "10.0.0.2+"}, "10.0.0.2", -1},
	} {
		settled := map[int]bool{}
		c := HandshakeLimiter[int]{Max: 6, MaxPerHost: 3, Settled: func(h int) bool { return settled[h] }}
		for i, w := range tt.who {
			addr, plus := strings.CutSuffix(w, "+")
			settled[i] = plus
			if _, ok := c.Add(i, netip.MustParseAddr(addr)); ok {
				t.Fatalf("%s: too many to start with", tt.name)
			}
		}
		gone, ok := c.Add(len(tt.who), netip.MustParseAddr(tt.next))
		if !ok {
			gone = -1
		}
		if gone != tt.want || c.Len() != len(tt.who)+1 && !ok || ok && (c.Len() != len(tt.who) || slices.Contains(c.All(), gone)) {
			t.Errorf("%s: %d gave way, want %d; %v are left", tt.name, gone, tt.want, c.All())
		}
	}
}

func TestCrowd_RemovedHandshakesCountNoMore(t *testing.T) {
	c := HandshakeLimiter[string]{Max: 10, MaxPerHost: 2}
	a := netip.MustParseAddr("10.0.0.1")
	for _, h := range []string{"one", "two"} {
		c.Add(h, a)
	}
	if !c.Remove("one") || c.Remove("one") {
		t.Error("a handshake is removed exactly once")
	}
	if gone, ok := c.Add("three", a); ok {
		t.Errorf("%s gave way though there was room", gone)
	}
	if gone, ok := c.Displace("three"); !ok || gone != "two" {
		t.Errorf("%q gave way, want the oldest", gone)
	}
	if gone, ok := c.Displace("three"); ok {
		t.Errorf("%q gave way to itself", gone)
	}
	c.RemoveAll(func(string) bool { return true })
	if c.Len() != 0 || len(c.of) != 0 {
		t.Errorf("%v, %v are left", c.All(), c.of)
	}
}

func TestC050_HostsOfIPv6HaveANetwork(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		same bool
	}{
		{"2001:db8::1", "2001:db8::ffff:2", true},
		{"fe80::1%eth0", "fe80::2%eth1", true},
		{"2001:db8:0:1::1", "2001:db8:0:2::1", false},
		{"10.0.0.1", "10.0.0.2", false},
		{"10.0.0.1", "::ffff:10.0.0.1", true},
	} {
		if got := HostOf(netip.MustParseAddr(tt.a)) == HostOf(netip.MustParseAddr(tt.b)); got != tt.same {
			t.Errorf("%s and %s are one host: %t", tt.a, tt.b, got)
		}
	}
}
