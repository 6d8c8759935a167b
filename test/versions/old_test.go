package versions

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// firstCommit stands for the last release while there is none.
const firstCommit = "405afdc050b01f64dbe80a0c3999caa38c11d79f"

var old struct {
	once sync.Once
	dir  string // temporary
	bin  string
	src  string // empty: not known
	err  error
}

func TestMain(m *testing.M) {
	code := lab.Run(m)
	if old.dir != "" {
		os.RemoveAll(old.dir)
	}
	os.Exit(code)
}

// programs of the last release, by their folders.
var programs = []string{"cmd/rnbd", "plugins/io-fileio", "plugins/io-blockio", "plugins/frontend-nbd", "plugins/frontend-ublk"}

// oldBin returns the folder of the last release's programs.
func oldBin(t *testing.T) string {
	t.Helper()
	if os.Getenv("RNBD_LONG") == "" {
		t.Skip("needs a build of the last release: RNBD_LONG=1, or make test-versions")
	}
	old.once.Do(func() {
		if old.bin = os.Getenv("RNBD_OLD_BIN"); old.bin == "" {
			old.err = buildOld()
		}
	})
	if errors.Is(old.err, errNoHistory) {
		t.Skipf("the last release: %v", old.err)
	}
	if old.err != nil {
		t.Fatalf("the last release: %v", old.err)
	}
	return old.bin
}

// errNoHistory is returned in a copy of the tree that has no commits, or not all.
var errNoHistory = errors.New("git does not have its commit: this is a shallow clone, or none")

// buildOld builds the last release in a temporary folder.
func buildOld() (err error) {
	known := exec.Command("git", "cat-file", "-e", lastRelease()+"^{commit}")
	known.Dir = lab.Root()
	if known.Run() != nil {
		return errNoHistory
	}
	if old.dir, err = os.MkdirTemp("", "rnbd-old-"); err != nil {
		return err
	}
	old.src, old.bin = filepath.Join(old.dir, "src"), filepath.Join(old.dir, "bin")
	if err := os.Mkdir(old.src, 0o755); err != nil {
		return err
	}
	archive := exec.Command("sh", "-c", `git archive "$1" | tar -x -C "$2"`, "sh", lastRelease(), old.src)
	archive.Dir = lab.Root()
	if out, err := archive.CombinedOutput(); err != nil || len(out) > 0 {
		return fmt.Errorf("git archive %s: %v: %s; a shallow clone has no history", lastRelease(), err, out)
	}
	for _, p := range programs {
		build := exec.Command("go", "build", "-buildvcs=false", "-trimpath", "-o", old.bin+"/", ".")
		build.Dir = filepath.Join(old.src, p)
		build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK="+filepath.Join(old.src, "go.work"))
		if out, err := build.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s of %s: %w\n%s", p, lastRelease(), err, out)
		}
	}
	return nil
}

// lastRelease is a tag, or firstCommit.
func lastRelease() string {
	list := exec.Command("git", "tag", "--list", "cmd/rnbd/v*", "--sort=-version:refname")
	list.Dir = lab.Root()
	out, err := list.Output()
	if tag, _, _ := strings.Cut(string(out), "\n"); err == nil && tag != "" {
		return tag
	}
	return firstCommit
}
