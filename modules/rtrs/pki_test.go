package rtrs

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
)

// authority signs certificates of tests.
type authority struct {
	t    testing.TB
	dir  string
	cert *x509.Certificate
	key  crypto.Signer
	next int64
}

// certKeys make the keys of certificates.
var certKeys = map[string]func() (crypto.Signer, error){
	"P-256":   func() (crypto.Signer, error) { return ecdsa.GenerateKey(elliptic.P256(), rand.Reader) },
	"Ed25519": func() (crypto.Signer, error) { _, key, err := ed25519.GenerateKey(rand.Reader); return key, err },
	"RSA":     sync.OnceValues(func() (crypto.Signer, error) { return rsa.GenerateKey(rand.Reader, 2048) }), // takes long
}

func newCA(t testing.TB) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir(), next: 2}
	var err error
	if a.key, err = certKeys["P-256"](); err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.write("ca.pem", "CERTIFICATE", der)
	return a
}

func (a *authority) file(name string) string { return filepath.Join(a.dir, name) }

func (a *authority) write(name, typ string, der []byte) string {
	a.t.Helper()
	if err := os.WriteFile(a.file(name), pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
	return a.file(name)
}

// issue signs a certificate for a key of a kind. Its common name, and its DNS name
// if it is not that of a client, are name.
func (a *authority) issue(kind, name string, change func(*x509.Certificate)) tlsauth.Files {
	a.t.Helper()
	key, err := certKeys[kind]()
	if err != nil {
		a.t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(a.next), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	if name != "client" {
		c.DNSNames = []string{name}
	}
	a.next++
	if change != nil {
		change(c)
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, key.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	at := fmt.Sprintf("%s-%s-%d", kind, name, a.next)
	return tlsauth.Files{CA: a.file("ca.pem"), Cert: a.write(at+".pem", "CERTIFICATE", der), Key: a.write(at+".key", "PRIVATE KEY", pkcs8)}
}

// revoke writes a list of revoked serial numbers, and returns its file.
func (a *authority) revoke(serials ...int64) string {
	a.t.Helper()
	list := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now().Add(-time.Hour), NextUpdate: time.Now().Add(time.Hour)}
	for _, n := range serials {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: big.NewInt(n), RevocationTime: time.Now()})
	}
	der, err := x509.CreateRevocationList(rand.Reader, list, a.cert, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	return a.write("crl.pem", "X509 CRL", der)
}

func expired(c *x509.Certificate)       { c.NotAfter = time.Now().Add(-time.Minute) }
func clientOnly(c *x509.Certificate)    { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }
func agreementOnly(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyAgreement }

// huge makes a certificate that does not fit into a message.
func huge(c *x509.Certificate) {
	for i := range 300 {
		c.DNSNames = append(c.DNSNames, fmt.Sprintf("%d.%s.example", i, strings.Repeat("x", 50)))
	}
}
