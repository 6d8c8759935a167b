package dev

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/registry"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// registryAt starts a registry at a host.
func (h *host) registryAt(cfg registry.Config) *registry.Server {
	h.t.Helper()
	var l net.Listener
	var err error
	eventually(h.t, "the registry listens", func() bool {
		h.Do(func() { l, err = net.Listen("tcp", netip.AddrPortFrom(h.port, registry.Port).String()) })
		return err == nil
	})
	s, err := registry.Serve(l, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		h.t.Fatal(err)
	}
	return s
}

// client makes the client of a host's port to the registry at server.
func (h *host) client(server netip.Addr, gid wire.GID) *registry.Client {
	c := registry.NewClient(registry.ClientConfig{Server: netip.AddrPortFrom(server, registry.Port), Local: h.port, GID: gid, Logger: slog.New(slog.DiscardHandler),
		Dial: func(ctx context.Context) (c net.Conn, err error) {
			h.Do(func() {
				d := net.Dialer{Timeout: 5 * time.Second, LocalAddr: &net.TCPAddr{IP: h.port.AsSlice()}}
				c, err = d.DialContext(ctx, "tcp", netip.AddrPortFrom(server, registry.Port).String())
			})
			return c, err
		}})
	h.t.Cleanup(func() { c.Close() })
	return c
}

// TestIP01_RFC4392: a link is the full members of a partition, and the broadcast
// group's parameters are those of the link. The registry decides both. Ports with
// GIDs that are no IP addresses find each other. The loss of the registry does not
// disturb the link.
func TestIP01_RFC4392(t *testing.T) {
	a, b := hosts(t, 4200)
	cfg := registry.Config{Partitions: []registry.Partition{{PKey: 0xffff, QKey: 0x1234, MTU: 4096}, {PKey: 0x8001}}, Ports: map[netip.Addr][]uint16{portB: {0xffff, 0x0001}}}
	r := a.registryAt(cfg)
	ca, cb := a.client(portA, wire.GID{0xfe, 0x80, 15: 0xa}), b.client(portA, wire.GID{0xfe, 0x80, 15: 0xb})
	none := []netip.Addr{}
	ia := a.open(Config{Registry: ca, Peers: none}, "192.168.50.1/24", "fd50::1/64")
	ib := b.open(Config{Registry: cb, Peers: none}, "192.168.50.2/24", "fd50::2/64")
	if ia.MTU() != 4092 || ib.MTU() != 4092 || ia.Address().GID() != ca.GID() {
		t.Errorf("MTUs %d and %d, GID %s; want those of the registry", ia.MTU(), ib.MTU(), ia.Address().GID())
	}
	a.ping("192.168.50.2")
	b.ping("fd50::1")
	if n := ia.Neighbors(); len(n) == 0 || n[0].Address != ib.Address() {
		t.Errorf("neighbours %+v, want %s", n, ib.Address())
	}
	if s := ib.Stats(); s.Fabric.QKey != 0 {
		t.Errorf("%d datagrams had another Q_Key", s.Fabric.QKey)
	}
	t.Run("a limited member has no carrier", func(t *testing.T) {
		i, err := b.tryOpen(Config{Name: "ib0.8001", Registry: cb, Peers: none, PKey: 0x8001})
		if err != nil {
			t.Fatal(err)
		}
		defer i.Close()
		eventually(t, "the join is refused", func() bool { return i.Stats().Mcast.Failures > 0 })
		if i.Carrier() {
			t.Error("it has carrier")
		}
	})
	t.Run("without the registry", func(t *testing.T) {
		r.Close()
		eventually(t, "the loss is noticed", func() bool { return !ca.Connected() && !cb.Connected() })
		ia.mu.Lock()
		ia.neigh.Flush() // so that the broadcast group is used
		ia.mu.Unlock()
		a.ping("192.168.50.2")
		if err := ia.JoinGroup(netip.MustParseAddr("239.1.1.1")); err != nil {
			t.Fatal(err)
		}
		failed := ia.Stats().Mcast.Failures
		eventually(t, "nothing new is joined", func() bool { return ia.Stats().Mcast.Failures > failed || failed > 0 })
	})
	t.Run("the registry is back", func(t *testing.T) {
		r = a.registryAt(cfg)
		mgid, _ := ia.link.Multicast(netip.MustParseAddr("239.1.1.1"))
		eventually(t, "the group is joined", func() bool {
			for _, g := range ia.Groups() {
				if g.MGID == mgid {
					return g.Complete
				}
			}
			return false
		})
		eventually(t, "the members are known again", func() bool { return len(ca.Members(ia.link.Broadcast())) == 1 })
		a.ping("192.168.50.2")
	})
	t.Run("the partition is gone", func(t *testing.T) {
		r.Close()
		r = a.registryAt(registry.Config{Partitions: []registry.Partition{{PKey: 0x8001}}})
		eventually(t, "the link is down", func() bool { return !ia.Carrier() && !ib.Carrier() })
		r.Close()
		r = a.registryAt(cfg)
		eventually(t, "the link is up", func() bool { return ia.Carrier() && ib.Carrier() })
		b.ping("192.168.50.1")
		r.Close()
	})
}
