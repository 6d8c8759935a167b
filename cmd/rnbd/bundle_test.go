package main

import (
	"archive/tar"
	"compress/gzip"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// unpack returns the files of an archive.
func unpack(t *testing.T, name string) map[string]string {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zip, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for archive := tar.NewReader(zip); ; {
		h, err := archive.Next()
		if err == io.EOF {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		files[h.Name] = string(text)
	}
}

func TestABundleHasNoSecrets(t *testing.T) {
	const secret = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
	dir := t.TempDir()
	put := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "rnbd_client_sessions 1\nrnbd_x{token=\""+secret+"\"} 1\n")
	}))
	defer page.Close()
	addr := strings.TrimPrefix(page.URL, "http://")
	config := put("client.yaml", "# "+secret+"\nloss: queue:30s\nmetrics: "+addr+"\npsk: "+secret+"\ntls-psk:\n  - "+secret+"\nfrontend-config:\n  - nbd:psk="+secret+"\n")
	log := put("client.log", "level=INFO msg=ready\nlevel=INFO psk="+secret+"\n-----BEGIN PRIVATE KEY-----\n"+secret+"\n-----END PRIVATE KEY-----\nhost1:"+secret+"\n")
	put("client.devices", `{"version":1,"options":{"password":"`+secret+`"}}`)
	out := filepath.Join(dir, "bundle.tar.gz")
	text, err := command(t, "bundle", out, "--socket", dir, "--config", config, "--log", log)
	if err != nil || !strings.Contains(text, "wrote") {
		t.Fatalf("%v: %s", err, text)
	}
	files := unpack(t, out)
	all := ""
	for name, text := range files {
		if strings.Contains(text, secret) {
			t.Errorf("%s has the secret:\n%s", name, text)
		}
		all += name + "\n" + text
	}
	for _, want := range []string{"version.txt", "doctor.json", "queue:30s", "msg=ready", "client.devices", "rnbd_client_sessions 1", "missing.txt", "no such file"} {
		if !strings.Contains(all, want) {
			t.Errorf("nothing of %q in it:\n%s", want, all)
		}
	}
	if st, err := os.Stat(out); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	if _, err := command(t, "bundle", out, "--socket", dir); exitCode(err) != exitExists {
		t.Errorf("an archive that is there is written over: %v", err)
	}
}

// TestABundleSaysWhatIsMissing has no configuration and no daemon: the metrics and the
// logs that are not there are named, with the option that adds them.
func TestABundleSaysWhatIsMissing(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir) // without journalctl
	out := filepath.Join(dir, "bundle.tar.gz")
	text, err := command(t, "bundle", out, "--socket", dir)
	if err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	missing := unpack(t, out)["rnbd-bundle/missing.txt"]
	for _, want := range []string{"--metrics ADDRESS:PORT", "--log FILE"} {
		if !strings.Contains(missing, want) || !strings.Contains(text, want) {
			t.Errorf("%q is not said:\n%s\n%s", want, text, missing)
		}
	}
}
