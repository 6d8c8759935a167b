package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// The rules of docs/inside/glossary.md for the language of comments, as far as a
// machine can check them.

// plain are the folders with comments that keep all of wording. Folders join
// it as their comments are edited.
var plain = []string{"plugins", "modules", "cmd", "examples", "tools"}

var wording = []struct {
	bad  *regexp.Regexp
	want string
}{
	{regexp.MustCompile(`(?i)\btells whether\b`), "reports whether"},
	{regexp.MustCompile(`\b([Hh]e|[Hh]is|[Hh]im|[Ww]hom)\b`), "things are it"},
	{regexp.MustCompile(`(?i)\bnobody\b`), "no process, no thread, nothing: say which"},
	{regexp.MustCompile(`(?i)\bsomebody\b`), "a process, a user, a program: say which"},
	{regexp.MustCompile(`(?i)\bbe it\b`), "even if"},
	{regexp.MustCompile(`(?i)\banew\b`), "again"},
}

// assertion is a doc comment "name: it is so" in place of "name reports whether".
var assertion = regexp.MustCompile(`^\w+: `)

func TestCommentsArePlain(t *testing.T) {
	for _, dir := range plain {
		err := filepath.WalkDir(filepath.Join(lab.Root(), dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, ".pb.go") {
				return err
			}
			checkComments(t, path)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func checkComments(t *testing.T, path string) {
	t.Helper()
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, path, nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	name, _ := filepath.Rel(lab.Root(), path)
	for _, group := range file.Comments {
		text := strings.Join(strings.Fields(group.Text()), " ")
		for _, w := range wording {
			if bad := w.bad.FindString(text); bad != "" {
				t.Errorf("%s:%d: comment says %q; want: %s", name, set.Position(group.Pos()).Line, bad, w.want)
			}
		}
	}
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if ok && assertion.MatchString(f.Doc.Text()) {
			t.Errorf("%s:%d: the comment of %s begins with %q; want a verb: returns, reports whether, waits until",
				name, set.Position(f.Pos()).Line, f.Name.Name, assertion.FindString(f.Doc.Text()))
		}
	}
}
