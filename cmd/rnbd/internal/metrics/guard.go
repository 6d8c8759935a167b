package metrics

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

// TLS makes the handshakes of a page, as tlsauth.Auth does.
type TLS interface {
	HTTPSConfig() *tls.Config
	Reload(force bool) error
}

// Guard protects a page by TLS, by a token, or by both. A nil Guard protects
// nothing. It looks at its files before they are used. Files with an error
// change nothing: the earlier ones stay in use.
type Guard struct {
	tls TLS // nil: none
	log *slog.Logger

	mu      sync.Mutex
	file    string            // of the token; empty: none is asked for
	seen    os.FileInfo       // file as it was looked at last; nil: it was not there
	token   [sha256.Size]byte // hash of the token
	refused int               // requests since told
	told    time.Time
}

// NewGuard returns a Guard with TLS by t, which may be nil, and with the token in
// file, which may be empty. Without both it returns nil.
func NewGuard(t TLS, file string, log *slog.Logger) (*Guard, error) {
	if t == nil && file == "" {
		return nil, nil
	}
	g := &Guard{tls: t, log: log, file: file}
	if err := g.readToken(true); err != nil {
		return nil, err
	}
	return g, nil
}

// Reload reads the files again.
func (g *Guard) Reload() error {
	if g == nil {
		return nil
	}
	if err := g.readToken(true); err != nil || g.tls == nil {
		return err
	}
	return g.tls.Reload(true)
}

// Shortest and longest token, in bytes.
const (
	minToken = 16
	maxToken = 4096
)

// readToken reads the file of the token if it has changed or force is set. g.mu
// is not held.
func (g *Guard) readToken(force bool) error {
	if g.file == "" {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	st, err := os.Stat(g.file)
	if err != nil {
		st = nil
	}
	if !force && sameFile(st, g.seen) {
		return nil
	}
	g.seen = st
	if err == nil {
		err = g.takeToken(st)
	}
	if err != nil {
		return fmt.Errorf("token %s: %w", g.file, err)
	}
	return nil
}

func sameFile(a, b os.FileInfo) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// takeToken reads the token. Its errors show nothing of it.
func (g *Guard) takeToken(st os.FileInfo) error {
	if !st.Mode().IsRegular() || st.Size() > maxToken {
		return fmt.Errorf("not a regular file of at most %d bytes", maxToken)
	}
	b, err := os.ReadFile(g.file)
	if err != nil {
		return err
	}
	token := strings.TrimSpace(string(b))
	if len(token) < minToken {
		return fmt.Errorf("it has %d characters, at least %d are needed; make one with \"openssl rand -hex 32\"", len(token), minToken)
	}
	for _, c := range []byte(token) {
		if c <= ' ' || c > '~' {
			return errors.New("it is more than one word of printable ASCII; make one with \"openssl rand -hex 32\"")
		}
	}
	if st.Mode()&0o077 != 0 {
		g.log.Warn(fmt.Sprintf("metrics: %s can be read by other users (mode %#o): make it 0600", g.file, st.Mode().Perm()))
	}
	g.token = sha256.Sum256([]byte(token))
	return nil
}

// wantToken lets requests with the token pass to h.
func (g *Guard) wantToken(h http.Handler) http.Handler {
	if g == nil || g.file == "" {
		return h
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if g.admits(r.Header.Get("Authorization")) {
			h.ServeHTTP(w, r)
			return
		}
		g.refuse(r.RemoteAddr)
		w.Header().Add("WWW-Authenticate", `Bearer realm="rnbd metrics"`)
		w.Header().Add("WWW-Authenticate", `Basic realm="rnbd metrics: any name, and the token as the password"`)
		http.Error(w, "the token is missing or wrong: send \"Authorization: Bearer TOKEN\"; in a browser, type any name, and the token as the password", http.StatusUnauthorized)
	})
}

// admits reports whether a header field has the token. The time that it takes
// does not depend on how much of the token is right.
func (g *Guard) admits(field string) bool {
	if err := g.readToken(false); err != nil {
		g.log.Error("metrics: the file of the token has changed and cannot be used, the earlier one stays in use", "err", err)
	}
	sum := sha256.Sum256([]byte(tokenOf(field)))
	g.mu.Lock()
	defer g.mu.Unlock()
	return subtle.ConstantTimeCompare(sum[:], g.token[:]) == 1
}

// tokenOf returns the token in a header field: that of a program (RFC 6750), or the
// password that a browser has asked a person for, with whatever name (RFC 7617). It is
// empty, and no token is, if there is none.
func tokenOf(field string) string {
	scheme, value, _ := strings.Cut(field, " ")
	value = strings.TrimSpace(value)
	switch {
	case strings.EqualFold(scheme, "Bearer"):
		return value
	case strings.EqualFold(scheme, "Basic"):
		pair, err := base64.StdEncoding.DecodeString(value)
		if err != nil {
			return ""
		}
		_, password, _ := strings.Cut(string(pair), ":")
		return password
	}
	return ""
}

// refusalPause is the time between two lines of the log about refused requests.
const refusalPause = time.Minute

// refuse counts a request without the token, and logs it now and then.
func (g *Guard) refuse(from string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.refused++
	if now := time.Now(); now.Sub(g.told) >= refusalPause {
		g.log.Warn("metrics: requests without the token are refused", "address", from, "requests", g.refused)
		g.refused, g.told = 0, now
	}
}
