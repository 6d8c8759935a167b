package tlsauth

import (
	"crypto/x509"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// proofOfClient returns how a server sees the identity of a client.
func proofOfClient(t *testing.T, server, client *Auth) verbs.Proof {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	got := make(chan verbs.Proof, 1)
	go func() {
		defer close(got)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		if c, err := server.Server(conn); err == nil {
			got <- c.Security().Proof
			c.Write([]byte("x"))
		}
	}()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	if c, err := client.Client(conn, ""); err == nil {
		c.Read(make([]byte, 1))
	}
	p := <-got
	if p == nil {
		t.Fatal("the client is not let in")
	}
	return p
}

// TestProofsAreLookedAtAgain: what a client has proved holds until its certificate is
// revoked, its CA is gone or has expired, or its shared key has no line any more.
func TestProofsAreLookedAtAgain(t *testing.T) {
	for name, c := range map[string]struct {
		change func(ca *authority, f *Files, number int64)
		reason string // empty: it holds
	}{
		"nothing":                          {func(*authority, *Files, int64) {}, ""},
		"revoked":                          {func(ca *authority, f *Files, n int64) { ca.revoke(f.CRL, time.Now().Add(time.Hour), n) }, "is revoked"},
		"revoked, the list is out of date": {func(ca *authority, f *Files, n int64) { ca.revoke(f.CRL, time.Now().Add(-time.Minute), n) }, "is revoked"},
		"another is revoked":               {func(ca *authority, f *Files, n int64) { ca.revoke(f.CRL, time.Now().Add(time.Hour), n+100) }, ""},
		"the list is out of date":          {func(ca *authority, f *Files, _ int64) { ca.revoke(f.CRL, time.Now().Add(-time.Minute)) }, ""},
		"another CA": {func(ca *authority, f *Files, _ int64) {
			other := newAuthority(t, "other")
			copyFile(t, other.path("ca.pem"), f.CA)
			copyFile(t, other.path("ca.pem"), f.CRL)
			other.revoke(f.CRL, time.Now().Add(time.Hour))
		}, "unknown authority"},
	} {
		t.Run(name, func(t *testing.T) {
			ca := newAuthority(t, "ca")
			files := ca.issue("server", nil)
			files.CRL = ca.path("crl.pem")
			ca.revoke(files.CRL, time.Now().Add(time.Hour))
			number := ca.next
			client := newAuth(t, ca.issue("client", nil))
			server := newAuth(t, files)
			p := proofOfClient(t, server, client)
			before := server.Reads()
			c.change(ca, &files, number)
			if err := server.Reload(true); err != nil {
				t.Fatal(err)
			}
			if err := p.Holds(); (err == nil) != (c.reason == "") || err != nil && !strings.Contains(err.Error(), c.reason) {
				t.Error(err)
			}
			if server.Reads() == before {
				t.Error("it is not told that the files were read")
			}
		})
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestProofsAndTime(t *testing.T) {
	ca := newAuthority(t, "ca") // for an hour
	server := newAuth(t, ca.issue("server", nil))
	for name, c := range map[string]struct {
		until, now time.Time
		holds      bool
	}{
		"valid":       {time.Now().Add(30 * time.Minute), time.Now(), true},
		"run out":     {time.Now().Add(30 * time.Minute), time.Now().Add(10 * time.Hour), true},
		"CA run out":  {time.Now().Add(9 * time.Hour), time.Now().Add(2 * time.Hour), false},
		"both, later": {time.Now().Add(9 * time.Hour), time.Now().Add(10 * time.Hour), false},
	} {
		files := ca.issue("client", func(cert *x509.Certificate) { cert.NotAfter = c.until })
		client, err := files.loadCredentials()
		if err != nil {
			t.Fatal(err)
		}
		if err := server.now.checkPeer([]*x509.Certificate{client.cert.Leaf}, x509.ExtKeyUsageClientAuth, c.now); (err == nil) != c.holds {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A shared key may be changed while its identity is there.
func TestProofsByASharedKey(t *testing.T) {
	a, b := psk(t, "a"), psk(t, "b")
	files := writePSK(t, a, b)
	server, err := New(Config{Files: files, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	p := proofOfClient(t, server, newAuth(t, writePSK(t, a)))
	for _, c := range []struct {
		lines string
		holds bool
	}{{a + b, true}, {psk(t, "a") + b, true}, {b, false}, {a, true}} {
		if err := os.WriteFile(files.PSK, []byte(c.lines), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := server.Reload(true); err != nil {
			t.Fatal(err)
		}
		if err := p.Holds(); (err == nil) != c.holds {
			t.Errorf("%q: %v", c.lines, err)
		}
	}
}
