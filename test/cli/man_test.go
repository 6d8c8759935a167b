package cli

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestManPagesAreRendered has groff look at every page with all warnings on.
func TestManPagesAreRendered(t *testing.T) {
	groff := lab.Tool(t, "groff")
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if out, err := exec.Command(filepath.Join(bin, "rnbd"), "man", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	pages, err := filepath.Glob(filepath.Join(dir, "*.8"))
	if err != nil || len(pages) < 30 {
		t.Fatalf("%d pages: %v", len(pages), err)
	}
	var text bytes.Buffer
	for _, p := range pages {
		var warnings bytes.Buffer
		cmd := exec.Command(groff, "-man", "-Tutf8", "-ww", "-P-c", p)
		cmd.Stdout, cmd.Stderr = &text, &warnings
		if err := cmd.Run(); err != nil || warnings.Len() > 0 {
			t.Errorf("%s: %v\n%s", filepath.Base(p), err, warnings.String())
		}
	}
	for _, want := range []string{"path_uu", "rnbd map disk.img from", "The noun may be left out", "U connected, _ not", "8  it took longer than allowed\n", "path_uu                PS             each path: U connected, _ not\n"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no page says %q", want)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "rnbd.8")); err != nil {
		t.Error(err)
	}
}
