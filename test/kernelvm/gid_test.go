package kernelvm

import (
	"errors"
	"strings"
	"syscall"
	"testing"
)

// otherAddresses maps in a cell of ibverbs on IPv4 with our client: our server by GID, the
// kernel's by addresses of IPv6, since it listens to all.
func otherAddresses(t *testing.T, b *bench) {
	if b.to == ours {
		const gid = "gid:0000:0000:0000:0000:0000:ffff:0a09:0102"
		t.Run("GID of an IPv4 address", func(t *testing.T) { mapAt(t, b, b.g.Addr(fast), true, gid) })
		return
	}
	v6, gid := b.g.Addr6(fast), "gid:fd00:0009:0001:0000:0000:0000:0000:0002"
	t.Run("IPv6 address", func(t *testing.T) { mapAt(t, b, v6, false, "ip:"+v6) })
	t.Run("GID of an IPv6 address", func(t *testing.T) { mapAt(t, b, v6, true, gid) })
	t.Run("GIDs that lead nowhere", func(t *testing.T) { lostGIDs(t, b) })
}

// mappingAt is a mapping between two ends at addr.
func (b *bench) mappingAt(addr string, gid bool) mapping {
	m := b.mapping("rw", fast)
	m.from, m.to, m.gid = addr, otherAddr{b.s, addr}, gid
	return m
}

// mapAt maps between two ends at addr. Both are called shown in the tree.
func mapAt(t *testing.T, b *bench, addr string, gid bool, shown string) {
	d, err := b.c.Map(t.Context(), b.mappingAt(addr, gid))
	if err != nil {
		t.Fatalf("map: %v", err)
	}
	o := b.c.(*ourClient)
	if got := strings.TrimSpace(run(t, o.at, "ls", o.dir+"/sys/class/rtrs-client/s/paths")); got != shown+"@"+shown {
		t.Errorf("the path is shown as %s", got)
	}
	if !gid {
		fill(t, b, d)
	} else if _, err := b.c.Exercise(t.Context(), d, "--for", "1s"); err != nil { // over the IP address that it is
		t.Error(err)
	}
	b.unmap(t, d)
}

// lostGIDs: neither client finds one that no device has. The kernel's finds none at all over
// Ethernet.
func lostGIDs(t *testing.T, b *bench) {
	k := &kernelClient{g: b.g}
	k.load(t)
	for _, c := range []struct {
		who  string
		c    client
		addr string
	}{
		{"ours", b.c, "fe80::1"},
		{"the kernel's", k, "fe80::1"},
		{"the kernel's", k, b.g.Addr6(fast)},
		{"the kernel's", k, b.g.Addr(fast)},
	} {
		if _, err := c.c.Map(t.Context(), b.mappingAt(c.addr, true)); !errors.Is(err, syscall.ENODEV) {
			t.Errorf("%s client maps at the GID of %s: %v, want ENODEV", c.who, c.addr, err)
		}
	}
}
