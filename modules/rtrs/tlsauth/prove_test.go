package tlsauth

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func TestKeysThatProveNothing(t *testing.T) {
	t.Setenv("GODEBUG", "rsa1024min=0")
	key := func(k crypto.Signer, err error) crypto.PublicKey { return must(k, err).Public() }
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	for name, c := range map[string]struct {
		key crypto.PublicKey
		bad string
	}{
		"Ed25519":  {key(ed, err), ""},
		"P-256":    {key(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)), ""},
		"P-384":    {key(ecdsa.GenerateKey(elliptic.P384(), rand.Reader)), ""},
		"RSA 2048": {key(rsa.GenerateKey(rand.Reader, 2048)), ""},
		"P-224":    {key(ecdsa.GenerateKey(elliptic.P224(), rand.Reader)), "224 bits"},
		"RSA 1024": {key(rsa.GenerateKey(rand.Reader, 1024)), "1024 bits"},
		"none":     {nil, "use Ed25519"},
	} {
		if err := checkKeyType(c.key); (err == nil) != (c.bad == "") || err != nil && !strings.Contains(err.Error(), c.bad) {
			t.Errorf("%s: %v, want %q", name, err, c.bad)
		}
	}
}

// TestCredentialsThatCannotProve: the start of a daemon says so.
func TestCredentialsThatCannotProve(t *testing.T) {
	a := newAuthority(t, "ca")
	agreement := func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyAgreement }
	for name, c := range map[string]struct {
		files Files
		max   int
		bad   string
	}{
		"certificate":            {a.issue("good", nil), 4096, ""},
		"shared key":             {writePSK(t, psk(t, "a")), 0, ""},
		"too long":               {a.issue("long", nil), 100, "at most 100"},
		"key not for signatures": {a.issue("agree", agreement), 4096, "not for signatures"},
	} {
		if err := newAuth(t, c.files).CheckProofs(c.max); (err == nil) != (c.bad == "") || err != nil && !strings.Contains(err.Error(), c.bad) {
			t.Errorf("%s: %v, want %q", name, err, c.bad)
		}
	}
}

// TestProofsAreOfOneEndAndOneText: and of the keys that were read when the exchange
// began.
func TestProofsAreOfOneEndAndOneText(t *testing.T) {
	a := newAuthority(t, "ca")
	for kind, files := range map[string]Files{
		"certificate": a.issue("both", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(time.Hour) }),
		"shared key":  writePSK(t, psk(t, "x")),
	} {
		auth := newAuth(t, files)
		client := must(auth.ClientProver("127.0.0.1", ""))
		server := must(auth.ServerProver(client.Key()))
		text := []byte("text")
		proof := must(client.Prove(text))
		if _, err := server.Verify(client.Certs(), text, proof); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
		if _, err := server.Verify(client.Certs(), []byte("another"), proof); err == nil {
			t.Errorf("%s: a proof of another text is good", kind)
		}
		if _, err := server.Verify(client.Certs(), text, nil); err == nil {
			t.Errorf("%s: no proof is good", kind)
		}
		if _, err := server.Verify(nil, text, proof[:len(proof)-1]); err == nil {
			t.Errorf("%s: a part of a proof is good", kind)
		}
		if kind == "certificate" { // the text tells the roles apart, not the key
			continue
		}
		if _, err := client.Verify(nil, text, proof); err == nil {
			t.Errorf("%s: a client takes its own proof for the server's", kind)
		}
		if _, err := auth.ServerProver(&verbs.KeyID{1}); err == nil {
			t.Error("an unknown key has a prover")
		}
	}
}
