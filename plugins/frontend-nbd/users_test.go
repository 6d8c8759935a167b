package main

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ratelimit"
)

// eventsOf takes the events of f until there are n at least.
func eventsOf(t *testing.T, f *frontend, n int) (all []plugin.UserEvent) {
	t.Helper()
	eventually(t, "the events", func() bool {
		events, lost := f.TakeUsers()
		all = append(all, events...)
		return len(all) >= n && lost == 0
	})
	return all
}

// TestTLS_HandshakesThatFailAreTold: each reason is an event, with the identity that
// the client claims.
func TestTLS_HandshakesThatFailAreTold(t *testing.T) {
	a := newAuthority(t)
	bad := a.next
	lost := a.member("lost")
	s := a.server(true, true)
	s.ClientCRL = a.revoke(time.Now().Add(time.Hour), bad)
	r, addr := tlsRig(t, rigConfig{}, s)
	old, key := a.issue("old", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) })
	odd, oddKey := a.issue("odd", func(c *x509.Certificate) { c.DNSNames = []string{"a\x1b\n\"b\""} })
	web, webKey := newAuthority(t).issue("web", nil)
	foreign := with(t, a.client(), web, webKey)
	shake := func(_ *tls.Conn, err error) {
		if err == nil {
			t.Error("a client is served that must not be")
		}
	}
	for _, c := range []struct {
		name, reason, claims string
		do                   func(conn net.Conn)
	}{
		{"no certificate", "didn't provide a certificate", "", func(conn net.Conn) { shake(upgrade(conn, a.client())) }},
		{"of another CA", "unknown authority", "dns:web", func(conn net.Conn) { shake(upgrade(conn, foreign)) }},
		{"expired", "expired", "dns:old", func(conn net.Conn) { shake(upgrade(conn, with(t, a.client(), old, key))) }},
		{"revoked", "is revoked", "dns:lost", func(conn net.Conn) { shake(upgrade(conn, lost)) }},
		{"of a name that is none", "", "", func(conn net.Conn) { shake(upgrade(conn, with(t, newAuthority(t).client(), odd, oddKey))) }},
		{"garbage", "TLS handshake", "", func(conn net.Conn) {
			mustAsk(t, conn, nbdwire.OptStartTLS, nil, nbdwire.RepAck)
			conn.Write([]byte("\x1b[2J no TLS \n"))
			conn.Read(make([]byte, 1))
		}},
		{"without TLS", "without TLS, which is required", "", func(conn net.Conn) { mustAsk(t, conn, nbdwire.OptGo, goData("disk0"), needsTLS) }},
	} {
		c.do(greeted(t, "tcp", addr))
		e := eventsOf(t, r.f, 1)
		if len(e) != 1 || e[0].Event != plugin.UserHandshakes || !strings.Contains(e[0].Error, c.reason) || e[0].Claimed != c.claims || e[0].Identity != "" {
			t.Errorf("%s: %+v", c.name, e)
			continue
		}
		if !strings.HasPrefix(e[0].Peer, "127.0.0.1:") || e[0].Listener == "" || strings.ContainsFunc(e[0].Error, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("%s: %+v", c.name, e[0])
		}
	}
}

// TestTLS_RefusalsAreBounded: a client that is refused again and again leaves a few
// events and their number, and crowds out no event of another one.
func TestTLS_RefusalsAreBounded(t *testing.T) {
	a := newAuthority(t)
	r, addr := tlsRig(t, rigConfig{}, a.server(true, true))
	attempts := 3 * ratelimit.Refusals.Burst
	for range attempts {
		conn := greeted(t, "tcp", addr)
		mustAsk(t, conn, nbdwire.OptGo, goData("disk0"), needsTLS)
		conn.Close()
	}
	c := secured(t, addr, a.member("web"), true)
	c.conn.Close()
	sum, of := uint64(0), map[string]int{}
	eventually(t, "the number that is left out", func() bool {
		events, _ := r.f.TakeUsers()
		for _, e := range events {
			of[e.Event]++
			if e.Event == plugin.UserHandshakes {
				sum += max(e.LeftOut, 1)
			}
			if e.LeftOut > 0 && e.Peer != "127.0.0.1" {
				t.Errorf("%+v", e)
			}
		}
		return sum == uint64(attempts)
	})
	if of[plugin.UserHandshakes] > ratelimit.Refusals.Burst+2 || of[plugin.UserOpens] != 1 {
		t.Errorf("events: %v", of)
	}
}
