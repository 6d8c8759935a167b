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
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// protection is what the daemon has given by SetTLS. It never changes.
type protection struct {
	config   *tls.Config
	required bool
	plain    []string // listeners that serve clients without TLS all the same
	rules    *access.Rules
	revoked  revoked
}

// security is how the connections of one listener begin; nil: TLS is off.
type security struct {
	by       *protection
	required bool // no option is answered before TLS
	user     *user
}

// SetTLS gives the means of TLS. They are used for connections that begin from
// now on; the others are judged by them, and go on if they may.
func (f *frontend) SetTLS(_ context.Context, t plugin.TLS) error {
	p, err := newProtection(&t)
	if err != nil {
		return fmt.Errorf("%w: %w", err, blk.EINVAL)
	}
	f.protection.Store(p)
	f.judge()
	f.log().Info("TLS is set", "required", p.required, "client_ca", p.config.ClientCAs != nil, "rules", p.rules.Len())
	return nil
}

// newProtection needs TLS 1.3. There are no session tickets: a client shows its
// certificate on each connection, to the CA of the day.
func newProtection(t *plugin.TLS) (*protection, error) {
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
	var list revoked
	if len(t.ClientCRL) > 0 {
		list, err = parseRevoked(t.ClientCRL, t.ClientCA)
		if err != nil {
			return nil, fmt.Errorf("revoked certificates: %w", err)
		}
		cfg.VerifyConnection = func(s tls.ConnectionState) error { return list.check(s.VerifiedChains, time.Now()) }
	}
	rules, err := plugin.ParseRules(t.Rules)
	if err != nil {
		return nil, err
	}
	return &protection{config: cfg, required: t.Required, plain: slices.Clone(t.Plain), rules: rules, revoked: list}, nil
}

// securityOf returns the security of a listener.
func (f *frontend) securityOf(listener string) *security {
	p := f.protection.Load()
	if p == nil {
		return nil
	}
	return &security{by: p, required: p.requires(listener)}
}

// requires reports whether a listener serves no client without TLS.
func (p *protection) requires(listener string) bool {
	return p.required && !slices.Contains(p.plain, listener)
}

// insists reports whether nothing is served before TLS.
func (s *security) insists() bool { return s != nil && s.required }

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
		return n.reply(optStartTLS, repErrUnsup, nil)
	case n.tls != nil || len(data) != 0:
		return n.reply(optStartTLS, repErrInvalid, nil)
	}
	conn, ok := n.rw.(net.Conn)
	if !ok {
		return errNoSocket
	}
	if err := n.reply(optStartTLS, repAck, nil); err != nil {
		return err
	}
	t := tls.Server(conn, n.secure.by.config)
	if err := t.Handshake(); err != nil {
		n.secure.user.claims(t, err)
		return fmt.Errorf("%w: %w", errNoTLS, err)
	}
	n.tls, n.rw = t, t
	n.secure.user.connects(identityOf(t))
	n.structured, n.context = false, nil
	return nil
}

// refuse answers an option that comes before TLS, which is required.
func (n *negotiation) refuse(opt uint32) error {
	if u := n.secure.user; opt != optExportName && u != nil && !n.told {
		n.told = true
		u.refused(errNeedsTLS)
	}
	if opt == optExportName { // it has no answer for errors
		return errNeedsTLS
	}
	return n.reply(opt, repErrTLSReqd, []byte("start TLS first"))
}

// cipherOf returns the name of the cipher suite.
func cipherOf(t *tls.Conn) string {
	return tls.CipherSuiteName(t.ConnectionState().CipherSuite)
}
