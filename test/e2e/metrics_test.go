package e2e

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// pageCertificate makes a certificate for 127.0.0.1 that is its own CA.
func pageCertificate(t *testing.T, dir string) (cert, key string) {
	t.Helper()
	cert, key = filepath.Join(dir, "page.pem"), filepath.Join(dir, "page.key")
	out, err := exec.CommandContext(t.Context(), lab.Tool(t, "openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
		"-nodes", "-days", "2", "-subj", "/CN=page", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return cert, key
}

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// TestMetricsByTLSWithAToken has a server that listens on all addresses, and
// changes its token while it runs.
func TestMetricsByTLSWithAToken(t *testing.T) {
	const first, second = "first-0123456789abcdef", "second-0123456789abcdef"
	dir := shortDir(t)
	cert, key := pageCertificate(t, dir)
	token := writeFile(t, filepath.Join(dir, "token"), first+"\n")
	config := filepath.Join(dir, "server.yaml")
	text := "metrics: 0.0.0.0:0\nmetrics-cert: " + cert + "\nmetrics-key: " + key + "\nmetrics-token-file: " + token + "\n"
	writeFile(t, config, text)
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}, Extra: []string{"--config", config}})
	m := regexp.MustCompile(`msg="metrics are served".* address=\S+:(\d+)`).FindStringSubmatch(s.Log())
	if m == nil {
		t.Fatalf("no address of metrics in the log:\n%s", s.Log())
	}

	pem, err := os.ReadFile(cert)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	c := http.Client{Timeout: enough, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	want := func(page, token string, status int) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://127.0.0.1:"+m[1]+page, nil)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		answer, err := c.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != status {
			t.Errorf("%s with the token %q: %s, want %d", page, token, answer.Status, status)
		}
	}
	want("/metrics", first, http.StatusOK)
	want("/metrics", second, http.StatusUnauthorized)
	want("/metrics", "", http.StatusUnauthorized)
	want("/", first, http.StatusOK)
	want("/status.json", first, http.StatusOK)
	want("/status.json", "", http.StatusUnauthorized)
	want("/healthz", "", http.StatusOK)
	want("/readyz", "", http.StatusOK)

	writeFile(t, token, second)
	rnbd(t, "config", "reload", "server", "--socket", s.Socket).want(t, 0)
	want("/metrics", second, http.StatusOK)
	want("/metrics", first, http.StatusUnauthorized)

	writeFile(t, token, "short")
	if r := rnbd(t, "config", "reload", "server", "--socket", s.Socket); r.code == 0 || !strings.Contains(r.err, "openssl rand -hex 32") {
		t.Errorf("a bad token is read again: code %d\n%s%s", r.code, r.out, r.err)
	}
	want("/metrics", second, http.StatusOK)
	want("/metrics", "short", http.StatusUnauthorized)

	writeFile(t, token, second)
	writeFile(t, config, "metrics: 0.0.0.0:0\n")
	if r := rnbd(t, "config", "reload", "server", "--socket", s.Socket); r.code == 0 || !strings.Contains(r.err, "add --metrics-cert") {
		t.Errorf("a page without protection is taken: code %d\n%s%s", r.code, r.out, r.err)
	}
	writeFile(t, config, strings.Replace(text, "0.0.0.0:0", "127.0.0.1:0", 1))
	rnbd(t, "config", "diff", "server", "--socket", s.Socket).want(t, 0, "metrics", "restart", "0.0.0.0:0 -> 127.0.0.1:0")
}

func TestMetricsBeyondLoopbackAreRefused(t *testing.T) {
	socket := filepath.Join(shortDir(t), "s")
	for _, kind := range []string{"server", "client"} {
		rnbd(t, kind, "run", "--socket", socket, "--sys", "off", "--metrics", "0.0.0.0:0").
			want(t, exitUsage, "add --metrics-cert, --metrics-key and --metrics-token-file", "0.0.0.0:0,trusted")
	}
}
