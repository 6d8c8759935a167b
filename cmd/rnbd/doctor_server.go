package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/doctor"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/load"
	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/ibverbs"
)

// prober tries servers with the client library in this process.
type prober struct {
	lib  *client.Client
	keys *clientTLS
}

// probeLoad measures the bandwidth.
var probeLoad = load.Workload{Name: "sequential read", Reads: 100, Blocks: []load.Block{{Bytes: 128 << 10, Weight: 1}}, Depth: 8, Jobs: 1}

// newProber returns a prober that uses keys.
func newProber(ctx context.Context, keys *clientTLS) (*prober, error) {
	auth, mode, err := keys.forProbes()
	if err != nil {
		return nil, err
	}
	lib, err := newTrialClient(ctx, slotsOf([]load.Workload{probeLoad}), true, auth, keys.TLS == tlsRequire, mode)
	if err != nil {
		return nil, err
	}
	return &prober{lib, keys}, nil
}

// close ends the library. Errors at the end do not change the findings.
func (p *prober) close() {
	ctx, cancel := context.WithTimeout(context.Background(), closing)
	defer cancel()
	_ = p.lib.Close(ctx)
}

// overAll tries a server at each of its addresses over each fabric, or over the
// fabric that is named. Beside one that works, a failure is no problem. It returns
// a path that works, or else the first.
func (p *prober) overAll(ctx context.Context, choice pathChoice) (found []doctor.Finding, works string) {
	for _, path := range choice {
		for _, path := range overFabrics(path) {
			of, ok := p.over(ctx, path)
			found = append(found, of...)
			if ok && works == "" {
				works = path
			}
		}
	}
	if works == "" {
		return found, choice[0]
	}
	for i := range found {
		if found[i].Outcome == doctor.Problem {
			found[i].Outcome = doctor.Note
			found[i].Do = "nothing, unless this address and fabric are wanted: then have the server listen there"
		}
	}
	return found, works
}

// overFabrics returns path over each fabric of this build, or over the one that it
// names.
func overFabrics(path string) (paths []string) {
	if _, _, found := cutPathFabric(path); found {
		return []string{path}
	}
	for _, fabric := range []string{"iwarp", "rocev2", "ibverbs"} {
		if fabric != "ibverbs" || ibverbs.Built {
			paths = append(paths, path+"%"+fabric)
		}
	}
	return paths
}

// slowTrip is a round trip that is long for a storage network.
const slowTrip = 5 * time.Millisecond

// over tries one path.
func (p *prober) over(ctx context.Context, path string) (found []doctor.Finding, works bool) {
	limited, cancel := context.WithTimeout(ctx, tryLimit)
	defer cancel()
	r, err := p.lib.Probe(limited, path, 50)
	if err != nil {
		do := cmp.Or(p.keys.hint(limited, addressOf(path), err), hintOf(err))
		if do == "" {
			do = "check the address, the network and that the server listens there"
		}
		return []doctor.Finding{{Check: "server", Subject: path, Outcome: doctor.Problem, Text: err.Error(), Do: do}}, false
	}
	kind := "a server of ours"
	if r.Features == 0 {
		kind = "a Linux kernel's server"
	}
	f := doctor.Finding{Check: "server", Subject: path, Outcome: doctor.OK,
		Text: fmt.Sprintf("%s, round trip %s (p50), %s (longest of %d), %d requests of at most %d KiB in flight",
			kind, round(r.Median()), round(r.Latency[len(r.Latency)-1]), len(r.Latency), r.QueueDepth, r.MaxIO>>10)}
	if r.Median() > slowTrip {
		f.Outcome, f.Do = doctor.Warning, "look for load and for what lies between (`ping`, `mtr`)"
	}
	found = append(found, f)
	if mtu := doctor.RouteMTU(addressOf(path)); mtu > 0 && mtu < 1280 {
		found = append(found, doctor.Finding{Check: "path MTU", Subject: path, Outcome: doctor.Warning, Text: fmt.Sprintf("%d bytes", mtu), Do: "raise the MTU of the route or tunnel to 1500 or more"})
	} else if mtu > 0 {
		found = append(found, doctor.Finding{Check: "path MTU", Subject: path, Outcome: doctor.OK, Text: fmt.Sprintf("%d bytes", mtu)})
	}
	return found, true
}

// addressOf returns the server's address and port of a path.
func addressOf(path string) string {
	addr, _, _ := cutPathFabric(path[strings.Index(path, "@")+1:])
	if _, _, err := net.SplitHostPort(addr); err != nil {
		addr = net.JoinHostPort(strings.Trim(addr, "[]"), "1234")
	}
	return addr
}

func round(d time.Duration) time.Duration { return d.Round(time.Microsecond) }

// bandwidth reads a device for a second.
func (p *prober) bandwidth(ctx context.Context, server, name string) doctor.Finding {
	f := doctor.Finding{Check: "bandwidth", Subject: server + " " + name}
	fail := func(err error) doctor.Finding {
		f.Outcome, f.Text, f.Do = doctor.Problem, err.Error(), "`rnbd explain ERRNO` says more of an errno; the server's log has the full story"
		return f
	}
	d, err := p.lib.Map(ctx, client.MapRequest{Path: name, Paths: []string{server}, Mode: blk.ReadOnly, Frontend: client.FrontendNone, Slots: slotsOf([]load.Workload{probeLoad})})
	if err != nil {
		return fail(err)
	}
	defer func() { _ = p.lib.Unmap(context.WithoutCancel(ctx), d.Name(), true) }()
	s, err := newServerDevice(d, 0)
	if err != nil {
		return fail(err)
	}
	target := &load.Target{Name: name, Device: s}
	if err := target.Fits(probeLoad); err != nil {
		return fail(err)
	}
	r, err := load.Run(ctx, probeLoad, []*load.Target{target}, load.Options{Time: time.Second})
	if err != nil {
		return fail(err)
	}
	f.Outcome = doctor.OK
	f.Text = fmt.Sprintf("%.0f MB/s of sequential reads of 128 KiB", float64(r.Bytes[0]+r.Bytes[1])/r.Elapsed.Seconds()/1e6)
	return f
}
