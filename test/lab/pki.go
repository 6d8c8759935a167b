package lab

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Authority signs certificates of tests and benchmarks. Its own is in ca-cert.pem.
type Authority struct {
	Dir  string // of all its files
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	next int64
}

// NewAuthority makes one with a name.
func NewAuthority(dir, name string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	a := &Authority{Dir: dir, key: key, next: 2}
	t := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, err
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		return nil, err
	}
	return a, writePEM(a.CA(), "CERTIFICATE", der)
}

// CA is the file of its own certificate.
func (a *Authority) CA() string { return filepath.Join(a.Dir, "ca-cert.pem") }

// Issue makes NAME-cert.pem and NAME-key.pem, for 127.0.0.1 as server and client. The
// serial numbers begin at 2.
func (a *Authority) Issue(name string, change func(*x509.Certificate)) (cert, key string, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", "", err
	}
	t := &x509.Certificate{
		SerialNumber: big.NewInt(a.next), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	a.next++
	if change != nil {
		change(t)
	}
	der, err := x509.CreateCertificate(rand.Reader, t, a.cert, private.Public(), a.key)
	if err != nil {
		return "", "", err
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	cert, key = filepath.Join(a.Dir, name+"-cert.pem"), filepath.Join(a.Dir, name+"-key.pem")
	return cert, key, errors.Join(err, writePEM(cert, "CERTIFICATE", der), writePEM(key, "PRIVATE KEY", pkcs8))
}

// Revoke writes a list of revoked serial numbers that is good until then.
func (a *Authority) Revoke(file string, until time.Time, serials ...int64) error {
	list := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now().Add(-time.Hour), NextUpdate: until}
	for _, n := range serials {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries,
			x509.RevocationListEntry{SerialNumber: big.NewInt(n), RevocationTime: time.Now()})
	}
	der, err := x509.CreateRevocationList(rand.Reader, list, a.cert, a.key)
	return errors.Join(err, writePEM(file, "X509 CRL", der))
}

func writePEM(file, kind string, der []byte) error {
	return os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
