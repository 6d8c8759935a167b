package main

import (
	"cmp"
	"slices"
	"strings"
)

// claim is a row of the results before it is measured: the target, the peer that
// it is compared with, and the ratio that it has to reach.
type claim struct {
	id     string
	w      workload
	m      metric
	ours   string
	peers  []string   // the best of them counts
	loads  []workload // of the peers; nil: the same
	target float64    // least ratio; 0: shown beside, not judged
}

// oneHop are the servers that everybody reaches directly over TCP, twoHops
// those behind a proxy of NBD.
var (
	oneHop  = []string{nbdkitMemory, qemuNBD, nbdServer}
	twoHops = []string{nbdkitProxy, qemuProxy}
)

// kinds are the first letters of rows, in their order.
const kinds = "PTIU"

// claims are all rows.
func claims() (all []claim) {
	for _, write := range []bool{false, true} {
		all = append(all, latencyClaims(write)...)
		all = append(all, throughputClaims(write)...)
		all = append(all, frontEndClaims(write)...)
		all = append(all, cpuClaims(write)...)
		all = append(all, ownClaims(write)...)
		all = append(all, pathClaims(write)...)
		all = append(all, diskClaims(write)...)
		all = append(all, isolationClaims(write)...)
		all = append(all, tlsClaims(write)...)
		all = append(all, userClaims(write)...)
	}
	all = append(all, idleClaims()...)
	slices.SortStableFunc(all, func(a, b claim) int {
		return cmp.Or(strings.IndexByte(kinds, a.id[0])-strings.IndexByte(kinds, b.id[0]), number(a.id)-number(b.id))
	})
	return all
}

// number of a row's id: the digits after its kind.
func number(id string) (n int) {
	for _, c := range id[1:] {
		n = n*10 + int(c-'0')
	}
	return n
}

func latencyClaims(write bool) []claim {
	w, memory, plain := random(write, 1, 1), []string{nbdkitMemory}, []string{goClient}
	return []claim{
		{"P1", w, mean, direct, memory, nil, 2},
		{"P1", w, median50, direct, memory, nil, 2},
		{"P1", w, tail99, direct, memory, nil, 0},
		{"P1", w, cpuPerIO, direct, memory, nil, 1},
		{"P1", w, mean, direct, plain, nil, 0},
		{"P1", w, median50, direct, plain, nil, 0},
		{"P1", w, cpuPerIO, direct, plain, nil, 0},
	}
}

func throughputClaims(write bool) (all []claim) {
	for _, depth := range []int{16, 64} {
		w := random(write, depth, 1)
		all = append(all,
			claim{"P2", w, kiops, direct, oneHop, nil, 4},
			claim{"P2", w, kiops, direct, []string{goClient}, nil, 3})
	}
	perGB := map[bool]float64{false: 1, true: 0.9}
	return append(all,
		claim{"P3", random(write, 16, 4), kiops, direct, oneHop, nil, 3},
		claim{"P4", sequential(write), bandwidth, direct, oneHop, nil, perGB[write]},
		claim{"P4", sequential(write), bandwidth, direct, []string{iperf}, nil, 1})
}

func frontEndClaims(write bool) (all []claim) {
	for _, c := range []struct {
		depth  int
		target float64
	}{{1, 1.5}, {16, 2.5}, {64, 2.5}} {
		all = append(all, claim{"P5", random(write, c.depth, 1), kiops, frontEnd, twoHops, nil, c.target})
	}
	return append(all,
		claim{"P5", sequential(write), bandwidth, frontEnd, twoHops, nil, 1},
		claim{"P6", random(write, 16, 1), kiops, frontEnd, oneHop, nil, 1.2},
		claim{"P6", random(write, 64, 1), kiops, frontEnd, oneHop, nil, 1.2})
}

func cpuClaims(write bool) []claim {
	w, seq := random(write, 64, 1), sequential(write)
	return []claim{
		{"P7", w, cpuPerIO, direct, []string{nbdkitMemory}, nil, 2},
		{"P7", seq, cpuPerGB, direct, []string{nbdkitMemory}, nil, 1},
		{"P7", w, cpuPerIO, direct, []string{goClient}, nil, 0},
		{"P7", seq, cpuPerGB, direct, []string{goClient}, nil, 0},
	}
}

// ownClaims compare the library with itself.
func ownClaims(write bool) []claim {
	d16, d64, many := random(write, 16, 1), random(write, 64, 1), random(write, 16, 4)
	all := []claim{{"P8", random(write, 1, 64), kiops, direct, []string{direct}, []workload{d16, d64, many}, 0.8}}
	for _, devices := range []int{1, 4, 16, 64} {
		all = append(all, claim{"P9", spread(write, devices), kiops, keysChange, []string{keysStay}, nil, 0.9})
	}
	off, seq := []string{direct + crcOff}, sequential(write)
	return append(all,
		claim{"P13", d16, kiops, direct, off, nil, 0.85},
		claim{"P13", d64, kiops, direct, off, nil, 0.85},
		claim{"P13", seq, bandwidth, direct, off, nil, 0.85},
		claim{"P14", seq, bandwidth, overRoCE, []string{direct}, nil, 1},
		claim{"P14", seq, cpuPerGB, overRoCE, []string{direct}, nil, 0})
}

func pathClaims(write bool) []claim {
	return []claim{
		{"P10", sequential(write), bandwidth, paths(2), []string{paths(1)}, nil, 1.9},
		{"P10", sequential(write), bandwidth, paths(4), []string{paths(1)}, nil, 3.6},
	}
}

func diskClaims(write bool) []claim {
	w := random(write, 32, 1)
	return []claim{
		{"P11", w, kiops, ioFileio, []string{localFile}, nil, 0.7},
		{"P11", w, kiops, ioBlockio, []string{localLoop}, nil, 0.7},
		{"P11", w, kiops, ringFileio, []string{ringFile}, nil, 0},
		{"P11", w, kiops, ringBlockio, []string{ringLoop}, nil, 0.8},
	}
}

// tlsClaims compare by the same cipher. T5 is here since it needs a server without
// rules beside it.
func tlsClaims(write bool) []claim {
	one, deep, seq := random(write, 1, 1), random(write, 64, 1), sequential(write)
	peer, client, plain := []string{tlsPeer}, []string{tlsGo}, []string{tlsPlain}
	return []claim{
		{"T1", one, mean, tlsOurs, peer, nil, 1.5},
		{"T1", one, median50, tlsOurs, peer, nil, 1.5},
		{"T1", one, median50, tlsOurs, client, nil, 0},
		{"T2", deep, kiops, tlsOurs, peer, nil, 4},
		{"T2", deep, kiops, tlsOurs, client, nil, 0},
		{"T3", seq, bandwidth, tlsOurs, peer, nil, 2},
		{"T3", seq, bandwidth, tlsOurs, client, nil, 0},
		{"T4", seq, bandwidth, tlsOurs, plain, nil, 0.7},
		{"T4", deep, kiops, tlsOurs, plain, nil, 0},
		{"T5", deep, kiops, tlsRules, plain, nil, 0.9},
	}
}

func idleClaims() []claim {
	limit := []string{idleLimit}
	return []claim{
		{"P12", idle(), idleCPU, idleFleet, limit, nil, 1},
		{"P12", idle(), idleResident, idleFleet, limit, nil, 1},
		{"P12", idle(), idleWakes, idleFleet, limit, nil, 1},
	}
}

// curve lists the depths that plots show, curveOf the targets.
var (
	curve   = []int{1, 4, 16, 64}
	curveOf = []string{direct, frontEnd, nbdkitMemory, qemuNBD, nbdServer, goClient, nbdkitProxy, qemuProxy}
)

// plan is the work of a run.
type plan struct {
	claims []claim
	loads  map[string][]workload // by target
	order  []workload            // all of them, in the order of their turns
}

// choose makes the plan of a run: the rows with the ids of only, or all rows
// and the curves of the plots. A quick one has a part of the workloads of
// each row.
func choose(only []string, quick bool) *plan {
	p := planOf(claims(), only, quick)
	if len(only) > 0 || quick {
		return p
	}
	for _, depth := range curve {
		for _, target := range curveOf {
			p.need(target, random(false, depth, 1))
			p.need(target, random(true, depth, 1))
		}
	}
	return p
}

// planOf makes the plan of the rows with the ids of only, or of all.
func planOf(all []claim, only []string, quick bool) *plan {
	p := &plan{loads: map[string][]workload{}}
	for _, c := range all {
		if len(only) > 0 && !slices.Contains(only, c.id) || quick && !c.quick() {
			continue
		}
		p.claims = append(p.claims, c)
		p.need(c.ours, c.w)
		if hasCRCOff(c.ours) {
			p.need(c.ours+crcOff, c.w)
		}
		if floor := c.floor(); floor != "" {
			p.need(floor, c.w)
			if c.ofItself() {
				for _, w := range c.loads {
					p.need(floor, w)
				}
			}
		}
		for _, peer := range c.peers {
			for _, w := range c.peerLoads() {
				p.need(peer, w)
			}
		}
	}
	return p
}

// repeats are the rows with targets and workloads of others: a try-out leaves them out.
var repeats = []string{"U2", "U3", "U7", "U8", "U9"}

// quick reports whether a try-out has the row: every other row takes part in it, not
// every depth in both directions.
func (c claim) quick() bool {
	if slices.Contains(repeats, c.id) {
		return false
	}
	switch c.id {
	case "P1", "P3", "P10", "U1":
		return !c.w.Write
	case "P2", "P6":
		return c.w.Write && c.w.Depth == 16
	case "P5":
		return c.w.Write && (c.w.Depth == 16 || c.w.Seq)
	case "P4", "P8", "P11", "P14", "U12", "T1", "T2", "T3", "T5":
		return c.w.Write
	case "U11":
		return c.w.Write && c.w.Depth == 32
	case "U10":
		return c.w.Write && c.w.Depth == 64
	case "P7", "P13", "T4":
		return c.w.Write && c.w.Seq
	case "P9":
		return c.w.Write && c.w.Devices == 4
	case "I1", "I2", "I3", "I4":
		return c.w.Write && c.m.name == kiops.name && strings.HasSuffix(c.ours, "threads"+besideHung)
	}
	return true
}

// ofItself reports whether the row is a target's against itself with other loads.
func (c claim) ofItself() bool { return slices.Equal(c.peers, []string{c.ours}) }

func (c claim) peerLoads() []workload {
	if c.loads == nil {
		return []workload{c.w}
	}
	return c.loads
}

func (p *plan) need(target string, w workload) {
	if !slices.Contains(p.loads[target], w) {
		p.loads[target] = append(p.loads[target], w)
	}
	if !slices.Contains(p.order, w) {
		p.order = append(p.order, w)
	}
}

// wants reports whether one of targets is measured.
func (p *plan) wants(targets ...string) bool {
	return slices.ContainsFunc(targets, func(t string) bool { return len(p.loads[t]) > 0 })
}

// has reports whether a target is measured with w.
func (p *plan) has(target string, w workload) bool { return slices.Contains(p.loads[target], w) }

// devices is the largest number of them that a target is measured with.
func (p *plan) devices(target string) (n int) {
	for _, w := range p.loads[target] {
		n = max(n, w.Devices)
	}
	return n
}
