package main

import (
	"crypto/x509"
	"fmt"
	"strings"
	"testing"
	"time"
)

// Faults of TLS have hints of their own, as crypto/x509 and the alerts of crypto/tls spell
// them.
func TestTLSFaultsHaveHintsOfTheirOwn(t *testing.T) {
	cert := &x509.Certificate{DNSNames: []string{"a"}, NotAfter: time.Now().Add(-time.Hour)}
	seen := map[string]bool{}
	for _, err := range []error{
		x509.CertificateInvalidError{Cert: cert, Reason: x509.Expired},
		x509.UnknownAuthorityError{Cert: cert},
		x509.HostnameError{Certificate: cert, Host: "b"},
		fmt.Errorf("remote error: tls: certificate required"),
		fmt.Errorf("remote error: tls: expired certificate"),
		fmt.Errorf("remote error: tls: unknown certificate authority"),
		fmt.Errorf("remote error: tls: protocol version not supported"),
	} {
		hint := hintOf(fmt.Errorf("map: TLS handshake: %w", err))
		if hint == "" || seen[hint] || strings.Contains(hint, "no rnbd server") {
			t.Errorf("%v: hint %q", err, hint)
		}
		seen[hint] = true
	}
}
