package kernelvm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
	"github.com/rnbd-go/rnbd/test/lab"
)

// Programs that tests run; known after TestMain.
var rnbdPath, exercisePath, rawpeerPath string

func repositoryRoot() string { return lab.Root() }

func TestMain(m *testing.M) {
	os.Exit(runAll(m))
}

func runAll(m *testing.M) int {
	if !vm.Enabled() {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "rnbd-kernelvm-")
	if err == nil {
		defer os.RemoveAll(dir)
		err = buildPrograms(dir)
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer lab.Cleanup()
	defer stopShared()
	return m.Run()
}

func buildPrograms(dir string) error {
	bin, err := lab.Bin()
	if err != nil {
		return err
	}
	rnbdPath, exercisePath, rawpeerPath = filepath.Join(bin, "rnbd"), filepath.Join(dir, "exercise"), filepath.Join(dir, "rawpeer")
	for path, pkg := range map[string]string{exercisePath: "./exercise/cmd", rawpeerPath: "./rawpeer"} {
		cmd := exec.Command("go", "build", "-o", path, pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w\n%s", pkg, err, out)
		}
	}
	return nil
}

// shared is the guest that tests have one after the other.
var shared struct {
	mu sync.Mutex
	g  *vm.Guest
}

func stopShared() {
	if shared.g != nil {
		shared.g.Stop()
	}
}

// fast is the link with jumbo frames, where packets carry 4096 bytes; on the other one
// they carry 1024.
const fast = 1

// guest returns the shared guest, with rxe on both its links. A test that fails
// takes it along, since its remains would fail the next one.
func guest(t testing.TB) *vm.Guest {
	t.Helper()
	vm.Require(t)
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.g == nil {
		g, err := vm.Start(vm.Config{Net: vm.Tap, Modules: []string{"loop"}})
		if err != nil {
			t.Fatalf("boot: %v", err)
		}
		shared.g = g
		for link := range 2 {
			eth := fmt.Sprintf("eth%d", link)
			if link == fast {
				g.Run(t, "ip", "link", "set", eth, "mtu", "9000")
			}
			g.RXEOn(t, fmt.Sprintf("rxe%d", link), eth, g.Addr(link)+"/24", g.Addr6(link)+"/64")
		}
	}
	g := shared.g
	t.Cleanup(func() {
		if t.Failed() {
			shared.mu.Lock()
			defer shared.mu.Unlock()
			shared.g.Stop()
			shared.g = nil
		}
	})
	g.Watch(t)
	return g
}

// column is a way for our daemons to run beside the kernel's modules.
type column struct {
	fabric string
	ipv6   bool
	ours   func(*vm.Guest) place
	// addresses of our server, our client and the kernel on a link
	server, client, kernel func(g *vm.Guest, link int) string
	prepare                func(testing.TB, *vm.Guest) // before each cell; nil: nothing
	cuts                   bool                        // vm.Guest.CutLink parts client and server
}

// rocev2: our daemons are on the host, and nothing is installed there.
var rocev2 = column{
	fabric: "rocev2",
	ours:   func(g *vm.Guest) place { return hostPlace{g} },
	server: func(_ *vm.Guest, link int) string { return vm.HostAddr(link) },
	client: func(_ *vm.Guest, link int) string { return secondHostAddr(link) },
	kernel: func(g *vm.Guest, link int) string { return g.Addr(link) },
	prepare: func(t testing.TB, g *vm.Guest) {
		for link := range 2 {
			addHostAddr(t, g, link, secondHostAddr(link)+"/24")
			meetNeighbours(t, g, vm.HostAddr(link), secondHostAddr(link))
		}
	},
	cuts: true,
}

var columns = []column{rocev2}

// side is the player of a part.
type side string

const (
	ours   side = "ours"
	kernel side = "kernel"
)

// cell is a client and a server that are to understand each other.
type cell struct {
	column
	from, to   side     // client, server
	invalidate bool     // always_invalidate of the server
	flags      []string // of our daemons
}

func (c cell) String() string {
	inv := map[bool]string{true: "Y", false: "N"}[c.invalidate]
	ip := map[bool]string{true: " on IPv6", false: ""}[c.ipv6]
	return fmt.Sprintf("%s%s/%s client, %s server, always_invalidate=%s", c.fabric, ip, c.from, c.to, inv)
}

// bench is a cell at work.
type bench struct {
	cell
	g       *vm.Guest
	c       client
	s       server
	records [2]*recording // by link
}

// set starts both parties. At the end the guest has none of it left.
func (c cell) set(t testing.TB) *bench {
	t.Helper()
	g := guest(t)
	b := &bench{cell: c, g: g}
	addr := func(f func(*vm.Guest, int) string) func(int) string {
		return func(link int) string { return f(g, link) }
	}
	if c.prepare != nil {
		c.prepare(t, g)
	}
	for link := range 2 {
		b.records[link] = record(t, g, link)
	}
	if c.to == kernel {
		b.s = &kernelServer{g: g, addr: addr(c.kernel), params: []string{"always_invalidate=" + map[bool]string{true: "Y", false: "N"}[c.invalidate]}}
	} else {
		b.s = &ourServer{at: c.ours(g), fabric: c.fabric, addr: addr(c.server), flags: append([]string{fmt.Sprintf("--always-invalidate=%t", c.invalidate)}, c.flags...)}
	}
	b.s.Start(t)
	if c.from == kernel {
		k := &kernelClient{g: g, addr: addr(c.kernel)}
		k.load(t)
		b.c = k
	} else {
		o := &ourClient{at: c.ours(g), fabric: c.fabric, addr: addr(c.client), flags: c.flags}
		o.start(t)
		b.c = o
	}
	return b
}

// meetNeighbours lets the guest find the host's link addresses before it connects. Its
// rdma_cm asks for them itself, but goes to sleep for 30 s when the answer comes faster
// than the emulated processor gets around to waiting for it.
func meetNeighbours(t testing.TB, g *vm.Guest, addrs ...string) {
	t.Helper()
	for _, a := range addrs {
		g.Run(t, "bash", "-c", `for i in {1..200}; do echo > /dev/udp/$0/9; ip neigh show to $0 | grep -q lladdr && exit; sleep 0.05; done; exit 1`, a)
	}
}

// secondHostAddr is the host's address for a client, beside that of the server: each
// has a UDP port for itself.
func secondHostAddr(link int) string { return fmt.Sprintf("10.9.%d.101", link) }

// addHostAddr gives the host an address on a link; an IPv6 address can be used at once.
func addHostAddr(t testing.TB, g *vm.Guest, link int, addr string) {
	t.Helper()
	run(t, hostPlace{g}, "ip", "addr", "replace", addr, "dev", fmt.Sprintf("br%d", link), "nodad")
}

// mapDisk maps the server's disk over the given links.
func (b *bench) mapDisk(t testing.TB, access string, links ...int) disk {
	t.Helper()
	return b.mustMap(t, b.mapping(access, links...))
}

// mustMap tries again when a guest is too slow to answer in time.
func (b *bench) mustMap(t testing.TB, m mapping) disk {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Second) {
		d, err := b.c.Map(t.Context(), m)
		if err == nil {
			return d
		}
		if slow := errors.Is(err, syscall.ETIMEDOUT) || errors.Is(err, syscall.ECONNRESET); !slow || time.Now().After(end) {
			t.Fatalf("map %s: %v", m.access, err)
		}
		t.Logf("map %s: %v", m.access, err)
	}
}

// unmap takes the only disk away, and waits for the server's end of the session: until
// then its name is taken.
func (b *bench) unmap(t *testing.T, d disk) {
	t.Helper()
	b.c.Unmap(t, d)
	eventually(t, time.Minute, "no session is left", func() bool { return b.s.Sessions(t) == 0 })
}

// repeat does an operation again that the loss of a path has made fail, at most
// twice: a kernel client lets no request wait for a path.
func (b *bench) repeat(t *testing.T, d disk, do func() error) (err error) {
	t.Helper()
	if b.from != kernel {
		return do()
	}
	for range 3 {
		before := b.c.Reconnects(t, "s")
		err = do()
		if err == nil || !strings.Contains(strings.ToLower(err.Error()), "input/output error") {
			return err
		}
		whole := func() bool { return b.connected(t) == len(b.c.Paths(t, "s")) }
		if whole() && b.c.Reconnects(t, "s") == before {
			return err
		}
		t.Logf("a path was lost: %v", err)
		eventually(t, 2*time.Minute, "the device is open again", func() bool { return whole() && b.c.State(t, d) == "open" })
	}
	return err
}

// connected counts the paths of session "s" that are.
func (b *bench) connected(t testing.TB) (n int) {
	for _, s := range b.c.Paths(t, "s") {
		if s == "connected" {
			n++
		}
	}
	return n
}

func (b *bench) mapping(access string, links ...int) mapping {
	return mapping{session: "s", name: b.s.Disk(), access: access, links: links, to: b.s, port: 1234}
}
