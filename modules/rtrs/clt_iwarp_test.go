package rtrs

import (
	"errors"
	"log/slog"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The same over real sockets: 127.0.0.1 and 127.0.0.2 are two links.

func iwarpDevice(t testing.TB) verbs.Device {
	t.Helper()
	cfg := iwarp.DefaultConfig()
	cfg.Logger = slog.New(slog.DiscardHandler)
	dev, err := iwarp.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Errorf("close device: %v", err)
		}
	})
	return dev
}

// serveIwarp starts a server with a disk and returns the paths to it.
func serveIwarp(t testing.TB, newRkey bool) (*Server, []PathAddr) {
	t.Helper()
	dev, client := iwarpDevice(t), iwarpDevice(t)
	d := &cltDisk{blocks: map[uint32][blockSize]byte{}, slow: 300 * time.Microsecond, tells: true}
	cfg := DefaultServerConfig()
	cfg.QueueDepth, cfg.ChunkSize, cfg.AlwaysInvalidate = 16, 8192, newRkey
	cfg.Pollers = cltPollers(t, 2)
	cfg.Logger = slog.New(slog.DiscardHandler)
	cfg.Handler = &testHandler{request: d.request}
	cfg.Alloc = func(size int) (Memory, error) { return &heapMemory{make([]byte, size), func() {}}, nil }
	d.srv = &cfg
	srv, err := NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := srv.Close(cltContext(t)); err != nil {
			t.Errorf("close server: %v", err)
		}
	})
	var paths []PathAddr
	for _, ip := range []string{"127.0.0.1", "127.0.0.2"} {
		addr, err := srv.Listen(dev, netip.AddrPortFrom(netip.MustParseAddr(ip), 0))
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, PathAddr{Device: client, Src: addr.Addr(), Dst: addr})
	}
	return srv, paths
}

func TestIwarp_LossesUnderLoad(t *testing.T) {
	for name, newRkey := range map[string]bool{"plain keys": false, "NEW_RKEY": true} {
		t.Run(name, func(t *testing.T) {
			srv, paths := serveIwarp(t, newRkey)
			w, c := openLoad(t, paths, nil)
			w.start()
			for i := range 4 {
				w.until(100)
				sess := srv.Sessions()[0]
				if list := sess.Paths(); len(list) == 2 {
					if err := sess.DisconnectPath(list[i%2].ID); err != nil && !errors.Is(err, syscall.ENOENT) {
						t.Error(err)
					}
				}
			}
			w.until(100)
			for id := 1; id <= 2; id++ {
				if err := c.ReconnectPath(cltContext(t), id); err != nil {
					t.Error(err)
				}
				w.until(50)
			}
			w.finish()
		})
	}
}

func TestIwarp_ErrnosOfOpen(t *testing.T) {
	_, paths := serveIwarp(t, true)
	c := cltOpen(t, paths, nil)
	if _, err := c.AddPath(cltContext(t), paths[0]); ErrnoOf(err) != int(syscall.EEXIST) {
		t.Errorf("the same addresses again: %v", err)
	}
	_, cfg := cltConfig(t, 1)
	if _, err := Open(cltContext(t), "clt", paths[:1], cfg); ErrnoOf(err) != int(syscall.ECONNRESET) {
		t.Errorf("the name of a live session: %v", err)
	}
	nobody := PathAddr{Device: paths[0].Device, Dst: netip.MustParseAddrPort("127.0.0.1:1")}
	if _, err := Open(cltContext(t), "other", []PathAddr{nobody}, cfg); ErrnoOf(err) != int(syscall.ECONNRESET) {
		t.Errorf("nobody listens: %v", err)
	}
}

func TestIwarp_AdminAndInfo(t *testing.T) {
	_, paths := serveIwarp(t, true)
	c := cltOpen(t, paths[:1], nil)
	reply := make([]byte, blockSize)
	if err := c.AdminRead(cltContext(t), []byte{0, 0, 0, 0}, reply); err != nil {
		t.Error(err)
	}
	p := c.Paths()[0]
	if p.Fabric != "iwarp" || p.Src != paths[0].Src || p.State != PathConnected || p.Stats.ReadCount != 1 {
		t.Errorf("path %+v", p)
	}
}
