package cli

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestMakeInAnOddFolder builds, tests, installs and cleans in a copy of the repository
// below a folder with spaces and quotes. A neighbour, whose name is the first word of
// that folder's name, must stay.
func TestMakeInAnOddFolder(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles a copy of the repository: make check")
	}
	lab.Tool(t, "make")
	dir := t.TempDir()
	source := filepath.Join(dir, `work it's "odd" $x`, "rnbd")
	copyTree(t, source)
	neighbour := filepath.Join(dir, "work", "file")
	writeFile(t, neighbour)
	before := filesBelow(t, dir)

	makeOdd := func(args ...string) string {
		t.Helper()
		cmd := exec.Command("make", append([]string{"-C", source, "PROGRAMS=cmd/rnbd"}, args...)...)
		cmd.Env = append(os.Environ(), "MAKEFLAGS=", "GOFLAGS=", "CGO_ENABLED=0", "CC=false")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("make %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	makeOdd("build")
	if _, err := os.Stat(filepath.Join(source, "bin/rnbd")); err != nil {
		t.Error(err)
	}
	if out := makeOdd("test", "PACKAGES=./modules/rnbd-sdk/blk"); !strings.Contains(out, " 0 failed") {
		t.Errorf("make test says:\n%s", out)
	}
	if help := makeOdd("help"); !strings.Contains(help, "  demo ") {
		t.Errorf("make help says:\n%s", help)
	}
	makeOdd("clean")
	if after := filesBelow(t, dir); !slices.Equal(before, after) {
		t.Errorf("files before and after: %q, %q", before, after)
	}
}

// copyTree copies the files of the repository that git does not ignore.
func copyTree(t *testing.T, to string) {
	t.Helper()
	list := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	list.Dir = lab.Root()
	names, err := list.Output()
	if err != nil {
		t.Skip("this is no checkout of git")
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names), "\x00"), "\x00") {
		info, err := os.Lstat(filepath.Join(lab.Root(), name))
		if os.IsNotExist(err) { // removed, and not committed yet
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := os.ReadFile(filepath.Join(lab.Root(), name))
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(to, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, content, info.Mode().Perm()); err != nil {
			t.Fatal(err)
		}
	}
}

func writeFile(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("a file of somebody else\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

func filesBelow(t *testing.T, dir string) (files []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// TestMakeStampsTheCommitWhereGitTellsIt builds in a checkout, which the version then
// names, and as root in the same checkout of another user, which git refuses to read.
func TestMakeStampsTheCommitWhereGitTellsIt(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles a copy of the repository: make check")
	}
	if os.Getuid() != 0 {
		t.Skip("gives a checkout to another user: only root can")
	}
	lab.Tool(t, "make")
	source := filepath.Join(t.TempDir(), "rnbd")
	copyTree(t, source)
	run := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir = source
		cmd.Env = append(os.Environ(), "MAKEFLAGS=", "GOENV=off", "GOFLAGS=", "CGO_ENABLED=0", "CC=false", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null", "SUDO_UID=")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
		}
		return strings.TrimSpace(string(out))
	}
	run("git", "init", "-q")
	run("git", "add", "-A")
	run("git", "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-qm", "test")
	commit := run("git", "rev-parse", "HEAD")[:12]
	build := func() string {
		t.Helper()
		run("make", "build", "PROGRAMS=cmd/rnbd")
		return run("bin/rnbd", "version")
	}
	if version := build(); !strings.Contains(version, commit) {
		t.Errorf("built in a checkout of %s, the version is:\n%s", commit, version)
	}
	run("chown", "-R", "12345:12345", ".")
	if version := build(); strings.Contains(version, commit) || !strings.HasPrefix(version, "rnbd devel") {
		t.Errorf("built where git refuses, the version is:\n%s", version)
	}
}
