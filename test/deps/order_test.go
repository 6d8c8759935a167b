package deps

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// ordered are the packages that list their files in doc.go, in an order that the
// files keep: a file uses no declaration of a file that the list names before it.
// Files that one pattern names have no order among themselves.
var ordered = []string{"modules/rnbd-client", "modules/rnbd-server"}

// TestFilesKeepTheirOrder compares the uses of a package's files with the list in
// its doc.go.
func TestFilesKeepTheirOrder(t *testing.T) {
	for _, dir := range ordered {
		t.Run(dir, func(t *testing.T) { checkOrder(t, filepath.Join(root(), dir)) })
	}
}

// TestFileOrder_IsSeen proves that the check can fail.
func TestFileOrder_IsSeen(t *testing.T) {
	parse := func(texts ...string) []string {
		p := &folder{set: token.NewFileSet(), ranks: map[string]int{"high.go": 0, "low.go": 1}}
		for i, name := range []string{"high.go", "low.go"} {
			f, err := parser.ParseFile(p.set, name, "package p\n"+texts[i], 0)
			if err != nil {
				t.Fatal(err)
			}
			p.files = append(p.files, f)
		}
		return p.upward()
	}
	for _, c := range []struct {
		name, high, low string
		want            string
	}{
		{"down", "func f() { g() }", "func g() {}", "[]"},
		{"function", "func f() {}", "func g() { f() }", "[low.go uses f of high.go]"},
		{"type", "type f int", "var g f", "[low.go uses f of high.go]"},
		{"method", "type T int\nfunc (T) f() {}", "func g(t interface{ f() }) { t.f() }", "[]"},
		{"method of a lower type", "func (T) f() {}", "type T int\nfunc g(t T) { t.f() }", "[low.go uses f of high.go]"},
		{"local name", "func f() {}", "func g() { f := 1; _ = f }", "[]"},
		{"argument of a generic type", "type f int", "import \"sync/atomic\"\nvar p atomic.Pointer[f]", "[low.go uses f of high.go]"},
		{"method of a value from another package", "func (*T) f() {}",
			"import \"sync/atomic\"\ntype T int\nvar p atomic.Pointer[T]\nfunc g() { p.Load().f() }", "[low.go uses f of high.go]"},
	} {
		if got := fmt.Sprint(parse(c.high, c.low)); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// folder is a package whose files have an order.
type folder struct {
	set   *token.FileSet
	files []*ast.File
	ranks map[string]int // of each file, 0: the highest
}

func checkOrder(t *testing.T, dir string) {
	t.Helper()
	p := &folder{set: token.NewFileSet(), ranks: map[string]int{}}
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(names) == 0 {
		t.Fatalf("%d files in %s: %v", len(names), dir, err)
	}
	var list []string
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(p.set, name, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		if base := filepath.Base(name); base != "doc.go" {
			p.files = append(p.files, f)
			p.ranks[base] = -1
		} else {
			list = fileList(f.Doc.Text())
		}
	}
	if len(list) < 10 {
		t.Fatalf("doc.go lists %d files; has the list another form now?", len(list))
	}
	p.rank(t, list)
	for _, s := range p.upward() {
		t.Errorf("%s: move the code, or change the order in doc.go", s)
	}
}

// fileList returns the names in the first column of the block that is indented
// below the heading Files.
func fileList(doc string) (list []string) {
	_, text, _ := strings.Cut(doc, "# Files\n")
	for line := range strings.Lines(text) {
		line, indented := strings.CutPrefix(strings.TrimRight(line, "\n"), "\t")
		if !indented || line == "" || line[0] == ' ' {
			continue
		}
		names, _, _ := strings.Cut(line, "  ")
		list = append(list, strings.Split(strings.TrimSuffix(names, ","), ", ")...)
	}
	return list
}

// rank sets the rank of each file: its place in the list. A name goes before a
// pattern.
func (p *folder) rank(t *testing.T, list []string) {
	t.Helper()
	for i, name := range list {
		if strings.Contains(name, "/") { // a package below
			continue
		}
		found := false
		for file, rank := range p.ranks {
			if ok, _ := path.Match(name+".go", file); ok {
				found = true
				if rank < 0 || !strings.Contains(name, "*") {
					p.ranks[file] = i
				}
			}
		}
		if !found {
			t.Errorf("doc.go lists %s, and there is no such file", name)
		}
	}
	for file, rank := range p.ranks {
		if rank < 0 {
			t.Errorf("doc.go does not list %s", file)
		}
	}
}

// upward returns the uses of what a higher file declares.
func (p *folder) upward() []string {
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{}}
	conf := types.Config{Importer: empty{}, Error: func(error) {}}
	pkg, _ := conf.Check("p", p.set, p.files, info) // what it cannot resolve is not in info
	p.guess(pkg, info)
	seen := map[string]bool{}
	for id, o := range info.Uses {
		if o.Pkg() != pkg || o.Parent() != pkg.Scope() && !isMember(o) {
			continue
		}
		if from := p.file(id.Pos()); p.rankOf(o) < p.ranks[from] {
			seen[fmt.Sprintf("%s uses %s of %s", from, o.Name(), p.file(o.Pos()))] = true
		}
	}
	return slices.Sorted(maps.Keys(seen))
}

// guess adds to info the uses that are unknown because other packages are not
// loaded: methods and fields of a value from such a package, each taken for the
// lowest one of its name, and the arguments of its generic types.
func (p *folder) guess(pkg *types.Package, info *types.Info) {
	lowest := map[string]types.Object{}
	for _, o := range info.Defs {
		if isMember(o) && !o.Exported() && (lowest[o.Name()] == nil || p.rankOf(o) > p.rankOf(lowest[o.Name()])) {
			lowest[o.Name()] = o
		}
	}
	selected := map[*ast.Ident]bool{}
	visit := func(n ast.Node) bool {
		if s, ok := n.(*ast.SelectorExpr); ok {
			selected[s.Sel] = true
		}
		id, ok := n.(*ast.Ident)
		if !ok || info.Uses[id] != nil || info.Defs[id] != nil {
			return true
		}
		o := pkg.Scope().Lookup(id.Name)
		if selected[id] {
			o = lowest[id.Name]
		}
		if o != nil {
			info.Uses[id] = o
		}
		return true
	}
	for _, f := range p.files {
		ast.Inspect(f, visit)
	}
}

func (p *folder) rankOf(o types.Object) int { return p.ranks[p.file(o.Pos())] }

func (p *folder) file(pos token.Pos) string { return filepath.Base(p.set.Position(pos).Filename) }

// isMember reports whether o is a field or a method.
func isMember(o types.Object) bool {
	switch o := o.(type) {
	case *types.Var:
		return o.IsField()
	case *types.Func:
		return o.Signature().Recv() != nil
	}
	return false
}

// empty imports packages without contents.
type empty struct{}

func (empty) Import(name string) (*types.Package, error) {
	p := types.NewPackage(name, path.Base(name))
	p.MarkComplete()
	return p, nil
}
