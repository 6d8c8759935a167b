package tlsauth

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/tlsrecord"
)

// talk sends records of the data path from one end to the other.
func talk(t *testing.T, from, to *Conn) {
	t.Helper()
	_, out, rest, err := from.Detach()
	if err != nil || len(rest) > 0 {
		t.Fatalf("%d bytes left: %v", len(rest), err)
	}
	in, _, rest, err := to.Detach()
	if err != nil || len(rest) > 0 {
		t.Fatalf("%d bytes left: %v", len(rest), err)
	}
	for i := range 3 {
		want := fmt.Sprintf("record %d", i)
		b := make([]byte, len(want)+tlsrecord.Overhead)
		copy(b[tlsrecord.HeaderLen:], want)
		out.Seal(b, tlsrecord.ApplicationData, len(want))
		if _, got, err := in.Open(b); string(got) != want || err != nil {
			t.Fatalf("%q, %v", got, err)
		}
	}
}

func TestCertificatesOfBothEnds(t *testing.T) {
	a := newAuthority(t, "ca")
	server := newAuth(t, a.issue("server", func(c *x509.Certificate) { c.DNSNames = []string{"storage"} }))
	for name, c := range map[string]struct {
		change func(*x509.Certificate)
		want   string
	}{
		"plain":  {nil, "cn:plain"},
		"named":  {func(c *x509.Certificate) { c.DNSNames = []string{"host.example", "other.example"} }, "dns:host.example"},
		"spiffe": {spiffe("spiffe://example/tenant/a"), "spiffe://example/tenant/a"},
	} {
		client := newAuth(t, a.issue(name, c.change))
		for i, expect := range []string{"", "storage"} { // the address, and a name
			cc, sc, cerr, serr := meet(t, client, server, expect)
			if cerr != nil || serr != nil {
				t.Fatalf("%s: client %v, server %v", name, cerr, serr)
			}
			got, back := sc.Security(), cc.Security()
			if got.Peer != c.want || got.Protocol != "TLS 1.3" || got.Cipher == "" || time.Until(got.Expires) < time.Minute || got.Resumed {
				t.Errorf("%s: the server sees %+v", name, got)
			}
			if back.Peer != "dns:storage" || back.Cipher != got.Cipher {
				t.Errorf("%s: the client sees %+v", name, back)
			}
			if i == 0 {
				talk(t, cc, sc)
			} else {
				talk(t, sc, cc)
			}
		}
	}
}

func TestSharedKeys(t *testing.T) {
	one, two := psk(t, "tenant-a"), psk(t, "tenant-b")
	server := newAuth(t, writePSK(t, "# tenants\n", one, "\n", two))
	for line, want := range map[string]string{one: "psk:tenant-a", two: "psk:tenant-b"} {
		client := newAuth(t, writePSK(t, line))
		for range 3 {
			c, s, cerr, serr := meet(t, client, server, "")
			if cerr != nil || serr != nil || s.Security().Peer != want || c.Security().Peer != want {
				t.Fatalf("client %v, server %v", cerr, serr)
			}
			talk(t, c, s)
		}
	}
	a := newAuthority(t, "ca")
	both := newAuth(t, func() Files { f := a.issue("server", nil); f.PSK = writePSK(t, one).PSK; return f }())
	for client, want := range map[*Auth]string{newAuth(t, writePSK(t, one)): "psk:tenant-a", newAuth(t, a.issue("client", nil)): "cn:client"} {
		if _, s, cerr, serr := meet(t, client, both, ""); cerr != nil || serr != nil || s.Security().Peer != want {
			t.Fatalf("client %v, server %v", cerr, serr)
		}
	}
}

func TestReconnectsResume(t *testing.T) {
	a, line := newAuthority(t, "ca"), psk(t, "x")
	for _, pair := range [][2]*Auth{
		{newAuth(t, a.issue("client", nil)), newAuth(t, a.issue("server", nil))},
		{newAuth(t, writePSK(t, line)), newAuth(t, writePSK(t, line))},
	} {
		for i := range 4 {
			c, s, cerr, serr := meet(t, pair[0], pair[1], "")
			if cerr != nil || serr != nil {
				t.Fatal(cerr, serr)
			}
			if c.Security().Resumed != (i > 0) || s.Security().Resumed != (i > 0) || s.Security().Peer == "" || c.Security().Peer == "" {
				t.Errorf("connection %d: %+v, %+v", i, c.Security(), s.Security())
			}
			talk(t, s, c)
		}
		if err := pair[1].Reload(true); err != nil {
			t.Fatal(err)
		}
		if _, s, cerr, serr := meet(t, pair[0], pair[1], ""); cerr != nil || serr != nil || s.Security().Resumed {
			t.Errorf("after a reload: %v, %v", cerr, serr)
		}
	}
}

// TestPeersThatAreRefused: each must fail at both ends, whatever the reason.
func TestPeersThatAreRefused(t *testing.T) {
	a, other := newAuthority(t, "ca"), newAuthority(t, "ca") // the same name, another key
	line := psk(t, "x")
	good, server := a.issue("client", nil), a.issue("server", nil)
	expired := func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }
	early := func(c *x509.Certificate) {
		c.NotBefore = time.Now().Add(24 * time.Hour)
		c.NotAfter = c.NotBefore.Add(time.Hour)
	}
	withCRL := func(f Files, until time.Time, serials ...int64) Files {
		f.CRL = a.path(fmt.Sprintf("crl-%d-%d", until.Unix(), len(serials)))
		a.revoke(f.CRL, until, serials...)
		return f
	}
	foreign := other.issue("client", nil)
	foreign.CA = a.path("ca.pem")
	foreignServer := other.issue("server", nil)
	foreignServer.CA = a.path("ca.pem")
	later := time.Now().Add(time.Hour)
	for name, c := range map[string]struct {
		client, server Files
		expect, reason string
	}{
		"client of another CA":     {client: foreign, server: server, reason: "unknown authority"},
		"server of another CA":     {client: good, server: foreignServer, reason: "unknown authority"},
		"expired client":           {client: a.issue("late", expired), server: server, reason: "expired"},
		"expired server":           {client: good, server: a.issue("lates", expired), reason: "expired"},
		"clock off by a day":       {client: a.issue("early", early), server: server, reason: "not yet valid"},
		"wrong name":               {client: good, server: server, expect: "elsewhere", reason: "elsewhere"},
		"wrong SPIFFE ID":          {client: good, server: a.issue("sp", spiffe("spiffe://example/b")), expect: "spiffe://example/a", reason: "spiffe://example/b"},
		"not a client":             {client: a.issue("only", func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }), server: server, reason: "incompatible key usage"},
		"revoked client":           {client: good, server: withCRL(server, later, 2), reason: "is revoked"},
		"revoked server":           {client: withCRL(good, later, 3, 99), server: server, reason: "is revoked"},
		"list out of date":         {client: good, server: withCRL(server, time.Now().Add(-time.Minute)), reason: "out of date"},
		"no identity":              {client: a.issue("empty", func(c *x509.Certificate) { c.Subject.CommonName = "" }), server: server, reason: "identity is empty"},
		"identity with a newline":  {client: a.issue("nl", func(c *x509.Certificate) { c.Subject.CommonName = "a\nb" }), server: server, reason: "has the character"},
		"identity with a wildcard": {client: a.issue("glob", func(c *x509.Certificate) { c.DNSNames = []string{"*.example"} }), server: server, reason: "has the character"},
		"two SPIFFE IDs":           {client: a.issue("two", func(c *x509.Certificate) { spiffe("spiffe://a/a")(c); spiffe("spiffe://a/b")(c) }), server: server, reason: "more than one"},
		"huge certificate": {client: a.issue("huge", func(c *x509.Certificate) {
			c.DNSNames = make([]string, 30000)
			for i := range c.DNSNames {
				c.DNSNames[i] = fmt.Sprintf("name-%d.example", i)
			}
		}), server: server, reason: ""},
		"shared key of another":     {client: writePSK(t, psk(t, "x")), server: writePSK(t, line), reason: "does not hold the shared key"},
		"identity without key":      {client: writePSK(t, psk(t, "y")), server: writePSK(t, line), reason: "none of that name"},
		"certificate to shared key": {client: good, server: writePSK(t, line), reason: "shared keys only"},
		"shared key to certificate": {client: writePSK(t, line), server: server, reason: ""},
		"client with two keys":      {client: writePSK(t, psk(t, "y"), psk(t, "z")), server: writePSK(t, line), reason: "exactly one"},
	} {
		for range 2 { // nothing may be resumed either
			_, _, cerr, serr := meet(t, newAuth(t, c.client), newAuth(t, c.server), c.expect)
			if cerr == nil || serr == nil {
				t.Errorf("%s: client %v, server %v", name, cerr, serr)
			} else if both := cerr.Error() + serr.Error(); !strings.Contains(both, c.reason) {
				t.Errorf("%s: %s: no %q", name, both, c.reason)
			}
		}
	}
}

func TestRevokedAfterTheFirstConnection(t *testing.T) {
	a := newAuthority(t, "ca")
	files := a.issue("server", nil)
	files.CRL = a.path("crl")
	a.revoke(files.CRL, time.Now().Add(time.Hour))
	server, client := newAuth(t, files), newAuth(t, a.issue("client", nil))
	if _, _, cerr, serr := meet(t, client, server, ""); cerr != nil || serr != nil {
		t.Fatal(cerr, serr)
	}
	a.revoke(files.CRL, time.Now().Add(time.Hour), 3)
	if _, _, cerr, serr := meet(t, client, server, ""); cerr == nil || serr == nil {
		t.Error("a revoked client got in with its ticket")
	}
}

func TestFilesWithErrors(t *testing.T) {
	a, other := newAuthority(t, "ca"), newAuthority(t, "other")
	good := a.issue("good", nil)
	bad := func(change func(*Files)) Files { f := good; change(&f); return f }
	write := func(name string, b []byte) string {
		if err := os.WriteFile(a.path(name), b, 0o600); err != nil {
			t.Fatal(err)
		}
		return a.path(name)
	}
	ca := must(os.ReadFile(good.CA))
	other.revoke(a.path("alien.crl"), time.Now().Add(time.Hour))
	for name, c := range map[string]struct {
		files  Files
		reason string
	}{
		"nothing":                {Files{}, "TLS needs"},
		"no key":                 {bad(func(f *Files) { f.Key = "" }), "all three"},
		"missing file":           {bad(func(f *Files) { f.CA = "/nonexistent" }), "no such file"},
		"folder":                 {bad(func(f *Files) { f.CA = a.dir }), "not a regular file"},
		"half a PEM":             {bad(func(f *Files) { f.CA = write("half", append(bytes.Clone(ca), ca[:len(ca)/2]...)) }), "damaged or cut off"},
		"empty":                  {bad(func(f *Files) { f.CA = write("empty", nil) }), "no \"CERTIFICATE\""},
		"garbage":                {bad(func(f *Files) { f.Cert = write("garbage", bytes.Repeat([]byte{0xff}, 1000)) }), "certificate"},
		"key as CA":              {bad(func(f *Files) { f.CA = good.Key }), "want \"CERTIFICATE\""},
		"key of another":         {bad(func(f *Files) { f.Key = a.issue("else", nil).Key }), "does not match"},
		"too large":              {bad(func(f *Files) { f.CA = write("large", make([]byte, maxFile+1)) }), "at most"},
		"CRL of another":         {bad(func(f *Files) { f.CRL = a.path("alien.crl") }), "has signed it"},
		"CRL without CA":         {Files{PSK: writePSK(t, psk(t, "x")).PSK, CRL: good.CA}, "needs the file of the CA"},
		"no shared key":          {writePSK(t, "# none\n"), "rnbd psk new"},
		"short shared key":       {writePSK(t, "a:0011\n"), "at least 16"},
		"odd shared key":         {writePSK(t, "a:"+strings.Repeat("x", 64)+"\n"), "not IDENTITY:HEX"},
		"shared key twice":       {writePSK(t, psk(t, "a"), psk(t, "a")), "has a key already"},
		"identity is empty":      {writePSK(t, ":"+strings.Repeat("0", 64)+"\n"), "is empty"},
		"identity with wildcard": {writePSK(t, "a*:"+strings.Repeat("0", 64)+"\n"), "has the character"},
	} {
		if _, err := New(Config{Files: c.files}); err == nil || !strings.Contains(err.Error(), c.reason) {
			t.Errorf("%s: %v, want %q", name, err, c.reason)
		} else if strings.Contains(err.Error(), strings.Repeat("x", 10)) {
			t.Errorf("%s: the error shows the key: %v", name, err)
		}
	}
	if _, err := NewPSK("a b"); err == nil {
		t.Error("a space in an identity was taken")
	}
}

func TestKeyThatOthersCanReadIsWarnedOf(t *testing.T) {
	f := writePSK(t, psk(t, "x"))
	if err := os.Chmod(f.PSK, 0o644); err != nil {
		t.Fatal(err)
	}
	if c := must(f.loadCredentials()); len(c.warnings) != 1 || !strings.Contains(c.warnings[0], "0600") {
		t.Errorf("%q", c.warnings)
	}
}

func TestChangedFilesAreRead(t *testing.T) {
	old, fresh := newAuthority(t, "old"), newAuthority(t, "new")
	files := old.issue("server", nil)
	server := newAuth(t, files)
	replace := func(from string) {
		t.Helper()
		b := must(os.ReadFile(from))
		if err := os.WriteFile(files.CA+".next", b, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(files.CA+".next", files.CA); err != nil {
			t.Fatal(err)
		}
	}
	mine := old.issue("mine", nil)
	mine.CA = old.path("kept.pem")
	if err := os.WriteFile(mine.CA, must(os.ReadFile(files.CA)), 0o600); err != nil {
		t.Fatal(err)
	}
	theirs := fresh.issue("theirs", nil)
	theirs.CA = mine.CA
	allowed := func(f Files) bool {
		_, _, cerr, serr := meet(t, newAuth(t, f), server, "")
		return cerr == nil && serr == nil
	}
	if !allowed(mine) || allowed(theirs) {
		t.Fatal("before the change")
	}
	replace(fresh.path("ca.pem"))
	if allowed(mine) || !allowed(theirs) {
		t.Error("after the change")
	}
	replace(mine.Key) // no certificate
	if allowed(mine) || !allowed(theirs) {
		t.Error("a bad file opened or closed a door")
	}
	if err := server.Reload(true); err == nil {
		t.Error("no error of a bad file")
	}
}

func TestPeersThatDoNotSpeakTLS(t *testing.T) {
	a := newAuthority(t, "ca")
	auth := newAuth(t, a.issue("server", nil))
	for _, bytes := range [][]byte{nil, []byte("MPA ID Req Frame\x50\x02\x00\x00"), {22, 3, 1, 0xff, 0xff}, {22, 3, 1, 0, 5, 1, 0, 0, 1, 0}, {21, 3, 3, 0, 2, 2, 40}} {
		cs, ss := sockets(t)
		cs.Write(bytes)
		cs.(interface{ CloseWrite() error }).CloseWrite()
		if _, err := auth.Server(ss); err == nil {
			t.Errorf("server: %x: no error", bytes)
		}
		cs, ss = sockets(t)
		ss.Write(bytes)
		ss.(interface{ CloseWrite() error }).CloseWrite()
		if _, err := auth.Client(cs, ""); err == nil {
			t.Errorf("client: %x: no error", bytes)
		}
	}
	// One that stalls ends with the deadline of the socket.
	_, ss := sockets(t)
	ss.SetDeadline(time.Now().Add(20 * time.Millisecond))
	if _, err := auth.Server(ss); err == nil {
		t.Error("a peer that stalls was let in")
	}
}

// TestOldVersionsAreRefused: TLS 1.2 has no record layer here.
func TestOldVersionsAreRefused(t *testing.T) {
	auth := newAuth(t, newAuthority(t, "ca").issue("server", nil))
	cs, ss := sockets(t)
	go tls.Client(cs, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12}).Handshake()
	if _, err := auth.Server(ss); err == nil {
		t.Error("TLS 1.2 was let in")
	}
	// A client without a certificate is refused, too.
	cs, ss = sockets(t)
	go tls.Client(cs, &tls.Config{InsecureSkipVerify: true}).Handshake()
	if _, err := auth.Server(ss); err == nil {
		t.Error("a client without a certificate was let in")
	}
}

// TestDataBehindTheAnswer: what was received in one record with what was read is
// handed over.
func TestDataBehindTheAnswer(t *testing.T) {
	a := newAuthority(t, "ca")
	c, s, cerr, serr := meet(t, newAuth(t, a.issue("client", nil)), newAuth(t, a.issue("server", nil)), "")
	if cerr != nil || serr != nil {
		t.Fatal(cerr, serr)
	}
	if _, err := s.Write([]byte("readunread")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4)
	if _, err := c.Read(b); err != nil {
		t.Fatal(err)
	}
	if _, _, rest, err := c.Detach(); string(rest) != "unread" || err != nil {
		t.Errorf("%q, %v", rest, err)
	}
}

func FuzzPSKFile(f *testing.F) {
	f.Add([]byte("a:000102030405060708090a0b0c0d0e0f\n# x\n\nb:00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := parsePSKs(b)
		if (err == nil) != (len(list) > 0) {
			t.Fatalf("%d keys, %v", len(list), err)
		}
		for _, p := range list {
			if checkPSKName(p.name) != nil {
				t.Fatalf("identity %q", p.name)
			}
		}
	})
}
