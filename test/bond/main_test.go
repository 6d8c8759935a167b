package bond

import (
	"os"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

func TestMain(m *testing.M) { os.Exit(lab.Run(m)) }
