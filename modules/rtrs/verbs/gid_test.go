package verbs

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func TestGIDs(t *testing.T) {
	for _, c := range []struct {
		name               string
		a                  netip.Addr
		text, withPort, in string
	}{
		{"IPv4", addr("10.0.0.1"), "10.0.0.1", "10.0.0.1:7", "ip:10.0.0.1"},
		{"IPv6", addr("fe80::1"), "fe80::1", "[fe80::1]:7", "ip:fe80::1"},
		{"GID", GID(addr("fe80::1")), "gid:fe80:0000:0000:0000:0000:0000:0000:0001",
			"gid:[fe80:0000:0000:0000:0000:0000:0000:0001]:7", "gid:fe80:0000:0000:0000:0000:0000:0000:0001"},
		{"GID of an IPv4 address", GID(addr("10.0.0.1")), "gid:0000:0000:0000:0000:0000:ffff:0a00:0001",
			"gid:[0000:0000:0000:0000:0000:ffff:0a00:0001]:7", "gid:0000:0000:0000:0000:0000:ffff:0a00:0001"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := AddrString(c.a); got != c.text {
				t.Errorf("alone: %s, want %s", got, c.text)
			}
			if got := AddrPortString(netip.AddrPortFrom(c.a, 7)); got != c.withPort {
				t.Errorf("with a port: %s, want %s", got, c.withPort)
			}
			if got := TreeString(c.a); got != c.in {
				t.Errorf("in the tree: %s, want %s", got, c.in)
			}
		})
	}
	if GID(addr("fe80::1")) == addr("fe80::1") || GID(addr("::ffff:10.0.0.1")) != GID(addr("10.0.0.1")) {
		t.Error("a GID is told by its bytes, and from the IP address with the same")
	}
}

// A fabric without addresses of InfiniBand takes the IP address that a GID is.
func TestConnectParamsIP(t *testing.T) {
	none := netip.Addr{}
	for _, c := range []struct {
		name             string
		src, dst         netip.Addr
		wantSrc, wantDst netip.Addr // zero destination: EINVAL
	}{
		{"IP addresses stay", addr("10.0.0.2"), addr("10.0.0.1"), addr("10.0.0.2"), addr("10.0.0.1")},
		{"so does a zone", none, addr("fe80::1%eth0"), none, addr("fe80::1%eth0")},
		{"GIDs of IPv4 addresses", GID(addr("10.0.0.2")), GID(addr("10.0.0.1")), addr("10.0.0.2"), addr("10.0.0.1")},
		{"GIDs of IPv6 addresses", GID(addr("fd00::2")), GID(addr("fd00::1")), addr("fd00::2"), addr("fd00::1")},
		{"no source", none, GID(addr("fd00::1")), none, addr("fd00::1")},
		{"link-local", none, GID(addr("fe80::1")), none, none},
		{"link-local source", GID(addr("fe80::2")), GID(addr("fd00::1")), none, none},
		{"all zero", none, GID(addr("::")), none, none},
		{"IPv4 of zeros", none, GID(addr("0.0.0.0")), none, none},
		{"multicast", none, GID(addr("ff0e::1")), none, none},
		{"one of IPv4, one of IPv6", GID(addr("10.0.0.2")), GID(addr("fd00::1")), none, none},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := ConnectParams{Src: c.src, Dst: netip.AddrPortFrom(c.dst, 7)}.IP()
			if c.wantDst == none {
				if !errors.Is(err, syscall.EINVAL) {
					t.Errorf("got %s, %v; want EINVAL", p.Dst, err)
				}
				return
			}
			if err != nil || p.Src != c.wantSrc || p.Dst != netip.AddrPortFrom(c.wantDst, 7) {
				t.Errorf("got %v to %v, %v", p.Src, p.Dst, err)
			}
		})
	}
}
