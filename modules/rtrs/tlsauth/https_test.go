package tlsauth

import (
	"crypto/tls"
	"log/slog"
	"strings"
	"testing"
)

func TestHTTPSFilesWithErrors(t *testing.T) {
	a := newAuthority(t, "ca")
	f := a.issue("page", nil)
	for want, f := range map[string]Files{
		"needs both":          {CA: f.CA, Key: f.Key},
		"neither shared":      {Cert: f.Cert, Key: f.Key, PSK: writePSK(t, psk(t, "a")).PSK},
		"list of revoked":     {Cert: f.Cert, Key: f.Key, CRL: f.CA},
		"CA " + f.Key:         {Cert: f.Cert, Key: f.Key, CA: f.Key},
		"certificate " + f.CA: {Cert: f.CA, Key: f.Key},
	} {
		if auth, err := NewHTTPS(Config{Files: f, Logger: slog.New(slog.DiscardHandler)}); auth != nil || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error with %q", f, err, want)
		}
	}
}

// A page without a CA asks its clients for no certificate; one with a CA asks
// for one of that CA.
func TestHTTPSHandshakes(t *testing.T) {
	a, others := newAuthority(t, "ca"), newAuthority(t, "others")
	f := a.issue("page", nil)
	reader, stranger := a.issue("reader", nil), others.issue("stranger", nil)
	for _, c := range []struct {
		ca, with string
		ok       bool
	}{{"", "", true}, {f.CA, "", false}, {f.CA, reader.Cert, true}, {f.CA, stranger.Cert, false}} {
		auth := must(NewHTTPS(Config{Files: Files{Cert: f.Cert, Key: f.Key, CA: c.ca}, Logger: slog.New(slog.DiscardHandler)}))
		cs, ss := sockets(t)
		done := make(chan error, 1)
		go func() {
			defer ss.Close()
			done <- tls.Server(ss, auth.HTTPSConfig()).Handshake()
		}()
		cfg := &tls.Config{InsecureSkipVerify: true}
		if c.with != "" {
			cfg.Certificates = []tls.Certificate{must(tls.LoadX509KeyPair(c.with, strings.TrimSuffix(c.with, "pem")+"key"))}
		}
		err := tls.Client(cs, cfg).Handshake()
		if serr := <-done; (err == nil && serr == nil) != c.ok {
			t.Errorf("CA %q, certificate %q: client %v, server %v", c.ca, c.with, err, serr)
		}
	}
}
