package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

var (
	sourceFile = regexp.MustCompile("`((?:cmd|modules|plugins|test|tools)/[^` ]+\\.go)`")
	goFunction = regexp.MustCompile("`(\\(\\*?[A-Za-z]\\w*\\)\\.\\w+|(?:Test|Fuzz)\\w+)`")
	step       = regexp.MustCompile(`^\| (\d+) \|`)
)

// A function stands behind the file that it is in; one file may have several.
func TestDataPathNamesFunctionsThatExist(t *testing.T) {
	steps, found := 0, 0
	for _, line := range strings.Split(read(t, "docs/inside/data-path.md"), "\n") {
		if step.MatchString(line) {
			steps++
		}
		files := sourceFile.FindAllStringSubmatchIndex(line, -1)
		for i, f := range files {
			end := len(line)
			if i+1 < len(files) {
				end = files[i+1][0]
			}
			file := line[f[2]:f[3]]
			have := functions(t, file)
			for _, m := range goFunction.FindAllStringSubmatch(line[f[1]:end], -1) {
				if found++; !have[m[1]] && !inPackage(t, file, m[1]) {
					t.Errorf("docs/inside/data-path.md: %s is not in the package of %s", m[1], file)
				}
			}
			if m := goFunction.FindStringSubmatch(line[f[1]:end]); m != nil && !have[m[1]] {
				t.Errorf("docs/inside/data-path.md: %s is not in %s itself", m[1], file)
			}
		}
	}
	if steps != 14 || found < 40 {
		t.Errorf("docs/inside/data-path.md: %d steps and %d functions were understood; has the page another form now?", steps, found)
	}
}

// functions are those that a file declares, as (*T).name, (T).name or name.
func functions(t *testing.T, file string) map[string]bool {
	t.Helper()
	tree, err := parser.ParseFile(token.NewFileSet(), filepath.Join(lab.Root(), file), nil, 0)
	if err != nil {
		t.Errorf("a page names %s: %v", file, err)
		return nil
	}
	names := map[string]bool{}
	for _, d := range tree.Decls {
		if f, ok := d.(*ast.FuncDecl); ok {
			names[receiver(f)+f.Name.Name] = true
		}
	}
	return names
}

func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	switch r := f.Recv.List[0].Type.(type) {
	case *ast.StarExpr:
		if id, ok := r.X.(*ast.Ident); ok {
			return "(*" + id.Name + ")."
		}
	case *ast.Ident:
		return "(" + r.Name + ")."
	}
	return ""
}

func inPackage(t *testing.T, file, function string) bool {
	t.Helper()
	siblings, err := filepath.Glob(filepath.Join(lab.Root(), filepath.Dir(file), "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range siblings {
		rel, err := filepath.Rel(lab.Root(), s)
		if err != nil {
			t.Fatal(err)
		}
		if functions(t, rel)[function] {
			return true
		}
	}
	return false
}
