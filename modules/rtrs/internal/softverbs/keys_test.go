package softverbs

import (
	"math"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func newDomain() *Domain {
	t := &KeyTable{}
	t.Init()
	return NewDomain(t)
}

func (d *Domain) register(t *testing.T, n int, access verbs.Access) *Region {
	t.Helper()
	mr, err := d.RegMR(make([]byte, n), access)
	if err != nil {
		t.Fatal(err)
	}
	return mr.(*Region)
}

func TestKeyTable_FindsEveryRegionUnderItsKey(t *testing.T) {
	d := newDomain()
	seen := map[uint32]*Region{}
	for range 3 * pageSlots {
		r := d.register(t, 1, 0)
		if r.LKey()>>8 == 0 || seen[r.LKey()>>8] != nil {
			t.Fatalf("key %#x has no index of its own", r.LKey())
		}
		seen[r.LKey()>>8] = r
	}
	for _, r := range seen {
		if d.keys.Lookup(r.LKey()) != r || !d.Holds(r.LKey(), r.buf) {
			t.Fatalf("key %#x does not find its region", r.LKey())
		}
	}
}

func TestKeyTable_KeysRestBeforeTheyAreUsedAgain(t *testing.T) {
	d := newDomain()
	r := d.register(t, 1, 0)
	first := r.LKey()
	for n := 0; ; n++ {
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		if r = d.register(t, 1, 0); r.LKey()>>8 == first>>8 {
			if n < restingSlots || r.LKey() != verbs.NextKey(first) {
				t.Errorf("key %#x follows %#x after %d others", r.LKey(), first, n)
			}
			return
		}
		if n > 10*restingSlots {
			t.Fatal("the slot is never used again")
		}
	}
}

func TestRegion_SpanStaysInside(t *testing.T) {
	d := newDomain()
	r := d.register(t, 64, 0)
	for _, tt := range []struct {
		name    string
		addr, n uint64
		ok      bool
	}{
		{"all", r.Addr(), 64, true},
		{"the last byte", r.Addr() + 63, 1, true},
		{"nothing at the end", r.Addr() + 64, 0, true},
		{"one byte behind the end", r.Addr() + 64, 1, false},
		{"one byte too many", r.Addr() + 1, 64, false},
		{"one byte before", r.Addr() - 1, 2, false},
		{"a sum that wraps", r.Addr() + 8, math.MaxUint64 - 4, false},
	} {
		if b := r.Span(tt.addr, tt.n); (b != nil) != tt.ok || uint64(len(b)) != tt.n && tt.ok {
			t.Errorf("%s: %d bytes", tt.name, len(b))
		}
	}
}

func TestDomain_ReachAsksForKeyDomainAndRight(t *testing.T) {
	d := newDomain()
	r := d.register(t, 8, verbs.AccessRemoteWrite)
	other := NewDomain(d.keys)
	for _, tt := range []struct {
		name  string
		d     *Domain
		key   uint32
		right verbs.Access
		want  KeyResult
	}{
		{"its key", d, r.RKey(), verbs.AccessRemoteWrite, KeyOK},
		{"a stale variant", d, verbs.NextKey(r.RKey()), verbs.AccessRemoteWrite, KeyUnknown},
		{"another index", d, r.RKey() + 1<<8, verbs.AccessRemoteWrite, KeyUnknown},
		{"another domain", other, r.RKey(), verbs.AccessRemoteWrite, KeyForeign},
		{"another right", d, r.RKey(), verbs.AccessRemoteRead, KeyDenied},
	} {
		found, got := tt.d.Reach(tt.key, tt.right)
		if got != tt.want || (found != nil) != (got == KeyOK) {
			t.Errorf("%s: %s", tt.name, got)
		}
		if b := tt.d.Remote(tt.key, r.Addr(), 8, tt.right); (b != nil) != (tt.want == KeyOK) {
			t.Errorf("%s: %d bytes are reached", tt.name, len(b))
		}
	}
}

func TestDomain_RotateChangesTheKey(t *testing.T) {
	d := newDomain()
	r := d.register(t, 8, verbs.AccessRemoteWrite)
	key := r.RKey()
	next := verbs.NextKey(key)
	for _, step := range []struct {
		name string
		op   verbs.Opcode
		key  uint32
		want KeyResult
	}{
		{"a valid region gets no second key", verbs.OpRegMR, next, KeyInUse},
		{"a stale key invalidates nothing", verbs.OpLocalInv, next, KeyUnknown},
		{"the key is taken away", verbs.OpLocalInv, key, KeyOK},
		{"again", verbs.OpLocalInv, key, KeyOK},
		{"the next one is given", verbs.OpRegMR, next, KeyOK},
	} {
		if got := d.Rotate(step.op, step.key); got != step.want {
			t.Errorf("%s: %s, want %s", step.name, got, step.want)
		}
	}
	if !r.Valid(next) || r.RKey() != key {
		t.Error("the region is not reached under its new key, or RKey has changed")
	}
}

// A goroutine that found a region before Close cannot make it valid again.
func TestRegion_HasNoFreeKeyOnceClosed(t *testing.T) {
	d := newDomain()
	r := d.register(t, 8, verbs.AccessRemoteWrite)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if r.valid.CompareAndSwap(0, r.key) {
		t.Error("a closed region has a free key")
	}
	if err := r.Close(); err == nil {
		t.Error("a region was closed twice")
	}
}

type released struct{ regions []*Region }

func (o *released) Release(r *Region) { o.regions = append(o.regions, r) }

func TestRegion_CloseAsksTheQueuesOfItsDomain(t *testing.T) {
	d := newDomain()
	other := NewDomain(d.keys)
	var used, left, foreign released
	d.AddUser(&used)
	d.AddUser(&used)
	d.RemoveUser(&used)
	d.AddUser(&left)
	d.RemoveUser(&left)
	other.AddUser(&foreign)
	r := d.register(t, 8, 0)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if len(used.regions) != 1 || used.regions[0] != r || len(left.regions)+len(foreign.regions) != 0 {
		t.Errorf("asked: %d of one connection, %d without any, %d of another domain", len(used.regions), len(left.regions), len(foreign.regions))
	}
	if d.RemoveUser(&used); d.Used() || !other.Used() {
		t.Error("the domains miscount their connections")
	}
}
