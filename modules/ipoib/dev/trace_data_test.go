package dev

import (
	"debug/elf"
	"debug/gosym"
	"os"
	"strings"
	"testing"
)

// TestIP30_NormalBuildHasNoDataTrace: without the build tag ipoib_debug_data the
// calls of the trace are not in the program, so they cost nothing. With the tag
// they are.
func TestIP30_NormalBuildHasNoDataTrace(t *testing.T) {
	names := functions(t)
	if !names["(*Interface).checkFrame"] {
		t.Fatalf("%d functions of this package were found, and the receiver's is not among them", len(names))
	}
	if got := names["(*Interface).traceData"]; got != DataTrace {
		t.Errorf("the trace is in the program: %t, want %t", got, DataTrace)
	}
}

// functions returns the names of the functions of this package that are in the
// program of the test.
func functions(t *testing.T) map[string]bool {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	f, err := elf.Open(self)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s := f.Section(".gopclntab")
	if s == nil {
		s = f.Section(".data.rel.ro.gopclntab") // of a position-independent program
	}
	if s == nil {
		t.Fatal("the program has no table of functions")
	}
	b, err := s.Data()
	if err != nil {
		t.Fatal(err)
	}
	table, err := gosym.NewTable(nil, gosym.NewLineTable(b, f.Section(".text").Addr))
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, fn := range table.Funcs {
		if name, ok := strings.CutPrefix(fn.Name, "github.com/rnbd-go/rnbd/modules/ipoib/dev."); ok {
			names[name] = true
		}
	}
	return names
}
