package devices

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/kernelvm/kernel"
	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
	"github.com/rnbd-go/rnbd/test/lab"
)

var (
	inGuest = flag.Bool("guest", false, "this is the guest: run the tests here")
	bin     = flag.String("bin", "", "folder of the programs (with -guest)")
	udev    = flag.String("udev", "", "folder with the files of the package udev (with -guest); empty: its test is left out")
	long    = flag.Bool("long", os.Getenv("RNBD_LONG") != "", "the long form")
)

func TestMain(m *testing.M) {
	flag.Parse()
	if *bin != "" {
		os.Setenv("RNBD_BIN", *bin)
	}
	if *inGuest { // which ends with all that the tests leave
		lab.Patience = 3 * time.Minute
		code := m.Run()
		lab.Cleanup()
		os.Exit(code)
	}
	os.Exit(lab.Run(m))
}

// frontends are the front ends under test, with the kernel modules they need.
var frontends = []struct {
	name    string
	modules []string
}{
	{"ublk", []string{"ublk_drv"}},
	{"nbd", []string{"nbd"}},
}

// machine is a guest to boot, for the tests of one front end.
type machine struct {
	name, frontend string
	modules        []string
	newer          bool // with the kernel of Debian's backports
}

// machines are one per front end. The long form has one more, for features of
// ublk since the usual kernel; its tests are in their short form.
func machines() (out []machine) {
	for _, fe := range frontends {
		out = append(out, machine{name: fe.name, frontend: fe.name, modules: fe.modules})
		if fe.name == "ublk" && *long {
			out = append(out, machine{name: "newer", frontend: fe.name, modules: fe.modules, newer: true})
		}
	}
	return out
}

// limit bounds the tests of one guest. A quiet machine needs a fifth of it.
func limit() time.Duration { return pick(30*time.Minute, 2*time.Hour) }

// TestInGuest boots the machines and has them run TestGuest.
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
	var udevFiles string
	if *long {
		if udevFiles, err = kernel.Unpack("udev"); err != nil {
			t.Fatal(err)
		}
	}
	dir := filepath.Join(lab.Root(), "test", "devices")
	for _, m := range machines() {
		t.Run(m.name, func(t *testing.T) {
			g := vm.Boot(t, vm.Config{MemMiB: 3072, Modules: append([]string{"loop", "ext4", "xfs"}, m.modules...), Newer: m.newer})
			ctx, cancel := context.WithTimeout(t.Context(), limit()+time.Minute)
			defer cancel()
			out, err := g.Try(ctx, "sh", "-c", `cd "$0" && exec "$@"`, dir, binary, "-guest", "-bin", programs, "-udev", udevFiles, fmt.Sprintf("-long=%v", *long && !m.newer),
				"-test.v", "-test.parallel", "4", "-test.timeout", limit().String(), "-test.run", guestTests(m.frontend))
			if report(t, out) == 0 {
				t.Errorf("no test ran in the guest")
			}
			if err != nil && !t.Failed() {
				t.Errorf("tests in the guest: %v", err)
			}
		})
	}
}

// guestTests returns the -test.run for the guest: TestInGuest/ublk/cuts here is
// TestGuest/ublk/cuts there.
func guestTests(frontend string) string {
	all := "^TestGuest$/^" + frontend + "$"
	if parts := strings.SplitN(flag.Lookup("test.run").Value.String(), "/", 3); len(parts) == 3 {
		return all + "/" + parts[2]
	}
	return all
}

// report makes the guest's verdicts tests of their own, with their output, and
// returns how many there were.
func report(t *testing.T, out string) (verdicts int) {
	t.Log(out)
	for _, line := range strings.Split(out, "\n") {
		f := strings.Fields(line)
		if len(f) < 3 || f[0] != "---" || strings.Count(f[2], "/") < 2 {
			continue
		}
		verdicts++
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
	return verdicts
}
