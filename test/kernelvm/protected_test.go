package kernelvm

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// The recipes of docs/use/security.md below "Other fabrics": RoCEv2 through IPsec and
// through WireGuard, between two network namespaces of the guest.
//
//	storage 10.0.0.1 ---- veth ---- 10.0.0.2 compute
//
// Linux's software RoCE works in the first namespace of its host only, so the end
// with the kernel's modules is there, and ours is in one of its own.

const storageAddr, computeAddr = "10.0.0.1", "10.0.0.2"

// netns is a network namespace of the guest, as a place. Without a name it is the
// guest's first one.
type netns struct {
	g    *vm.Guest
	name string
}

func (n netns) Name() string { return "namespace " + n.name + " of the guest" }

func (n netns) argv(argv []string) []string {
	if argv[0] == rnbdPath {
		argv = append([]string{guestBin + "/rnbd"}, argv[1:]...)
	}
	if n.name == "" {
		return argv
	}
	return append([]string{"ip", "netns", "exec", n.name}, argv...)
}

func (n netns) Try(ctx context.Context, argv ...string) (string, error) {
	return n.g.Try(ctx, n.argv(argv)...)
}

func (n netns) Start(t testing.TB, argv ...string) process { return n.g.Start(t, n.argv(argv)...) }

// wire are two hosts on one cable.
type wire struct {
	g     *vm.Guest
	hosts map[string]netns
	file  string // captured
	dump  process
}

// guestBin has copies of our programs in the memory of the guest, since pages of
// programs come slowly from the host.
const guestBin = "/tmp/protected-bin"

// newWire makes the namespaces of both hosts. The host with the kernel's modules, if
// there is one, gets rxe.
func newWire(t *testing.T, g *vm.Guest, kernelHost string) *wire {
	t.Helper()
	w := &wire{g: g, hosts: map[string]netns{}}
	bin := filepath.Dir(rnbdPath)
	g.Run(t, "sh", "-c", "mkdir -p "+guestBin+" && cp -u "+bin+"/rnbd "+bin+"/io-fileio "+bin+"/frontend-nbd "+guestBin)
	for _, h := range []string{"storage", "compute"} {
		w.hosts[h] = netns{g: g, name: h}
		if h == kernelHost {
			w.hosts[h] = netns{g: g}
			continue
		}
		g.Run(t, "ip", "netns", "add", h)
		t.Cleanup(func() { g.Run(t, "ip", "netns", "del", h) })
	}
	g.Run(t, "ip", "link", "add", "to-storage", "mtu", "4200", "type", "veth", "peer", "name", "to-compute", "mtu", "4200")
	for h, end := range map[string]struct{ link, addr string }{"storage": {"to-compute", storageAddr}, "compute": {"to-storage", computeAddr}} {
		n := w.hosts[h]
		if n.name != "" {
			g.Run(t, "ip", "link", "set", end.link, "netns", n.name)
		}
		w.sh(t, h, "ip addr add "+end.addr+"/24 dev "+end.link+" && ip link set lo up && ip link set "+end.link+" up")
		if n.name == "" {
			t.Cleanup(func() { g.Run(t, "ip", "link", "del", end.link) })
		}
	}
	w.meet(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("counters of IPsec:\n%s", w.sh(t, "storage", "awk '$2>0' /proc/net/xfrm_stat")+w.sh(t, "compute", "awk '$2>0' /proc/net/xfrm_stat"))
		}
	})
	if kernelHost != "" {
		link := map[string]string{"storage": "to-compute", "compute": "to-storage"}[kernelHost]
		g.Run(t, "rdma", "link", "add", "rxe8", "type", "rxe", "netdev", link)
		t.Cleanup(func() { g.Run(t, "rdma", "link", "delete", "rxe8") })
	}
	return w
}

// meet has the ends find each other's link addresses, see meetNeighbours.
func (w *wire) meet(t *testing.T) {
	t.Helper()
	for h, peer := range map[string]string{"storage": computeAddr, "compute": storageAddr} {
		run(t, w.hosts[h], "bash", "-c", `for i in {1..200}; do echo > /dev/udp/$0/9; ip neigh show to $0 | grep -q lladdr && exit; sleep 0.05; done; exit 1`, peer)
	}
}

// sh runs a line of shell on a host.
func (w *wire) sh(t *testing.T, host, line string) string {
	t.Helper()
	return run(t, w.hosts[host], "sh", "-c", line)
}

// recipe runs lines "HOST# COMMAND" of a page.
func (w *wire) recipe(t *testing.T, lines string, env map[string]string) {
	t.Helper()
	for line := range strings.Lines(lines) {
		host, command, ok := strings.Cut(strings.TrimSpace(line), "# ")
		if _, known := w.hosts[host]; !ok || !known {
			t.Fatalf("the recipe has the line %q", line)
		}
		for name, value := range env {
			command = strings.ReplaceAll(command, "$"+name, value)
		}
		w.sh(t, host, command)
	}
}

// capture records all packets of the cable.
func (w *wire) capture(t *testing.T) {
	t.Helper()
	w.file = strings.TrimSpace(w.g.Run(t, "mktemp", "/tmp/wireXXXXXX"))
	t.Cleanup(func() { w.g.Run(t, "rm", "-f", w.file) })
	w.dump = w.hosts["compute"].Start(t, "tcpdump", "-i", "to-storage", "-Z", "root", "-U", "--immediate-mode", "-s", "128", "-B", "16384", "-w", w.file)
	eventually(t, time.Minute, "tcpdump listens", func() bool { return strings.Contains(w.dump.Output(), "listening on") })
}

// count counts the captured packets of a filter of tcpdump.
func (w *wire) count(t *testing.T, filter string) int {
	t.Helper()
	return count(w.sh(t, "compute", "tcpdump -n -r "+w.file+" '"+filter+"' 2>/dev/null"))
}

// secret fails the test if the cable has carried IP packets other than protected
// ones, or few of these.
func (w *wire) secret(t *testing.T, protected string) {
	t.Helper()
	if n := w.count(t, "ip and not ("+protected+")"); n > 0 {
		t.Errorf("%d packets were on the wire without protection:\n%s", n, w.sh(t, "compute", "tcpdump -n -c 5 -r "+w.file+" 'ip and not ("+protected+")' 2>/dev/null"))
	}
	if n := w.count(t, protected); n < 500 {
		t.Errorf("%d protected packets were on the wire: the data went elsewhere", n)
	}
}

// securityRecipe returns the lines of a code block of docs/use/security.md: the first
// one behind a paragraph that begins with title.
func securityRecipe(t *testing.T, title string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repositoryRoot(), "docs/use/security.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, part, _ := strings.Cut(string(text), "\n**"+title+".**")
	m := regexp.MustCompile("(?s)\n```\n(.*?)\n```\n").FindStringSubmatch(part)
	if m == nil {
		t.Fatalf("docs/use/security.md has no recipe %q", title)
	}
	return m[1]
}

// parties are a server and a client on the hosts of a cable.
func (w *wire) parties(t *testing.T, from, to side, server, client string) *bench {
	t.Helper()
	const size = 4 << 20 // of a disk: an emulated processor encrypts slowly
	fixed := func(a string) func(int) string { return func(int) string { return a } }
	b := &bench{cell: cell{from: from, to: to}, g: w.g}
	if to == kernel {
		b.s = &kernelServer{g: w.g, addr: fixed(server), params: []string{"always_invalidate=N"}, size: size}
	} else {
		b.s = &ourServer{at: w.hosts["storage"], fabric: "rocev2", addr: fixed(server), size: size, flags: []string{"--io-plugin", "blockio=none", "--confine", "off"}}
	}
	b.s.Start(t)
	if from == kernel {
		k := &kernelClient{g: w.g, addr: fixed(client)}
		k.load(t)
		b.c = k
	} else {
		o := &ourClient{at: w.hosts["compute"], fabric: "rocev2", addr: fixed(client), flags: []string{"--frontend-plugin", "ublk=none", "--confine", "off"}}
		o.start(t)
		b.c = o
	}
	return b
}

// protected is a mapping with requests that wait while there is no protection.
func (b *bench) protected() mapping {
	m := b.mapping("rw", 0)
	m.loss = "queue:30m"
	return m
}

// exchange writes and reads the disk with random requests, and compares it at both
// ends.
func exchange(t *testing.T, b *bench, d disk) {
	t.Helper()
	if err := b.repeat(t, d, func() error {
		_, err := b.c.Exercise(t.Context(), d, "--for", "1s")
		return err
	}); err != nil {
		t.Fatalf("exercise: %v", err)
	}
	sum, err := b.c.Exercise(t.Context(), d, "--read")
	if err != nil {
		t.Fatal(err)
	}
	if got := b.s.Sum(t); got != strings.TrimSpace(sum) {
		t.Errorf("the disk of the server has the sum %s, the client reads %s", got, sum)
	}
}

const esp = "ip proto 50"

// longForm skips what takes minutes.
func longForm(t *testing.T) {
	if os.Getenv("RNBD_LONG") == "" {
		t.Skip("in the long form: make test-kernel-full")
	}
}

// Data of all pairs go through IPsec, none beside it: neither while both ends have
// the policies nor when one end has lost the one that encrypts.
func TestIPsec(t *testing.T) {
	longForm(t)
	g := guest(t)
	for _, m := range []string{"veth", "esp4", "xfrm_user"} {
		g.Modprobe(t, m)
	}
	recipe := securityRecipe(t, "IPsec")
	for _, c := range []struct {
		from, to   side
		kernelHost string
	}{{ours, ours, ""}, {ours, kernel, "storage"}, {kernel, ours, "compute"}} {
		t.Run(fmt.Sprintf("%s client, %s server", c.from, c.to), func(t *testing.T) {
			w := newWire(t, g, c.kernelHost)
			for h := range w.hosts {
				t.Cleanup(func() { w.sh(t, h, "ip xfrm policy flush && ip xfrm state flush") })
			}
			w.recipe(t, recipe, map[string]string{"KEY1": "0x" + strings.Repeat("1f", 20), "KEY2": "0x" + strings.Repeat("2e", 20)})
			w.capture(t)
			b := w.parties(t, c.from, c.to, storageAddr, computeAddr)
			d := b.mustMap(t, b.protected())
			exchange(t, b, d)
			w.secret(t, esp)

			// The policy that encrypts is lost: nothing is sent in its place.
			lost := w.policy(t, recipe)
			w.sh(t, "compute", strings.Replace(lost[:strings.Index(lost, " priority")], " add ", " delete ", 1))
			reader := b.c.StartExercise(t, d, "--read")
			if c.from == ours {
				eventually(t, 2*time.Minute, "the path is lost", func() bool { return b.connected(t) == 0 })
			} else {
				time.Sleep(3 * time.Second) // Linux would take half a minute to notice
			}
			if err := reader.Wait(time.Millisecond); err == nil {
				t.Error("the client reads the whole disk without the policy")
			}
			w.sh(t, "compute", lost)
			w.secret(t, esp)
			if c.from == ours {
				if err := reader.Wait(5 * time.Minute); err != nil {
					t.Errorf("after the policy is back: %v", err)
				}
			} else {
				reader.Kill()
				b.unmapKernel(t, d)
				return
			}
			b.unmap(t, d)
		})
	}
}

// unmapKernel takes a device of the kernel's client away when its last requests have
// ended.
func (b *bench) unmapKernel(t *testing.T, d disk) {
	t.Helper()
	eventually(t, 3*time.Minute, "the device is unmapped", func() bool {
		return b.g.Write("/sys/block/"+d.name+"/rnbd/unmap_device", "normal") == nil
	})
}

// policy is the command of the recipe that has compute encrypt what it sends.
func (w *wire) policy(t *testing.T, recipe string) string {
	t.Helper()
	m := regexp.MustCompile(`(?m)^compute# (ip xfrm policy add .* dir out .* tmpl .*)$`).FindStringSubmatch(recipe)
	if m == nil {
		t.Fatal("the recipe has no policy by which compute encrypts")
	}
	return m[1]
}

// Our two ends through WireGuard. Without its interface nothing is sent, although
// there is another route to the peer.
func TestWireGuard(t *testing.T) {
	longForm(t)
	g := guest(t)
	for _, m := range []string{"veth", "wireguard"} {
		g.Modprobe(t, m)
	}
	w := newWire(t, g, "")
	w.sh(t, "compute", "ip route add default via "+storageAddr)
	keys := map[string]string{}
	for _, h := range []string{"storage", "compute"} {
		secret := strings.TrimSpace(w.sh(t, h, "umask 077 && wg genkey | tee /tmp/wg-"+h+".key"))
		t.Cleanup(func() { g.Run(t, "rm", "-f", "/tmp/wg-"+h+".key") })
		keys[strings.ToUpper(h)] = strings.TrimSpace(w.sh(t, h, "echo "+secret+" | wg pubkey"))
	}
	recipe := strings.ReplaceAll(securityRecipe(t, "WireGuard"), "/etc/wireguard/", "/tmp/wg-")
	w.recipe(t, recipe, keys)
	w.capture(t)
	// Without its interface compute refuses packets of the tunnel, by messages that
	// quote them, encrypted as they are.
	const tunnel = "udp port 51820 or (icmp[0] = 3 and icmp[30:2] = 51820)"
	b := w.parties(t, ours, ours, "10.8.0.1", "10.8.0.2")
	d := b.mustMap(t, b.protected())
	exchange(t, b, d)
	w.secret(t, tunnel)
	w.sh(t, "compute", "ip link del wg0")
	eventually(t, 2*time.Minute, "the path is lost", func() bool { return b.connected(t) == 0 })
	w.secret(t, tunnel)
}
