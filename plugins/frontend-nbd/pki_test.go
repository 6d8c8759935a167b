package main

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

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// authority signs certificates of tests.
type authority struct {
	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
	next int64
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, "make key", err)
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "CA"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	must(t, "sign", err)
	c, err = x509.ParseCertificate(der)
	must(t, "parse", err)
	return &authority{t: t, cert: c, key: key, pem: encode("CERTIFICATE", der), next: 2}
}

func encode(typ string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: der})
}

// issue signs a certificate and returns it and its key in PEM.
func (a *authority) issue(name string, change func(*x509.Certificate)) (cert, key []byte) {
	a.t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(a.t, "make key", err)
	c := &x509.Certificate{
		SerialNumber: big.NewInt(a.next), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{name, "localhost"},
	}
	a.next++
	if change != nil {
		change(c)
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, k.Public(), a.key)
	must(a.t, "sign", err)
	raw, err := x509.MarshalPKCS8PrivateKey(k)
	must(a.t, "marshal key", err)
	return encode("CERTIFICATE", der), encode("PRIVATE KEY", raw)
}

// server is a configuration of the front end with a new certificate. With mutual
// clients need one of the same authority.
func (a *authority) server(required, mutual bool) plugin.TLS {
	t := plugin.TLS{Required: required}
	t.Certificate, t.PrivateKey = a.issue("storage", nil)
	if mutual {
		t.ClientCA = a.pem
	}
	return t
}

// client is the configuration of a client without a certificate that knows a.
func (a *authority) client() *tls.Config {
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	return &tls.Config{RootCAs: roots, ServerName: "localhost"}
}

// with returns c with a certificate.
func with(t testing.TB, c *tls.Config, cert, key []byte) *tls.Config {
	t.Helper()
	pair, err := tls.X509KeyPair(cert, key)
	must(t, "load certificate", err)
	c = c.Clone()
	// Also where the server does not name the authority.
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	return c
}

// member is the configuration of a client with a certificate of a.
func (a *authority) member(name string) *tls.Config {
	a.t.Helper()
	cert, key := a.issue(name, nil)
	return with(a.t, a.client(), cert, key)
}

// folder has the files that libnbd, QEMU and nbdkit look for in a client's folder.
func (a *authority) folder(name string) string {
	a.t.Helper()
	dir := a.t.TempDir()
	cert, key := a.issue(name, nil)
	for file, b := range map[string][]byte{"ca-cert.pem": a.pem, "client-cert.pem": cert, "client-key.pem": key} {
		must(a.t, "write file", os.WriteFile(filepath.Join(dir, file), b, 0o600))
	}
	return dir
}
