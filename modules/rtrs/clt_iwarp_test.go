package rtrs

import (
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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

// A network may lose one connection of a path and carry the others, for minutes.
// Heartbeats notice it, or TCP does, and the requests go another way.
func TestIwarp_OneConnectionOfAPathIsLost(t *testing.T) {
	for _, tt := range []struct {
		name string
		beat time.Duration
		tcp  time.Duration
		want error
	}{
		{"noticed by heartbeats", 50 * time.Millisecond, -1, ErrHeartbeat},
		{"noticed by TCP", time.Minute, 500 * time.Millisecond, ErrConnLost},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, paths := serveIwarp(t, true)
			cfg := iwarp.DefaultConfig()
			cfg.Logger, cfg.PeerTimeout = slog.New(slog.DiscardHandler), tt.tcp
			dev, err := iwarp.Open(cfg)
			if err != nil {
				t.Fatal(err)
			}
			for i := range paths {
				paths[i].Device = dev
			}
			w, c := openLoad(t, paths, func(cfg *ClientConfig) { cfg.Timing.Heartbeat, cfg.Timing.HeartbeatMisses = tt.beat, 5 })
			w.start()
			w.until(100)
			c.mu.Lock()
			qp := c.links[0].conns[1].qp
			c.mu.Unlock()
			loseConnection(t, qp.LocalAddr(), qp.RemoteAddr())
			e := c.awaitState(1, PathReconnecting)
			if !errors.Is(e.Err, tt.want) {
				t.Errorf("cause %v", e.Err)
			}
			c.awaitState(1, PathConnected)
			w.until(100)
			w.finish()
		})
	}
}

// loseConnection makes the kernel drop all packets of a connection, in both
// directions.
func loseConnection(t *testing.T, a, b netip.AddrPort) {
	t.Helper()
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}}
	prog := unix.SockFprog{Len: uint16(len(drop)), Filter: &drop[0]}
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, f := range files {
		fd, _ := strconv.Atoi(f.Name())
		from, err1 := unix.Getsockname(fd)
		to, err2 := unix.Getpeername(fd)
		if err1 != nil || err2 != nil {
			continue
		}
		x, y := ipv4Of(from), ipv4Of(to)
		if x == a && y == b || x == b && y == a {
			n++
			if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n != 2 {
		t.Fatalf("%d sockets of the connection %s - %s", n, a, b)
	}
}

func ipv4Of(a unix.Sockaddr) netip.AddrPort {
	if v4, ok := a.(*unix.SockaddrInet4); ok {
		return netip.AddrPortFrom(netip.AddrFrom4(v4.Addr), uint16(v4.Port))
	}
	return netip.AddrPort{}
}
