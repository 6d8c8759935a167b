package devices

import (
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
	"github.com/rnbd-go/rnbd/test/lab"
)

var (
	inGuest = flag.Bool("guest", false, "this is the guest: run the tests here")
	bin     = flag.String("bin", "", "folder of the programs (with -guest)")
	long    = flag.Bool("long", os.Getenv("RNBD_LONG") != "", "the long form")
)

func TestMain(m *testing.M) {
	flag.Parse()
	if *bin != "" {
		os.Setenv("RNBD_BIN", *bin)
	}
	if *inGuest {
		lab.Patience = 3 * time.Minute
	}
	code := m.Run()
	lab.Cleanup()
	os.Exit(code)
}

// frontends are what is tested, with the kernel modules they need.
var frontends = []struct {
	name    string
	modules []string
}{
	{"ublk", []string{"ublk_drv"}},
	{"nbd", []string{"nbd"}},
}

// TestInGuest boots a guest per front end and has it run TestGuest.
func TestInGuest(t *testing.T) {
	if *inGuest {
		t.Skip("this is the guest")
	}
	vm.Require(t)
	programs, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(t.TempDir(), "devices.test")
	if out, err := exec.Command("go", "test", "-c", "-o", binary, ".").CombinedOutput(); err != nil {
		t.Fatalf("build the tests: %v\n%s", err, out)
	}
	dir := filepath.Join(lab.Root(), "test", "devices")
	for _, fe := range frontends {
		t.Run(fe.name, func(t *testing.T) {
			g := vm.Boot(t, vm.Config{MemMiB: 2048, Modules: append([]string{"loop", "ext4", "xfs"}, fe.modules...)})
			limit := 15 * time.Minute // an idle machine needs a fifth of it
			args := []string{"sh", "-c", `cd "$0" && exec "$@"`, dir, binary, "-guest", "-bin", programs,
				"-test.v", "-test.run", "^TestGuest$/^" + fe.name + "$"}
			if *long {
				limit = 40 * time.Minute
				args = append(args, "-long", "-test.timeout", limit.String())
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			out, err := g.Try(ctx, args...)
			report(t, out)
			if err != nil && !t.Failed() {
				t.Errorf("tests in the guest: %v", err)
			}
		})
	}
}

// report makes the guest's verdicts tests of their own, with their output.
func report(t *testing.T, out string) {
	t.Log(out)
	for _, line := range strings.Split(out, "\n") {
		f := strings.Fields(line)
		if len(f) < 3 || f[0] != "---" || strings.Count(f[2], "/") < 2 {
			continue
		}
		name := strings.SplitN(f[2], "/", 3)[2]
		switch f[1] {
		case "PASS:":
			t.Run(name, func(*testing.T) {})
		case "FAIL:":
			t.Run(name, func(t *testing.T) { t.Error("failed in the guest, see its output") })
		case "SKIP:":
			t.Run(name, func(t *testing.T) { t.Skip("skipped in the guest, see its output") })
		}
	}
}
