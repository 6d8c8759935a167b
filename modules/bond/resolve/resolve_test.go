package resolve

import (
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
)

type bond struct {
	name, active string
	prefixes     []netip.Prefix
}

func (b *bond) Name() string             { return b.name }
func (b *bond) Active() (string, []byte) { return b.active, []byte{1} }
func (b *bond) Prefixes() []netip.Prefix { return b.prefixes }

func TestResolve_LongestPrefixWins(t *testing.T) {
	wide := &bond{"bond0", "ib0", []netip.Prefix{netip.MustParsePrefix("10.0.0.1/8")}}
	narrow := &bond{"bond1", "ib3", []netip.Prefix{netip.MustParsePrefix("10.5.0.1/24"), netip.MustParsePrefix("fd00::1/64")}}
	var r Resolver
	r.Add(wide)
	r.Add(narrow)
	for addr, want := range map[string]string{"10.5.0.9": "ib3", "10.5.0.1": "ib3", "10.6.0.1": "ib0", "fd00::9": "ib3"} {
		if got, err := r.Resolve(netip.MustParseAddr(addr)); err != nil || got.Slave != want {
			t.Errorf("%s: %+v, %v; want %s", addr, got, err, want)
		}
	}
	r.Remove(narrow)
	if got, err := r.Resolve(netip.MustParseAddr("10.5.0.9")); err != nil || got.Slave != "ib0" {
		t.Errorf("after the removal: %+v, %v", got, err)
	}
}

func TestSubscribe_CallsAreInOrderAndHoldUpNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bond{"bond0", "a", []netip.Prefix{netip.MustParsePrefix("10.0.0.1/8")}}
		var r Resolver
		r.Add(b)
		slow := make(chan struct{})
		var got []string
		cancel := r.Subscribe(netip.MustParseAddr("10.1.1.1"), func(c AddrChange) {
			<-slow
			got = append(got, c.New)
		})
		for _, n := range []string{"b", "a", "", "b"} {
			r.Changed(b, "", n) // does not wait for the subscriber
		}
		close(slow)
		synctest.Wait()
		if want := []string{"b", "a", "", "b"}; !slices.Equal(got, want) {
			t.Errorf("told %q, want %q", got, want)
		}
		cancel()
		r.Changed(b, "b", "a")
		synctest.Wait()
		if len(got) != 4 {
			t.Error("told after cancel")
		}
	})
}
