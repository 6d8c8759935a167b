package docs

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestExtendingQuotesTheTree looks up the lines that docs/extend/extending.md quotes:
// each "+" line of a diff is a line of the file that "+++" names.
func TestExtendingQuotesTheTree(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(lab.Root(), "docs/extend/extending.md"))
	if err != nil {
		t.Fatal(err)
	}
	var name string
	var lines []string
	quoted, inDiff := 0, false
	for line := range strings.Lines(string(page)) {
		line = strings.TrimRight(line, "\n")
		switch {
		case strings.HasPrefix(line, "```"):
			inDiff, name = line == "```diff", ""
		case !inDiff:
		case strings.HasPrefix(line, "+++ "):
			name = strings.TrimPrefix(line, "+++ ")
			text, err := os.ReadFile(filepath.Join(lab.Root(), name))
			if err != nil {
				t.Fatalf("docs/extend/extending.md names a file that is not there: %v", err)
			}
			lines = strings.Split(string(text), "\n")
			for i := range lines {
				lines[i] = strings.TrimSpace(lines[i])
			}
		case name == "":
			t.Errorf("docs/extend/extending.md: %q has no file", line)
		case line != "":
			quoted++
			if !slices.Contains(lines, strings.TrimSpace(line[1:])) {
				t.Errorf("docs/extend/extending.md quotes a line that %s does not have: %s", name, line[1:])
			}
		}
	}
	if quoted < 15 {
		t.Errorf("%d lines are quoted", quoted)
	}
}
