package tlsauth

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
)

// NewHTTPS reads the files of an HTTP server: Cert and Key, and CA if its
// clients must have certificates. Use HTTPSConfig of the result.
func NewHTTPS(cfg Config) (*Auth, error) {
	f := cfg.Files
	switch {
	case f.PSK != "" || f.CRL != "":
		return nil, errors.New("this server has neither shared keys nor a list of revoked certificates")
	case f.Cert == "" || f.Key == "":
		return nil, errors.New("TLS needs both: the files of certificate and key")
	}
	return openAuth(cfg, f.loadHTTPS)
}

func (f *Files) loadHTTPS() (*credentials, error) {
	c := &credentials{}
	if f.CA != "" {
		if _, err := c.loadCAs(f.CA); err != nil {
			return nil, fmt.Errorf("CA %s: %w", f.CA, err)
		}
	}
	return c, c.loadPair(f)
}

// HTTPSConfig is the configuration of a TLS listener for HTTP/1.1. It looks at
// the files before each handshake.
func (a *Auth) HTTPSConfig() *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return a.currentCredentials().httpsConfig(), nil },
	}
}

// httpsConfig has no tickets: a client shows its certificate on each connection.
func (c *credentials) httpsConfig() *tls.Config {
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{"http/1.1"}, SessionTicketsDisabled: true,
		Certificates: []tls.Certificate{*c.cert},
	}
	if c.roots != nil {
		cfg.ClientAuth = tls.RequireAnyClientCert
		cfg.VerifyConnection = func(s tls.ConnectionState) error {
			return c.verifyChain(s.PeerCertificates, x509.ExtKeyUsageClientAuth)
		}
	}
	return cfg
}
