package main

import (
	"os/exec"
	"strings"
	"testing"
)

// TestImports: a plugin is built from the SDK alone, so that it can be released
// and replaced without the daemons.
func TestImports(t *testing.T) {
	out, err := exec.Command("go", "list", "-f", `{{join .Imports "\n"}}`, ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	const sdk = "github.com/rnbd-go/rnbd/modules/rnbd-sdk/"
	for _, path := range strings.Fields(string(out)) {
		switch path {
		case sdk + "blk", sdk + "extents", sdk + "shm", sdk + "pump", sdk + "plugin", sdk + "tally", "golang.org/x/sys/unix":
			continue
		}
		if strings.Contains(path, ".") {
			t.Errorf("%s is imported; a plugin uses the SDK", path)
		}
	}
}
