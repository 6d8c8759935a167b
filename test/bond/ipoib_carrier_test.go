package bond

import (
	"context"
	"testing"
	"time"

	ipoib "github.com/rnbd-go/rnbd/modules/ipoib/dev"
)

// TestBO16_IPoIBCarrier: a slave of the type InfiniBand loses its carrier with the
// network below, so that the MII monitor sees the cut.
func TestBO16_IPoIBCarrier(t *testing.T) {
	n, _ := newIPoIB(t, ipoib.Datagram)
	n.bondOf([]string{"ib0", "ib1"}, "miimon 50", "primary ib0")
	n.waitActive("ib0")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	flows := []*flow{n.udp(ctx)}
	n.allFlow(flows, time.Now())
	for range 2 {
		n.cut("carrier", "p0")
		n.waitActive("ib1")
		n.allFlow(flows, time.Now())
		n.heal("carrier", "p0")
		n.waitActive("ib0")
		n.allFlow(flows, time.Now())
	}
}
