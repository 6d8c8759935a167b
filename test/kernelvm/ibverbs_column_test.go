package kernelvm

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// ibverbs: our daemons are in the guest and use its RDMA devices, as the
// kernel's modules do. All are on the same address.
var ibverbs = column{
	fabric: "ibverbs",
	ours:   func(g *vm.Guest) place { return residentPlace{guestPlace{g}} },
	server: func(g *vm.Guest, link int) string { return g.Addr(link) },
	client: func(g *vm.Guest, link int) string { return g.Addr(link) },
	kernel: func(g *vm.Guest, link int) string { return g.Addr(link) },
}

// The column of ibverbs has the tests of columns, but sets each cell up once,
// because programs start slowly in the guest.
func TestIBVerbs_Matrix(t *testing.T) {
	for _, c := range ibverbs.cells() {
		t.Run(c.String(), func(t *testing.T) {
			b := c.set(t)
			wholeLife(t, b)
			if c.from == ours && !c.invalidate && !t.Failed() {
				t.Run("other addresses", func(t *testing.T) { otherAddresses(t, b) })
			}
			if c.from == c.to || t.Failed() {
				return
			}
			if c.invalidate {
				t.Run("errors", func(t *testing.T) { refusals(t, b) })
				if c.from == kernel {
					t.Run("file system", func(t *testing.T) { filesystem(t, b) })
				}
				t.Run("fio", func(t *testing.T) { fioVerify(t, b) })
			}
			// Last, since the server that it starts ends with it. The cells are
			// those of TestServerRestart.
			if c.invalidate == (c.to == ours) {
				t.Run("server restart", func(t *testing.T) { restart(t, b) })
			}
		})
	}
}

// residentPlace is the guest with our programs in its memory: their first pages
// come slowly from the host's files, and plugins have half a minute to answer.
type residentPlace struct{ guestPlace }

const residentDir = "/tmp/bin"

// settle copies the programs, once for each guest.
func (p residentPlace) settle(ctx context.Context) error {
	bin := filepath.Dir(rnbdPath)
	script := `[ -d "$0" ] || { mkdir "$0.new" && cp "$@" "$0.new" && mv "$0.new" "$0"; }`
	_, err := p.guestPlace.Try(ctx, "sh", "-c", script, residentDir,
		rnbdPath, filepath.Join(bin, "io-fileio"), filepath.Join(bin, "frontend-nbd"), exercisePath)
	return err
}

// local is argv with the copies, and daemons with no more plugins than needed.
func (p residentPlace) local(argv []string) []string {
	if argv[0] != rnbdPath && argv[0] != exercisePath {
		return argv
	}
	argv = slices.Clone(argv)
	argv[0] = filepath.Join(residentDir, filepath.Base(argv[0]))
	switch said := strings.Join(argv[1:min(3, len(argv))], " "); said {
	case "server run":
		argv = append(argv, "--io-plugin", "fileio="+residentDir+"/io-fileio")
	case "client run":
		argv = append(argv, "--frontend-plugin", "nbd="+residentDir+"/frontend-nbd")
	}
	return argv
}

func (p residentPlace) Try(ctx context.Context, argv ...string) (string, error) {
	if err := p.settle(ctx); err != nil {
		return "", err
	}
	return p.guestPlace.Try(ctx, p.local(argv)...)
}

func (p residentPlace) Start(t testing.TB, argv ...string) process {
	t.Helper()
	if err := p.settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	return p.guestPlace.Start(t, p.local(argv)...)
}
