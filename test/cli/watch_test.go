package cli

import (
	"bufio"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestWatchPrintsAgain reads a list three times, and ends it by Ctrl-C.
func TestWatchPrintsAgain(t *testing.T) {
	l := lab.New(t)
	c := l.Client(lab.ClientOptions{})
	cmd := exec.Command(program(t), "client", "device", "list", "--watch=50ms", "--socket", c.Socket)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	seen := 0
	for lines := bufio.NewScanner(out); seen < 3 && lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "Session") {
			seen++
		}
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || seen < 3 {
		t.Errorf("%d lists, and its end is %v", seen, err)
	}
}
