package metrics

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// authority signs certificates of tests.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	next int64
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, dir: t.TempDir(), next: 2, key: must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der := must(x509.CreateCertificate(rand.Reader, c, c, a.key.Public(), a.key))
	a.cert = must(x509.ParseCertificate(der))
	a.put("ca.pem", pemText("CERTIFICATE", der))
	return a
}

func pemText(typ string, der []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: der}))
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

// put replaces a file as a whole.
func (a *authority) put(name, text string) string {
	a.t.Helper()
	if err := os.WriteFile(a.path(name+".new"), []byte(text), 0o600); err != nil {
		a.t.Fatal(err)
	}
	if err := os.Rename(a.path(name+".new"), a.path(name)); err != nil {
		a.t.Fatal(err)
	}
	return a.path(name)
}

// issue writes a certificate for 127.0.0.1 and its key.
func (a *authority) issue(name string, usage x509.ExtKeyUsage) (cert, key string) {
	a.t.Helper()
	private := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	c := &x509.Certificate{
		SerialNumber: big.NewInt(a.next), Subject: pkix.Name{CommonName: name}, ExtKeyUsage: []x509.ExtKeyUsage{usage},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	a.next++
	der := must(x509.CreateCertificate(rand.Reader, c, a.cert, private.Public(), a.key))
	return a.put(name+".pem", pemText("CERTIFICATE", der)),
		a.put(name+".key", pemText("PRIVATE KEY", must(x509.MarshalPKCS8PrivateKey(private))))
}

// trusting is the configuration of a client that trusts a.
func (a *authority) trusting() *tls.Config {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return &tls.Config{RootCAs: pool}
}
