package tlsauth

import (
	"crypto/x509"
	"fmt"
	"strings"
)

const maxIdentity = 255 // bytes

// checkIdentity refuses names that would be mistaken for others in logs and
// rules.
func checkIdentity(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("the identity is empty")
	case len(name) > maxIdentity:
		return fmt.Errorf("the identity has %d bytes, at most %d", len(name), maxIdentity)
	}
	for _, c := range []byte(name) {
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`*?[]{}\"'`, c) >= 0 {
			return fmt.Errorf("identity %q has the character %q: use letters, digits and punctuation without quotes and wildcards", name, c)
		}
	}
	return nil
}

// identityOf returns the identity that a certificate gives its holder: its SPIFFE
// ID, else "dns:" and its first DNS name, else "cn:" and its common name.
func identityOf(c *x509.Certificate) (string, error) {
	name, id := "", ""
	for _, u := range c.URIs {
		if u.Scheme != "spiffe" {
			continue
		}
		if name != "" {
			return "", fmt.Errorf("the certificate has more than one SPIFFE ID")
		}
		name = u.String()
		id = name
	}
	switch {
	case name != "":
	case len(c.DNSNames) > 0:
		name = c.DNSNames[0]
		id = "dns:" + name
	default:
		name = c.Subject.CommonName
		id = "cn:" + name
	}
	if err := checkIdentity(name); err != nil {
		return "", fmt.Errorf("certificate %v: %w", c.SerialNumber, err)
	}
	return id, nil
}
