package tlsauth

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// protocol is the only application protocol (ALPN) of these connections.
const protocol = "rnbd"

// Config is the identity of this end, and the rules for accepting a peer.
type Config struct {
	Files
	// Name is the identity that a client expects of its servers, if a
	// connection does not name one: a DNS name, an IP address, or a SPIFFE ID.
	// Empty: the address that it connects to.
	Name   string
	Logger *slog.Logger // default slog.Default()
}

// Auth makes handshakes. All methods may be called by any goroutine.
type Auth struct {
	cfg  Config
	load func() (*credentials, error) // reads the files

	mu    sync.Mutex
	now   *credentials
	stamp []fileStamp // of the files that were looked at last
	reads uint64      // how often they were read
}

// fileStamp says whether a file has changed.
type fileStamp struct {
	size  int64
	mtime time.Time
	info  os.FileInfo
}

// New reads the files.
func New(cfg Config) (*Auth, error) {
	return openAuth(cfg, cfg.Files.loadCredentials)
}

func openAuth(cfg Config, load func() (*credentials, error)) (*Auth, error) {
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	a := &Auth{cfg: cfg, load: load, stamp: fileStamps(&cfg.Files)}
	var err error
	if a.now, err = load(); err != nil {
		return nil, err
	}
	a.warnExpiry(a.now)
	return a, nil
}

func (a *Auth) warnExpiry(c *credentials) {
	for _, w := range c.warnings {
		a.cfg.Logger.Warn("TLS: " + w)
	}
}

func fileStamps(f *Files) (list []fileStamp) {
	for _, name := range f.allPaths() {
		var s fileStamp
		if name != "" {
			if st, err := os.Stat(name); err == nil {
				s = fileStamp{st.Size(), st.ModTime(), st}
			}
		}
		list = append(list, s)
	}
	return list
}

func (a fileStamp) sameAs(b fileStamp) bool {
	return a.size == b.size && a.mtime.Equal(b.mtime) && (a.info == nil) == (b.info == nil) &&
		(a.info == nil || os.SameFile(a.info, b.info))
}

// Reload reads the files again, if they have changed or force is set. After an
// error the files that were read before stay in use. Connections that exist are
// not touched, see verbs.Proof; none of their tickets is accepted any more.
func (a *Auth) Reload(force bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	next := fileStamps(&a.cfg.Files)
	changed := force
	for i := range next {
		changed = changed || !next[i].sameAs(a.stamp[i])
	}
	if !changed {
		return nil
	}
	a.stamp = next
	c, err := a.load()
	if err != nil {
		a.cfg.Logger.Error("TLS: the files have changed and cannot be used, the earlier ones stay in use", "err", err)
		return err
	}
	a.now = c
	a.reads++
	a.cfg.Logger.Info("TLS: the files are read again")
	a.warnExpiry(c)
	return nil
}

// currentCredentials returns the credentials after a look at the files.
func (a *Auth) currentCredentials() *credentials {
	_ = a.Reload(false) // it has logged its error
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.now
}

// Server is the server's part of a handshake. conn has a deadline and belongs to
// the result. It may implement Turns.
func (a *Auth) Server(conn net.Conn) (*Conn, error) {
	cred := a.currentCredentials()
	c := newConn(conn, false)
	c.proof.auth = a
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			return c.serverConfig(cred, hello.ServerName)
		},
	}
	return c.runHandshake(tls.Server(c.tap, cfg))
}

// serverConfig is the configuration for a client that asks for the server name.
func (c *Conn) serverConfig(cred *credentials, name string) (*tls.Config, error) {
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{protocol}, KeyLogWriter: &c.tap.secrets,
		ClientAuth: tls.RequireAnyClientCert,
	}
	if p := cred.psks[name]; p != nil {
		c.claim = "psk:" + p.name
		cfg.Certificates = []tls.Certificate{p.server}
		cfg.SetSessionTicketKeys([][32]byte{cred.pskKeys})
		cfg.VerifyConnection = func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 0 || !holdsKey(&p.client, s.PeerCertificates[0]) {
				return errWrongPSK
			}
			c.peer, c.proof.psk = "psk:"+p.name, p.name
			return nil
		}
		return cfg, nil
	}
	if c.claim = keyOf(name); cred.cert == nil {
		return nil, fmt.Errorf("the client asks for %q, and this server has shared keys only and none of that name", name[:min(len(name), maxIdentity)])
	}
	cfg.Certificates = []tls.Certificate{*cred.cert}
	cfg.ClientCAs = cred.roots
	cfg.SetSessionTicketKeys([][32]byte{cred.tickets})
	cfg.VerifyConnection = func(s tls.ConnectionState) error {
		return c.verifyPeer(cred, s.PeerCertificates, x509.ExtKeyUsageClientAuth)
	}
	return cfg, nil
}

var errWrongPSK = errors.New("the peer does not hold the shared key")

// verifyPeer checks the certificates of the peer and notes its identity.
func (c *Conn) verifyPeer(cred *credentials, peer []*x509.Certificate, usage x509.ExtKeyUsage) (err error) {
	if err := cred.verifyChain(peer, usage); err != nil {
		return err
	}
	c.expires = peer[0].NotAfter
	c.proof.chain, c.proof.usage = peer, usage
	c.peer, err = identityOf(peer[0])
	return err
}

// Client is the client's part of a handshake. conn has a deadline and belongs
// to the result. name is the expected identity of the server, as in Config;
// empty: Config.Name, else the remote address of conn.
func (a *Auth) Client(conn net.Conn, name string) (*Conn, error) {
	cred := a.currentCredentials()
	c := newConn(conn, true)
	c.proof.auth = a
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{protocol}, KeyLogWriter: &c.tap.secrets,
		ClientSessionCache: cred.sessions,
		InsecureSkipVerify: true, // VerifyConnection verifies, also names that crypto/tls does not know
	}
	if cred.cert == nil {
		if len(cred.psks) != 1 {
			return nil, fmt.Errorf("the file of shared keys has %d identities: a client needs exactly one", len(cred.psks))
		}
		for _, p := range cred.psks {
			cfg.ServerName = p.label
			cfg.Certificates = []tls.Certificate{p.client}
			cfg.VerifyConnection = func(s tls.ConnectionState) error {
				if len(s.PeerCertificates) == 0 || !holdsKey(&p.server, s.PeerCertificates[0]) {
					return errWrongPSK
				}
				c.peer, c.proof.psk = "psk:"+p.name, p.name
				return nil
			}
		}
		return c.runHandshake(tls.Client(c.tap, cfg))
	}
	if name = cmp.Or(name, a.cfg.Name); name == "" {
		host, err := netip.ParseAddrPort(conn.RemoteAddr().String())
		if err != nil {
			return nil, fmt.Errorf("the name of the server is not known: %w", err)
		}
		name = host.Addr().Unmap().WithZone("").String()
	}
	cfg.ServerName = name
	if isSPIFFE(name) {
		cfg.ServerName = spiffeHost
	}
	cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cred.cert, nil }
	cfg.VerifyConnection = func(s tls.ConnectionState) error {
		if err := c.verifyPeer(cred, s.PeerCertificates, x509.ExtKeyUsageServerAuth); err != nil {
			return err
		}
		return hasName(s.PeerCertificates[0], name)
	}
	return c.runHandshake(tls.Client(c.tap, cfg))
}

// spiffeHost is the server name that is sent if a SPIFFE ID is expected.
const spiffeHost = "spiffe.invalid"

func isSPIFFE(name string) bool { return strings.HasPrefix(name, "spiffe://") }

// hasName returns an error if the certificate is not for name.
func hasName(cert *x509.Certificate, name string) error {
	if !isSPIFFE(name) {
		return cert.VerifyHostname(name)
	}
	id, err := identityOf(cert)
	if err == nil && id != name {
		err = fmt.Errorf("the certificate is for %s, not for %s", id, name)
	}
	return err
}

// claimedIdentity returns the identity that a peer claims, whose handshake has failed. peer are
// its certificates.
func (c *Conn) claimedIdentity(peer []*x509.Certificate) string {
	if c.claim != "" || len(peer) == 0 {
		return c.claim
	}
	id, _ := identityOf(peer[0])
	return id
}

// unprovedError is err, with the identity that the peer claims if that is known.
func unprovedError(err error, claimed string) error {
	if claimed == "" {
		return err
	}
	return verbs.Unproved{Claimed: claimed, Err: err}
}

// runHandshake makes the handshake. The chain of its error has a verbs.Unproved if the
// peer claims an identity. Whatever fails, the caller closes the socket.
func (c *Conn) runHandshake(t *tls.Conn) (*Conn, error) {
	c.Conn = t
	err := t.Handshake()
	c.tap.giveTurn()
	c.tap.turns = nil
	s := t.ConnectionState()
	if err != nil {
		return nil, unprovedError(fmt.Errorf("TLS handshake: %w", err), c.claimedIdentity(s.PeerCertificates))
	}
	if s.Version != tls.VersionTLS13 || c.peer == "" {
		return nil, errors.New("TLS handshake: the peer is not known")
	}
	c.suite = s.CipherSuite
	c.security = verbs.Security{
		Protocol: tls.VersionName(s.Version), Cipher: tls.CipherSuiteName(s.CipherSuite),
		Peer: c.peer, Expires: c.expires, Resumed: s.DidResume, Proof: c.proof,
	}
	return c, nil
}
