package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// tlsProtection is what the daemon has given by SetTLS. It never changes.
type tlsProtection struct {
	config   *tls.Config
	required bool
	plain    []string // listeners that serve clients without TLS all the same
	rules    *access.Rules
	revoked  revocationLists
}

// listenerSecurity is how the connections of one listener begin; nil: TLS is off.
type listenerSecurity struct {
	by       *tlsProtection
	required bool // no option is answered before TLS
	user     *nbdUser
}

// SetTLS gives the means of TLS. They are used for connections that begin from
// now on; the open connections are checked by them, and go on if they are allowed.
func (f *frontend) SetTLS(_ context.Context, t plugin.TLS) error {
	p, err := newProtection(&t)
	if err != nil {
		return fmt.Errorf("%w: %w", err, blk.EINVAL)
	}
	f.protection.Store(p)
	f.recheckAccess()
	f.log().Info("TLS is set", "required", p.required, "client_ca", p.config.ClientCAs != nil, "rules", p.rules.Len())
	return nil
}

// newProtection needs TLS 1.3. There are no session tickets: a client shows its
// certificate on each connection, to the CA of the day.
func newProtection(t *plugin.TLS) (*tlsProtection, error) {
	cert, err := tls.X509KeyPair(t.Certificate, t.PrivateKey)
	if err != nil {
		return nil, fmt.Errorf("certificate: %w", err)
	}
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert},
		SessionTicketsDisabled: true, DynamicRecordSizingDisabled: true,
	}
	if len(t.ClientCA) > 0 {
		cfg.ClientAuth, cfg.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
		if !cfg.ClientCAs.AppendCertsFromPEM(t.ClientCA) {
			return nil, errors.New("no certificate in the CA of clients")
		}
	}
	var list revocationLists
	if len(t.ClientCRL) > 0 {
		list, err = parseRevoked(t.ClientCRL, t.ClientCA)
		if err != nil {
			return nil, fmt.Errorf("revoked certificates: %w", err)
		}
		cfg.VerifyConnection = func(s tls.ConnectionState) error { return list.checkChains(s.VerifiedChains, time.Now()) }
	}
	rules, err := plugin.ParseRules(t.Rules)
	if err != nil {
		return nil, err
	}
	return &tlsProtection{config: cfg, required: t.Required, plain: slices.Clone(t.Plain), rules: rules, revoked: list}, nil
}

// securityOf returns the security of a listener.
func (f *frontend) securityOf(listener string) *listenerSecurity {
	p := f.protection.Load()
	if p == nil {
		return nil
	}
	return &listenerSecurity{by: p, required: p.requiresTLS(listener)}
}

// requiresTLS reports whether a listener serves no client without TLS.
func (p *tlsProtection) requiresTLS(listener string) bool {
	return p.required && !slices.Contains(p.plain, listener)
}

// tlsRequired reports whether nothing is served before TLS.
func (s *listenerSecurity) tlsRequired() bool { return s != nil && s.required }

var (
	errNeedsTLS = errors.New("the client asks for an export without TLS, which is required")
	errNoTLS    = errors.New("TLS handshake")
	errNoSocket = errors.New("TLS needs a socket")

	errNoCertificate = errors.New("the client has shown no certificate, which is required")
)

// onStartTLS makes the handshake. The negotiation begins again behind it. Nothing
// was read in advance, so plain bytes behind the option are taken for a part of
// the handshake, which fails. What was agreed on before may be an attacker's.
func (n *negotiation) onStartTLS(data []byte) error {
	switch {
	case n.secure == nil:
		return n.sendReply(nbdwire.OptStartTLS, nbdwire.RepErrUnsup, nil)
	case n.tls != nil || len(data) != 0:
		return n.sendReply(nbdwire.OptStartTLS, nbdwire.RepErrInvalid, nil)
	}
	conn, ok := n.rw.(net.Conn)
	if !ok {
		return errNoSocket
	}
	if err := n.sendReply(nbdwire.OptStartTLS, nbdwire.RepAck, nil); err != nil {
		return err
	}
	t := tls.Server(conn, n.secure.by.config)
	if err := t.Handshake(); err != nil {
		n.secure.user.noteClaim(t, err)
		return fmt.Errorf("%w: %w", errNoTLS, err)
	}
	n.tls, n.rw = t, t
	n.secure.user.eventConnected(identityOf(t))
	n.structured, n.context = false, nil
	return nil
}

// refuseOption answers an option that comes before TLS, which is required.
func (n *negotiation) refuseOption(opt uint32) error {
	if u := n.secure.user; opt != nbdwire.OptExportName && u != nil && !n.told {
		n.told = true
		u.eventRefused(errNeedsTLS)
	}
	if opt == nbdwire.OptExportName { // it has no answer for errors
		return errNeedsTLS
	}
	return n.sendReply(opt, nbdwire.RepErrTLSReqd, []byte("start TLS first"))
}

// cipherOf returns the name of the cipher suite.
func cipherOf(t *tls.Conn) string {
	return tls.CipherSuiteName(t.ConnectionState().CipherSuite)
}
