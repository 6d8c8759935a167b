package rtrswire

import (
	"errors"
	"fmt"
)

// The messages of a challenge, an extension between our own ends: HELLO and PROOF
// of the client, CHALLENGE and REFUSAL of the server, by SEND on connection 0
// before INFO_REQ. See docs/extend/protocol/rtrs.md.

const (
	// ChallengeVersion is that of the messages.
	ChallengeVersion = 1
	// NonceLen is the length of the random bytes of each end.
	NonceLen = 32
	// KeyIDLen is the length of the hash that names a shared key.
	KeyIDLen = 16
	// HelloLen is the length of a HELLO.
	HelloLen = 312
	// EvidenceHdrLen is the length of a CHALLENGE or a PROOF without its
	// certificates and its proof.
	EvidenceHdrLen = 48
	// MaxEvidenceLen bounds a CHALLENGE or a PROOF.
	MaxEvidenceLen = 16384
	// RefusalLen is the length of a REFUSAL.
	RefusalLen = 8

	helloName = 56 // offset of the name
)

// ProofMethod is the way in which both ends prove their identities.
type ProofMethod uint16

const (
	// ProofKey is HMAC-SHA-256 with a shared key.
	ProofKey ProofMethod = 1
	// ProofCert is a signature of the key of a certificate.
	ProofCert ProofMethod = 2
)

// Hello begins a challenge.
type Hello []byte

// HelloFields are the contents of a Hello.
type HelloFields struct {
	Method ProofMethod
	Nonce  [NonceLen]byte
	KeyID  [KeyIDLen]byte // names the shared key; zero with ProofCert
	Name   string         // of the session, as in the INFO_REQ that follows
}

// Put writes f over the first HelloLen bytes of m.
func (m Hello) Put(f *HelloFields) {
	clear(m[:HelloLen])
	le.PutUint16(m, uint16(MsgHello))
	le.PutUint16(m[2:], ChallengeVersion)
	le.PutUint16(m[4:], uint16(f.Method))
	copy(m[8:], f.Nonce[:])
	copy(m[40:], f.KeyID[:])
	copy(m[helloName:helloName+MaxNameLen], f.Name)
}

// Check refuses a message that is no HELLO.
func (m Hello) Check() error {
	switch {
	case len(m) != HelloLen:
		return fmt.Errorf("HELLO of %d bytes, want %d", len(m), HelloLen)
	case MsgType(le.Uint16(m)) != MsgHello:
		return fmt.Errorf("HELLO with type %d", le.Uint16(m))
	case le.Uint16(m[2:]) != ChallengeVersion:
		return fmt.Errorf("HELLO of version %d, want %d", le.Uint16(m[2:]), ChallengeVersion)
	case !m.proofMethod().isKnown():
		return fmt.Errorf("HELLO with method %d", m.proofMethod())
	case m[helloName+nameField-1] != 0:
		return errors.New("HELLO with a name that does not end")
	}
	return nil
}

func (m Hello) proofMethod() ProofMethod { return ProofMethod(le.Uint16(m[4:])) }

func (p ProofMethod) isKnown() bool { return p == ProofKey || p == ProofCert }

// Fields returns the contents.
func (m Hello) Fields() HelloFields {
	f := HelloFields{Method: m.proofMethod(), Nonce: [NonceLen]byte(m[8:]), KeyID: [KeyIDLen]byte(m[40:])}
	f.Name = cString(m[helloName : helloName+nameField])
	return f
}

// Evidence is a CHALLENGE or a PROOF: the certificates of its sender, and its
// proof.
type Evidence []byte

// EvidenceFields are the contents of an Evidence. The slices of Evidence.Fields
// share its memory.
type EvidenceFields struct {
	Type   MsgType // MsgChallenge or MsgProof
	Method ProofMethod
	Nonce  [NonceLen]byte // of the server; zero in a PROOF
	Certs  []byte         // DER, one behind the other, the sender's first; none with ProofKey
	Proof  []byte         // the rest of the message, not empty
}

// Len returns the length of the message.
func (f *EvidenceFields) Len() int { return EvidenceHdrLen + len(f.Certs) + len(f.Proof) }

// Put writes f over the first f.Len() bytes of m.
func (m Evidence) Put(f *EvidenceFields) {
	clear(m[:EvidenceHdrLen])
	le.PutUint16(m, uint16(f.Type))
	le.PutUint16(m[2:], ChallengeVersion)
	le.PutUint16(m[4:], uint16(f.Method))
	le.PutUint32(m[8:], uint32(len(f.Certs)))
	copy(m[16:], f.Nonce[:])
	copy(m[EvidenceHdrLen:], f.Certs)
	copy(m[EvidenceHdrLen+len(f.Certs):], f.Proof)
}

// Check refuses a message that is not an Evidence of type t, or is cut off.
func (m Evidence) Check(t MsgType) error {
	switch {
	case len(m) < EvidenceHdrLen || len(m) > MaxEvidenceLen:
		return fmt.Errorf("message of %d bytes, want %d to %d", len(m), EvidenceHdrLen, MaxEvidenceLen)
	case MsgType(le.Uint16(m)) != t:
		return fmt.Errorf("message of type %d, want %d", le.Uint16(m), t)
	case le.Uint16(m[2:]) != ChallengeVersion:
		return fmt.Errorf("message of version %d, want %d", le.Uint16(m[2:]), ChallengeVersion)
	case !m.proofMethod().isKnown():
		return fmt.Errorf("message with method %d", m.proofMethod())
	case uint64(len(m)) <= EvidenceHdrLen+uint64(m.certsLen()):
		return fmt.Errorf("message of %d bytes with certificates of %d and no proof", len(m), m.certsLen())
	}
	return nil
}

func (m Evidence) proofMethod() ProofMethod { return ProofMethod(le.Uint16(m[4:])) }
func (m Evidence) certsLen() uint32         { return le.Uint32(m[8:]) }

// Claim returns the part of the message before the proof, which the proof covers.
func (m Evidence) Claim() []byte { return m[:EvidenceHdrLen+int(m.certsLen())] }

// Fields returns the contents.
func (m Evidence) Fields() EvidenceFields {
	claim := len(m.Claim())
	return EvidenceFields{
		Type: MsgType(le.Uint16(m)), Method: m.proofMethod(), Nonce: [NonceLen]byte(m[16:]),
		Certs: m[EvidenceHdrLen:claim:claim], Proof: m[claim:],
	}
}

// Refusal ends a challenge. Its receiver cannot know who has sent it.
type Refusal []byte

// Put writes a REFUSAL over the first RefusalLen bytes of m. errno is positive.
func (m Refusal) Put(errno int) {
	clear(m[:RefusalLen])
	le.PutUint16(m, uint16(MsgRefusal))
	le.PutUint16(m[2:], ChallengeVersion)
	le.PutUint16(m[4:], uint16(errno))
}

// Valid reports whether m is a REFUSAL.
func (m Refusal) Valid() bool {
	return len(m) == RefusalLen && MsgType(le.Uint16(m)) == MsgRefusal && m.Errno() != 0
}

// Errno returns the reason as a positive errno.
func (m Refusal) Errno() int { return int(le.Uint16(m[4:])) }
