package kernelvm

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// Packets are lost on one link, in both directions. The numbers of lost paths
// are compared, with ours at one end, and with rxe at both; the kernel's
// messages about it are in the log. Nothing fails here but the end of the
// session: an emulated kernel is too slow to demand that no path is lost.
//
// Only in the long form: it is a measurement, see "Lost packets" in
// docs/extend/protocol/rocev2.md.
func TestPacketLoss(t *testing.T) {
	longForm(t)
	for _, c := range []cell{
		{column: rocev2, from: ours, to: kernel},
		{column: rocev2, from: ours, to: kernel, invalidate: true},
		{column: rocev2, from: kernel, to: ours},
	} {
		t.Run(c.String(), func(t *testing.T) {
			b := c.set(t)
			measureLoss(t, b, b.g)
		})
	}
	for _, invalidate := range []bool{false, true} {
		c := cell{column: column{fabric: "rxe"}, from: kernel, to: kernel, invalidate: invalidate}
		t.Run(c.String(), func(t *testing.T) { measureLoss(t, c.between(t), guest(t)) })
	}
}

// between starts the kernel's client in the shared guest and its server in another.
func (c cell) between(t *testing.T) *bench {
	t.Helper()
	g := guest(t)
	other := vm.Boot(t, vm.Config{Net: vm.Pair(g), Modules: []string{"loop"}})
	eth := fmt.Sprintf("eth%d", fast)
	other.Run(t, "ip", "link", "set", eth, "mtu", "9000")
	other.RXEOn(t, "rxe1", eth, other.Addr(fast)+"/24")
	meetNeighbours(t, g, other.Addr(fast))
	meetNeighbours(t, other, g.Addr(fast))
	b := &bench{cell: c, g: g}
	b.s = &kernelServer{g: other, addr: other.Addr, params: []string{"always_invalidate=" + map[bool]string{true: "Y", false: "N"}[c.invalidate]}}
	b.s.Start(t)
	k := &kernelClient{g: g, addr: g.Addr}
	k.load(t)
	b.c = k
	return b
}

func measureLoss(t *testing.T, b *bench, g *vm.Guest) {
	m := b.mapping("rw", fast)
	d := b.mustMap(t, m)
	from := len(g.KernelLog())
	for _, percent := range []int{0, 1} {
		lose(t, g, percent)
		for _, rw := range []string{"randwrite", "randread"} {
			before := b.c.Reconnects(t, "s")
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			begin := time.Now()
			_, err := b.c.Fio(ctx, d, "--rw="+rw, "--bs=4k", "--iodepth=16", "--size=8M", "--io_size=8M")
			cancel()
			t.Logf("%s, %d %% lost, %s: %s, failed: %t, %d paths connected, %d reconnects",
				b, percent, rw, time.Since(begin).Round(100*time.Millisecond), err != nil, b.connected(t), b.c.Reconnects(t, "s")-before)
			eventually(t, 3*time.Minute, "the path is there", func() bool {
				return b.connected(t) == 1 && b.c.State(t, d) == "open"
			})
		}
	}
	lose(t, g, 0)
	said := map[string]int{}
	for line := range strings.Lines(g.KernelLog()[from:]) {
		if _, text, ok := strings.Cut(line, "] "); ok && strings.HasPrefix(text, "rtrs_") {
			said[strings.TrimSpace(text)]++
		}
	}
	for text, n := range said {
		t.Logf("%d times: %s", n, text)
	}
	b.c.Unmap(t, d)
}

// lose makes the guest lose packets of the fast link in both directions.
func lose(t *testing.T, g *vm.Guest, percent int) {
	t.Helper()
	g.Run(t, "sh", "-ec", `
		for m in sch_netem sch_ingress ifb act_mirred cls_matchall; do modprobe $m; done
		ip link show ifb0 >/dev/null 2>&1 || ip link add ifb0 type ifb
		ip link set ifb0 up
		tc qdisc del dev $0 root 2>/dev/null || true
		tc qdisc del dev $0 ingress 2>/dev/null || true
		tc qdisc del dev ifb0 root 2>/dev/null || true
		[ $1 = 0 ] && exit 0
		tc qdisc add dev $0 root netem loss $1% limit 10000
		tc qdisc add dev ifb0 root netem loss $1% limit 10000
		tc qdisc add dev $0 ingress
		tc filter add dev $0 parent ffff: matchall action mirred egress redirect dev ifb0`, fmt.Sprintf("eth%d", fast), fmt.Sprint(percent))
}
