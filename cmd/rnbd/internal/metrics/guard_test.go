package metrics

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
)

const (
	token      = "0123456789abcdef0123456789abcdef"
	otherToken = "fedcba9876543210fedcba9876543210"
	patience   = time.Minute // of clients in tests
)

// lines is a log.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// files are those of a page, as options of the daemons name them.
type files struct{ Cert, Key, ClientCA, Token string }

func (f files) guard(log *slog.Logger) (*Guard, error) {
	if f.Cert+f.Key+f.ClientCA == "" {
		return NewGuard(nil, f.Token, log)
	}
	a, err := tlsauth.NewHTTPS(tlsauth.Config{Files: tlsauth.Files{Cert: f.Cert, Key: f.Key, CA: f.ClientCA}, Logger: log})
	if err != nil {
		return nil, err
	}
	return NewGuard(a, f.Token, log)
}

// guarded serves a page with the files.
func guarded(t *testing.T, f files) (*Page, *Guard, *lines) {
	t.Helper()
	var text lines
	log := slog.New(slog.NewTextHandler(&text, nil))
	g, err := f.guard(log)
	if err != nil {
		t.Fatal(err)
	}
	p, err := Listen("127.0.0.1:0", Client(busyDaemon()), g, nil, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p, g, &text
}

// ask makes a request on a connection of its own. cfg is nil without TLS. The
// status is 0 if there is no answer.
func ask(t *testing.T, p *Page, cfg *tls.Config, page, authorization string) (status int, text string, state *tls.ConnectionState) {
	t.Helper()
	scheme := "http://"
	if cfg != nil {
		scheme = "https://"
	}
	r, err := http.NewRequest(http.MethodGet, scheme+p.Addr().String()+page, nil)
	if err != nil {
		t.Fatal(err)
	}
	if authorization != "" {
		r.Header.Set("Authorization", authorization)
	}
	c := http.Client{Timeout: patience, Transport: &http.Transport{TLSClientConfig: cfg, DisableKeepAlives: true}}
	answer, err := c.Do(r)
	if err != nil {
		return 0, err.Error(), nil
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	if err != nil {
		return 0, err.Error(), nil
	}
	return answer.StatusCode, string(b), answer.TLS
}

// basic are credentials as a browser sends them.
func basic(name, password string) string {
	return base64.StdEncoding.EncodeToString([]byte(name + ":" + password))
}

func TestMetricsNeedTheToken(t *testing.T) {
	a := newAuthority(t)
	p, _, _ := guarded(t, files{Token: a.put("token", token+"\n")})
	for field, want := range map[string]int{
		"":                                http.StatusUnauthorized,
		"Bearer":                          http.StatusUnauthorized,
		"Bearer ":                         http.StatusUnauthorized,
		"Bearer " + otherToken:            http.StatusUnauthorized,
		"Bearer " + token[:31]:            http.StatusUnauthorized,
		"Bearer " + token + "0":           http.StatusUnauthorized,
		"Bearer " + token + " " + token:   http.StatusUnauthorized,
		"Basic " + token:                  http.StatusUnauthorized,
		token:                             http.StatusUnauthorized,
		"Basic " + basic("", token[:31]):  http.StatusUnauthorized,
		"Basic " + basic(token, ""):       http.StatusUnauthorized,
		"Basic " + basic(token, "x"):      http.StatusUnauthorized,
		"Basic " + basic("", ":"+token):   http.StatusUnauthorized,
		"Basic %%":                        http.StatusUnauthorized,
		"Digest " + token:                 http.StatusUnauthorized,
		"Basic " + basic("anyone", token): http.StatusOK,
		"basic " + basic("", token):       http.StatusOK,
		"Bearer " + token:                 http.StatusOK,
		"bearer " + token:                 http.StatusOK,
	} {
		status, text, _ := ask(t, p, nil, "/metrics", field)
		if status != want {
			t.Errorf("%q: status %d, want %d", field, status, want)
		}
		if named := strings.Contains(text, "rnbd0"); named != (want == http.StatusOK) {
			t.Errorf("%q: names are shown: %v\n%.300s", field, named, text)
		}
	}
	for _, page := range []string{"/healthz", "/readyz"} {
		if status, text, _ := ask(t, p, nil, page, ""); status != http.StatusOK || text != "ok\n" {
			t.Errorf("%s without a token: %d %q", page, status, text)
		}
	}
}

// Pages beside the metrics need the token, too. A browser is asked for it as a
// password.
func TestOtherPagesNeedTheToken(t *testing.T) {
	a := newAuthority(t)
	log := slog.New(slog.DiscardHandler)
	g, err := NewGuard(nil, a.put("token", token), log)
	if err != nil {
		t.Fatal(err)
	}
	rest := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "rest: "+r.URL.Path) })
	p, err := Listen("127.0.0.1:0", Client(busyDaemon()), g, rest, log)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for _, page := range []string{"/", "/status.json", "/no/such/page"} {
		if status, text, _ := ask(t, p, nil, page, "Basic "+basic("me", token)); status != http.StatusOK || text != "rest: "+page {
			t.Errorf("%s with the token: %d %q", page, status, text)
		}
		if status, text, _ := ask(t, p, nil, page, "Basic "+basic("me", otherToken)); status != http.StatusUnauthorized || strings.Contains(text, "rest") {
			t.Errorf("%s with another token: %d %q", page, status, text)
		}
	}
	r, err := http.Get("http://" + p.Addr().String() + "/")
	if err != nil {
		t.Fatal(err)
	}
	r.Body.Close()
	if asked := strings.Join(r.Header.Values("WWW-Authenticate"), ", "); !strings.Contains(asked, "Basic realm=") || !strings.Contains(asked, "Bearer realm=") {
		t.Errorf("a browser is asked for %q", asked)
	}
	if status, text, _ := ask(t, p, nil, "/healthz", ""); status != http.StatusOK || text != "ok\n" {
		t.Errorf("/healthz: %d %q", status, text)
	}
	if status, text, _ := ask(t, p, nil, "/metrics", "Basic "+basic("me", token)); status != http.StatusOK || !strings.Contains(text, "rnbd0") {
		t.Errorf("/metrics: %d %.100q", status, text)
	}
}

func TestRefusedRequestsAreLoggedNowAndThen(t *testing.T) {
	a := newAuthority(t)
	p, _, log := guarded(t, files{Token: a.put("token", token)})
	for range 5 {
		ask(t, p, nil, "/metrics", "Bearer "+otherToken)
	}
	if n := strings.Count(log.String(), "requests without the token are refused"); n != 1 || strings.Contains(log.String(), otherToken) {
		t.Errorf("%d lines about refused requests, want 1 and no token in it:\n%s", n, log.String())
	}
}

func TestPageByTLS(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.issue("page", x509.ExtKeyUsageServerAuth)
	p, _, _ := guarded(t, files{Cert: cert, Key: key, Token: a.put("token", token)})
	status, text, state := ask(t, p, a.trusting(), "/metrics", "Bearer "+token)
	if status != http.StatusOK || !strings.Contains(text, "rnbd_client_build_info") || state.Version != tls.VersionTLS13 {
		t.Fatalf("%d %.300s", status, text)
	}
	for _, field := range []string{"", "Bearer " + otherToken} {
		if status, _, _ := ask(t, p, a.trusting(), "/metrics", field); status != http.StatusUnauthorized {
			t.Errorf("%q: status %d", field, status)
		}
	}
	if status, text, _ := ask(t, p, a.trusting(), "/healthz", ""); status != http.StatusOK {
		t.Errorf("/healthz without a token: %d %s", status, text)
	}
	if status, text, _ := ask(t, p, nil, "/metrics", "Bearer "+token); status != http.StatusBadRequest || strings.Contains(text, "rnbd") {
		t.Errorf("without TLS: %d %s", status, text)
	}
	old := a.trusting()
	old.MaxVersion = tls.VersionTLS12
	if status, text, _ := ask(t, p, old, "/metrics", "Bearer "+token); status != 0 || !strings.Contains(text, "protocol version") {
		t.Errorf("by TLS 1.2: %d %s", status, text)
	}
}

func TestReadersNeedACertificate(t *testing.T) {
	a, strangers := newAuthority(t), newAuthority(t)
	cert, key := a.issue("page", x509.ExtKeyUsageServerAuth)
	p, _, _ := guarded(t, files{Cert: cert, Key: key, ClientCA: a.path("ca.pem")})
	with := func(by *authority, usage x509.ExtKeyUsage) *tls.Config {
		cfg := a.trusting()
		cfg.Certificates = []tls.Certificate{must(tls.LoadX509KeyPair(by.issue("reader", usage)))}
		return cfg
	}
	if status, text, _ := ask(t, p, with(a, x509.ExtKeyUsageClientAuth), "/metrics", ""); status != http.StatusOK {
		t.Errorf("%d %.300s", status, text)
	}
	for name, cfg := range map[string]*tls.Config{
		"no certificate":  a.trusting(),
		"of another CA":   with(strangers, x509.ExtKeyUsageClientAuth),
		"one of a server": with(a, x509.ExtKeyUsageServerAuth),
	} {
		for _, page := range []string{"/metrics", "/healthz"} {
			if status, text, _ := ask(t, p, cfg, page, ""); status != 0 {
				t.Errorf("%s, %s: %d %.300s", name, page, status, text)
			}
		}
	}
}

func TestCertificateAndTokenAreReadAgain(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.issue("page", x509.ExtKeyUsageServerAuth)
	p, g, _ := guarded(t, files{Cert: cert, Key: key, Token: a.put("token", token)})
	serial := func(token string, want int) int64 {
		t.Helper()
		status, text, state := ask(t, p, a.trusting(), "/metrics", "Bearer "+token)
		if status != want {
			t.Fatalf("status %d, want %d: %.300s", status, want, text)
		}
		return state.PeerCertificates[0].SerialNumber.Int64()
	}
	first := serial(token, http.StatusOK)
	a.put("token", otherToken)
	a.issue("page", x509.ExtKeyUsageServerAuth)
	second := serial(otherToken, http.StatusOK)
	if second == first {
		t.Error("the certificate is the earlier one")
	}
	serial(token, http.StatusUnauthorized)

	a.put("token", "short")
	a.put("page.pem", "-----BEGIN CERTIFICATE-----\nAAAA")
	if err := g.Reload(); err == nil || !strings.Contains(err.Error(), "token") {
		t.Errorf("a bad token is read again: %v", err)
	}
	a.put("token", token)
	if err := g.Reload(); err == nil || !strings.Contains(err.Error(), "page.pem") {
		t.Errorf("a bad certificate is read again: %v", err)
	}
	if serial(token, http.StatusOK) != second {
		t.Error("a bad certificate takes the place of the earlier one")
	}
	if err := os.Remove(a.path("token")); err != nil {
		t.Fatal(err)
	}
	serial("", http.StatusUnauthorized)
	serial(otherToken, http.StatusUnauthorized)
	serial(token, http.StatusOK)
}

func TestFilesOfThePageWithErrors(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.issue("page", x509.ExtKeyUsageServerAuth)
	_, otherKey := a.issue("other", x509.ExtKeyUsageServerAuth)
	for want, f := range map[string]files{
		"no such file":                 {Token: a.path("nothing")},
		"at least 16":                  {Token: a.put("short", "0123456789abcde\n")},
		"it has 0 characters":          {Token: a.put("empty", "\n")},
		"more than one word":           {Token: a.put("two", token+"\n"+otherToken+"\n")},
		"at most 4096 bytes":           {Token: a.put("long", strings.Repeat("a", 5000))},
		"not a regular file":           {Token: a.dir},
		"files of certificate and key": {Cert: cert},
		"private key does not match":   {Cert: cert, Key: otherKey},
		"needs both":                   {ClientCA: a.path("ca.pem")},
		"CA ":                          {Cert: cert, Key: key, ClientCA: a.path("short")},
	} {
		g, err := f.guard(slog.New(slog.DiscardHandler))
		if g != nil || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error with %q", f, err, want)
		}
	}
}

func TestTokenThatOthersCanReadIsWarnedOf(t *testing.T) {
	a := newAuthority(t)
	name := a.put("token", token)
	if err := os.Chmod(name, 0o644); err != nil {
		t.Fatal(err)
	}
	_, _, log := guarded(t, files{Token: name})
	if !strings.Contains(log.String(), "can be read by other users") {
		t.Errorf("the log:\n%s", log)
	}
}

// served serves one page, of names, with the limits of newServer.
func served(t *testing.T, f files, limit time.Duration) *Page {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	g := must(f.guard(log))
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	p := &Page{addr: l.Addr(), http: newServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "names") }), limit, log)}
	t.Cleanup(func() { p.Close() })
	if g != nil {
		l = tls.NewListener(l, g.tls.HTTPSConfig())
	}
	go p.http.Serve(l)
	return p
}

// wantEnd waits until the page hangs up.
func wantEnd(t *testing.T, c net.Conn) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(patience))
	if _, err := c.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
		t.Errorf("a connection that stalls: %v, want its end", err)
	}
}

// Strangers that connect and say nothing, or half a handshake, keep no reader
// out: the one that has waited longest is hung up on, long before its time is over.
func TestStalledHandshakesKeepNobodyOut(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.issue("page", x509.ExtKeyUsageServerAuth)
	for name, f := range map[string]files{"TLS": {Cert: cert, Key: key}, "plain": {}} {
		p := served(t, f, time.Hour)
		var first net.Conn
		for i := range 2 * maxConns {
			c, err := net.DialTimeout("tcp", p.Addr().String(), patience)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if i == 0 {
				first = c
			}
			if i%2 == 1 {
				c.Write([]byte{22, 3, 1}) // the begin of a record
			}
		}
		var cfg *tls.Config
		if f.Cert != "" {
			cfg = a.trusting()
		}
		for range 3 {
			if status, text, _ := ask(t, p, cfg, "/", ""); status != http.StatusOK {
				t.Errorf("%s: %d %.300s", name, status, text)
			}
		}
		wantEnd(t, first)
	}
}

func TestStalledHandshakeEnds(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.issue("page", x509.ExtKeyUsageServerAuth)
	p := served(t, files{Cert: cert, Key: key}, 200*time.Millisecond)
	c := must(net.Dial("tcp", p.Addr().String()))
	defer c.Close()
	wantEnd(t, c)
}
