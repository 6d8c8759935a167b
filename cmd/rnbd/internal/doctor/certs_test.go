package doctor

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// issued writes a certificate with its key and returns their names.
func issued(t *testing.T, dir, name string, from, to time.Time) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: from, NotAfter: to}
	der, err := x509.CreateCertificate(rand.Reader, c, c, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, name+".pem"), filepath.Join(dir, name+".key")
	put(t, cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644)
	put(t, key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), 0o600)
	return cert, key
}

func put(t *testing.T, name string, b []byte, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(name, b, mode); err != nil {
		t.Fatal(err)
	}
}

func TestKeysCheck(t *testing.T) {
	dir, now, day := t.TempDir(), time.Now(), 24*time.Hour
	good, goodKey := issued(t, dir, "good", now.Add(-day), now.Add(90*day))
	late, lateKey := issued(t, dir, "late", now.Add(-9*day), now.Add(-day))
	soon, soonKey := issued(t, dir, "soon", now.Add(-9*day), now.Add(10*day))
	early, earlyKey := issued(t, dir, "early", now.Add(day), now.Add(90*day))
	open, garbage, cut := filepath.Join(dir, "open.key"), filepath.Join(dir, "garbage"), filepath.Join(dir, "cut")
	b, err := os.ReadFile(goodKey)
	if err != nil {
		t.Fatal(err)
	}
	put(t, open, b, 0o644)
	put(t, garbage, []byte("garbage"), 0o600)
	put(t, cut, []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), 0o600)
	for name, c := range map[string]struct {
		k    Keys
		want Outcome
		word string
	}{
		"nothing":             {Keys{}, OK, ""},
		"good":                {Keys{CA: good, Cert: good, Key: goodKey}, OK, "fits the key"},
		"ended":               {Keys{Cert: late, Key: lateKey}, Problem, "has ended"},
		"ends soon":           {Keys{Cert: soon, Key: soonKey}, Warning, "in 9 days"},
		"clock is behind":     {Keys{Cert: early, Key: earlyKey}, Problem, "the clock of this host says"},
		"CA that has ended":   {Keys{CA: late}, Problem, "has ended"},
		"another key":         {Keys{Cert: good, Key: lateKey}, Problem, "does not fit the key"},
		"key others can read": {Keys{Cert: good, Key: open}, Warning, "other users can read it"},
		"no key named":        {Keys{Name: "--tls", Cert: good}, Problem, "need each other"},
		"missing":             {Keys{Cert: good + "x", Key: goodKey}, Problem, "cannot be read"},
		"missing key":         {Keys{Cert: good, Key: goodKey + "x"}, Problem, "cannot be read"},
		"missing shared keys": {Keys{PSK: dir + "/none"}, Problem, "cannot be read"},
		"garbage":             {Keys{CA: garbage}, Problem, "has no \"CERTIFICATE\""},
		"half of one":         {Keys{CA: cut}, Problem, "block 1"},
		"key in place of it":  {Keys{CA: goodKey}, Problem, "is \"PRIVATE KEY\""},
		"list that is none":   {Keys{CRL: good}, Problem, "must be \"X509 CRL\""},
	} {
		found := c.k.Check(now)
		all := ""
		for _, f := range found {
			all += f.Subject + ": " + f.Text + "\n"
			if (f.Outcome == OK) != (f.Do == "") {
				t.Errorf("%s: %+v", name, f)
			}
		}
		if got := Worst(found); len(found) > 0 && got != c.want || !strings.Contains(all, c.word) {
			t.Errorf("%s: %s, want %s with %q:\n%s", name, got, c.want, c.word, all)
		}
	}
}
