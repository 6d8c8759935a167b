package verbs

// Authenticator has the keys of an end, with which it proves its identity where
// the fabric proves none. tlsauth has one. All methods may be called by any
// goroutine.
type Authenticator interface {
	// ClientProver returns the client's end of one exchange of proofs. name is what
	// the server's certificate must be for; empty: a default, or else addr, the
	// server's address. A shared key proves that the server has it, whatever its name.
	ClientProver(name, addr string) (Prover, error)
	// ServerProver returns the server's end for a client with a shared key, or with
	// a certificate if key is nil.
	ServerProver(key *KeyID) (Prover, error)
}

// KeyID names a shared key without telling its identity.
type KeyID [16]byte

// Role is the end that proves its identity.
type Role string

const (
	ClientRole Role = "client"
	ServerRole Role = "server"
)

// Prover is one end of one exchange of proofs. What is proved is a text that both
// ends know; it must be fresh, and different for the two roles.
type Prover interface {
	// Key names the shared key; nil: the ends have certificates.
	Key() *KeyID
	// Certs returns the certificates of this end in DER, one behind the other, its
	// own first. A shared key has none.
	Certs() []byte
	// Prove returns the proof of this end for text.
	Prove(text []byte) ([]byte, error)
	// Verify checks the proof of the other end, whose certificates are as from
	// Certs, and returns its identity. The chain of its error has an Unproved, if the
	// other end claims an identity. A Prover with a method Claimed() string returns
	// that of the client before its proof.
	Verify(certs, text, proof []byte) (Security, error)
}

// Unproved is the error of a proof that is refused. Its text is that of Err.
type Unproved struct {
	Claimed string // identity that the other end claims to have; for records only
	Err     error
}

func (e Unproved) Error() string { return e.Err.Error() }
func (e Unproved) Unwrap() error { return e.Err }
