package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
	"github.com/rnbd-go/rnbd/test/lab"
)

// TestLogKeysAreListed finds the calls of slog in the released code and looks
// their keys up in package logs.
func TestLogKeysAreListed(t *testing.T) {
	used := map[string]bool{}
	for _, top := range []string{"modules", "plugins", "cmd"} {
		err := filepath.WalkDir(filepath.Join(lab.Root(), top), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, ".pb.go") {
				return err
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, path, nil, 0)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				for _, key := range logKeys(call) {
					used[key] = true
					if _, ok := logs.Keys[key]; !ok {
						name, _ := filepath.Rel(lab.Root(), path)
						t.Errorf("%s:%d: the log key %q is not one of logs.Keys", name, set.Position(call.Pos()).Line, key)
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for key := range logs.Keys {
		if !used[key] {
			t.Errorf("no line of the log has the key %q", key)
		}
	}
}

// logKeys returns the keys of a call of slog: the strings in front of values,
// behind the message.
func logKeys(call *ast.CallExpr) (keys []string) {
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return nil
	}
	args := call.Args
	switch f.Sel.Name {
	case "Debug", "Info", "Warn", "Error":
		if len(args) == 0 || text(args[0]) == "" {
			return nil // a message is a string literal
		}
		args = args[1:]
	case "With":
	default:
		return nil
	}
	for i := 0; i+1 < len(args); i += 2 {
		if key := text(args[i]); key != "" {
			keys = append(keys, key)
		}
	}
	return keys
}

// text returns the value of a string literal, or "".
func text(e ast.Expr) string {
	lit, ok := e.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return ""
	}
	s, _ := strconv.Unquote(lit.Value)
	return s
}
