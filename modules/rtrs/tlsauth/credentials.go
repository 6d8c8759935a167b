package tlsauth

import (
	"bytes"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"time"
)

// Files are the names of files in PEM; PSK is a file of lines IDENTITY:HEX.
// Either PSK or the three of CA, Cert and Key are needed. A server may have both.
type Files struct {
	CA   string // certificates that may sign the peer's
	Cert string // of this end, with those between it and the peer's CA behind it
	Key  string // of Cert
	CRL  string // certificates that are revoked, signed by CAs of CA; may be empty
	PSK  string
}

func (f *Files) allPaths() []string { return []string{f.CA, f.Cert, f.Key, f.CRL, f.PSK} }

// maxFile is the largest file that is read, in bytes.
const maxFile = 4 << 20

// credentials are files as they were read. They never change.
type credentials struct {
	roots    *x509.CertPool
	cert     *tls.Certificate // nil: shared keys only
	crls     []*x509.RevocationList
	psks     map[string]*pskIdentity // by label
	tickets  [32]byte
	pskKeys  [32]byte // of tickets to those with shared keys
	sessions tls.ClientSessionCache
	warnings []string
	files    Handover // of Cert, Key, CA and CRL
}

// readFile returns a file. private files are warned of if others can read them.
func (c *credentials) readFile(name string, private bool) ([]byte, error) {
	st, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() || st.Size() > maxFile {
		return nil, fmt.Errorf("%s: not a regular file of at most %d bytes", name, maxFile)
	}
	if private && st.Mode()&0o077 != 0 {
		c.warnings = append(c.warnings, fmt.Sprintf("%s can be read by other users (mode %#o): make it 0600", name, st.Mode().Perm()))
	}
	return os.ReadFile(name)
}

// loadCredentials reads the files. The error names the bad one.
func (f *Files) loadCredentials() (*credentials, error) {
	c := &credentials{sessions: tls.NewLRUClientSessionCache(0)}
	rand.Read(c.tickets[:])
	rand.Read(c.pskKeys[:])
	given := 0
	for _, name := range []string{f.CA, f.Cert, f.Key} {
		if name != "" {
			given++
		}
	}
	switch {
	case given == 0 && f.PSK == "":
		return nil, errors.New("TLS needs either a file of shared keys, or the files of CA, certificate and key")
	case given != 0 && given != 3:
		return nil, errors.New("TLS with certificates needs all three: the files of CA, certificate and key")
	case f.CRL != "" && given == 0:
		return nil, errors.New("a file of revoked certificates needs the file of the CA")
	}
	if f.PSK != "" {
		if err := c.loadPSKs(f.PSK); err != nil {
			return nil, fmt.Errorf("shared keys %s: %w", f.PSK, err)
		}
	}
	if given == 3 {
		if err := c.loadCertificates(f); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (c *credentials) loadPSKs(name string) error {
	b, err := c.readFile(name, true)
	if err != nil {
		return err
	}
	list, err := parsePSKs(b)
	if err != nil {
		return err
	}
	c.psks = map[string]*pskIdentity{}
	for _, p := range list {
		c.psks[p.label] = p
	}
	return nil
}

func (c *credentials) loadCertificates(f *Files) error {
	cas, err := c.loadCAs(f.CA)
	if err != nil {
		return fmt.Errorf("CA %s: %w", f.CA, err)
	}
	if err := c.loadPair(f); err != nil {
		return err
	}
	if f.CRL == "" {
		return nil
	}
	if err := c.loadCRLs(f.CRL, cas); err != nil {
		return fmt.Errorf("revoked certificates %s: %w", f.CRL, err)
	}
	return nil
}

// loadPair reads the certificate of this end and its key.
func (c *credentials) loadPair(f *Files) error {
	chain, err := c.readFile(f.Cert, false)
	if err != nil {
		return fmt.Errorf("certificate: %w", err)
	}
	key, err := c.readFile(f.Key, true)
	if err != nil {
		return fmt.Errorf("key: %w", err)
	}
	cert, err := tls.X509KeyPair(chain, key)
	if err != nil {
		return fmt.Errorf("certificate %s with key %s: %w", f.Cert, f.Key, err)
	}
	c.cert = &cert
	c.files.Cert, c.files.Key = chain, key
	if now := time.Now(); now.Before(cert.Leaf.NotBefore) || now.After(cert.Leaf.NotAfter) {
		c.warnings = append(c.warnings, fmt.Sprintf("%s is valid from %s to %s: peers will refuse it", f.Cert,
			cert.Leaf.NotBefore.Format(time.RFC3339), cert.Leaf.NotAfter.Format(time.RFC3339)))
	}
	return nil
}

// pemBlocks calls f for each block of a PEM file. All blocks must be of type
// typ. There must be one at least, and nothing that is cut off.
func pemBlocks(b []byte, typ string, f func(der []byte) error) error {
	n := 0
	for rest := b; ; n++ {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			if bytes.Contains(rest, []byte("-----BEGIN")) {
				return fmt.Errorf("block %d of the PEM file is damaged or cut off", n+1)
			}
			break
		}
		if block.Type != typ {
			return fmt.Errorf("block %d of the PEM file is %q, want %q", n+1, block.Type, typ)
		}
		if err := f(block.Bytes); err != nil {
			return fmt.Errorf("block %d of the PEM file: %w", n+1, err)
		}
	}
	if n == 0 {
		return fmt.Errorf("no %q in PEM", typ)
	}
	return nil
}

func (c *credentials) loadCAs(name string) (cas []*x509.Certificate, err error) {
	b, err := c.readFile(name, false)
	if err != nil {
		return nil, err
	}
	c.roots = x509.NewCertPool()
	c.files.CA = b
	return cas, pemBlocks(b, "CERTIFICATE", func(der []byte) error {
		ca, err := x509.ParseCertificate(der)
		if err != nil {
			return err
		}
		c.roots.AddCert(ca)
		cas = append(cas, ca)
		return nil
	})
}

func (c *credentials) loadCRLs(name string, cas []*x509.Certificate) error {
	b, err := c.readFile(name, false)
	if err != nil {
		return err
	}
	c.files.CRL = b
	return pemBlocks(b, "X509 CRL", func(der []byte) error {
		crl, err := x509.ParseRevocationList(der)
		if err != nil {
			return err
		}
		err = errors.New("no certificate of the CA file has signed it")
		for _, ca := range cas {
			if bytes.Equal(ca.RawSubject, crl.RawIssuer) {
				if err = crl.CheckSignatureFrom(ca); err == nil {
					break
				}
			}
		}
		c.crls = append(c.crls, crl)
		return err
	})
}

// checkCRLAge returns an error if it cannot be known whether a certificate of chain is
// revoked, since a list is out of date.
func (c *credentials) checkCRLAge(chain []*x509.Certificate, now time.Time) error {
	for _, crl := range c.crls {
		for _, cert := range chain {
			if bytes.Equal(cert.RawIssuer, crl.RawIssuer) && !crl.NextUpdate.IsZero() && now.After(crl.NextUpdate) {
				return fmt.Errorf("the list of revoked certificates is out of date since %s", crl.NextUpdate.Format(time.RFC3339))
			}
		}
	}
	return nil
}

// checkRevoked returns an error if a certificate of chain is revoked.
func (c *credentials) checkRevoked(chain []*x509.Certificate) error {
	for _, crl := range c.crls {
		for _, cert := range chain {
			if !bytes.Equal(cert.RawIssuer, crl.RawIssuer) {
				continue
			}
			for i := range crl.RevokedCertificateEntries {
				if crl.RevokedCertificateEntries[i].SerialNumber.Cmp(cert.SerialNumber) == 0 {
					return fmt.Errorf("certificate %v of %q is revoked", cert.SerialNumber, cert.Subject.CommonName)
				}
			}
		}
	}
	return nil
}

// verifiedChains returns the chains from the certificate of a peer to a CA.
func (c *credentials) verifiedChains(peer []*x509.Certificate, usage x509.ExtKeyUsage, now time.Time) ([][]*x509.Certificate, error) {
	between := x509.NewCertPool()
	for _, cert := range peer[1:] {
		between.AddCert(cert)
	}
	return peer[0].Verify(x509.VerifyOptions{
		Roots: c.roots, Intermediates: between, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage},
	})
}

// verifyChain checks the certificates of a peer.
func (c *credentials) verifyChain(peer []*x509.Certificate, usage x509.ExtKeyUsage) error {
	if len(peer) == 0 {
		return errors.New("the peer has shown no certificate")
	}
	now := time.Now()
	chains, err := c.verifiedChains(peer, usage, now)
	if err != nil {
		return err
	}
	// Any chain without a revoked certificate would do, but there is one nearly
	// always, and an attacker chooses the certificates between.
	for _, chain := range chains {
		if err := errors.Join(c.checkCRLAge(chain, now), c.checkRevoked(chain)); err != nil {
			return err
		}
	}
	return nil
}
