package main

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// revoke returns a list of a in PEM with the certificates of these numbers.
func (a *authority) revoke(until time.Time, numbers ...int64) []byte {
	a.t.Helper()
	l := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now().Add(-time.Hour), NextUpdate: until}
	for _, n := range numbers {
		l.RevokedCertificateEntries = append(l.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: big.NewInt(n), RevocationTime: time.Now()})
	}
	der, err := x509.CreateRevocationList(rand.Reader, l, a.cert, a.key)
	must(a.t, "sign list", err)
	return encode("X509 CRL", der)
}

// TestTLS_RevokedCertificates: a client of the list is refused, others are not, and
// the list of the day counts.
func TestTLS_RevokedCertificates(t *testing.T) {
	a := newAuthority(t)
	bad := a.next
	lost, good := a.member("lost"), a.member("good")
	s := a.server(true, true)
	r, addr := tlsRig(t, rigConfig{}, s)
	if _, err := upgrade(greeted(t, "tcp", addr), lost); err != nil {
		t.Fatal(err)
	}
	s.ClientCRL = a.revoke(time.Now().Add(time.Hour), bad)
	must(t, "set TLS", r.f.SetTLS(t.Context(), s))
	if _, err := upgrade(greeted(t, "tcp", addr), lost); err == nil {
		t.Error("a client is served whose certificate is revoked")
	}
	if _, err := upgrade(greeted(t, "tcp", addr), good); err != nil {
		t.Errorf("another client: %v", err)
	}
	s.ClientCRL = a.revoke(time.Now().Add(-time.Minute))
	must(t, "set TLS", r.f.SetTLS(t.Context(), s))
	if _, err := upgrade(greeted(t, "tcp", addr), good); err == nil {
		t.Error("a client is served though the list is out of date")
	}
}

func TestTLS_ListsThatAreRefused(t *testing.T) {
	a := newAuthority(t)
	list := a.revoke(time.Now().Add(time.Hour), 7)
	r, _ := tlsRig(t, rigConfig{}, plugin.TLS{})
	for name, crl := range map[string][]byte{
		"of another CA": newAuthority(t).revoke(time.Now().Add(time.Hour)),
		"cut off":       list[:len(list)/2],
		"a certificate": a.pem,
		"garbage":       []byte("garbage"),
		"and garbage":   append(append([]byte{}, list...), "garbage"...),
		"no list":       encode("X509 CRL", []byte("garbage")),
	} {
		s := a.server(true, true)
		s.ClientCRL = crl
		if err := r.f.SetTLS(t.Context(), s); blk.ToErrno(err) != blk.EINVAL {
			t.Errorf("%s: %v", name, err)
		}
	}
	s := a.server(true, false)
	s.ClientCRL = list
	if err := r.f.SetTLS(t.Context(), s); err == nil {
		t.Error("a list without a CA is accepted")
	}
	s = a.server(true, true)
	s.Rules = []plugin.UserRule{{Allow: "all"}}
	if err := r.f.SetTLS(t.Context(), s); err == nil || !strings.Contains(err.Error(), "rule 1") {
		t.Errorf("a rule with an error: %v", err)
	}
}

// TestTLS_Rules: the first rule that fits decides what a client sees, opens and
// writes.
func TestTLS_Rules(t *testing.T) {
	a := newAuthority(t)
	for name, c := range map[string]struct {
		rules      []plugin.UserRule
		see, write bool
	}{
		"none":                   {nil, true, true},
		"none that fits":         {[]plugin.UserRule{{Identity: []string{"dns:other"}, Allow: "rw"}}, false, false},
		"of another export":      {[]plugin.UserRule{{Device: []string{"disk1"}, Allow: "rw"}}, false, false},
		"to read":                {[]plugin.UserRule{{Identity: []string{"dns:web"}, Device: []string{"disk*"}, Allow: "ro"}}, true, false},
		"to write":               {[]plugin.UserRule{{Identity: []string{"dns:w*"}, Device: []string{"disk0"}, Allow: "rw"}}, true, true},
		"the first says no":      {[]plugin.UserRule{{Identity: []string{"dns:web"}, Allow: "none"}, {Allow: "rw"}}, false, false},
		"the first says to read": {[]plugin.UserRule{{Allow: "ro"}, {Allow: "rw"}}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := a.server(true, true)
			s.Rules = c.rules
			r, addr := tlsRig(t, rigConfig{}, s)
			for _, opt := range []uint32{nbdwire.OptInfo, nbdwire.OptGo} {
				conn, err := upgrade(greeted(t, "tcp", addr), a.member("web"))
				must(t, "upgrade", err)
				want := uint32(nbdwire.RepInfo)
				if !c.see {
					want = nbdwire.RepErrUnknown
				}
				mustAsk(t, conn, opt, goData("disk0"), want)
				if !c.see {
					mustAsk(t, conn, opt, goData(""), nbdwire.RepErrUnknown)
					mustAsk(t, conn, nbdwire.OptList, nil, nbdwire.RepAck)
				}
			}
			if !c.see {
				eventually(t, "no opener", func() bool { return r.f.Openers(0) == 0 })
				return
			}
			client := secured(t, addr, a.member("web"), true)
			if ro := client.tx&nbdwire.ReadOnly != 0; ro == c.write {
				t.Errorf("transmission flags %#x", client.tx)
			}
			running(client)
			if code := client.write(0, make([]byte, 4096)); (code == 0) != c.write {
				t.Errorf("a write ends with %d", code)
			}
			if code := client.do(nbdwire.CmdWriteZeroes, 0, 0, 4096, nil); (code == 0) != c.write {
				t.Errorf("a write of zeroes ends with %d", code)
			}
			if code := client.read(0, make([]byte, 4096)); code != 0 {
				t.Errorf("a read ends with %d", code)
			}
		})
	}
}

// TestTLS_RulesWithoutTLS: a client without TLS has what rules without an identity
// give.
func TestTLS_RulesWithoutTLS(t *testing.T) {
	a := newAuthority(t)
	s := a.server(false, true)
	s.Rules = []plugin.UserRule{{Identity: []string{"**"}, Allow: "rw"}}
	r, _ := tlsRig(t, rigConfig{}, s)
	mustAsk(t, greeted(t, "unix", r.addr), nbdwire.OptGo, goData("disk0"), nbdwire.RepErrUnknown)
	s.Rules = append(s.Rules, plugin.UserRule{Device: []string{"disk0"}, Allow: "ro"})
	must(t, "set TLS", r.f.SetTLS(t.Context(), s))
	mustAsk(t, greeted(t, "unix", r.addr), nbdwire.OptGo, goData("disk0"), nbdwire.RepInfo)
}

func TestNamesOfCertificates(t *testing.T) {
	id := func(s string) *url.URL { u, _ := url.Parse(s); return u }
	for want, c := range map[string]x509.Certificate{
		"cn:a":             {Subject: pkix.Name{CommonName: "a"}},
		"dns:b":            {Subject: pkix.Name{CommonName: "a"}, DNSNames: []string{"b", "c"}},
		"spiffe://d/e":     {DNSNames: []string{"b"}, URIs: []*url.URL{id("https://x"), id("spiffe://d/e")}},
		"":                 {},
		"two SPIFFE IDs":   {URIs: []*url.URL{id("spiffe://d/e"), id("spiffe://d/f")}},
		"a pattern":        {Subject: pkix.Name{CommonName: "w*"}},
		"a space":          {DNSNames: []string{"a b"}},
		"other characters": {Subject: pkix.Name{CommonName: "\u00e4"}},
		"long":             {Subject: pkix.Name{CommonName: strings.Repeat("x", 256)}},
	} {
		if strings.Contains(want, " ") || want == "long" {
			want = ""
		}
		if got := nameOf(&c); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestTLS_Events: each client's connect, opens and close are reported, refusals with
// their reason; clients of listeners without TLS are not.
func TestTLS_Events(t *testing.T) {
	a := newAuthority(t)
	s := a.server(true, true)
	s.Rules = []plugin.UserRule{{Identity: []string{"dns:web"}, Device: []string{"disk0"}, Allow: "ro"}}
	r, addr := tlsRig(t, rigConfig{}, s)
	take := func(want ...plugin.UserEvent) {
		t.Helper()
		var got []plugin.UserEvent
		eventually(t, "the events", func() bool {
			events, lost := r.f.TakeUsers()
			got = append(got, events...)
			return len(got) >= len(want) && lost == 0
		})
		for i, e := range got {
			if i >= len(want) || e.Event != want[i].Event || e.Identity != want[i].Identity || e.Device != want[i].Device || e.Mode != want[i].Mode ||
				!strings.Contains(e.Error, want[i].Error) || (e.Error == "") != (want[i].Error == "") || !strings.Contains(e.Reason, want[i].Reason) {
				t.Errorf("event %d: %+v", i, e)
			}
			if e.Peer == "" || e.Listener == "" || time.Since(e.Time) > time.Hour {
				t.Errorf("event %d: %+v", i, e)
			}
		}
	}
	c := secured(t, addr, a.member("web"), true)
	take(plugin.UserEvent{Event: "connect", Identity: "dns:web"}, plugin.UserEvent{Event: "open", Identity: "dns:web", Device: "disk0", Mode: "ro"})
	c.conn.Close()
	take(plugin.UserEvent{Event: "close", Identity: "dns:web", Device: "disk0", Mode: "ro"})

	conn, err := upgrade(greeted(t, "tcp", addr), a.member("other"))
	must(t, "upgrade", err)
	mustAsk(t, conn, nbdwire.OptGo, goData("disk0"), nbdwire.RepErrUnknown)
	take(plugin.UserEvent{Event: "connect", Identity: "dns:other"}, plugin.UserEvent{Event: "open", Identity: "dns:other", Device: "disk0", Error: "no rule fits"})
	conn.Close()

	if _, err := upgrade(greeted(t, "tcp", addr), newAuthority(t).member("web")); err == nil {
		t.Error("a server of another CA is accepted")
	}
	take(plugin.UserEvent{Event: "handshake", Error: "TLS handshake"})
	plain := greeted(t, "tcp", addr)
	mustAsk(t, plain, nbdwire.OptList, nil, needsTLS)
	mustAsk(t, plain, nbdwire.OptGo, goData("disk0"), needsTLS)
	take(plugin.UserEvent{Event: "handshake", Error: "without TLS"})
	plain.Close()
	without, _ := tlsRig(t, rigConfig{}, plugin.TLS{})
	without.connect(true)
	if events, _ := without.f.TakeUsers(); len(events) > 0 {
		t.Errorf("without TLS: %+v", events)
	}
}
