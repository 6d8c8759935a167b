package rtrs

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// keyAuth has the given shared keys.
func keyAuth(t testing.TB, lines ...string) *tlsauth.Auth {
	t.Helper()
	file := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(file, []byte(strings.Join(lines, "")), 0o600); err != nil {
		t.Fatal(err)
	}
	return filesAuth(t, tlsauth.Files{PSK: file})
}

func filesAuth(t testing.TB, f tlsauth.Files) *tlsauth.Auth {
	t.Helper()
	a, err := tlsauth.New(tlsauth.Config{Files: f, Name: "storage", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// fixedBinding is that of the vectors in testdata.
func fixedBinding() *challengeBinding {
	b := &challengeBinding{response: make([]byte, rtrswire.ConnRspLen)}
	seq := func(from byte) (u rtrswire.UUID) {
		for i := range u {
			u[i] = from + byte(i)
		}
		return u
	}
	for cid := range 3 {
		m := make([]byte, rtrswire.ConnReqLen)
		rtrswire.ConnReq(m).Put(&rtrswire.ConnReqFields{CID: uint16(cid), CIDNum: 3, ReconCnt: 1, FirstConn: true,
			SessUUID: seq(0x40), PathsUUID: seq(0x60), Features: rtrswire.FeatureProof})
		b.requests = append(b.requests, m)
	}
	rtrswire.ConnRsp(b.response).Put(&rtrswire.ConnRspFields{QueueDepth: 512, MaxIOSize: 126976, MaxHdrSize: 4096, Flags: rtrswire.FlagNewRkey,
		Features:    rtrswire.FeatureFence | rtrswire.FeatureIncarnation | rtrswire.FeatureBeats | rtrswire.FeatureProof,
		Incarnation: seq(0x80)})
	return b
}

func nonceOf(b byte) (n nonce) {
	for i := range n {
		n[i] = b
	}
	return n
}

// exchange is one challenge between two ends. Hooks change what an end gets, or
// knows; nil changes nothing.
type exchange struct {
	client, server                 *tlsauth.Auth
	clientNonce, serverNonce       nonce
	onHello, onChallenge, onProof  func([]byte) []byte
	clientKnows, serverKnows       func(*challengeBinding)
	hello, challenge, proof        []byte // as sent
	clientIdentity, serverIdentity verbs.Security
}

// run returns the error of the end that refuses.
func (e *exchange) run(t testing.TB) (clientErr, serverErr error) {
	t.Helper()
	change := func(f func([]byte) []byte, m []byte) []byte {
		if m = bytes.Clone(m); f != nil {
			return f(m)
		}
		return m
	}
	know := func(f func(*challengeBinding)) *challengeBinding {
		b := fixedBinding()
		if f != nil {
			f(b)
		}
		return b
	}
	prover, err := e.client.ClientProver("", "10.0.0.1")
	if err != nil {
		return err, nil
	}
	c := newCltChallenge(prover, know(e.clientKnows), "session", e.clientNonce)
	e.hello = c.hello
	s, err := newSrvChallenge(e.server, know(e.serverKnows), change(e.onHello, c.hello), e.serverNonce)
	if err != nil {
		return nil, err
	}
	e.challenge = s.challenge
	if e.proof, e.serverIdentity, err = c.answerChallenge(change(e.onChallenge, s.challenge)); err != nil {
		if e.serverIdentity != (verbs.Security{}) || e.proof != nil {
			t.Errorf("with %v: server %+v, proof %x", err, e.serverIdentity, e.proof)
		}
		return err, nil
	}
	e.clientIdentity, err = s.verifyProof(change(e.onProof, e.proof))
	if err == nil && s.session != "session" {
		t.Errorf("session %q", s.session)
	}
	if err != nil && e.clientIdentity != (verbs.Security{}) {
		t.Errorf("with %v: client %+v", err, e.clientIdentity)
	}
	return nil, err
}

const fixedKey = "tenant-a:000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n"

// goldenHex returns the bytes of testdata/name.hex. Its first line is a comment.
func goldenHex(t testing.TB, name string) []byte {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name + ".hex")
	if err != nil {
		t.Fatal(err)
	}
	_, digits, _ := strings.Cut(string(text), "\n")
	b, err := hex.DecodeString(strings.ReplaceAll(digits, "\n", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestE040_ChallengeVectors(t *testing.T) {
	a := keyAuth(t, fixedKey)
	e := &exchange{client: a, server: a, clientNonce: nonceOf(0x11), serverNonce: nonceOf(0x22)}
	if cerr, serr := e.run(t); cerr != nil || serr != nil {
		t.Fatal(cerr, serr)
	}
	for name, got := range map[string][]byte{"hello": e.hello, "challenge": e.challenge, "proof": e.proof} {
		if want := goldenHex(t, "challenge_"+name); !bytes.Equal(got, want) {
			t.Errorf("%s is\n%x, want\n%x", name, got, want)
		}
	}
	for _, s := range []*verbs.Security{&e.clientIdentity, &e.serverIdentity} {
		if s.Proof == nil || s.Proof.Holds() != nil {
			t.Errorf("the proof is %v", s.Proof)
		}
		s.Proof = nil
	}
	want := verbs.Security{Protocol: "challenge", Cipher: "HMAC-SHA-256", Peer: "psk:tenant-a"}
	if e.clientIdentity != want || e.serverIdentity != want {
		t.Errorf("the server sees %+v, the client %+v", e.clientIdentity, e.serverIdentity)
	}
}

// credentialPairs are ends that prove their identities in each way.
func credentialPairs(t testing.TB) map[string]*exchange {
	ca := newCA(t)
	pairs := map[string]*exchange{"key": {client: keyAuth(t, fixedKey), server: keyAuth(t, fixedKey)}}
	for kind := range certKeys {
		pairs[kind] = &exchange{client: filesAuth(t, ca.issue(kind, "client", nil)), server: filesAuth(t, ca.issue(kind, "storage", nil))}
	}
	return pairs
}

// TestE041_ChallengeNoticesEachChange: whatever changes in what the ends send or
// know, one of them refuses, and no end takes it for a proof.
func TestE041_ChallengeNoticesEachChange(t *testing.T) {
	for kind, e := range credentialPairs(t) {
		t.Run(kind, func(t *testing.T) {
			refused := func(what string, x exchange) {
				t.Helper()
				if cerr, serr := x.run(t); cerr == nil && serr == nil {
					t.Fatalf("%s: nobody notices", what)
				}
			}
			if cerr, serr := e.run(t); cerr != nil || serr != nil {
				t.Fatal(cerr, serr)
			}
			step := 1
			if kind != "key" {
				step = 13 // signatures are slow
			}
			for _, m := range []struct {
				name string
				size int
				hook func(*exchange, func([]byte) []byte)
			}{
				{"HELLO", len(e.hello), func(x *exchange, f func([]byte) []byte) { x.onHello = f }},
				{"CHALLENGE", len(e.challenge), func(x *exchange, f func([]byte) []byte) { x.onChallenge = f }},
				{"PROOF", len(e.proof), func(x *exchange, f func([]byte) []byte) { x.onProof = f }},
			} {
				for i := 0; i < m.size; i += step {
					x := *e
					m.hook(&x, func(b []byte) []byte { b[min(i, len(b)-1)] ^= 1; return b })
					refused(fmt.Sprintf("byte %d of %s", i, m.name), x)
				}
				for _, n := range []int{0, 1, 2, 4} { // signatures differ in length
					x := *e
					m.hook(&x, func(b []byte) []byte { return b[:len(b)*n/4-n/4] })
					refused(fmt.Sprintf("%d quarters of %s, less one byte", n, m.name), x)
				}
				x := *e
				m.hook(&x, func(b []byte) []byte { return append(b, 0) })
				refused(m.name+" with another byte", x)
			}
			for i := 2; i < rtrswire.ConnReqLen; i += step {
				x := *e
				x.serverKnows = func(b *challengeBinding) { b.requests[1][i] ^= 1 }
				refused(fmt.Sprintf("byte %d of a connection request", i), x)
			}
			for i := 0; i < rtrswire.ConnRspLen; i += step {
				x := *e
				x.clientKnows = func(b *challengeBinding) { b.response[i] ^= 1 }
				refused(fmt.Sprintf("byte %d of the answer to connection 0", i), x)
			}
			x := *e
			x.serverKnows = func(b *challengeBinding) { b.requests = b.requests[:2] }
			refused("a connection less", x)
			x = *e
			x.serverKnows = func(b *challengeBinding) { b.requests[1], b.requests[2] = b.requests[2], b.requests[1] }
			refused("connections in another order", x)
		})
	}
}

// TestE042_ChallengeMessagesOfAnotherTime: messages of an earlier challenge, of
// the other role, or of the other path prove nothing.
func TestE042_ChallengeMessagesOfAnotherTime(t *testing.T) {
	for kind, e := range credentialPairs(t) {
		old := *e
		old.clientNonce, old.serverNonce = nonceOf(1), nonceOf(2)
		if cerr, serr := old.run(t); cerr != nil || serr != nil {
			t.Fatal(kind, cerr, serr)
		}
		is := func(m []byte) func([]byte) []byte { return func([]byte) []byte { return bytes.Clone(m) } }
		as := func(m []byte, typ rtrswire.MsgType) func([]byte) []byte {
			return func(now []byte) []byte {
				f := rtrswire.Evidence(m).Fields()
				f.Type, f.Nonce = typ, rtrswire.Evidence(now).Fields().Nonce
				b := make(rtrswire.Evidence, f.Len())
				b.Put(&f)
				return b
			}
		}
		for what, x := range map[string]exchange{
			"replayed CHALLENGE":         {clientNonce: nonceOf(3), onChallenge: is(old.challenge)},
			"replayed HELLO and PROOF":   {clientNonce: nonceOf(3), serverNonce: nonceOf(4), onHello: is(old.hello), onProof: is(old.proof)},
			"replayed PROOF":             {clientNonce: nonceOf(1), serverNonce: nonceOf(4), onProof: is(old.proof)},
			"CHALLENGE sent back":        {clientNonce: nonceOf(1), serverNonce: nonceOf(2), onProof: as(old.challenge, rtrswire.MsgProof)},
			"PROOF sent back":            {clientNonce: nonceOf(1), serverNonce: nonceOf(2), onChallenge: as(old.proof, rtrswire.MsgChallenge)},
			"PROOF of another path":      {clientNonce: nonceOf(1), serverNonce: nonceOf(2), serverKnows: func(b *challengeBinding) { b.requests[0][12] ^= 1 }, onChallenge: is(old.challenge)},
			"PROOF of another session":   {clientNonce: nonceOf(1), serverNonce: nonceOf(2), serverKnows: func(b *challengeBinding) { b.requests[0][28] ^= 1 }, onChallenge: is(old.challenge)},
			"PROOF for another name":     {clientNonce: nonceOf(1), serverNonce: nonceOf(2), onHello: func(b []byte) []byte { b[56] ^= 1; return b }, onChallenge: is(old.challenge)},
			"PROOF without connection 2": {clientNonce: nonceOf(1), serverNonce: nonceOf(2), serverKnows: func(b *challengeBinding) { b.requests = b.requests[:2] }, onChallenge: is(old.challenge)},
		} {
			x.client, x.server = e.client, e.server
			if cerr, serr := x.run(t); cerr == nil && serr == nil {
				t.Errorf("%s: %s is taken for a proof", kind, what)
			}
		}
	}
}

// TestE043_IdentitiesThatAreNotProved: each pair of ends fails with EACCES, at the
// end that must notice.
func TestE043_IdentitiesThatAreNotProved(t *testing.T) {
	ca, other := newCA(t), newCA(t)
	good, server := ca.issue("P-256", "client", nil), ca.issue("P-256", "storage", nil)
	with := func(f tlsauth.Files, change func(*tlsauth.Files)) tlsauth.Files { change(&f); return f }
	foreign := func(name string) tlsauth.Files {
		return with(other.issue("P-256", name, nil), func(f *tlsauth.Files) { f.CA = ca.file("ca.pem") })
	}
	key, another := psk(t, "a"), psk(t, "a")
	for name, c := range map[string]struct {
		client, server *tlsauth.Auth
		atClient       bool
		reason         string
	}{
		"wrong key":              {keyAuth(t, key), keyAuth(t, another), true, `has not the key of "psk:a"`},
		"unknown identity":       {keyAuth(t, psk(t, "b")), keyAuth(t, key), false, "not in this server's file"},
		"key, server with cert":  {keyAuth(t, key), filesAuth(t, server), false, "not in this server's file"},
		"cert, server with keys": {filesAuth(t, good), keyAuth(t, key), false, "shared keys only"},
		"two keys of a client":   {keyAuth(t, key, psk(t, "b")), keyAuth(t, key), true, "exactly one"},
		"client of another CA":   {filesAuth(t, foreign("client")), filesAuth(t, server), false, "unknown authority"},
		"server of another CA":   {filesAuth(t, good), filesAuth(t, foreign("storage")), true, "unknown authority"},
		"expired client":         {filesAuth(t, ca.issue("P-256", "late", expired)), filesAuth(t, server), false, "expired"},
		"expired server":         {filesAuth(t, good), filesAuth(t, ca.issue("P-256", "storage", expired)), true, "expired"},
		"server of another name": {filesAuth(t, good), filesAuth(t, ca.issue("P-256", "elsewhere", nil)), true, "elsewhere"},
		"client as a server":     {filesAuth(t, good), filesAuth(t, ca.issue("P-256", "storage", clientOnly)), true, "incompatible key usage"},
		"key not for signatures": {filesAuth(t, ca.issue("P-256", "agree", agreementOnly)), filesAuth(t, server), false, "not for signatures"},
		"revoked client":         {filesAuth(t, good), filesAuth(t, with(server, func(f *tlsauth.Files) { f.CRL = ca.revoke(2) })), false, "revoked"},
		"huge chain":             {filesAuth(t, ca.issue("P-256", "huge", huge)), filesAuth(t, server), true, "at most"},
	} {
		cerr, serr := (&exchange{client: c.client, server: c.server}).run(t)
		err := serr
		if c.atClient {
			err = cerr
		}
		if err == nil || !strings.Contains(err.Error(), c.reason) {
			t.Errorf("%s: client %v, server %v, want %q", name, cerr, serr, c.reason)
		}
		if !c.atClient && !errors.Is(serr, syscall.EACCES) {
			t.Errorf("%s: %v is not EACCES", name, serr)
		}
	}
	both := filesAuth(t, with(server, func(f *tlsauth.Files) {
		f.PSK = filepath.Join(t.TempDir(), "keys")
		os.WriteFile(f.PSK, []byte(key), 0o600)
	}))
	for want, client := range map[string]*tlsauth.Auth{"psk:a": keyAuth(t, key), "cn:client": filesAuth(t, good)} {
		e := &exchange{client: client, server: both}
		if cerr, serr := e.run(t); cerr != nil || serr != nil || e.clientIdentity.Peer != want {
			t.Errorf("%v, %v, %+v, want %s", cerr, serr, e.clientIdentity, want)
		}
	}
}

// BenchmarkChallenge is the work of both ends for one start of a path.
func BenchmarkChallenge(b *testing.B) {
	for kind, e := range credentialPairs(b) {
		b.Run(kind, func(b *testing.B) {
			for b.Loop() {
				if cerr, serr := e.run(b); cerr != nil || serr != nil {
					b.Fatal(cerr, serr)
				}
			}
		})
	}
}

// FuzzChallenge: no bytes of a stranger prove anything, and none ends the program.
func FuzzChallenge(f *testing.F) {
	a := keyAuth(f, fixedKey)
	ca := newCA(f)
	server := filesAuth(f, func() tlsauth.Files {
		files := ca.issue("P-256", "storage", nil)
		files.PSK = filepath.Join(f.TempDir(), "keys")
		if err := os.WriteFile(files.PSK, []byte(fixedKey), 0o600); err != nil {
			f.Fatal(err)
		}
		return files
	}())
	x := &exchange{client: a, server: a, clientNonce: nonceOf(0x11), serverNonce: nonceOf(0x22)}
	if cerr, serr := x.run(f); cerr != nil || serr != nil {
		f.Fatal(cerr, serr)
	}
	for _, m := range [][]byte{x.hello, x.challenge, x.proof} {
		f.Add(m)
	}
	f.Fuzz(func(t *testing.T, m []byte) {
		if s, err := newSrvChallenge(server, fixedBinding(), bytes.Clone(m), nonceOf(3)); err == nil {
			if id, err := s.verifyProof(m); err == nil {
				t.Errorf("%x proves %+v", m, id)
			}
		}
		e := &exchange{client: a, server: server, clientNonce: nonceOf(4), serverNonce: nonceOf(5)}
		e.onChallenge = func([]byte) []byte { return m }
		if cerr, _ := e.run(t); cerr == nil {
			t.Errorf("%x proves the server", m)
		}
		e.onChallenge, e.onProof = nil, func([]byte) []byte { return m }
		if _, serr := e.run(t); serr == nil {
			t.Errorf("%x proves the client", m)
		}
	})
}
