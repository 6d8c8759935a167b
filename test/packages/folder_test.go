package packages

import (
	"os/exec"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// copyTree copies the files of the repository, as they are now, to a new folder.
func copyTree(t *testing.T, to string) {
	t.Helper()
	cmd := exec.Command("sh", "-ec", `mkdir -p "$0" && git ls-files -z --cached --others --exclude-standard | tar --null -T - -c | tar -x -C "$0"`, to)
	cmd.Dir = lab.Root()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("copy the tree: %v\n%s", err, out)
	}
}
