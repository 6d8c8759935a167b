package vuln

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// makeVuln runs make vuln on programs of a folder, with a database.
func makeVuln(t *testing.T, database, folder, programs string) (out string, err error) {
	t.Helper()
	if testing.Short() { // the tests of make test may be without a network
		t.Skip("builds govulncheck, which may need its module: make check")
	}
	if _, err := exec.LookPath("make"); err != nil {
		t.Skip("make is not installed")
	}
	cmd := exec.Command("make", "--no-print-directory", "-C", "../..", "-o", "build", "vuln", "RNBD_BIN="+folder, "PROGRAMS="+programs)
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "GOVULNDB="+database)
	text, err := cmd.CombinedOutput()
	return string(text), err
}

// writeDatabase writes a database of version 1 with one invented weakness of a module.
// All versions of the module have the weakness.
func writeDatabase(t *testing.T, module string) (address string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"index/db.json":      `{"modified": "2020-01-01T00:00:00Z"}`,
		"index/modules.json": `[{"path": "MODULE", "vulns": [{"id": "GO-2020-0001", "modified": "2020-01-01T00:00:00Z"}]}]`,
		"index/vulns.json":   `[{"id": "GO-2020-0001", "modified": "2020-01-01T00:00:00Z"}]`,
		"ID/GO-2020-0001.json": `{"schema_version": "1.3.1", "id": "GO-2020-0001", "modified": "2020-01-01T00:00:00Z", "published": "2020-01-01T00:00:00Z",
			"affected": [{"package": {"name": "MODULE", "ecosystem": "Go"}, "ranges": [{"type": "SEMVER", "events": [{"introduced": "0"}]}],
			"ecosystem_specific": {"imports": [{"path": "os"}]}}], "database_specific": {"url": "https://pkg.go.dev/vuln/GO-2020-0001"}}`,
	} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(strings.ReplaceAll(text, "MODULE", module)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return "file://" + dir
}

func TestPrograms(t *testing.T) {
	self, err := os.Executable() // a program of Go, with os
	if err != nil {
		t.Fatal(err)
	}
	folder, name := filepath.Split(self)
	if out, err := makeVuln(t, writeDatabase(t, "example.org/nothing"), folder, name); err != nil || !strings.Contains(out, "nothing is known") {
		t.Errorf("a program without a known weakness: %v\n%s", err, out)
	}
	if out, err := makeVuln(t, writeDatabase(t, "stdlib"), folder, name); err == nil || !strings.Contains(out, "GO-2020-0001") || !strings.Contains(out, "affected: "+name) {
		t.Errorf("a program with a weakness: %v\n%s", err, out)
	}
	if out, err := makeVuln(t, writeDatabase(t, "stdlib"), t.TempDir(), "none"); err == nil {
		t.Errorf("a missing program passes:\n%s", out)
	}
}

// TestDatabaseOutOfReach shows that a database out of reach is one line, and no failure.
func TestDatabaseOutOfReach(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	folder, name := filepath.Split(self)
	refused := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(refused.Close)
	for _, database := range []string{"file://" + t.TempDir(), "http://127.0.0.1:1", refused.URL} {
		if out, err := makeVuln(t, database, folder, name); err != nil || strings.Count(out, "\n") != 1 || !strings.Contains(out, "left out") {
			t.Errorf("%s: %v, %q", database, err, out)
		}
	}
}
