package lab

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
)

// binaries are the programs of the repository, by their package's folder.
var binaries = []string{
	"cmd/rnbd", "cmd/rnbd-net", "plugins/io-fileio", "plugins/io-blockio", "plugins/io-nbd", "plugins/frontend-nbd", "plugins/frontend-ublk", "plugins/frontend-fuse", "examples/io-memory",
}

// Root is the top of the repository.
func Root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(filepath.Dir(file)))
}

var built struct {
	once sync.Once
	dir  string
	err  error
}

// Bin is the folder of the programs: $RNBD_BIN, else a temporary folder they
// are built into once per process.
func Bin() (string, error) {
	built.once.Do(func() {
		if built.dir = os.Getenv("RNBD_BIN"); built.dir != "" {
			return
		}
		if built.dir, built.err = os.MkdirTemp("", "rnbd-bin-"); built.err == nil {
			built.err = build(built.dir)
		}
	})
	return built.dir, built.err
}

// Cleanup removes the binaries of Bin; call it at the end of TestMain.
func Cleanup() {
	if built.dir != "" && os.Getenv("RNBD_BIN") == "" {
		os.RemoveAll(built.dir)
	}
}

func build(dir string) error {
	for _, pkg := range binaries {
		cmd := exec.Command("go", "build", "-o", filepath.Join(dir, filepath.Base(pkg)), ".")
		cmd.Dir = filepath.Join(Root(), pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w\n%s", pkg, err, out)
		}
	}
	return nil
}
