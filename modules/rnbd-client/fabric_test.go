package client

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// named is a device of another fabric's name.
type named struct {
	verbs.Device
	fabric string
}

func (n named) Info() verbs.Info { return verbs.Info{Fabric: n.fabric} }

// leading is a fabric that leads to some addresses.
type leading struct {
	named
	to map[string]bool
}

func (l leading) DeviceFor(_ context.Context, _, dst netip.Addr) (verbs.Device, error) {
	if l.to[dst.String()] {
		return l.named, nil
	}
	return nil, errors.New("no device")
}

func TestPathWithoutAFabricTakesThePreferredOneWhereItLeads(t *testing.T) {
	c := newTarget(t, 1<<20).newClient(func(cfg *Config) {
		cfg.Fabrics = map[string]verbs.Device{
			"iwarp":   named{fabric: "iwarp"},
			"ibverbs": leading{named{fabric: "ibverbs"}, map[string]bool{"10.0.0.1": true, "127.0.0.1": true}},
		}
		cfg.DefaultFabric, cfg.PreferredFabric = "iwarp", "ibverbs"
	})
	for path, want := range map[string]string{
		"10.0.0.1": "ibverbs", "10.0.0.2": "iwarp", "127.0.0.1": "iwarp", "10.0.0.1%iwarp": "iwarp", "10.0.0.2%ibverbs": "ibverbs",
	} {
		addrs, err := c.pathAddresses(t.Context(), []string{path})
		must(t, err)
		if got := addrs[0].Device.Info().Fabric; got != want {
			t.Errorf("%s goes over %s, want %s", path, got, want)
		}
	}
	c.cfg.PreferredFabric = "" // also one that the build lacks
	addrs, err := c.pathAddresses(t.Context(), []string{"10.0.0.1"})
	must(t, err)
	if got := addrs[0].Device.Info().Fabric; got != "iwarp" {
		t.Errorf("without a preference the path goes over %s", got)
	}
}

func TestRefusedPathNamesTheOtherFabric(t *testing.T) {
	at := func(fabric string) []rtrs.PathAddr {
		return []rtrs.PathAddr{{Device: named{fabric: fabric}, Dst: netip.MustParseAddrPort("10.0.0.1:1234")}}
	}
	for fabric, want := range map[string]string{"iwarp": "10.0.0.1:1234%rocev2", "ibverbs": "10.0.0.1:1234%iwarp"} {
		if err := withPathHint(at(fabric), syscall.ECONNREFUSED); !strings.Contains(err.Error(), want) || !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("over %s: %v", fabric, err)
		}
	}
	local := []rtrs.PathAddr{{Device: named{fabric: "iwarp"}, Dst: netip.MustParseAddrPort("[fe80::1]:1234")}}
	if err := withPathHint(local, syscall.EINVAL); !strings.Contains(err.Error(), "[fe80::1%eth0]") || !errors.Is(err, syscall.EINVAL) {
		t.Errorf("link-local address without interface: %v", err)
	}
	for _, err := range []error{withPathHint(at("rocev2"), syscall.ECONNREFUSED), withPathHint(at("iwarp"), syscall.ENOENT)} {
		if strings.Contains(err.Error(), "%") {
			t.Errorf("advice where there is none: %v", err)
		}
	}
}

// The whole way: a refused map tells it.
func TestRefusedMapNamesTheOtherFabric(t *testing.T) {
	s := newTarget(t, 1<<20)
	s.net.RefuseDial(s.addrs[0], syscall.ECONNREFUSED)
	c := s.newClient(func(cfg *Config) {
		cfg.Fabrics = map[string]verbs.Device{"iwarp": renamed{s.net.Device("clt"), "iwarp"}}
		cfg.DefaultFabric = "iwarp"
	})
	_, err := c.Map(t.Context(), MapRequest{Path: "vol", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Frontend: "none"})
	if err == nil || !strings.Contains(err.Error(), "%rocev2") {
		t.Errorf("refused map: %v", err)
	}
}

// renamed is a device that works, under another fabric's name.
type renamed struct {
	verbs.Device
	fabric string
}

func (r renamed) Info() verbs.Info {
	i := r.Device.Info()
	i.Fabric = r.fabric
	return i
}
