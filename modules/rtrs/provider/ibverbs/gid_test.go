//go:build linux && cgo && ibverbs

package ibverbs

import (
	"errors"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// overEthernet reports whether a device is on Ethernet (RoCE, iWARP).
func overEthernet(t testing.TB, device string) bool {
	t.Helper()
	layer, err := os.ReadFile("/sys/class/infiniband/" + device + "/ports/1/link_layer")
	check(t, err)
	return strings.TrimSpace(string(layer)) == "Ethernet"
}

// resolveGID resolves dst as an address of InfiniBand, without a second try by IP.
func resolveGID(t *testing.T, f *Fabric, src netip.Addr, dst netip.AddrPort) (*cmID, eventWaiter, error) {
	t.Helper()
	w := make(eventWaiter, 4)
	id, err := f.resolveAddr(t.Context(), w, w, src, dst)
	if err == nil {
		t.Cleanup(id.destroyID)
	}
	return id, w, err
}

// Why GIDs are taken for IP addresses on Ethernet: Linux finds the device of one, but
// no route, and with a source not even the device. When this fails, Linux has learnt it.
func TestLinuxHasNoRouteToAGIDOverEthernet(t *testing.T) {
	v4, v6 := addresses(t)
	f := openFabric(t, Config{})
	d, err := f.DeviceFor(t.Context(), v4, v4)
	check(t, err)
	if !overEthernet(t, d.Info().Name) {
		t.Skip("the device is on InfiniBand")
	}
	for _, a := range []netip.Addr{v4, v6} {
		if !a.IsValid() {
			continue
		}
		gid := verbs.GID(a)
		id, w, err := resolveGID(t, f, netip.Addr{}, netip.AddrPortFrom(gid, 1234))
		check(t, err)
		if id.remoteAddr() != netip.AddrPortFrom(gid, 1234) || !verbs.IsGID(id.localAddr().Addr()) || id.linkLayer() != "Ethernet" {
			t.Errorf("resolved from %v to %v on %q", id.localAddr(), id.remoteAddr(), id.linkLayer())
		}
		if err := id.resolveRoute(t.Context(), w); !errors.Is(err, syscall.ENODEV) {
			t.Errorf("route to %s: %v, want ENODEV", verbs.AddrString(gid), err)
		}
		if _, _, err := resolveGID(t, f, gid, netip.AddrPortFrom(gid, 1234)); !errors.Is(err, syscall.ENODEV) {
			t.Errorf("resolve %s from itself: %v, want ENODEV", verbs.AddrString(gid), err)
		}
	}
}

// As with the kernel's server, a listener at [::] listens to GIDs too.
func TestListenerTakesGIDs(t *testing.T) {
	v4, _ := addresses(t)
	f := openFabric(t, Config{})
	gids := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(verbs.GID(netip.IPv6Unspecified()), port) }
	for _, c := range []struct {
		name string
		at   netip.Addr
		want error
	}{
		{"IPv6 wildcard", netip.IPv6Unspecified(), syscall.EADDRNOTAVAIL}, // Linux's word for a GID's port that is taken
		{"IPv4 wildcard", netip.IPv4Unspecified(), nil},
		{"one address", v4, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, err := f.Listen(netip.AddrPortFrom(c.at, 0))
			check(t, err)
			other, err := f.Listen(gids(l.Addr().Port()))
			if !errors.Is(err, c.want) {
				t.Errorf("another listener for GIDs: %v, want %v", err, c.want)
			}
			if err == nil {
				check(t, other.Close())
			}
			check(t, l.Close())
			again, err := f.Listen(gids(l.Addr().Port()))
			check(t, err) // closed for GIDs too
			check(t, again.Close())
		})
	}
}

func TestGIDsThatLeadNowhere(t *testing.T) {
	v4, _ := addresses(t)
	f := openFabric(t, Config{})
	for _, c := range []struct {
		gid  string
		want error
	}{{"fe80::1", syscall.EINVAL}, {"::", syscall.EINVAL}, {"2001:db8::1", ErrNoDevice}} {
		if d, err := f.DeviceFor(t.Context(), netip.Addr{}, verbs.GID(netip.MustParseAddr(c.gid))); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, %v; want %v", c.gid, d, err, c.want)
		}
	}
	if _, err := f.DeviceFor(t.Context(), netip.Addr{}, verbs.GID(v4)); err != nil {
		t.Errorf("the GID of this host: %v", err)
	}
}
