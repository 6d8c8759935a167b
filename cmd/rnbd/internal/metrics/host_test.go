package metrics

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestOtherNamesOfLoopbackAreRefused asks an unprotected page as a browser would
// after DNS rebinding.
func TestOtherNamesOfLoopbackAreRefused(t *testing.T) {
	page, _, _ := guarded(t, files{})
	own, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/metrics", "/healthz", "/"} {
		for host, want := range map[string]bool{
			"": true, "localhost": true, "LOCALHOST:80": true, "localhost.": true, "a.localhost:9": true,
			"127.0.0.1": true, "127.0.0.1:1": true, "[::1]": true, "[::1]:80": true, "192.0.2.1": true, own: true,
			"evil.example": false, "evil.example:80": false, "127.0.0.1.evil.example": false, "localhost.evil.example": false,
			"notlocalhost": false, "[evil.example]:80": false,
		} {
			code, text := asking(t, page, host, path)
			if refused := code == http.StatusMisdirectedRequest; refused == want {
				t.Errorf("Host %q, %s: status %d, %q", host, path, code, text)
			} else if refused && !strings.Contains(text, "http://"+page.Addr().String()+path) {
				t.Errorf("Host %q, %s: the answer names no address to use: %q", host, path, text)
			}
		}
	}
}

// TestNamesOfProtectedPagesAreFree: a browser that knows no token reads nothing.
func TestNamesOfProtectedPagesAreFree(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	page, _, _ := guarded(t, files{Token: file})
	if code, text := asking(t, page, "storage.example:9100", "/metrics"); code != http.StatusUnauthorized {
		t.Errorf("status %d, %q", code, text)
	}
}

func asking(t *testing.T, page *Page, host, path string) (code int, text string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+page.Addr().String()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Host = host
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}
