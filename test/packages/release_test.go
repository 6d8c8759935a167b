package packages

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// releaseFiles are the files of a release: for each of two architectures 6 programs
// with a bill of materials each, 3 Debian packages, 3 of RPM and an image; and the 3
// packages of each kind that are for all architectures.
const releaseFiles = 2*(6*2+3+3+1) + 2*3

// Releases that are built in two folders are bit for bit the same: programs, bills
// of materials, packages and images. The second build has no cache of compiled
// packages, another home, other settings of Go, and one processor.
func TestBuildsAreTheSameBitForBit(t *testing.T) {
	require(t)
	if !long {
		t.Skip("long form")
	}
	var sources [2]string
	for i := range sources { // before the builds, which take long: the tree may change
		sources[i] = filepath.Join(t.TempDir(), strings.Repeat("x", 1+7*i))
		copyTree(t, sources[i])
	}
	var all [2][]byte
	for i, source := range sources {
		out := filepath.Join(t.TempDir(), "out")
		env := []string{"SOURCE_DATE_EPOCH=1700000000"}
		if i == 1 {
			modules, err := goEnv("GOMODCACHE")
			if err != nil {
				t.Fatal(err)
			}
			env = append(env, "GOCACHE="+t.TempDir(), "GOMODCACHE="+modules, "HOME="+t.TempDir(), "GOAMD64=v3", "GOFLAGS=-buildvcs=true", "CGO_ENABLED=1",
				"GOMAXPROCS=1", "LC_ALL=C", "TZ=Pacific/Auckland", "XDG_RUNTIME_DIR=/run/user/4711", "COLUMNS=40")
		}
		start := time.Now()
		if err := makeIn(source, env, "release", "VERSION="+first, "DIST="+out); err != nil {
			t.Fatal(err)
		}
		t.Logf("built in %v", time.Since(start).Round(time.Second))
		var err error
		if all[i], err = os.ReadFile(filepath.Join(out, "SHA256SUMS")); err != nil {
			t.Fatal(err)
		}
		if i == 1 {
			checkLicences(t, out)
		}
	}
	if !bytes.Equal(all[0], all[1]) || bytes.Count(all[0], []byte("\n")) != releaseFiles {
		t.Errorf("hashes of the first build:\n%s\nof the second:\n%s", all[0], all[1])
	}
}

// checkLicences wants the licences of all parts of all programs to be known.
func checkLicences(t *testing.T, out string) {
	t.Helper()
	bills, err := filepath.Glob(filepath.Join(out, "linux-*", "*.cdx.json"))
	if err != nil || len(bills) != 12 {
		t.Fatalf("bills of materials %q, %v", bills, err)
	}
	for _, name := range bills {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var bill struct {
			Components []struct {
				Name     string
				Licenses []struct{ License struct{ ID string } }
			}
		}
		if err := json.Unmarshal(text, &bill); err != nil {
			t.Fatal(err)
		}
		for _, c := range bill.Components {
			if len(c.Licenses) == 0 || c.Licenses[0].License.ID == "" {
				t.Errorf("%s: the licence of %s is not recognised", filepath.Base(name), c.Name)
			}
		}
	}
}

// The short form of it: one program from two folders, with the cache of compiled
// packages in common. It has no name of a folder of this machine in it.
func TestAProgramIsTheSameFromTwoFolders(t *testing.T) {
	require(t)
	root, err := goEnv("GOROOT")
	if err != nil {
		t.Fatal(err)
	}
	modules, err := goEnv("GOMODCACHE")
	if err != nil {
		t.Fatal(err)
	}
	var all [2][]byte
	for i := range all {
		source := filepath.Join(t.TempDir(), strings.Repeat("y", 1+7*i))
		copyTree(t, source)
		out := filepath.Join(t.TempDir(), "out")
		if err := makeIn(source, nil, "release-programs", "VERSION="+first, "ARCH=amd64", "PROGRAMS=plugins/io-fileio", "DIST="+out); err != nil {
			t.Fatal(err)
		}
		if all[i], err = os.ReadFile(filepath.Join(out, "io-fileio")); err != nil {
			t.Fatal(err)
		}
		for _, dir := range []string{source, root + "/src", modules} {
			if bytes.Contains(all[i], []byte(dir)) {
				t.Errorf("the program names the folder %s", dir)
			}
		}
	}
	if !bytes.Equal(all[0], all[1]) {
		t.Error("the programs differ")
	}
}

// goEnv asks the go command for a setting.
func goEnv(name string) (string, error) {
	out, err := exec.Command("go", "env", name).Output()
	value := strings.TrimSpace(string(out))
	if err == nil && value == "" {
		err = fmt.Errorf("go env %s is empty", name)
	}
	return value, err
}
