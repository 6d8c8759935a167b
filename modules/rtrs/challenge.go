package rtrs

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A challenge, an extension between our own ends: before the INFO exchange of a
// path, client and server prove their identities to each other with a shared key
// or with certificates. See docs/extend/protocol/rtrs.md.
//
//	client                                    server
//	newCltChallenge   -- HELLO -->            newSrvChallenge
//	answer            <-- CHALLENGE --
//	                  -- PROOF -->            verify
//
// Nothing here waits or sends. clt_challenge.go and srv_challenge.go do.

// AuthMode is what an end does about challenges.
type AuthMode uint8

const (
	AuthOff     AuthMode = iota // no challenge
	AuthAllow                   // one if the other end takes part
	AuthRequire                 // paths without proved identities are refused
)

var authModes = [...]string{"off", "allow", "require"}

// String returns the word that ParseAuthMode takes.
func (m AuthMode) String() string {
	if int(m) < len(authModes) {
		return authModes[m]
	}
	return fmt.Sprintf("mode %d", uint8(m))
}

// ParseAuthMode parses "off", "allow" and "require".
func ParseAuthMode(s string) (AuthMode, error) {
	for i, name := range authModes {
		if s == name {
			return AuthMode(i), nil
		}
	}
	return 0, fmt.Errorf("%q: use off, allow or require: %w", s, syscall.EINVAL)
}

// checkAuth returns an error if mode cannot work with a.
func checkAuth(mode AuthMode, a verbs.Authenticator) error {
	if int(mode) >= len(authModes) || mode != AuthOff && a == nil {
		return fmt.Errorf("proofs of identity (%v) without keys: %w", mode, syscall.EINVAL)
	}
	return nil
}

// MaxProofCerts is the room for the certificates of an end, in bytes of DER.
const MaxProofCerts = rtrswire.MaxEvidenceLen - rtrswire.EvidenceHdrLen - maxSignature

// maxSignature is more than a signature of any key has, in bytes.
const maxSignature = 2048

// challengeBinding is the start of the path that a challenge belongs to: what both ends
// know of its connections. A proof for one path is worth nothing on another one.
type challengeBinding struct {
	requests [][]byte // private data of the connections, by cid
	response []byte   // that of the answer to connection 0
}

// proofText returns what the end with that role proves: that it has the key, and has
// seen these messages on this path.
func (b *challengeBinding) proofText(role verbs.Role, messages ...[]byte) []byte {
	h := sha256.New()
	put := func(part []byte) {
		var n [4]byte
		binary.LittleEndian.PutUint32(n[:], uint32(len(part)))
		h.Write(n[:])
		h.Write(part)
	}
	for _, r := range b.requests {
		put(r[2:rtrswire.ConnReqLen]) // some fabrics use the first two bytes
	}
	put(b.response[:rtrswire.ConnRspLen])
	for _, m := range messages {
		put(m)
	}
	return h.Sum([]byte("rnbd rtrs challenge v1, " + string(role) + "\x00"))
}

// cltChallenge is the client's part.
type cltChallenge struct {
	prover verbs.Prover
	bound  *challengeBinding
	method rtrswire.ProofMethod
	hello  []byte
}

type nonce = [rtrswire.NonceLen]byte

func newNonce() (n nonce) {
	rand.Read(n[:])
	return n
}

// newCltChallenge begins a challenge for a path of the session. Its hello is to
// be sent.
func newCltChallenge(prover verbs.Prover, bound *challengeBinding, session string, n nonce) *cltChallenge {
	f := rtrswire.HelloFields{Method: rtrswire.ProofCert, Nonce: n, Name: session}
	if id := prover.Key(); id != nil {
		f.Method, f.KeyID = rtrswire.ProofKey, *id
	}
	c := &cltChallenge{prover: prover, bound: bound, method: f.Method, hello: make([]byte, rtrswire.HelloLen)}
	rtrswire.Hello(c.hello).Put(&f)
	return c
}

// answerChallenge checks the CHALLENGE and returns the PROOF to be sent, and the identity
// of the server.
func (c *cltChallenge) answerChallenge(m rtrswire.Evidence) (proof []byte, server verbs.Security, err error) {
	if err := m.Check(rtrswire.MsgChallenge); err != nil {
		return nil, server, protocolErrorf("CHALLENGE: %v", err)
	}
	f := m.Fields()
	if f.Method != c.method {
		return nil, server, protocolErrorf("CHALLENGE with method %d, want %d", f.Method, c.method)
	}
	server, err = c.prover.Verify(f.Certs, c.bound.proofText(verbs.ServerRole, c.hello, m.Claim()), f.Proof)
	if err != nil {
		return nil, verbs.Security{}, fmt.Errorf("the server's identity is not proved: %w: %w", err, syscall.EACCES)
	}
	proof, err = evidenceMessage(c.prover, &rtrswire.EvidenceFields{Type: rtrswire.MsgProof, Method: c.method}, func(claim []byte) []byte {
		return c.bound.proofText(verbs.ClientRole, c.hello, m, claim)
	})
	if err != nil {
		return nil, verbs.Security{}, err
	}
	return proof, server, nil
}

// srvChallenge is the server's part.
type srvChallenge struct {
	prover    verbs.Prover
	bound     *challengeBinding
	method    rtrswire.ProofMethod
	session   string // name that the client gives it
	hello     []byte
	challenge []byte
}

// newSrvChallenge takes a HELLO. The challenge of the result is to be sent.
func newSrvChallenge(a verbs.Authenticator, bound *challengeBinding, hello rtrswire.Hello, n nonce) (*srvChallenge, error) {
	if err := hello.Check(); err != nil {
		return nil, protocolErrorf("%v", err)
	}
	f := hello.Fields()
	var key *verbs.KeyID
	if f.Method == rtrswire.ProofKey {
		key = (*verbs.KeyID)(&f.KeyID)
	}
	prover, err := a.ServerProver(key)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, syscall.EACCES)
	}
	c := &srvChallenge{prover: prover, bound: bound, method: f.Method, session: f.Name, hello: hello}
	c.challenge, err = evidenceMessage(prover, &rtrswire.EvidenceFields{Type: rtrswire.MsgChallenge, Method: f.Method, Nonce: n}, func(claim []byte) []byte {
		return bound.proofText(verbs.ServerRole, hello, claim)
	})
	return c, err
}

// verifyProof checks the PROOF and returns the identity of the client.
func (c *srvChallenge) verifyProof(m rtrswire.Evidence) (verbs.Security, error) {
	if err := m.Check(rtrswire.MsgProof); err != nil {
		return verbs.Security{}, protocolErrorf("PROOF: %v", err)
	}
	f := m.Fields()
	if f.Method != c.method {
		return verbs.Security{}, protocolErrorf("PROOF with method %d, want %d", f.Method, c.method)
	}
	client, err := c.prover.Verify(f.Certs, c.bound.proofText(verbs.ClientRole, c.hello, c.challenge, m.Claim()), f.Proof)
	if err != nil {
		return verbs.Security{}, fmt.Errorf("the client's identity is not proved: %w: %w", err, syscall.EACCES)
	}
	return client, nil
}

// evidenceMessage makes a message with the proof of this end. text returns the text to
// prove for the part of the message before the proof.
func evidenceMessage(p verbs.Prover, f *rtrswire.EvidenceFields, text func(claim []byte) []byte) ([]byte, error) {
	f.Certs = p.Certs()
	if len(f.Certs) > MaxProofCerts {
		return nil, fmt.Errorf("the certificates of this end have %d bytes, at most %d fit: %w", len(f.Certs), MaxProofCerts, syscall.EMSGSIZE)
	}
	m := make(rtrswire.Evidence, rtrswire.MaxEvidenceLen)
	m.Put(f)
	var err error
	if f.Proof, err = p.Prove(text(m[:f.Len()])); err != nil {
		return nil, fmt.Errorf("prove the identity of this end: %w", err)
	}
	if f.Len() > len(m) {
		return nil, fmt.Errorf("a proof of %d bytes does not fit: %w", len(f.Proof), syscall.EMSGSIZE)
	}
	m.Put(f)
	return m[:f.Len()], nil
}
