package tlsauth

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// authority signs certificates of tests.
type authority struct {
	t    testing.TB
	dir  string
	cert *x509.Certificate
	key  crypto.Signer
	next int64
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func newAuthority(t testing.TB, name string) *authority {
	a := &authority{t: t, dir: t.TempDir(), next: 2}
	a.key = must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der := must(x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key))
	a.cert = must(x509.ParseCertificate(der))
	writePEM(t, a.path("ca.pem"), "CERTIFICATE", der)
	return a
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

func writePEM(t testing.TB, name, typ string, der []byte) {
	t.Helper()
	if err := os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// issue signs a certificate and returns the files of its holder.
func (a *authority) issue(name string, change func(*x509.Certificate)) Files {
	a.t.Helper()
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	c := &x509.Certificate{
		SerialNumber: big.NewInt(a.next), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	a.next++
	if change != nil {
		change(c)
	}
	der := must(x509.CreateCertificate(rand.Reader, c, a.cert, key.Public(), a.key))
	writePEM(a.t, a.path(name+".pem"), "CERTIFICATE", der)
	writePEM(a.t, a.path(name+".key"), "PRIVATE KEY", must(x509.MarshalPKCS8PrivateKey(key)))
	return Files{CA: a.path("ca.pem"), Cert: a.path(name + ".pem"), Key: a.path(name + ".key")}
}

// revoke writes a list of revoked serial numbers.
func (a *authority) revoke(file string, until time.Time, serials ...int64) {
	a.t.Helper()
	list := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now().Add(-time.Hour), NextUpdate: until}
	for _, n := range serials {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: big.NewInt(n), RevocationTime: time.Now()})
	}
	writePEM(a.t, file, "X509 CRL", must(x509.CreateRevocationList(rand.Reader, list, a.cert, a.key)))
}

func spiffe(id string) func(*x509.Certificate) {
	u, err := url.Parse(id)
	if err != nil {
		panic(err)
	}
	return func(c *x509.Certificate) { c.URIs = append(c.URIs, u) }
}

func writePSK(t testing.TB, lines ...string) Files {
	t.Helper()
	name := filepath.Join(t.TempDir(), "keys")
	var b bytes.Buffer
	for _, l := range lines {
		b.WriteString(l)
	}
	if err := os.WriteFile(name, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return Files{PSK: name}
}

func psk(t testing.TB, identity string) string {
	return must(NewPSK(identity))
}

func newAuth(t testing.TB, f Files) *Auth {
	t.Helper()
	return must(New(Config{Files: f, Logger: slog.New(slog.DiscardHandler)}))
}

// sockets returns the two ends of a TCP connection.
func sockets(t testing.TB) (client, server net.Conn) {
	t.Helper()
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	client = must(net.Dial("tcp", l.Addr().String()))
	server = must(l.Accept())
	for _, c := range []net.Conn{client, server} {
		c.SetDeadline(time.Now().Add(30 * time.Second))
		t.Cleanup(func() { c.Close() })
	}
	return client, server
}

// meet makes a handshake and exchanges a question and an answer. An end that
// refuses closes its socket.
func meet(t testing.TB, client, server *Auth, name string) (c, s *Conn, cerr, serr error) {
	t.Helper()
	cs, ss := sockets(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if s, serr = server.Server(ss); serr == nil {
			serr = answer(s)
		}
		if serr != nil {
			ss.Close()
		}
	}()
	if c, cerr = client.Client(cs, name); cerr == nil {
		cerr = ask(c)
	}
	if cerr != nil {
		cs.Close()
	}
	<-done
	return c, s, cerr, serr
}

func ask(c *Conn) error {
	if _, err := c.Write([]byte("question")); err != nil {
		return err
	}
	b := make([]byte, 6)
	_, err := c.Read(b)
	return err
}

func answer(s *Conn) error {
	b := make([]byte, 8)
	if _, err := s.Read(b); err != nil {
		return err
	}
	_, err := s.Write([]byte("answer"))
	return err
}
