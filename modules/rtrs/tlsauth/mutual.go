package tlsauth

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
)

// MutualServer is the configuration of a TLS 1.3 listener whose clients have certificates
// of Files.CA, for the application protocol of that name. The files are looked at before
// each handshake. Shared keys prove nothing to it.
func (a *Auth) MutualServer(protocol string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{protocol},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			cred := a.currentCredentials()
			if cred.cert == nil {
				return nil, errOnlySharedKeys
			}
			return &tls.Config{
				MinVersion: tls.VersionTLS13, NextProtos: []string{protocol}, SessionTicketsDisabled: true,
				Certificates: []tls.Certificate{*cred.cert}, ClientAuth: tls.RequireAnyClientCert,
				VerifyConnection: func(s tls.ConnectionState) error {
					return cred.verifyChain(s.PeerCertificates, x509.ExtKeyUsageClientAuth)
				},
			}, nil
		},
	}
}

var errOnlySharedKeys = errors.New("there is no certificate, only shared keys")

// MutualClient is the configuration of a client of MutualServer at address, HOST:PORT. name
// is what the server must prove to be, as in Config; empty: the host of address. The files
// are those that are there now.
func (a *Auth) MutualClient(protocol, address, name string) (*tls.Config, error) {
	cred := a.currentCredentials()
	if cred.cert == nil {
		return nil, errOnlySharedKeys
	}
	if name == "" {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		name = host
	}
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{protocol}, Certificates: []tls.Certificate{*cred.cert},
		ServerName:         name,
		InsecureSkipVerify: true, // VerifyConnection verifies, also names that crypto/tls does not know
		VerifyConnection: func(s tls.ConnectionState) error {
			if err := cred.verifyChain(s.PeerCertificates, x509.ExtKeyUsageServerAuth); err != nil {
				return err
			}
			return hasName(s.PeerCertificates[0], name)
		},
	}
	if isSPIFFE(name) {
		cfg.ServerName = spiffeHost
	}
	return cfg, nil
}

// MutualPeer returns the identity of a client of MutualServer, and a function that returns
// an error when the identity does not hold any more by the files as they are then.
func (a *Auth) MutualPeer(s tls.ConnectionState) (identity string, holds func() error, err error) {
	if len(s.PeerCertificates) == 0 {
		return "", nil, errors.New("the client has shown no certificate")
	}
	if identity, err = identityOf(s.PeerCertificates[0]); err != nil {
		return "", nil, fmt.Errorf("certificate of the client: %w", err)
	}
	proof := &heldProof{auth: a, chain: s.PeerCertificates, usage: x509.ExtKeyUsageClientAuth}
	return identity, func() error { _ = a.currentCredentials(); return proof.Holds() }, nil
}
