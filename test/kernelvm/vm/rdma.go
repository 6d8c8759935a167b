package vm

import (
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// Modprobe loads a module with its dependencies.
func (g *Guest) Modprobe(t testing.TB, module string, params ...string) {
	t.Helper()
	g.Run(t, append([]string{"modprobe", module}, params...)...)
}

// Rmmod removes modules, in the order given.
func (g *Guest) Rmmod(t testing.TB, modules ...string) {
	t.Helper()
	g.Run(t, append([]string{"rmmod"}, modules...)...)
}

// RXE makes an RDMA device over software RoCEv2 with the given addresses
// (ADDR/BITS). Both ends of its connections are in the guest: it lies on a link
// of its own that leads nowhere.
func (g *Guest) RXE(t testing.TB, name string, addrs ...string) { g.rdma(t, "rxe", name, addrs) }

// SIW makes an RDMA device over software iWARP likewise.
func (g *Guest) SIW(t testing.TB, name string, addrs ...string) { g.rdma(t, "siw", name, addrs) }

// RXEOn makes one on a network interface of the guest, as eth0.
func (g *Guest) RXEOn(t testing.TB, name, netdev string, addrs ...string) {
	g.rdmaOn(t, "rxe", name, netdev, addrs)
}

// SIWOn makes one on a network interface of the guest.
func (g *Guest) SIWOn(t testing.TB, name, netdev string, addrs ...string) {
	g.rdmaOn(t, "siw", name, netdev, addrs)
}

func (g *Guest) rdma(t testing.TB, kind, name string, addrs []string) {
	t.Helper()
	netdev := "n-" + name
	g.Run(t, "ip", "link", "add", netdev, "type", "dummy")
	g.rdmaOn(t, kind, name, netdev, addrs)
}

func (g *Guest) rdmaOn(t testing.TB, kind, name, netdev string, addrs []string) {
	t.Helper()
	module := map[string]string{"rxe": "rdma_rxe", "siw": "siw"}[kind]
	for _, m := range []string{module, "rdma_ucm", "ib_uverbs"} {
		g.Modprobe(t, m)
	}
	for _, a := range addrs {
		args := []string{"ip", "addr", "add", a, "dev", netdev}
		if strings.Contains(a, ":") {
			args = append(args, "nodad")
		}
		g.Run(t, args...)
	}
	g.Run(t, "ip", "link", "set", netdev, "up")
	g.Run(t, "rdma", "link", "add", name, "type", kind, "netdev", netdev)
}

// GoTest builds the tests of a package of the repository (its folder, from the top) and
// runs them in the guest, with the flags of a test binary, as "-test.v".
func (g *Guest) GoTest(t testing.TB, pkgDir string, args ...string) string {
	t.Helper()
	dir := filepath.Join(lab.Root(), pkgDir)
	binary := filepath.Join(t.TempDir(), filepath.Base(pkgDir)+".test")
	build := exec.Command("go", "test", "-c", "-o", binary, ".")
	build.Dir = dir
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the tests of %s: %v\n%s", pkgDir, err, out)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	shell := `cd "$0" && exec "$@"`
	out, err := g.Try(ctx, append([]string{"sh", "-c", shell, dir, binary}, args...)...)
	if err != nil {
		t.Fatalf("tests of %s in the guest: %v\nall of their output:\n%s", pkgDir, err, out)
	}
	t.Logf("tests of %s in the guest:\n%s", pkgDir, out)
	return out
}
