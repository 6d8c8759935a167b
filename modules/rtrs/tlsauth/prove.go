package tlsauth

import (
	"bytes"
	"cmp"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Proofs of identity without TLS: an end signs a text that both ends know, or
// computes its HMAC with a shared key. What is in the text is the caller's
// matter; it must be fresh, and different for the two ends.

// credentialProver is a verbs.Prover. It uses the credentials as they were when it was made.
type credentialProver struct {
	auth *Auth
	cred *credentials
	role verbs.Role
	psk  *pskIdentity // nil: certificates
	name string       // that a client expects of the server's certificate
}

var _ verbs.Authenticator = (*Auth)(nil)

// ClientProver implements verbs.Authenticator. The default name is Config.Name.
func (a *Auth) ClientProver(name, addr string) (verbs.Prover, error) {
	cred := a.currentCredentials()
	if cred.cert != nil {
		return &credentialProver{auth: a, cred: cred, role: verbs.ClientRole, name: cmp.Or(name, a.cfg.Name, addr)}, nil
	}
	if len(cred.psks) != 1 {
		return nil, fmt.Errorf("the file of shared keys has %d identities: a client needs exactly one", len(cred.psks))
	}
	p := &credentialProver{auth: a, cred: cred, role: verbs.ClientRole}
	for _, p.psk = range cred.psks {
	}
	return p, nil
}

// ServerProver implements verbs.Authenticator.
func (a *Auth) ServerProver(key *verbs.KeyID) (verbs.Prover, error) {
	cred := a.currentCredentials()
	switch {
	case key == nil && cred.cert == nil:
		return nil, errors.New("the client has a certificate, and this server has shared keys only")
	case key == nil:
		return &credentialProver{auth: a, cred: cred, role: verbs.ServerRole}, nil
	}
	p := cred.psks["psk-"+hex.EncodeToString(key[:])+".invalid"]
	if p == nil {
		return nil, errors.New("the client has a shared key that is not in this server's file")
	}
	return &credentialProver{auth: a, cred: cred, role: verbs.ServerRole, psk: p}, nil
}

func (p *credentialProver) Key() *verbs.KeyID {
	if p.psk == nil {
		return nil
	}
	sum := sha256.Sum256([]byte(pskNameLabel + p.psk.name))
	return (*verbs.KeyID)(sum[:16])
}

// Claimed returns the identity that the other end of a shared key claims; empty:
// the certificates of the other end say it.
func (p *credentialProver) Claimed() string {
	if p.psk == nil {
		return ""
	}
	return "psk:" + p.psk.name
}

func (p *credentialProver) Certs() []byte {
	if p.psk != nil {
		return nil
	}
	return bytes.Join(p.cred.cert.Certificate, nil)
}

func (p *credentialProver) Prove(text []byte) ([]byte, error) {
	if p.psk != nil {
		return p.psk.proofMAC(p.role, text), nil
	}
	signer, ok := p.cred.cert.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, errors.New("the key of the certificate cannot sign")
	}
	if err := checkKeyType(signer.Public()); err != nil {
		return nil, fmt.Errorf("the certificate of this end: %w", err)
	}
	digest := sha256.Sum256(text)
	switch signer.Public().(type) {
	case ed25519.PublicKey:
		return signer.Sign(rand.Reader, text, crypto.Hash(0))
	case *rsa.PublicKey:
		return signer.Sign(rand.Reader, digest[:], pss)
	default:
		return signer.Sign(rand.Reader, digest[:], crypto.SHA256)
	}
}

func (p *credentialProver) Verify(certs, text, proof []byte) (verbs.Security, error) {
	other := verbs.ServerRole
	if p.role == verbs.ServerRole {
		other = verbs.ClientRole
	}
	if p.psk != nil {
		if len(certs) > 0 || !hmac.Equal(proof, p.psk.proofMAC(other, text)) {
			err := fmt.Errorf("the %s has not the key of %q that this end has", other, "psk:"+p.psk.name)
			return verbs.Security{}, verbs.Unproved{Claimed: "psk:" + p.psk.name, Err: err}
		}
		return verbs.Security{Protocol: ChallengeProtocol, Cipher: "HMAC-SHA-256", Peer: "psk:" + p.psk.name, Proof: &heldProof{auth: p.auth, psk: p.psk.name}}, nil
	}
	chain, err := x509.ParseCertificates(certs)
	if err != nil || len(chain) == 0 {
		return verbs.Security{}, fmt.Errorf("the certificates of the %s cannot be read: %w", other, errors.Join(err, errNoCertificate))
	}
	s, err := p.verifyChain(other, chain, text, proof)
	if claimed, bad := identityOf(chain[0]); err != nil && bad == nil {
		err = verbs.Unproved{Claimed: claimed, Err: err}
	}
	return s, err
}

// verifyChain checks the certificates of the other end, and its proof.
func (p *credentialProver) verifyChain(other verbs.Role, chain []*x509.Certificate, text, proof []byte) (verbs.Security, error) {
	usage := x509.ExtKeyUsageClientAuth
	if other == verbs.ServerRole {
		usage = x509.ExtKeyUsageServerAuth
	}
	if err := p.cred.verifyChain(chain, usage); err != nil {
		return verbs.Security{}, fmt.Errorf("the certificate of the %s: %w", other, err)
	}
	if other == verbs.ServerRole {
		if err := hasName(chain[0], p.name); err != nil {
			return verbs.Security{}, fmt.Errorf("the certificate of the server: %w", err)
		}
	}
	cipher, err := verifySignature(chain[0], text, proof)
	if err != nil {
		return verbs.Security{}, fmt.Errorf("the proof of the %s: %w", other, err)
	}
	id, err := identityOf(chain[0])
	return verbs.Security{Protocol: ChallengeProtocol, Cipher: cipher, Peer: id, Expires: chain[0].NotAfter, Proof: &heldProof{auth: p.auth, chain: chain, usage: usage}}, err
}

// ChallengeProtocol is the Security.Protocol of a connection whose ends have
// proved their identities, and that is not encrypted.
const ChallengeProtocol = "challenge"

var errNoCertificate = errors.New("there must be at least one in DER")

// pss are the parameters of signatures with RSA keys.
var pss = &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthEqualsHash, Hash: crypto.SHA256}

// minRSA is the least length of an RSA key in bits.
const minRSA = 2048

// checkKeyType refuses keys whose signatures prove nothing.
func checkKeyType(key crypto.PublicKey) error {
	switch key := key.(type) {
	case ed25519.PublicKey:
		return nil
	case *ecdsa.PublicKey:
		if key.Curve.Params().BitSize >= 256 {
			return nil
		}
		return fmt.Errorf("a curve of %d bits is too short: use P-256", key.Curve.Params().BitSize)
	case *rsa.PublicKey:
		if key.N.BitLen() >= minRSA {
			return nil
		}
		return fmt.Errorf("an RSA key of %d bits is too short: use %d", key.N.BitLen(), minRSA)
	}
	return fmt.Errorf("keys of type %T prove nothing here: use Ed25519, ECDSA or RSA", key)
}

// verifySignature checks the signature of text and returns its algorithm.
func verifySignature(cert *x509.Certificate, text, signature []byte) (algorithm string, err error) {
	if cert.KeyUsage != 0 && cert.KeyUsage&x509.KeyUsageDigitalSignature == 0 {
		return "", errors.New("the key of the certificate is not for signatures")
	}
	if err := checkKeyType(cert.PublicKey); err != nil {
		return "", err
	}
	digest := sha256.Sum256(text)
	good := false
	switch key := cert.PublicKey.(type) {
	case ed25519.PublicKey:
		algorithm, good = "Ed25519", ed25519.Verify(key, text, signature)
	case *ecdsa.PublicKey:
		algorithm, good = "ECDSA-SHA-256", ecdsa.VerifyASN1(key, digest[:], signature)
	case *rsa.PublicKey:
		algorithm, good = "RSA-PSS-SHA-256", rsa.VerifyPSS(key, crypto.SHA256, digest[:], signature, pss) == nil
	}
	if !good {
		return "", errors.New("the signature is wrong: it is of another key, or something between the ends has changed messages")
	}
	return algorithm, nil
}

// proofMAC returns the proof of a role for text.
func (p *pskIdentity) proofMAC(r verbs.Role, text []byte) []byte {
	key := p.proveClient
	if r == verbs.ServerRole {
		key = p.proveServer
	}
	h := hmac.New(sha256.New, key)
	h.Write(text)
	return h.Sum(nil)
}

// proofKey derives the key of a role's proofs.
func proofKey(name string, r verbs.Role, key []byte) ([]byte, error) {
	return hkdf.Key(sha256.New, key, []byte("rnbd rtrs challenge v1"), string(r)+"\x00"+name, sha256.Size)
}

// CheckProofs returns an error if this end's certificates cannot prove anything,
// or have more than max bytes.
func (a *Auth) CheckProofs(max int) error {
	c := a.currentCredentials().cert
	if c == nil {
		return nil
	}
	if n := len(bytes.Join(c.Certificate, nil)); n > max {
		return fmt.Errorf("%s has %d bytes of certificates, at most %d fit: leave out those that the other ends have in their CA file", a.cfg.Cert, n, max)
	}
	if err := checkKeyType(c.Leaf.PublicKey); err != nil {
		return fmt.Errorf("%s: %w", a.cfg.Cert, err)
	}
	if c.Leaf.KeyUsage != 0 && c.Leaf.KeyUsage&x509.KeyUsageDigitalSignature == 0 {
		return fmt.Errorf("%s: its key is not for signatures", a.cfg.Cert)
	}
	return nil
}
