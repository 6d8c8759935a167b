package ratelimit

import (
	"fmt"
	"net/netip"
	"sync"
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
		c := New(Refusals, func(from netip.Addr, item int, leftOut uint64) { got = append(got, line{from, item, leftOut}) })
		for i := range 10000 { // 1,000 a second
			c.Add(one(1), i)
			if i == 5000 {
				c.Add(one(2), i)
			}
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		if len(got) != Refusals.Burst+2 {
			t.Fatalf("%d lines", len(got))
		}
		if got[Refusals.Burst] != (line{one(2), 5000, 0}) {
			t.Errorf("a neighbour: %+v", got[Refusals.Burst])
		}
		if last := got[Refusals.Burst+1]; last != (line{one(1), 9999, uint64(10000 - Refusals.Burst)}) {
			t.Errorf("the number: %+v", last)
		}
		c.Add(one(1), 1)
		if last := got[len(got)-1]; last != (line{one(1), 1, 0}) {
			t.Errorf("in the next window: %+v", last)
		}
		c.Flush()
		time.Sleep(2 * Refusals.Window)
		if len(got) != Refusals.Burst+3 {
			t.Errorf("%d lines after a quiet window", len(got))
		}
	})
}

func TestManyStrangersHaveABoundTogether(t *testing.T) {
	sum, lines := uint64(0), 0
	c := New(Refusals, func(_ netip.Addr, _ int, leftOut uint64) { sum, lines = sum+max(leftOut, 1), lines+1 })
	for i := range 20000 {
		c.Add(one(i), i)
	}
	if lines != Refusals.TotalBurst || len(c.counts) > maxSubjects+1 {
		t.Errorf("%d lines, %d addresses", lines, len(c.counts))
	}
	c.Flush()
	if sum != 20000 || lines > Refusals.TotalBurst+maxSubjects+1 {
		t.Errorf("%d items in %d lines", sum, lines)
	}
}

func TestAddressesOfIPv6CountAsTheirNetwork(t *testing.T) {
	lines := 0
	c := New(Refusals, func(netip.Addr, int, uint64) { lines++ })
	for i := range 1000 {
		c.Add(Host(netip.MustParseAddr(fmt.Sprintf("2001:db8::%x", i))), i)
		c.Add(Host(netip.MustParseAddr(fmt.Sprintf("fe80::%x%%eth0", i))), i)
	}
	if lines != 2*Refusals.Burst {
		t.Errorf("%d lines", lines)
	}
}

// A subject may have a burst, and after that as much as a window gives back.
func TestABurstAndThenARate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		passed, left := 0, uint64(0)
		l := New(Limits{Window: time.Second, Burst: 100, PerWindow: 5, TotalBurst: 1000, TotalPerWindow: 50}, func(_ string, _ int, leftOut uint64) {
			mu.Lock()
			defer mu.Unlock()
			if leftOut == 0 {
				passed++
			}
			left += leftOut
		})
		for i := range 1000 {
			l.Add("a", i)
		}
		if passed != 100 {
			t.Errorf("%d of a burst have passed", passed)
		}
		for range 10 {
			time.Sleep(time.Second)
			synctest.Wait()
			for i := range 100 {
				l.Add("a", i)
			}
		}
		if passed < 140 || passed > 150 {
			t.Errorf("%d have passed after ten windows", passed)
		}
		l.Add("b", 1)
		before := passed
		time.Sleep(time.Minute) // all is given back, and no timer is left
		synctest.Wait()
		if len(l.counts) != 0 || l.timer != nil || l.used != 0 {
			t.Errorf("%d counts are left, %d used", len(l.counts), l.used)
		}
		if passed != before || left+uint64(passed) != 2001 {
			t.Errorf("%d passed, %d left out", passed, left)
		}
	})
}
