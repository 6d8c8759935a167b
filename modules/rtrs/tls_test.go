package rtrs

import (
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// protectedDevice is an iwarp device with shared keys.
func protectedDevice(t *testing.T, accept iwarp.TLSMode, keys ...string) verbs.Device {
	t.Helper()
	file := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(file, []byte(strings.Join(keys, "")), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := iwarp.DefaultConfig()
	cfg.Logger = slog.New(slog.DiscardHandler)
	cfg.AcceptTLS = accept
	var err error
	if cfg.TLS, err = tlsauth.New(tlsauth.Config{Files: tlsauth.Files{PSK: file}, Logger: cfg.Logger}); err != nil {
		t.Fatal(err)
	}
	dev, err := iwarp.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	return dev
}

func psk(t *testing.T, identity string) string {
	t.Helper()
	line, err := tlsauth.NewPSK(identity)
	if err != nil {
		t.Fatal(err)
	}
	return line
}

// TestASessionHasOneIdentity: a client that knows the identifiers of a session
// of another one cannot add a path to it.
func TestASessionHasOneIdentity(t *testing.T) {
	a, b := psk(t, "a"), psk(t, "b")
	srv, err := NewServer(func() ServerConfig {
		cfg := DefaultServerConfig()
		cfg.QueueDepth, cfg.ChunkSize = 16, 8192
		cfg.Pollers = cltPollers(t, 1)
		cfg.Logger = slog.New(slog.DiscardHandler)
		cfg.Handler = &testHandler{request: func(op *Op) { op.Respond(0) }}
		cfg.Alloc = func(size int) (Memory, error) { return &heapMemory{make([]byte, size), func() {}}, nil }
		return cfg
	}())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { srv.Close(cltContext(t)) })
	dev := protectedDevice(t, iwarp.TLSAllow, a, b)
	var addrs []netip.AddrPort
	for _, ip := range []string{"127.0.0.1", "127.0.0.2"} {
		addr, err := srv.Listen(dev, netip.AddrPortFrom(netip.MustParseAddr(ip), 0))
		if err != nil {
			t.Fatal(err)
		}
		addrs = append(addrs, addr)
	}
	first, second := protectedDevice(t, iwarp.TLSOff, a), protectedDevice(t, iwarp.TLSOff, b)
	for name, other := range map[string]verbs.Device{"the same": first, "another": second} {
		_, cfg := cltConfig(t, 1)
		cfg.Protect = true
		s, err := Open(cltContext(t), "s-"+name, []PathAddr{{Device: first, Dst: addrs[0]}, {Device: other, Dst: addrs[1]}}, cfg)
		if (err == nil) != (other == first) {
			t.Errorf("%s identity: %v", name, err)
		}
		if err != nil {
			continue
		}
		for _, p := range s.Paths() {
			if p.Security.Peer != "psk:a" {
				t.Errorf("path: %+v", p.Security)
			}
		}
		for _, p := range srv.Sessions()[0].Paths() {
			if p.Security.Peer != "psk:a" || p.Security.Cipher == "" {
				t.Errorf("path of the server: %+v", p.Security)
			}
		}
		if err := s.Close(cltContext(t)); err != nil {
			t.Error(err)
		}
	}
}

// TestAFabricWithoutTLSIsNotUsed: a session that requires TLS does not connect
// over a fabric that has none.
func TestAFabricWithoutTLSIsNotUsed(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	_, cfg := cltConfig(t, 1)
	cfg.Protect = true
	_, err := Open(cltContext(t), "s", []PathAddr{pathTo(net.Device("client"), cltA, serverAddr.String())}, cfg)
	if !errors.Is(err, syscall.EPROTONOSUPPORT) {
		t.Error(err)
	}
}
