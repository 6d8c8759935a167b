package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

func TestMain(m *testing.M) { os.Exit(lab.Run(m)) }

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(lab.Root(), file))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// pages are all documents of the tree, relative to its top.
func pages(t *testing.T) (out []string) {
	t.Helper()
	err := filepath.WalkDir(lab.Root(), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != lab.Root() && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || d.Name() == "bin") {
			return fs.SkipDir
		}
		if strings.HasSuffix(path, ".md") {
			rel, err := filepath.Rel(lab.Root(), path)
			out = append(out, rel)
			return err
		}
		return nil
	})
	if err != nil || len(out) < 10 {
		t.Fatalf("%d documents: %v", len(out), err)
	}
	return out
}

var (
	fence      = regexp.MustCompile("(?ms)^```[^\n]*\n(.*?)^```")
	codeSpan   = regexp.MustCompile("`[^`\n]+`")
	link       = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading    = regexp.MustCompile(`(?m)^#+ +(.+?) *$`)
	makeTarget = regexp.MustCompile(`\bmake ([a-z][a-z0-9-]*)`)
)

// prose is a document without its code.
func prose(text string) string {
	return codeSpan.ReplaceAllString(fence.ReplaceAllString(text, ""), "")
}

// code returns the code of a document, a line each.
func code(text string) (out []string) {
	for _, m := range fence.FindAllStringSubmatch(text, -1) {
		out = append(out, strings.Split(strings.ReplaceAll(m[1], "\\\n", " "), "\n")...)
	}
	for _, m := range codeSpan.FindAllString(fence.ReplaceAllString(text, ""), -1) {
		out = append(out, strings.Trim(m, "`"))
	}
	return out
}

func TestLinksLeadSomewhere(t *testing.T) {
	checked := 0
	for _, page := range pages(t) {
		for _, m := range link.FindAllStringSubmatch(prose(read(t, page)), -1) {
			target, anchor, _ := strings.Cut(m[1], "#")
			if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			checked++
			file := filepath.Join(filepath.Dir(page), target)
			if target == "" {
				file = page
			}
			if _, err := os.Stat(filepath.Join(lab.Root(), file)); err != nil {
				t.Errorf("%s: link to %s: there is no %s", page, m[1], file)
				continue
			}
			if anchor != "" && strings.HasSuffix(file, ".md") && !anchors(read(t, file))[anchor] {
				t.Errorf("%s: link to %s: %s has no such heading", page, m[1], file)
			}
		}
	}
	if checked < 30 {
		t.Errorf("only %d links were found", checked)
	}
}

// anchors are the names that headings get where Markdown is shown.
func anchors(text string) map[string]bool {
	out := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		name := strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r > 127:
				return r
			}
			return -1
		}, strings.ToLower(m[1]))
		out[name] = true
	}
	return out
}

func TestMakeTargetsExist(t *testing.T) {
	have := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^([a-z0-9-]+):`).FindAllStringSubmatch(read(t, "Makefile"), -1) {
		have[m[1]] = true
	}
	checked := 0
	for _, page := range pages(t) {
		for _, line := range code(read(t, page)) {
			for _, m := range makeTarget.FindAllStringSubmatch(line, -1) {
				if checked++; !have[m[1]] {
					t.Errorf("%s: there is no target for make %s", page, m[1])
				}
			}
		}
	}
	if checked < 10 {
		t.Errorf("only %d mentions of make were found", checked)
	}
}
