package monitor

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/core"
	"github.com/rnbd-go/rnbd/modules/bond/frame"
)

// polls is a target that wants to be polled at fixed times.
type polls struct {
	start time.Time
	every time.Duration // 0: never by itself
	at    []time.Duration
}

func (p *polls) Poll() (time.Time, bool) {
	p.at = append(p.at, time.Since(p.start))
	return time.Now().Add(p.every), p.every > 0
}

func TestLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &polls{start: time.Now(), every: 100 * time.Millisecond}
		ctx, cancel := context.WithCancel(t.Context())
		wake := make(chan struct{}, 1)
		go Loop(ctx, p, wake)
		time.Sleep(250 * time.Millisecond)
		wake <- struct{}{}
		time.Sleep(10 * time.Millisecond)
		cancel()
		synctest.Wait()
		ms := time.Millisecond
		if want := []time.Duration{0, 100 * ms, 200 * ms, 250 * ms}; !slices.Equal(p.at, want) {
			t.Errorf("polled at %v, want %v", p.at, want)
		}
	})
	synctest.Test(t, func(t *testing.T) { // nothing is due: only wake counts
		p := &polls{start: time.Now()}
		wake := make(chan struct{}, 1)
		go Loop(t.Context(), p, wake)
		time.Sleep(time.Hour)
		wake <- struct{}{}
		synctest.Wait()
		if len(p.at) != 2 {
			t.Errorf("polled at %v, want at 0 and when woken", p.at)
		}
	})
}

func TestProbesAndAnswers(t *testing.T) {
	for _, l := range []frame.Link{{Type: frame.Ethernet, Address: make([]byte, 6)}, {Type: frame.InfiniBand, Address: make([]byte, 20)}} {
		target, mine := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.9")
		own := func(a netip.Addr) netip.Addr {
			if a == target {
				return mine
			}
			return netip.Addr{}
		}
		fs := Probes(l, []netip.Addr{target, netip.MustParseAddr("10.9.0.1")}, own)
		if len(fs) != 2 {
			t.Fatalf("%d probes of 2 targets", len(fs))
		}
		now := time.Now()
		s, ok := See(l.Type, fs[0], now)
		if want := (core.Seen{At: now, ARP: true, SPA: mine, TPA: target}); !ok || s != want {
			t.Errorf("type %d: %+v, want %+v", l.Type, s, want)
		}
		if s, _ := See(l.Type, fs[1], now); s.SPA != netip.IPv4Unspecified() {
			t.Errorf("type %d: the sender without an address is %v", l.Type, s.SPA)
		}
		if s, ok := See(l.Type, make([]byte, 60), now); !ok || s.ARP {
			t.Errorf("type %d: a frame that is not ARP: %+v, %v", l.Type, s, ok)
		}
		fs[0][frame.HeaderLen(l.Type)+1]++ // another hardware type
		if _, ok := See(l.Type, fs[0], now); ok {
			t.Errorf("type %d: ARP of another hardware type is taken", l.Type)
		}
	}
}

func FuzzSee(f *testing.F) {
	f.Add(uint16(1), make([]byte, 42))
	f.Add(uint16(32), []byte{8, 6, 0, 0, 0, 32})
	f.Fuzz(func(t *testing.T, linkType uint16, b []byte) {
		s, ok := See(linkType, b, time.Unix(1, 0))
		if ok && s.ARP && (!s.SPA.Is4() || !s.TPA.Is4()) {
			t.Fatalf("%x is ARP about %v and %v", b, s.SPA, s.TPA)
		}
	})
}
