package tlsrecord

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"hash"

	"golang.org/x/crypto/chacha20poly1305"
)

const (
	ivLen = 12
	// tagLen is the length of the authentication tag of every suite.
	tagLen = 16
)

// cipherSuite is a cipher suite of TLS 1.3 (RFC 8446, appendix B.4).
type cipherSuite struct {
	id     uint16
	keyLen int
	hash   func() hash.Hash
	aead   func(key []byte) (cipher.AEAD, error)
}

func suiteOf(id uint16) (cipherSuite, error) {
	switch id {
	case tls.TLS_AES_128_GCM_SHA256:
		return cipherSuite{id, 16, sha256.New, newGCM}, nil
	case tls.TLS_AES_256_GCM_SHA384:
		return cipherSuite{id, 32, sha512.New384, newGCM}, nil
	case tls.TLS_CHACHA20_POLY1305_SHA256:
		return cipherSuite{id, chacha20poly1305.KeySize, sha256.New, chacha20poly1305.New}, nil
	}
	return cipherSuite{}, fmt.Errorf("cipher suite %#04x is not of TLS 1.3", id)
}

// newGCM returns AES-GCM for a key of 16 or 32 bytes.
func newGCM(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// expandLabel is HKDF-Expand-Label of RFC 8446, section 7.1, with an empty context.
func (s *cipherSuite) expandLabel(secret []byte, label string, n int) ([]byte, error) {
	const prefix = "tls13 "
	info := binary.BigEndian.AppendUint16(nil, uint16(n))
	info = append(info, byte(len(prefix)+len(label)))
	info = append(info, prefix...)
	info = append(info, label...)
	info = append(info, 0)
	return hkdf.Expand(s.hash, secret, string(info), n)
}

// Keys are the state of one direction at the moment when the handshake hands it
// over.
type Keys struct {
	Suite  uint16 // as in package crypto/tls
	Secret []byte // the traffic secret
	Seq    uint64 // records protected with it so far
}

// recordState is the state that sealing and opening have in common.
type recordState struct {
	suite  cipherSuite
	secret []byte
	aead   cipher.AEAD
	iv     [ivLen]byte
	nonce  [ivLen]byte
	seq    uint64 // of the next record
}

func (d *recordState) init(k Keys) (err error) {
	if d.suite, err = suiteOf(k.Suite); err != nil {
		return err
	}
	if err = d.setSecret(k.Secret); err != nil {
		return err
	}
	d.seq = k.Seq
	return nil
}

// setSecret derives key and IV from a traffic secret and starts at record 0.
func (d *recordState) setSecret(secret []byte) error {
	key, err := d.suite.expandLabel(secret, "key", d.suite.keyLen)
	if err != nil {
		return fmt.Errorf("derive traffic key: %w", err)
	}
	iv, err := d.suite.expandLabel(secret, "iv", ivLen)
	if err != nil {
		return fmt.Errorf("derive IV: %w", err)
	}
	if d.aead, err = d.suite.aead(key); err != nil {
		return err
	}
	copy(d.iv[:], iv)
	d.secret, d.seq = secret, 0
	return nil
}

// Update replaces the traffic secret by the one that follows it (RFC 8446,
// section 7.2).
func (d *recordState) Update() error {
	next, err := d.suite.expandLabel(d.secret, "traffic upd", len(d.secret))
	if err != nil {
		return fmt.Errorf("derive next traffic secret: %w", err)
	}
	return d.setSecret(next)
}

// nextNonce returns the nonce of the next record (RFC 8446, section 5.3). It is
// valid until the next call.
func (d *recordState) nextNonce() []byte {
	d.nonce = d.iv
	low := binary.BigEndian.Uint64(d.nonce[4:])
	binary.BigEndian.PutUint64(d.nonce[4:], low^d.seq)
	return d.nonce[:]
}

// Keys returns the present state.
func (d *recordState) Keys() Keys {
	return Keys{Suite: d.suite.id, Secret: d.secret, Seq: d.seq}
}
