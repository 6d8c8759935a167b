package main

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestNet_EveryRowHasATitleAndIsMeasured(t *testing.T) {
	p := planOf(netClaims(), nil, false)
	for id := range netTitles {
		if !slices.ContainsFunc(p.claims, func(c claim) bool { return c.id == id }) {
			t.Errorf("%s is not in the run", id)
		}
	}
	for _, c := range p.claims {
		if netTitles[c.id] == "" {
			t.Errorf("%s has no title", c.id)
		}
		if !p.has(c.ours, c.w) || !p.has(c.peers[0], c.w) {
			t.Errorf("%s: %s or %s is not measured with %s", c.id, c.ours, c.peers[0], c.w.Name)
		}
	}
}

func TestNet_ParsePing(t *testing.T) {
	s, err := parsePing([]byte(`{"trips":5000,"lost":1,"elapsed_ns":500000000,"mean_ns":90000,"p50_ns":80000,"p99_ns":200000}`))
	if err != nil || s.IOs != 5000 || s.Elapsed != 0.5 || s.Mean != 90 || s.P50 != 80 || s.P99 != 200 {
		t.Errorf("%+v, %v", s, err)
	}
	for _, out := range []string{"", `{"trips":0,"lost":3}`} {
		if _, err := parsePing([]byte(out)); err == nil {
			t.Errorf("%q has no error", out)
		}
	}
}

// TestNet_Tables: a target that is missed is shown, and so is what the tables are good for.
func TestNet_Tables(t *testing.T) {
	w := streams(1)
	gbit := func(n uint64) []*sample { return []*sample{{Bytes: n << 27, Elapsed: 1, ServerCPU: 1}} }
	r := &results{samples: map[key][]*sample{
		{datagram, w.Name}: gbit(10), {connected, w.Name}: gbit(15), {wireguard, w.Name}: gbit(5), {plainVeth, w.Name}: gbit(100),
	}}
	text := newReport(settings{Net: true, Rounds: 1, Cell: time.Second}, planOf(netClaims(), nil, false), r).markdown()
	for _, want := range []string{
		"use what the kernel has", "make bench-net", "wireguard-go: v0.0.0-", "**1 of 2 targets are met**",
		"| IPoIB, datagram mode, MTU 2044 | tcp-stream-1 | throughput, Gbit/s | 10.7 | wireguard-go, MTU 1420 | 5.37 | **2.00** | 2.00 | 0.9 | 1 | met |",
		"| **1.50** | 1.50 | 2 | 1 | **not met** |", "## N5: ",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the tables do not say %q:\n%s", want, text)
		}
	}
}

func TestNet_Flags(t *testing.T) {
	o, err := parse([]string{"-net", "-quick", "-only", "N1"}, nil)
	if err != nil || !o.Net || !o.Quick {
		t.Errorf("%+v, %v", o, err)
	}
	if _, err := parse([]string{"-net", "-only", "P1"}, nil); err == nil || !strings.Contains(err.Error(), "N1") {
		t.Errorf("-net -only P1: %v", err)
	}
}
