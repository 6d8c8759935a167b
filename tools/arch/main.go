// Command arch checks the types of the released packages for architectures other
// than the one that it runs on, from source and without compiling anything:
//
//	arch arm64
//
// A release has programs for all of them, and the tests run on one.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/tools/go/packages"
)

// released are the packages with programs and libraries.
var released = []string{
	"github.com/rnbd-go/rnbd/modules/...", "github.com/rnbd-go/rnbd/plugins/...", "github.com/rnbd-go/rnbd/cmd/...", "github.com/rnbd-go/rnbd/examples/...",
}

func main() {
	for _, arch := range os.Args[1:] {
		n, err := vetArch(arch, ".", released...)
		if err != nil {
			fmt.Fprintf(os.Stderr, "arch: %s: %v\n", arch, err)
			os.Exit(1)
		}
		fmt.Printf("arch: %d packages have the right types for %s\n", n, arch)
	}
}

// vetArch returns the number of packages of the patterns, or all their errors.
func vetArch(arch, dir string, patterns ...string) (int, error) {
	list, err := packages.Load(&packages.Config{
		Mode: packages.LoadAllSyntax, Dir: dir,
		Env: append(os.Environ(), "GOOS=linux", "GOARCH="+arch, "CGO_ENABLED=0", "GOFLAGS="),
	}, patterns...)
	if err != nil {
		return 0, err
	}
	var errs []error
	for _, p := range list {
		for _, e := range p.Errors {
			if file, err := filepath.Rel(dir, e.Pos); err == nil {
				e.Pos = file
			}
			errs = append(errs, e)
		}
	}
	if len(list) == 0 {
		errs = append(errs, errors.New("no package matches"))
	}
	return len(list), errors.Join(errs...)
}
