package docs

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// relatives is the largest number of sentences in a hundred with a relative
// clause or an indirect question that comments of a folder may have. Most of
// them read better as two sentences.
const relatives = 3

var (
	relative    = regexp.MustCompile(`(?i)\b(who|whose|whom|what|which)\b`)
	paragraph   = regexp.MustCompile(`\n[ \t]*\n`)
	sentenceEnd = regexp.MustCompile(`[.!?]\s+`)
	word        = regexp.MustCompile(`[A-Za-z]{2}`)
)

// commentLanguage counts the sentences of comments.
type commentLanguage struct{ sentences, relative int }

func TestCommentsHaveFewRelativeClauses(t *testing.T) {
	folders := map[string]*commentLanguage{}
	for _, dir := range plain {
		err := filepath.WalkDir(filepath.Join(lab.Root(), dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, ".pb.go") {
				return err
			}
			name, _ := filepath.Rel(lab.Root(), path)
			folder := dir
			if dir == "modules" || dir == "cmd" {
				folder = strings.Join(strings.SplitN(name, "/", 3)[:2], "/")
			}
			if folders[folder] == nil {
				folders[folder] = &commentLanguage{}
			}
			folders[folder].count(t, path)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for folder, c := range folders {
		if c.relative*100 > relatives*c.sentences {
			t.Errorf("comments in %s: %d of %d sentences have who, whose, whom, what or which; at most %d in a hundred may: write short sentences of subject, verb and fact",
				folder, c.relative, c.sentences, relatives)
		}
	}
}

// count adds the comments of a file.
func (c *commentLanguage) count(t *testing.T, path string) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	for _, group := range file.Comments {
		for _, p := range paragraph.Split(group.Text(), -1) {
			for _, s := range sentenceEnd.Split(strings.Join(strings.Fields(p), " "), -1) {
				if !word.MatchString(s) {
					continue
				}
				c.sentences++
				if relative.MatchString(s) {
					c.relative++
				}
			}
		}
	}
}
