package rtrs

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// importRules list the packages of this project that a folder may import,
// outside of tests. The first rule that fits counts.
var importRules = []struct {
	dir     string
	allowed []string
	reason  string
}{
	{"rtrswire", nil, "the wire format is a leaf"},
	{"verbs/verbstest", []string{"verbs"}, "the suite knows the seam only"},
	{"verbs", nil, "the seam is a leaf"},
	{"internal/checksum", nil, "it adds up bytes, whosever they are"},
	{"internal/tally", nil, "it counts, whatever it is"},
	{"internal/tlsrecord", nil, "it protects bytes, whatever they are"},
	{"internal/softverbs", []string{"verbs"}, "it implements the seam for fabrics whose wire it does not know"},
	{"tlsauth", []string{"verbs", "internal/tlsrecord"}, "it knows connections, whatever they carry"},
	{"provider", []string{"verbs", "internal/checksum", "internal/softverbs", "internal/tally", "internal/tlsrecord", "tlsauth"}, "a provider knows neither the transport nor another provider"},
	{".", []string{"verbs", "rtrswire", "internal/tally"}, "providers are handed in, and what is carried is the caller's business"},
}

func TestImportsFollowTheRules(t *testing.T) {
	const project, module = "github.com/rnbd-go/rnbd/", "github.com/rnbd-go/rnbd/modules/rtrs/"
	files := 0
	err := filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return err
		}
		files++
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, i := range f.Imports {
			imported, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				return err
			}
			if strings.HasPrefix(imported, project) {
				checkImport(t, name, strings.TrimPrefix(imported, module))
			}
		}
		return nil
	})
	if err != nil || files < 20 {
		t.Fatalf("looked at %d files: %v", files, err)
	}
}

func checkImport(t *testing.T, file, imported string) {
	for _, r := range importRules {
		dir := filepath.ToSlash(filepath.Dir(file))
		if r.dir != "." && dir != r.dir && !strings.HasPrefix(dir, r.dir+"/") {
			continue
		}
		for _, a := range r.allowed {
			if imported == a {
				return
			}
		}
		if strings.HasPrefix(imported, dir+"/") {
			return // its own parts
		}
		t.Errorf("%s imports %s: %s", file, imported, r.reason)
		return
	}
}
