package packages

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// podman keeps its images and containers below a folder.
type podman struct {
	t   *testing.T
	dir string
}

func (p podman) run(args ...string) string {
	p.t.Helper()
	out, err := p.try(args...)
	if err != nil {
		p.t.Fatalf("podman %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

func (p podman) try(args ...string) (string, error) {
	common := []string{"--root", filepath.Join(p.dir, "root"), "--runroot", filepath.Join(p.dir, "run"), "--tmpdir", filepath.Join(p.dir, "tmp"),
		"--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--events-backend", "none"}
	out, err := exec.Command("podman", append(common, args...)...).CombinedOutput()
	return string(out), err
}

// The image has a server, a client and its commands: a server and a client in two
// containers exchange data.
func TestImageRunsInPodman(t *testing.T) {
	require(t)
	if !long {
		t.Skip("long form")
	}
	if _, err := exec.LookPath("podman"); err != nil {
		t.Skip("podman is not installed")
	}
	dir, err := os.MkdirTemp(temp, "podman-")
	if err != nil {
		t.Fatal(err)
	}
	p := podman{t: t, dir: dir}
	loaded := p.run("load", "-q", "-i", filepath.Join(packages(t, first), "rnbd_"+first+"_amd64.oci.tar"))
	_, image, _ := strings.Cut(strings.TrimSpace(loaded), "Loaded image: ")
	if !strings.HasSuffix(image, "rnbd:"+first) {
		t.Fatalf("podman loads %q", loaded)
	}
	if out := p.run("run", "--rm", "--network=none", "--cgroups=disabled", image, "version"); !strings.Contains(out, "rnbd "+first+"\n") {
		t.Errorf("rnbd version in a container says %q", out)
	}
}

// Two builds in two folders, with caches of their own, are bit for bit the same.
func TestBuildsAreTheSameBitForBit(t *testing.T) {
	require(t)
	if !long {
		t.Skip("long form: compiles everything twice more")
	}
	var all [2][]byte
	for i := range all {
		source := filepath.Join(t.TempDir(), strings.Repeat("x", 1+7*i))
		copyTree(t, source)
		out := filepath.Join(t.TempDir(), "out")
		start := time.Now()
		if err := makePackages(source, first, out, "SOURCE_DATE_EPOCH=1700000000", "GOCACHE="+t.TempDir()); err != nil {
			t.Fatal(err)
		}
		t.Logf("built in %v", time.Since(start).Round(time.Second))
		var err error
		if all[i], err = os.ReadFile(filepath.Join(out, "SHA256SUMS")); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(all[0], all[1]) || bytes.Count(all[0], []byte("\n")) != 13 {
		t.Errorf("hashes of the first build:\n%s\nof the second:\n%s", all[0], all[1])
	}
}

func TestLintianFindsNoErrors(t *testing.T) {
	require(t)
	if !long {
		t.Skip("long form")
	}
	if _, err := exec.LookPath("lintian"); err != nil {
		t.Skip("lintian is not installed")
	}
	debs, err := filepath.Glob(filepath.Join(packages(t, first), "*.deb"))
	if err != nil || len(debs) != 6 {
		t.Fatalf("packages %q, %v", debs, err)
	}
	out, err := exec.Command("lintian", append([]string{"--allow-root", "--fail-on", "error", "--tag-display-limit", "0"}, debs...)...).CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}
