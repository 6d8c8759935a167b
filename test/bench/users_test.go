package main

import (
	"slices"
	"strings"
	"testing"
)

func TestRowAtTheFloor(t *testing.T) {
	c := claim{"U2", random(true, 16, 1), kiops, frontEnd, []string{nbdkitMemory}, nil, 1.3}
	of := func(ios uint64) []*sample { return []*sample{{IOs: ios, Elapsed: 1}} }
	r := &results{samples: map[key][]*sample{
		{frontEnd, c.w.Name}: of(9000), {floorSocket, c.w.Name}: of(10000), {nbdkitMemory, c.w.Name}: of(9000),
	}}
	got, _ := r.row(c)
	if got.Floor != 10 || got.AtFloor != 0.9 || got.PeerName != nbdkitMemory {
		t.Errorf("%+v", got)
	}
	var b strings.Builder
	without := got
	without.Floor, without.AtFloor, without.Ours = 0, 0, 7
	(&report{Rows: []row{got, without}}).writeRows(&b, "U2")
	for _, want := range []string{"| figure | floor | ours |", "| 10.0 (0.90) | 9.00 |", "kIOPS | | 7.00 |", "**not met**, at the floor of this design |"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in:\n%s", want, b.String())
		}
	}
	r.samples[key{frontEnd, c.w.Name}] = of(8000)
	if got, _ = r.row(c); got.AtFloor != 0.8 {
		t.Errorf("%+v", got)
	} else if _, verdict := got.verdict(); verdict != "**not met**" {
		t.Errorf("at 0.8 of the floor: %s", verdict)
	}
}

// The floor of a target against itself is the skeleton against itself.
func TestFloorOfARatioToItself(t *testing.T) {
	many, best := random(false, 1, 64), random(false, 16, 1)
	c := claim{"U9", many, kiops, direct, []string{direct}, []workload{best}, 0.8}
	of := func(ios uint64) []*sample { return []*sample{{IOs: ios, Elapsed: 1}} }
	r := &results{samples: map[key][]*sample{
		{direct, many.Name}: of(6000), {direct, best.Name}: of(10000), {floorLibrary, many.Name}: of(15000), {floorLibrary, best.Name}: of(20000),
	}}
	if got, _ := r.row(c); got.Ratio != 0.6 || got.Floor != 15 || got.AtFloor < 0.799 || got.AtFloor > 0.801 {
		t.Errorf("%+v", got)
	}
	if p := choose([]string{"U9"}, false); !p.has(floorLibrary, random(false, 64, 1)) {
		t.Error("the skeleton is not measured with fewer jobs")
	}
}

func TestFloorIsMeasuredBesideItsRows(t *testing.T) {
	p := choose([]string{"P14", "U1", "U7", "U10"}, false)
	if !p.has(floorDatagrams, sequential(true)) || p.has(floorLibrary, sequential(true)) {
		t.Errorf("workloads of the floors: %v, %v", p.loads[floorDatagrams], p.loads[floorLibrary])
	}
	if !p.has(floorSocket, random(true, 1, 1)) || p.has(floorSocket, random(true, 64, 1)) || !p.has(floorFile, random(true, 32, 1)) || !p.has(floorLoop, random(true, 32, 1)) {
		t.Errorf("workloads of the floors: %v, %v, %v", p.loads[floorSocket], p.loads[floorFile], p.loads[floorLoop])
	}
}

func TestBusyNeighbourIsMeasuredBesideItself(t *testing.T) {
	p := choose([]string{"U10"}, false)
	if busy, alone := p.loads[frontEnd+besideBusy], p.loads[frontEnd]; len(busy) != 4 || !slices.Equal(busy, alone) {
		t.Errorf("with a neighbour %v, without %v", busy, alone)
	}
}
