package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// database makes a database in the form of version 1, with one weakness of the
// standard library that is older than all versions of Go, or of a module that no
// program has.
func database(t *testing.T, module string) string {
	t.Helper()
	dir := t.TempDir()
	const id, when = "GO-2020-0001", "2020-01-01T00:00:00Z"
	put := func(name string, v any) {
		t.Helper()
		text, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	type m = map[string]any
	put("index/db.json", m{"modified": when})
	put("index/modules.json", []m{{"path": module, "vulns": []m{{"id": id, "modified": when}}}})
	put("index/vulns.json", []m{{"id": id, "modified": when}})
	put("ID/"+id+".json", m{
		"schema_version": "1.3.1", "id": id, "modified": when, "published": when, "summary": "invented for the test", "details": "invented for the test",
		"affected": []m{{
			"package":            m{"name": module, "ecosystem": "Go"},
			"ranges":             []m{{"type": "SEMVER", "events": []m{{"introduced": "0"}}}},
			"ecosystem_specific": m{"imports": []m{{"path": "os"}}},
		}},
		"database_specific": m{"url": "https://pkg.go.dev/vuln/" + id},
	})
	return "file://" + dir
}

func TestPrograms(t *testing.T) {
	self, err := os.Executable() // a program of Go, with os
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := run(t.Context(), database(t, "example.org/nothing"), []string{self}, &out); err != nil || !strings.Contains(out.String(), "nothing is known") {
		t.Errorf("a program that nothing is known of: %v\n%s", err, out.String())
	}
	out.Reset()
	if err := run(t.Context(), database(t, "stdlib"), []string{self}, &out); err == nil || !strings.Contains(out.String(), "GO-2020-0001") {
		t.Errorf("a program with a weakness: %v\n%s", err, out.String())
	}
	if err := run(t.Context(), database(t, "stdlib"), []string{filepath.Join(t.TempDir(), "none")}, &out); err == nil {
		t.Error("a program that is not there passes")
	}
	if err := run(t.Context(), database(t, "stdlib"), nil, &out); err == nil {
		t.Error("no program passes")
	}
}

// A database that cannot be reached is one line, and no failure.
func TestDatabaseOutOfReach(t *testing.T) {
	refused := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(refused.Close)
	for _, db := range []string{"file://" + t.TempDir(), "http://127.0.0.1:1", refused.URL} {
		var out strings.Builder
		if err := run(t.Context(), db, []string{"program"}, &out); err != nil || strings.Count(out.String(), "\n") != 1 || !strings.Contains(out.String(), "left out") {
			t.Errorf("%s: %v, %q", db, err, out.String())
		}
	}
}
