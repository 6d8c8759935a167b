package kernelvm

import (
	"fmt"
	"os"
	"testing"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// The columns on IPv6, on addresses that need no interface beside them.
var (
	rocev2IPv6 = column{
		fabric: "rocev2", ipv6: true,
		ours:   rocev2.ours,
		server: func(_ *vm.Guest, link int) string { return vm.HostAddr6(link) },
		client: func(_ *vm.Guest, link int) string { return secondHostAddr6(link) },
		kernel: (*vm.Guest).Addr6,
		prepare: func(t testing.TB, g *vm.Guest) {
			for link := range 2 {
				addHostAddr(t, g, link, secondHostAddr6(link)+"/64")
				meetNeighbours(t, g, vm.HostAddr6(link), secondHostAddr6(link))
			}
		},
	}
	ibverbsIPv6 = column{
		fabric: "ibverbs", ipv6: true,
		ours:   ibverbs.ours,
		server: (*vm.Guest).Addr6,
		client: (*vm.Guest).Addr6,
		kernel: (*vm.Guest).Addr6,
	}
)

func secondHostAddr6(link int) string { return fmt.Sprintf("fd00:9:%d::101", link) }

// The matrix on IPv6, in the long form. In the short one a disk is written in
// either direction over both links, small packets and large ones: the
// differences from IPv4 are below sessions and access modes. Over ibverbs see
// TestIBVerbs_Matrix.
func TestIPv6(t *testing.T) {
	if os.Getenv("RNBD_LONG") != "" {
		for _, c := range append(rocev2IPv6.cells(), ibverbsIPv6.cells()...) {
			t.Run(c.String(), func(t *testing.T) { wholeLife(t, c.set(t)) })
		}
		return
	}
	for _, c := range []cell{
		{column: rocev2IPv6, from: ours, to: kernel},
		{column: rocev2IPv6, from: kernel, to: ours},
	} {
		t.Run(c.String(), func(t *testing.T) {
			b := c.set(t)
			d := b.mapDisk(t, "rw", 0, fast)
			fill(t, b, d)
			b.c.Unmap(t, d)
		})
	}
}
