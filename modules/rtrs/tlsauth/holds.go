package tlsauth

import (
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// heldProof is a verbs.Proof: a shared key, or certificates.
type heldProof struct {
	auth  *Auth
	psk   string              // identity of the shared key; empty: certificates
	chain []*x509.Certificate // the peer's first
	usage x509.ExtKeyUsage
}

var _ verbs.Proof = (*heldProof)(nil)

// Holds implements verbs.Proof, by the files as they were read last. A shared key holds
// as long as its identity has one, so that keys can be changed.
func (p *heldProof) Holds() error {
	p.auth.mu.Lock()
	cred := p.auth.now
	p.auth.mu.Unlock()
	if p.psk == "" {
		return cred.checkPeer(p.chain, p.usage, time.Now())
	}
	if cred.psks[pskLabel(p.psk)] == nil {
		return fmt.Errorf("the identity %q is not in the file of shared keys any more", "psk:"+p.psk)
	}
	return nil
}

// checkPeer returns an error if the certificates of a peer that was let in would not do any
// more: a CA is not known any more or has expired, or one of them is revoked. It is no
// reason that the peer's own certificate, or a list, has run out since.
func (c *credentials) checkPeer(peer []*x509.Certificate, usage x509.ExtKeyUsage, now time.Time) error {
	if c.roots == nil {
		return errors.New("there are shared keys only now, and the peer has a certificate")
	}
	if peer[0].NotAfter.Before(now) {
		now = peer[0].NotAfter
	}
	chains, err := c.verifiedChains(peer, usage, now)
	if err != nil {
		return err
	}
	for _, chain := range chains {
		if err := c.checkRevoked(chain); err != nil {
			return err
		}
	}
	return nil
}

// Reads is how often the files were read. It changes when other ones are in use.
func (a *Auth) Reads() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.reads
}
