package bond

import (
	"os"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

func TestMain(m *testing.M) {
	code := m.Run()
	lab.Cleanup()
	os.Exit(code)
}
