package bond

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// longest gap that a test allows; the histogram shows the measured gaps.
const bound = 6 * time.Second

// kinds of cuts with the monitor that sees them. A port of the switch starts to
// forward a moment after its carrier is up, on a busy machine more than 100 ms
// later. Announcements sent before that are lost: updelay and resend_igmp exist
// for this case.
var kinds = []struct {
	name, cut string
	options   []string
}{
	{"carrier", "carrier", []string{"miimon 50", "updelay 100", "resend_igmp 10", "fail_over_mac active", "primary s0"}},
	{"carrier, fail_over_mac none", "carrier", []string{"miimon 50", "updelay 100", "resend_igmp 10", "primary s0"}},
	{"carrier, fail_over_mac follow", "carrier", []string{"miimon 50", "updelay 100", "resend_igmp 10", "fail_over_mac follow", "primary s0"}},
	{"silent", "silent", []string{"arp_interval 100", "arp_ip_target +10.5.0.2", "arp_validate all", "fail_over_mac active", "primary s0"}},
}

// gaps of one flow: of the fail-overs and of the fail-backs.
type gaps struct{ over, back []time.Duration }

// TestFailOver lets four kinds of traffic run through a bond while its active
// slave is cut off and healed, again and again.
func TestFailOver(t *testing.T) {
	runs := 2
	if os.Getenv("RNBD_LONG") != "" {
		runs = 20
	}
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) { failOver(t, kind.cut, kind.options, runs) })
	}
}

func failOver(t *testing.T, kind string, options []string, runs int) {
	n := newNetwork(t)
	n.newBond(options...)
	n.waitActive("s0")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	tcp := n.tcp(ctx)
	flows := []*flow{tcp.flow, n.udp(ctx), n.multicast(ctx), n.icmp(ctx)}
	measured := map[string]*gaps{}
	for _, f := range flows {
		measured[f.name] = &gaps{}
	}
	n.allFlow(flows, time.Now())
	for range runs {
		start := time.Now()
		n.cut(kind, "p0")
		n.waitActive("s1")
		n.allFlow(flows, time.Now())
		for _, f := range flows {
			measured[f.name].over = append(measured[f.name].over, f.gap(start))
		}
		start = time.Now()
		n.heal(kind, "p0")
		n.waitActive("s0")
		n.allFlow(flows, time.Now())
		for _, f := range flows {
			measured[f.name].back = append(measured[f.name].back, f.gap(start))
		}
	}
	tcp.stop()
	t.Run("BO-03 TCP", func(t *testing.T) {
		select {
		case err := <-tcp.done:
			if err != nil {
				t.Errorf("the stream: %v", err)
			}
		case <-time.After(patience):
			t.Error("the stream does not end")
		}
		measured["TCP"].check(t)
	})
	for number, name := range map[string]string{"BO-04": "UDP", "BO-05": "multicast", "BO-06": "ICMP"} {
		t.Run(number+" "+name, func(t *testing.T) { measured[name].check(t) })
	}
	for _, f := range flows[1:] {
		if f.double > 0 {
			t.Errorf("%d packets of %s arrived twice", f.double, f.name)
		}
	}
	t.Logf("%s, %d runs, longest time without an arrival, ms (buckets are upper limits)\n%s", kind, runs, histogram(flows, measured))
}

// allFlow waits until every flow has had 20 arrivals after t.
func (n *network) allFlow(flows []*flow, t time.Time) {
	n.t.Helper()
	for _, f := range flows {
		n.waitFor(f.name+" flows", func() bool { return f.since(t) >= 20 })
	}
}

func (g *gaps) check(t *testing.T) {
	for _, d := range slices.Concat(g.over, g.back) {
		if d > bound {
			t.Errorf("a gap of %v, want at most %v", d, bound)
		}
	}
}

// histogram is a table: a row for each flow and direction, a column for each
// range of gaps.
func histogram(flows []*flow, measured map[string]*gaps) string {
	limits := []int{20, 50, 100, 150, 200, 300, 400, 600, 1000, 2000}
	var w strings.Builder
	fmt.Fprintf(&w, "%-22s %8s %8s ", "", "median", "longest")
	for _, l := range limits {
		fmt.Fprintf(&w, "%5d", l)
	}
	fmt.Fprintf(&w, "%5s\n", "more")
	row := func(name string, all []time.Duration) {
		all = slices.Sorted(slices.Values(all))
		fmt.Fprintf(&w, "%-22s %8d %8d ", name, all[len(all)/2].Milliseconds(), all[len(all)-1].Milliseconds())
		for i := range len(limits) + 1 {
			count := 0
			for _, d := range all {
				if at, _ := slices.BinarySearch(limits, int(d.Milliseconds())); at == i {
					count++
				}
			}
			fmt.Fprintf(&w, "%5d", count)
		}
		w.WriteByte('\n')
	}
	for _, f := range flows {
		row(f.name+", fail-over", measured[f.name].over)
		row(f.name+", fail-back", measured[f.name].back)
	}
	return w.String()
}
