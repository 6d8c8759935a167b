package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestRoomsListEveryPackage compares the tables of "The rooms" in
// ARCHITECTURE.md with the released packages.
func TestRoomsListEveryPackage(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(lab.Root(), "ARCHITECTURE.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rooms, _ := strings.Cut(string(page), "## The rooms\n")
	rooms, _, _ = strings.Cut(rooms, "\n## ")
	listed := map[string]bool{}
	for line := range strings.Lines(rooms) {
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		for name := range strings.SplitSeq(strings.Split(line, "|")[1], ",") {
			listed[strings.Trim(name, " `")] = true
		}
	}
	for _, top := range []string{"modules", "plugins", "cmd", "examples"} {
		err := filepath.WalkDir(filepath.Join(lab.Root(), top), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() || d.Name() == "testdata" || !hasCode(path) {
				return err
			}
			name, _ := filepath.Rel(lab.Root(), path)
			if !listed[name] {
				t.Errorf("ARCHITECTURE.md, \"The rooms\", does not list the package %s", name)
			}
			delete(listed, name)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for name := range listed {
		t.Errorf("ARCHITECTURE.md, \"The rooms\", lists %s, which is no package", name)
	}
}

// hasCode reports whether a folder is a package with more than tests.
func hasCode(dir string) bool {
	files, _ := filepath.Glob(filepath.Join(dir, "*.go"))
	for _, name := range files {
		if !strings.HasSuffix(name, "_test.go") {
			return true
		}
	}
	return false
}
