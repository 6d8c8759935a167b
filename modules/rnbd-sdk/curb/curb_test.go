package curb

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

type line struct {
	from    netip.Addr
	item    int
	leftOut uint64
}

// one returns the n-th address of a network of IPv4.
func one(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}) }

func TestAStrangerHasAFewLinesAndANumber(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []line
		c := New(func(from netip.Addr, item int, leftOut uint64) { got = append(got, line{from, item, leftOut}) })
		for i := range 10000 { // 1,000 a second
			c.Add(one(1), i)
			if i == 5000 {
				c.Add(one(2), i)
			}
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		if len(got) != PerAddr+2 {
			t.Fatalf("%d lines", len(got))
		}
		if got[PerAddr] != (line{one(2), 5000, 0}) {
			t.Errorf("a neighbour: %+v", got[PerAddr])
		}
		if last := got[PerAddr+1]; last != (line{one(1), 9999, 10000 - PerAddr}) {
			t.Errorf("the number: %+v", last)
		}
		c.Add(one(1), 1)
		if last := got[len(got)-1]; last != (line{one(1), 1, 0}) {
			t.Errorf("in the next window: %+v", last)
		}
		c.Flush()
		time.Sleep(2 * Window)
		if len(got) != PerAddr+3 {
			t.Errorf("%d lines after a quiet window", len(got))
		}
	})
}

func TestManyStrangersHaveABoundTogether(t *testing.T) {
	sum, lines := uint64(0), 0
	c := New(func(_ netip.Addr, _ int, leftOut uint64) { sum, lines = sum+max(leftOut, 1), lines+1 })
	for i := range 20000 {
		c.Add(one(i), i)
	}
	if lines != PerWindow || len(c.counts) > maxAddrs+1 {
		t.Errorf("%d lines, %d addresses", lines, len(c.counts))
	}
	c.Flush()
	if sum != 20000 || lines > PerWindow+maxAddrs+1 {
		t.Errorf("%d items in %d lines", sum, lines)
	}
}

func TestAddressesOfIPv6CountAsTheirNetwork(t *testing.T) {
	lines := 0
	c := New(func(netip.Addr, int, uint64) { lines++ })
	for i := range 1000 {
		c.Add(netip.MustParseAddr(fmt.Sprintf("2001:db8::%x", i)), i)
		c.Add(netip.MustParseAddr(fmt.Sprintf("fe80::%x%%eth0", i)), i)
	}
	if lines != 2*PerAddr {
		t.Errorf("%d lines", lines)
	}
}

func TestTextOfPeers(t *testing.T) {
	for in, want := range map[string]string{
		"plain \"quoted\"":                "plain \"quoted\"",
		"a\nb\x1b[2J\x7f\u202e\u0085\xff": "a?b?[2J????",
		strings.Repeat("x", 300):          strings.Repeat("x", 256) + "...",
		"":                                "",
	} {
		if got := Text(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}
