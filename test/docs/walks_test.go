package docs

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// stop is a row of a walk: number, file (empty: that of the row before) and
// function.
var stop = regexp.MustCompile("^\\| \\d+ \\| (?:`([^`]+)`)? ?\\| `([^`]+)` \\|")

const (
	walksOfPage = 4
	mostReturns = 2
)

// TestWalks looks up each stop of docs/inside/walks.md, and counts the stops of a walk
// that return to a file already left.
func TestWalks(t *testing.T) {
	walks := strings.Split(read(t, "docs/inside/walks.md"), "\n## ")[1:]
	if len(walks) != walksOfPage {
		t.Errorf("docs/inside/walks.md: %d walks were understood, want %d; has the page another form now?", len(walks), walksOfPage)
	}
	for _, walk := range walks {
		title, text, _ := strings.Cut(walk, "\n")
		checkWalk(t, title, text)
	}
}

func checkWalk(t *testing.T, title, text string) {
	t.Helper()
	var left, returns []string
	file, rows := "", 0
	for line := range strings.Lines(text) {
		m := stop.FindStringSubmatch(line)
		if m == nil {
			if strings.HasPrefix(line, "|") && !strings.HasPrefix(line, "| # |") && !strings.HasPrefix(line, "|---") {
				t.Errorf("docs/inside/walks.md, %s: the row %q names no function", title, line)
			}
			continue
		}
		rows++
		if m[1] != "" && m[1] != file {
			if slices.Contains(left, m[1]) {
				returns = append(returns, m[1])
			}
			left = append(left, file)
			file = m[1]
		}
		if !functions(t, file)[m[2]] {
			t.Errorf("docs/inside/walks.md, %s: %s is not in %s", title, m[2], file)
		}
	}
	if rows < 10 || len(returns) > mostReturns {
		t.Errorf("docs/inside/walks.md, %s: %d stops, returns to %v; want 10 stops or more, and at most %d returns", title, rows, returns, mostReturns)
	}
}
