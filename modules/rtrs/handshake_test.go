package rtrs

import (
	"crypto/tls"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
)

// toldRefusals is a handler that keeps what is refused.
type toldRefusals struct {
	*testHandler
	got chan Refusal
}

func (h *toldRefusals) Refused(r Refusal) { h.got <- r }

// listenTLS starts a server that requires TLS, and returns its address and its refusals.
func listenTLS(t *testing.T, files tlsauth.Files) (netip.AddrPort, chan Refusal) {
	t.Helper()
	icfg := iwarp.DefaultConfig()
	icfg.Logger, icfg.AcceptTLS = slog.New(slog.DiscardHandler), iwarp.TLSRequire
	var err error
	if icfg.TLS, err = tlsauth.New(tlsauth.Config{Files: files, Logger: icfg.Logger}); err != nil {
		t.Fatal(err)
	}
	dev, err := iwarp.Open(icfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	h := &toldRefusals{&testHandler{request: func(op *Op) { op.Respond(0) }}, make(chan Refusal, 16)}
	cfg := DefaultServerConfig()
	cfg.QueueDepth, cfg.ChunkSize = 16, 8192
	cfg.Pollers = cltPollers(t, 1)
	cfg.Logger, cfg.Handler = icfg.Logger, h
	cfg.Alloc = func(size int) (Memory, error) { return &heapMemory{make([]byte, size), func() {}}, nil }
	srv, err := NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { srv.Close(cltContext(t)) })
	addr, err := srv.Listen(dev, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	return addr, h.got
}

// TestHandshakesThatFailAreTold: each reason reaches the handler, with the identity
// that the client claims.
func TestHandshakesThatFailAreTold(t *testing.T) {
	ca, other := newCA(t), newCA(t)
	server := ca.issue("P-256", "server", nil)
	revoked := ca.next
	lost := ca.issue("P-256", "lost", nil)
	server.CRL = ca.revoke(revoked)
	keys := ca.file("keys")
	if err := os.WriteFile(keys, []byte(psk(t, "a")), 0o600); err != nil {
		t.Fatal(err)
	}
	addr, got := listenTLS(t, server)
	keyAddr, gotKey := listenTLS(t, tlsauth.Files{PSK: keys})

	shake := func(addr netip.AddrPort, files tlsauth.Files) {
		conn, err := net.Dial("tcp", addr.String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		cfg := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"rnbd"}, MaxVersion: tls.VersionTLS13}
		if files.Cert != "" {
			pair, err := tls.LoadX509KeyPair(files.Cert, files.Key)
			if err != nil {
				t.Fatal(err)
			}
			cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
		}
		c := tls.Client(conn, cfg)
		if c.Handshake() == nil {
			c.Read(make([]byte, 1))
		}
	}
	withKey := func(addr netip.AddrPort, line string) {
		file := ca.file("other keys")
		if err := os.WriteFile(file, []byte(line), 0o600); err != nil {
			t.Fatal(err)
		}
		a, err := tlsauth.New(tlsauth.Config{Files: tlsauth.Files{PSK: file}, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		conn, err := net.Dial("tcp", addr.String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		if c, err := a.Client(conn, ""); err == nil {
			c.Read(make([]byte, 1))
		}
	}
	send := func(text string) {
		conn, err := net.Dial("tcp", addr.String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		conn.Write([]byte(text))
		conn.Read(make([]byte, 1))
	}
	for _, c := range []struct {
		name           string
		do             func()
		reason, claims string
		from           chan Refusal
	}{
		{"no certificate", func() { shake(addr, tlsauth.Files{}) }, "didn't provide a certificate", "", got},
		{"of another CA", func() { shake(addr, other.issue("P-256", "web", nil)) }, "unknown authority", "dns:web", got},
		{"expired", func() { shake(addr, ca.issue("P-256", "old", expired)) }, "expired", "dns:old", got},
		{"revoked", func() { shake(addr, lost) }, "is revoked", "dns:lost", got},
		{"plain bytes", func() { send("rnbd\x1b[2J") }, "does not begin with TLS", "", got},
		{"garbage as TLS", func() { send("\x16\x03\x01\xff\xff" + strings.Repeat("\x1b\n", 400)) }, "TLS handshake", "", got},
		{"an unknown shared key", func() { withKey(keyAddr, psk(t, "b")) }, "shared keys only and none of that name", "key ", gotKey},
		{"another key of an identity", func() { withKey(keyAddr, psk(t, "a")) }, "bad certificate", "psk:a", gotKey},
	} {
		c.do()
		select {
		case r := <-c.from:
			if !r.Handshake || !strings.Contains(r.Err.Error(), c.reason) || !strings.HasPrefix(r.Claimed, c.claims) || (r.Claimed == "") != (c.claims == "") {
				t.Errorf("%s: %+v", c.name, r)
			}
			if r.Client.Addr().String() != "127.0.0.1" || r.Client.Port() == 0 || r.Server != addr && r.Server != keyAddr || r.Fabric != "iwarp" {
				t.Errorf("%s: %+v", c.name, r)
			}
		case <-time.After(20 * time.Second):
			t.Errorf("%s: not told", c.name)
		}
	}
	conn, err := net.Dial("tcp", addr.String()) // a look at the port
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	send("x")
	if r := <-got; !strings.Contains(r.Err.Error(), "does not begin with TLS") {
		t.Errorf("a look at the port is told: %+v", r)
	}
}
