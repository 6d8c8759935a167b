package path

import (
	"net/netip"
	"testing"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

func TestEndpoint(t *testing.T) {
	var tab Table
	v4, v6 := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	made := wire.GID(netip.MustParseAddr("fe80::2:c903:1:2345").As16())
	for _, a := range []netip.Addr{v4, v6} {
		if got, err := tab.Endpoint(wire.AddrGID(a)); err != nil || got != a || tab.GID(a) != wire.AddrGID(a) {
			t.Errorf("endpoint of %s: %s, %v", a, got, err)
		}
	}
	for _, gid := range []wire.GID{made, {}, wire.Link{PKey: 0xffff, Scope: 2}.Broadcast()} {
		if a, err := tab.Endpoint(gid); err == nil {
			t.Errorf("endpoint of %s: %s, want an error", gid, a)
		}
	}
	if err := tab.Set(made, v4); err != nil {
		t.Fatal(err)
	}
	if got, err := tab.Endpoint(made); err != nil || got != v4 || tab.GID(v4) != made {
		t.Errorf("endpoint of an entry: %s, %v; GID of %s: %s", got, err, v4, tab.GID(v4))
	}
	if err := tab.Set(made, v6); err != nil || tab.GID(v4) != wire.AddrGID(v4) || tab.GID(v6) != made {
		t.Errorf("a moved port is still at the old address: %v", err)
	}
	for _, bad := range []struct {
		gid  wire.GID
		addr netip.Addr
	}{{wire.GID{}, v4}, {wire.GID{0: 0xff}, v4}, {made, netip.IPv4Unspecified()}, {made, netip.Addr{}}, {made, netip.MustParseAddr("224.0.0.1")}} {
		if err := tab.Set(bad.gid, bad.addr); err == nil {
			t.Errorf("Set(%s, %s) returned no error", bad.gid, bad.addr)
		}
	}
}
