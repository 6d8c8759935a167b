package port

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/internal/nstest"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

var quiet = slog.New(slog.DiscardHandler)

// host is a namespace with interfaces for the ports at addrs.
type host struct {
	*nstest.Namespace
	Set
}

func newHost(t *testing.T, n *nstest.Namespace, peers []string, addrs ...string) *host {
	t.Helper()
	h := &host{Namespace: n}
	n.Do(func() {
		for _, s := range addrs {
			d, err := rocev2.Open(rocev2.Config{Logger: quiet})
			if err != nil {
				t.Error(err)
				return
			}
			t.Cleanup(func() { d.Close() })
			cfg := Config{Fabric: d.(verbs.DatagramDevice), Local: netip.MustParseAddr(s), Logger: quiet}
			for _, p := range peers {
				cfg.Peers = append(cfg.Peers, netip.MustParseAddr(p))
			}
			if _, err := h.AddPort(cfg); err != nil {
				t.Error(err)
			}
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	t.Cleanup(func() { h.Close() })
	return h
}

func (h *host) create(parent string, pkey int) (l *Link, err error) {
	h.Do(func() { l, err = h.CreateChild(parent, pkey) })
	return l, err
}

func (h *host) addLinkIn(parent, name string, pkey int) (l *Link, err error) {
	h.Do(func() { l, err = h.AddLink(parent, name, pkey) })
	return l, err
}

// shown lists the IPoIB interfaces in the kernel.
func (h *host) shown() string {
	var names []string
	for f := range strings.FieldsSeq(h.Run("ls", "/sys/class/net")) {
		if strings.HasPrefix(f, "ib") || strings.HasPrefix(f, "my") {
			names = append(names, f)
		}
	}
	return strings.Join(names, " ")
}

func TestIP04_OneInterfaceForEachPort(t *testing.T) {
	n := nstest.New(t)
	n.Run("ip", "addr", "add", "127.0.0.2/8", "dev", "lo")
	h := newHost(t, n, nil, "127.0.0.1", "127.0.0.2")
	if got := h.shown(); got != "ib0 ib1" {
		t.Errorf("interfaces %s, want ib0 ib1", got)
	}
	for i, l := range h.Links() {
		if l.PKey() != 0xffff || l.Parent != "" || l.Name() != fmt.Sprintf("ib%d", i) {
			t.Errorf("interface %s: P_Key %04x, parent %q", l.Name(), l.PKey(), l.Parent)
		}
	}
}

func TestChildren(t *testing.T) {
	n := nstest.New(t)
	h := newHost(t, n, nil, "127.0.0.1")
	refused := func(t *testing.T, err error, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("error %v, want %v", err, want)
		}
	}
	t.Run("IP-05 IP-06 IP-08 IP-09 a P_Key makes a child", func(t *testing.T) {
		l, err := h.create("ib0", 0x8001)
		if err != nil {
			t.Fatal(err)
		}
		if h.shown() != "ib0 ib0.8001" || l.Name() != "ib0.8001" || l.PKey() != 0x8001 || l.Parent != "ib0" {
			t.Errorf("interfaces %s; the child %s has P_Key %04x, parent %s", h.shown(), l.Name(), l.PKey(), l.Parent)
		}
	})
	t.Run("IP-06 the name has the P_Key as written, the interface the full-member bit", func(t *testing.T) {
		l, err := h.create("ib0", 2)
		if err != nil {
			t.Fatal(err)
		}
		if l.Name() != "ib0.0002" || l.PKey() != 0x8002 {
			t.Errorf("child %s with P_Key %04x", l.Name(), l.PKey())
		}
	})
	t.Run("what is no P_Key, and what is taken", func(t *testing.T) {
		for _, pkey := range []int{0, -1, 0x10000, 0x8000} {
			_, err := h.create("ib0", pkey)
			refused(t, err, unix.EINVAL)
		}
		for _, pkey := range []int{0x8001, 1, 0x8002, 2, 0xffff, 0x7fff} {
			_, err := h.create("ib0", pkey)
			refused(t, err, unix.ENOTUNIQ)
		}
		_, err := h.create("ib0.8001", 0x8003)
		refused(t, err, unix.EINVAL)
		_, err = h.create("ib7", 0x8003)
		refused(t, err, unix.ENODEV)
	})
	t.Run("IP-10 links of any name, with a P_Key that others have", func(t *testing.T) {
		for name, pkey := range map[string]int{"my0": 0x8001, "my1": 0x8001, "my2": 0} {
			l, err := h.addLinkIn("ib0", name, pkey)
			if err != nil {
				t.Fatal(err)
			}
			if want := map[int]uint16{0x8001: 0x8001, 0: 0xffff}[pkey]; l.PKey() != want || l.Parent != "ib0" || l.MTU() != h.Links()[0].MTU() {
				t.Errorf("link %s: P_Key %04x, parent %s, MTU %d", name, l.PKey(), l.Parent, l.MTU())
			}
		}
		_, err := h.addLinkIn("my0", "my3", 0)
		refused(t, err, unix.EINVAL)
		_, err = h.addLinkIn("ib0", "my%d", 0)
		refused(t, err, unix.EINVAL)
		_, err = h.addLinkIn("ib0", "my0", 0)
		refused(t, err, unix.EBUSY)
	})
	t.Run("IP-07 the P_Key removes the child that it made", func(t *testing.T) {
		if err := h.DeleteChild("ib0", 1); err != nil { // with and without the bit
			t.Fatal(err)
		}
		refused(t, h.DeleteChild("ib0", 0x8001), unix.ENODEV) // my0 and my1 stay
		refused(t, h.DeleteChild("ib0", 0x8000), unix.EINVAL)
		refused(t, h.DeleteChild("ib9", 0x8001), unix.ENODEV)
		if got := h.shown(); got != "ib0 ib0.0002 my0 my1 my2" {
			t.Errorf("interfaces %s", got)
		}
	})
	t.Run("IP-10 a link is removed by name", func(t *testing.T) {
		for _, name := range []string{"my1", "ib0.0002"} {
			if err := h.DelLink(name); err != nil {
				t.Fatal(err)
			}
		}
		refused(t, h.DelLink("my1"), unix.ENODEV)
		refused(t, h.DelLink("ib0"), unix.EOPNOTSUPP)
		if got := h.shown(); got != "ib0 my0 my2" {
			t.Errorf("interfaces %s", got)
		}
	})
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if got := h.shown(); got != "" {
		t.Errorf("interfaces %s after Close", got)
	}
}

// TestIP10_BothWaysCarryTheSame: a child made by P_Key at one end speaks to a link
// made by name at the other.
func TestIP10_BothWaysCarryTheSame(t *testing.T) {
	na, nb := nstest.Pair(t, 4200)
	peers := []string{"10.9.0.1", "10.9.0.2"}
	a, b := newHost(t, na, peers, "10.9.0.1"), newHost(t, nb, peers, "10.9.0.2")
	if _, err := a.create("ib0", 0x8001); err != nil {
		t.Fatal(err)
	}
	if _, err := b.addLinkIn("ib0", "my0", 0x8001); err != nil {
		t.Fatal(err)
	}
	for i, n := range []*host{a, b} {
		name := []string{"ib0.8001", "my0"}[i]
		n.Run("ip", "addr", "add", fmt.Sprintf("192.168.60.%d/24", i+1), "dev", name)
		n.Run("ip", "link", "set", name, "up")
	}
	// A neighbour that answers ARP is there in both tables.
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		a.Do(func() {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
			if err == nil {
				unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{192, 168, 60, 2}})
				unix.Close(fd)
			}
		})
		l, err := a.Link("ib0.8001")
		if err != nil {
			t.Fatal(err)
		}
		remote, err := b.Link("my0")
		if err != nil {
			t.Fatal(err)
		}
		if n := l.Neighbors(); len(n) == 1 && n[0].Address == remote.Address() && remote.Stats().RxPackets > 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("neighbours %v, received %d packets", l.Neighbors(), remote.Stats().RxPackets)
		}
	}
}
