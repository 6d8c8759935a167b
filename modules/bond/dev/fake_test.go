package dev

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/bond/frame"
)

// fake is a slave that records its calls.
type fake struct {
	mu      sync.Mutex
	name    string
	attrs   Attrs
	up      bool
	carrier bool
	fixed   bool // its address cannot be set
	filter  RxFilter
	groups  map[string]bool // link-layer addresses
	sent    [][]byte
	calls   Callbacks
	fail    map[string]error // by method
}

func newFake(name string, linkType uint16, last byte) *fake {
	f := &fake{name: name, carrier: true, groups: map[string]bool{}, fail: map[string]error{}}
	if linkType == frame.InfiniBand {
		f.fixed = true
		addr := make([]byte, 20)
		copy(addr, []byte{0x80, 0, 0, last, 0xfe, 0x80})
		addr[19] = last
		bcast := append([]byte{0, 0xff, 0xff, 0xff, 0xff, 0x12, 0x40, 0x1b, 0xff, 0xff}, make([]byte, 6)...)
		f.attrs = Attrs{Type: 32, Address: addr, Broadcast: append(bcast, 0xff, 0xff, 0xff, 0xff), HeaderLen: 24, MTU: 2044}
	} else {
		f.attrs = Attrs{Type: linkType, Address: []byte{2, 0, 0, 0, 0, last}, Broadcast: bytes.Repeat([]byte{255}, 6), HeaderLen: 14, MTU: 1400}
	}
	return f
}

func (f *fake) lock() func() { f.mu.Lock(); return f.mu.Unlock }

func (f *fake) Name() string       { return f.name }
func (f *fake) Attrs() Attrs       { defer f.lock()(); return f.attrs.copyAttrs() }
func (f *fake) Speed() (int, bool) { return 10000, true }
func (f *fake) IsUp() bool         { defer f.lock()(); return f.up }
func (f *fake) SetUp(up bool) error {
	defer f.lock()()
	f.up = up && f.fail["SetUp"] == nil
	return f.failed("SetUp", up)
}
func (f *fake) Carrier() bool      { defer f.lock()(); return f.carrier }
func (f *fake) SetsAddress() bool  { return !f.fixed }
func (f *fake) Detach()            { defer f.lock()(); f.calls = Callbacks{} }
func (f *fake) Attach(c Callbacks) { defer f.lock()(); f.calls = c }
func (f *fake) SetFilter(r RxFilter) error {
	defer f.lock()()
	f.filter = r
	return f.failed("SetFilter", r != RxNone)
}

// failed is the error of a method that was told to fail; taking something back always works.
func (f *fake) failed(method string, forward bool) error {
	if !forward {
		return nil
	}
	return f.fail[method]
}

func (f *fake) SetAddress(a []byte) error {
	defer f.lock()()
	if f.fixed {
		return syscall.EOPNOTSUPP
	}
	if err := f.fail["SetAddress"]; err != nil {
		return err
	}
	f.attrs.Address = bytes.Clone(a)
	return nil
}

func (f *fake) SetMTU(n int) error {
	defer f.lock()()
	if err := f.fail["SetMTU"]; err != nil && n != 1400 && n != 2044 {
		return err
	}
	f.attrs.MTU = n
	return nil
}

// linkGroup maps as RFC 1112 for Ethernet and RFC 4391 for InfiniBand.
func (f *fake) linkGroup(g netip.Addr) string {
	if f.attrs.Type == 32 {
		return fmt.Sprintf("ff12:%s1b:ffff:%x", map[bool]string{true: "40", false: "60"}[g.Is4()], g.AsSlice())
	}
	return fmt.Sprintf("%x", frame.GroupMAC(g))
}

func (f *fake) JoinGroup(g netip.Addr) error {
	defer f.lock()()
	f.groups[f.linkGroup(g)] = true
	return nil
}
func (f *fake) LeaveGroup(g netip.Addr) error {
	defer f.lock()()
	delete(f.groups, f.linkGroup(g))
	return nil
}
func (f *fake) Send(b []byte) error {
	defer f.lock()()
	f.sent = append(f.sent, bytes.Clone(b))
	return nil
}

func (f *fake) groupList() []string { defer f.lock()(); return slices.Sorted(maps.Keys(f.groups)) }
func (f *fake) takeSent() [][]byte  { defer f.lock()(); s := f.sent; f.sent = nil; return s }
func (f *fake) rx() RxFilter        { defer f.lock()(); return f.filter }

func (f *fake) setCarrier(on bool) {
	f.mu.Lock()
	f.carrier = on
	changed := f.calls.Changed
	f.mu.Unlock()
	if changed != nil {
		changed()
	}
}

func (f *fake) receive(b []byte) {
	f.mu.Lock()
	received := f.calls.Received
	f.mu.Unlock()
	if received != nil {
		received(b)
	}
}

// top is an upper side that records its calls.
type top struct {
	mu        sync.Mutex
	attrs     Attrs
	up        bool
	carrier   bool
	closed    bool
	log       []string
	prefixes  []netip.Prefix
	delivered [][]byte
	calls     UpperCallbacks
	onAddress func()
	only      uint16 // the type that it can have; 0: any
}

func (u *top) lock() func() { u.mu.Lock(); return u.mu.Unlock }

func (u *top) Configure(a Attrs) error {
	defer u.lock()()
	if u.only != 0 && a.Type != u.only {
		return syscall.EINVAL
	}
	u.attrs = a
	u.log = append(u.log, fmt.Sprint("configure ", a.Type))
	return nil
}
func (u *top) SetAddress(a []byte) error {
	u.mu.Lock()
	u.attrs.Address = a
	u.mu.Unlock()
	if u.onAddress != nil {
		u.onAddress()
	}
	return nil
}
func (u *top) SetMTU(n int) error       { defer u.lock()(); u.attrs.MTU = n; return nil }
func (u *top) SetCarrier(on bool) error { defer u.lock()(); u.carrier = on; return nil }
func (u *top) SetUp(up bool) error      { defer u.lock()(); u.up = up; return nil }
func (u *top) Prefixes() []netip.Prefix { defer u.lock()(); return u.prefixes }
func (u *top) Deliver(b []byte) error {
	defer u.lock()()
	u.delivered = append(u.delivered, bytes.Clone(b))
	return nil
}
func (u *top) Close() error  { defer u.lock()(); u.closed = true; return nil }
func (u *top) received() int { defer u.lock()(); return len(u.delivered) }

// lab is a net with one bond and fakes.
type lab struct {
	t    *testing.T
	net  *Net
	bond *Bond
	top  *top
}

func newLab(t *testing.T, slaves ...*fake) *lab {
	l := &lab{t: t, top: &top{prefixes: []netip.Prefix{netip.MustParsePrefix("10.5.0.1/24"), netip.MustParsePrefix("fe80::5/64")}}}
	l.net = &Net{Log: slog.New(slog.DiscardHandler), NewUpper: func(_ string, c UpperCallbacks) (Upper, error) {
		l.top.calls = c
		return l.top, nil
	}}
	t.Cleanup(l.net.Close)
	for _, s := range slaves {
		l.must(l.net.AddDevice(s))
	}
	b, err := l.net.Create("bond0")
	l.must(err)
	l.bond = b
	return l
}

func (l *lab) must(err error) {
	l.t.Helper()
	if err != nil {
		l.t.Fatal(err)
	}
}

// enslave takes names in order.
func (l *lab) enslave(names ...string) {
	l.t.Helper()
	for _, n := range names {
		l.must(l.net.Enslave(l.bond, "+"+n+"\n"))
	}
}

func (l *lab) set(option, value string) { l.t.Helper(); l.must(l.bond.Set(option, value)) }

func (l *lab) wantActive(want string) {
	l.t.Helper()
	if got, _ := l.bond.Active(); got != want {
		l.t.Errorf("active slave is %q, want %q", got, want)
	}
}
