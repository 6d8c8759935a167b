package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// allowedCatalogue is the catalogue of a client under rules: exports that no rule gives to
// the client are not there for it.
type allowedCatalogue struct {
	catalogue
	n *negotiation
}

// decideAccess reports whether the client may open an export, and whether to read only, or why not.
func (a *allowedCatalogue) decideAccess(name string) (ok, readOnly bool, why string) {
	identity := ""
	if a.n.tls != nil {
		identity = identityOf(a.n.tls)
	}
	return decideAccess(a.n.secure.by.rules, identity, name)
}

// findExport has the answer of an export that is not there for one that is refused.
func (a *allowedCatalogue) findExport(name string) (*export, error) {
	e, err := a.catalogue.findExport(name)
	if err != nil {
		return nil, err
	}
	ok, readOnly, why := a.decideAccess(e.name)
	if !ok {
		a.n.secure.user.mayNotOpen(e.name, why)
		return nil, fmt.Errorf("no export %q", name)
	}
	a.n.readOnly = readOnly
	return e, nil
}

func (a *allowedCatalogue) openExport(name string) (*export, error) {
	e, err := a.catalogue.openExport(name)
	if err != nil {
		return nil, err
	}
	ok, readOnly, why := a.decideAccess(e.name)
	if !ok {
		a.n.secure.user.mayNotOpen(e.name, why)
		e.removeOpener()
		return nil, fmt.Errorf("no export %q", name)
	}
	a.n.readOnly = readOnly
	return e, nil
}

func (a *allowedCatalogue) exportNames() []string {
	return slices.DeleteFunc(a.catalogue.exportNames(), func(name string) bool {
		ok, _, _ := a.decideAccess(name)
		return !ok
	})
}

// ChecksUsers states that revoked certificates and rules are honoured.
func (*frontend) ChecksUsers() {}

// revocationLists are lists of revoked certificates.
type revocationLists []*x509.RevocationList

// parseRevoked reads lists in PEM, each signed by a certificate of cas.
func parseRevoked(text, cas []byte) (list revocationLists, err error) {
	for len(bytes.TrimSpace(text)) > 0 {
		block, rest := pem.Decode(text)
		if block == nil || block.Type != "X509 CRL" {
			return nil, errors.New("something in the file is no list in PEM, or is cut off")
		}
		crl, err := x509.ParseRevocationList(block.Bytes)
		if err != nil {
			return nil, err
		}
		if !signedBy(crl, cas) {
			return nil, fmt.Errorf("no certificate of the CA of clients has signed the list of %q", crl.Issuer)
		}
		list, text = append(list, crl), rest
	}
	return list, nil
}

func signedBy(crl *x509.RevocationList, cas []byte) bool {
	for {
		var block *pem.Block
		if block, cas = pem.Decode(cas); block == nil {
			return false
		}
		ca, err := x509.ParseCertificate(block.Bytes)
		if err == nil && bytes.Equal(ca.RawSubject, crl.RawIssuer) && crl.CheckSignatureFrom(ca) == nil {
			return true
		}
	}
}

// checkChains returns an error if a certificate of one of the chains is revoked, or if a
// list is out of date.
func (r revocationLists) checkChains(chains [][]*x509.Certificate, now time.Time) error {
	for _, crl := range r {
		for _, cert := range slices.Concat(chains...) {
			if bytes.Equal(cert.RawIssuer, crl.RawIssuer) && !crl.NextUpdate.IsZero() && now.After(crl.NextUpdate) {
				return fmt.Errorf("the list of revoked certificates is out of date since %s: install a newer one", crl.NextUpdate.Format(time.RFC3339))
			}
		}
	}
	return r.checkListed(chains)
}

// checkListed returns an error if a certificate of one of the chains is revoked.
func (r revocationLists) checkListed(chains [][]*x509.Certificate) error {
	for _, crl := range r {
		for _, cert := range slices.Concat(chains...) {
			if bytes.Equal(cert.RawIssuer, crl.RawIssuer) &&
				slices.ContainsFunc(crl.RevokedCertificateEntries, func(e x509.RevocationListEntry) bool { return e.SerialNumber.Cmp(cert.SerialNumber) == 0 }) {
				return fmt.Errorf("certificate %v of %q is revoked", cert.SerialNumber, cert.Subject.CommonName)
			}
		}
	}
	return nil
}

// identityOf returns the identity in a client's certificate: its SPIFFE ID, else its
// first DNS name, else its common name. It is empty if there is no certificate, or
// one with a name that could be mistaken for another or for a pattern.
func identityOf(t *tls.Conn) string {
	if len(t.ConnectionState().PeerCertificates) == 0 {
		return ""
	}
	return nameOf(t.ConnectionState().PeerCertificates[0])
}

func nameOf(c *x509.Certificate) string {
	prefix, name, ids := "cn:", c.Subject.CommonName, 0
	if len(c.DNSNames) > 0 {
		prefix, name = "dns:", c.DNSNames[0]
	}
	for _, u := range c.URIs {
		if u.Scheme == "spiffe" {
			prefix, name = "", u.String()
			ids++
		}
	}
	odd := strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f || strings.ContainsRune("*?[]{}\\\"'", r) })
	if name == "" || len(name) > maxIdentity || odd || ids > 1 {
		return ""
	}
	return prefix + name
}

const maxIdentity = 255 // bytes
