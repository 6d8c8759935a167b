package packages

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// Versions that tests install: the first, and an upgrade.
const (
	first  = "0.1.0"
	second = "0.2.0~test"
)

var long = os.Getenv("RNBD_LONG") != ""

// require skips the test unless tests of packages are asked for.
func require(t *testing.T, programs ...string) {
	t.Helper()
	if os.Getenv("RNBD_PACKAGES") == "" {
		t.Skip("builds packages and a clean root: make test-packages, or RNBD_PACKAGES=1")
	}
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	for _, p := range programs {
		lab.Tool(t, p)
	}
}

// temp is removed by TestMain.
var temp string

func TestMain(m *testing.M) {
	var err error
	if temp, err = os.MkdirTemp("", "rnbd-packages-"); err != nil {
		panic(err)
	}
	code := lab.Run(m)
	for _, mount := range lab.UnmountBelow(temp) { // before anything there is removed
		fmt.Fprintln(os.Stderr, "FAIL: the tests left a mount behind:", mount)
		code = 1
	}
	os.RemoveAll(temp)
	os.Exit(code)
}

// made are folders with packages, by version. RNBD_PACKAGES may be a folder that
// keeps them for the next run.
var made = map[string]func() (string, error){first: maker(first), second: maker(second)}

func maker(version string) func() (string, error) {
	return sync.OnceValues(func() (string, error) {
		base := temp
		if kept := os.Getenv("RNBD_PACKAGES"); filepath.IsAbs(kept) {
			base = kept
		}
		dir := filepath.Join(base, version)
		if _, err := os.Stat(filepath.Join(dir, "SHA256SUMS")); err == nil {
			return dir, nil
		}
		return dir, makePackages(lab.Root(), version, dir)
	})
}

// makePackages runs make packages for the source in a folder.
func makePackages(source, version, dir string, env ...string) error {
	return makeIn(source, env, "packages", "VERSION="+version, "DIST="+dir)
}

func makeIn(source string, env []string, args ...string) error {
	cmd := exec.Command("make", args...)
	cmd.Dir, cmd.Env = source, append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

func packages(t *testing.T, version string) (dir string) {
	t.Helper()
	dir, err := made[version]()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// cleanRoot returns the folder of a root with apt and what that needs. Its name
// has the recipe, so that another recipe makes another one.
var cleanRoot = sync.OnceValues(func() (string, error) {
	return debianRoot("root-1")
})

// bootRoot returns the folder of a root that boots as a guest, with the kernel of
// another package.
var bootRoot = sync.OnceValues(func() (string, error) {
	return debianRoot("guest-1", "--include=systemd-sysv,udev,kmod,e2fsprogs,procps")
})

// debianRoot makes a root of Debian by mmdebstrap, or takes that of the cache.
func debianRoot(name string, args ...string) (string, error) {
	cache := filepath.Join(lab.Root(), ".cache", "packages")
	dir := filepath.Join(cache, name)
	if _, err := os.Stat(dir + ".complete"); err == nil {
		return dir, nil
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	args = append([]string{"--quiet", "--variant=apt", "--dpkgopt=force-unsafe-io", "--dpkgopt=path-exclude=/usr/share/doc/*",
		"--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=path-include=/usr/share/doc/rnbd*"}, args...)
	var out []byte
	var err error
	for range 3 { // a mirror may be out of reach for a moment
		if err = os.RemoveAll(dir); err != nil {
			return "", err
		}
		if out, err = exec.Command("mmdebstrap", append(args, "bookworm", dir)...).CombinedOutput(); err == nil {
			break
		}
	}
	if err != nil {
		return "", fmt.Errorf("mmdebstrap: %w\n%s", err, out)
	}
	return dir, os.WriteFile(dir+".complete", nil, 0o644)
}

// prepare makes the packages of some versions and a root at the same time.
func prepare(t *testing.T, makeRoot func() (string, error), versions ...string) (root string) {
	t.Helper()
	go func() {
		for _, v := range versions {
			made[v]() // packages waits for them, and reports their errors
		}
	}()
	root, err := makeRoot()
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range versions {
		packages(t, v)
	}
	return root
}
