package tlsauth

import (
	"bufio"
	"bytes"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"fmt"
	"math/big"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// minPSK is the least length of a shared key in bytes. Whoever connects can try
// guesses against the public key that the server shows, so it must be random.
const minPSK = 16

// pskIdentity is one line of a file of shared keys.
type pskIdentity struct {
	name           string
	label          string          // the server name that a client asks for
	server, client tls.Certificate // the two derived pairs

	proveServer, proveClient []byte // derived keys of proofs without TLS
}

// NewPSK returns a line for a file of shared keys: identity, colon, 32 random
// bytes in hexadecimal, newline.
func NewPSK(identity string) (string, error) {
	if err := checkPSKName(identity); err != nil {
		return "", err
	}
	var key [32]byte
	rand.Read(key[:])
	return identity + ":" + hex.EncodeToString(key[:]) + "\n", nil
}

func checkPSKName(name string) error {
	if strings.Contains(name, ":") {
		return fmt.Errorf("identity %q has a colon", name)
	}
	return checkIdentity(name)
}

// parsePSKs reads a file of shared keys: one IDENTITY:HEX a line, empty lines,
// and comments that begin with #.
func parsePSKs(b []byte) (list []*pskIdentity, err error) {
	seen := map[string]bool{}
	in := bufio.NewScanner(bytes.NewReader(b))
	for n := 1; in.Scan(); n++ {
		line := strings.TrimSpace(in.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, digits, _ := strings.Cut(line, ":")
		key, err := hex.DecodeString(digits)
		switch {
		case err != nil: // the error would show a part of the key
			return nil, fmt.Errorf("line %d: not IDENTITY:HEX; make one with \"rnbd psk new IDENTITY\"", n)
		case len(key) < minPSK:
			return nil, fmt.Errorf("line %d: the key has %d bytes, at least %d", n, len(key), minPSK)
		case seen[name]:
			return nil, fmt.Errorf("line %d: identity %q has a key already", n, name)
		}
		if err := checkPSKName(name); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		p, err := newPSKIdentity(name, key)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		seen[name] = true
		list = append(list, p)
	}
	if err := in.Err(); err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("no key; make one with \"rnbd psk new IDENTITY\"")
	}
	return list, nil
}

func newPSKIdentity(name string, key []byte) (p *pskIdentity, err error) {
	p = &pskIdentity{name: name, label: pskLabel(name)}
	if p.server, err = deriveKeyPair(name, "server", key); err != nil {
		return nil, err
	}
	if p.client, err = deriveKeyPair(name, "client", key); err != nil {
		return nil, err
	}
	if p.proveServer, err = proofKey(name, verbs.ServerRole, key); err != nil {
		return nil, err
	}
	p.proveClient, err = proofKey(name, verbs.ClientRole, key)
	return p, err
}

// pskNameLabel begins the text whose hash names a shared key.
const pskNameLabel = "rnbd tls psk name\x00"

// pskLabel returns the server name by which a client names its key. It is sent
// in the clear, so it is a hash of the identity.
func pskLabel(name string) string {
	sum := sha256.Sum256([]byte(pskNameLabel + name))
	return "psk-" + hex.EncodeToString(sum[:16]) + ".invalid"
}

// keyOf returns "key " and the hash of a label, empty for another server name.
func keyOf(name string) string {
	digits, ok := strings.CutPrefix(name, "psk-")
	digits, end := strings.CutSuffix(digits, ".invalid")
	if b, err := hex.DecodeString(digits); !ok || !end || err != nil || len(b) != 16 {
		return ""
	}
	return "key " + digits
}

// deriveKeyPair makes the key pair of one role, and a certificate around it.
func deriveKeyPair(name, role string, key []byte) (tls.Certificate, error) {
	seed, err := hkdf.Key(sha256.New, key, []byte("rnbd tls psk v1"), role+"\x00"+name, ed25519.SeedSize)
	if err != nil {
		return tls.Certificate{}, err
	}
	private := ed25519.NewKeyFromSeed(seed)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Unix(0, 0),
		NotAfter:     time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		return tls.Certificate{}, err
	}
	leaf, err := x509.ParseCertificate(der)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private, Leaf: leaf}, err
}

// holdsKey reports whether the certificate of a peer has the public key of pair.
func holdsKey(pair *tls.Certificate, peer *x509.Certificate) bool {
	key, ok := peer.PublicKey.(ed25519.PublicKey)
	return ok && key.Equal(pair.Leaf.PublicKey)
}
