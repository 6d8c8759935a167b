package netguest

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/bond/netns"
)

// What test/kernelvm passes to the guest.
var (
	netPath  = flag.String("rnbd-net", "", "path of the program `rnbd-net`")
	peerPath = flag.String("udpeer", "", "path of the program `udpeer`, made of testdata/udpeer.c")
	root     = flag.String("root", "", "the repository")
)

const patience = time.Minute // for things that take less than a second on a quiet machine

func inGuest(t *testing.T) {
	t.Helper()
	if *netPath == "" {
		t.Skip("runs in a guest: make test-kernel")
	}
}

func command(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// eventually waits until ok, and fails the test with what why says.
func eventually(t *testing.T, what string, ok func() bool, why ...func() string) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			var text string
			for _, f := range why {
				text += "\n" + f()
			}
			t.Fatalf("%s: not within %v%s", what, patience, text)
		}
	}
}

// output is what a process has printed so far.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// host is a network namespace with daemons. Each host has its own rnbd-net on
// its PATH, which uses a socket of its own.
type host struct {
	t    *testing.T
	name string
	bin  string
	log  output
}

func newHost(t *testing.T, name string) *host {
	t.Helper()
	h := &host{t: t, name: name, bin: t.TempDir()}
	command(t, "ip", "netns", "add", name)
	t.Cleanup(func() {
		exec.Command("ip", "netns", "del", name).Run()
		if t.Failed() {
			t.Logf("daemons of %s:\n%s", name, &h.log)
		}
	})
	h.wrap("rnbd-net")
	command(t, "ip", "-n", name, "link", "set", "lo", "up")
	return h
}

// wrap makes a command that is rnbd-net with a socket of its own.
func (h *host) wrap(name string) {
	h.t.Helper()
	text := fmt.Sprintf("#!/bin/sh\nexec %s --socket %s \"$@\"\n", *netPath, filepath.Join(h.bin, name+".sock"))
	if err := os.WriteFile(filepath.Join(h.bin, name), []byte(text), 0o755); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) command(line string) *exec.Cmd {
	c := exec.Command("ip", "netns", "exec", h.name, "sh", "-c", line)
	c.Env = append(os.Environ(), "PATH="+h.bin+":"+os.Getenv("PATH")+":/usr/sbin:/sbin")
	return c
}

// try runs a line of shell on the host.
func (h *host) try(line string) (string, error) {
	out, err := h.command(line).CombinedOutput()
	return string(out), err
}

// run is try that fails the test.
func (h *host) run(line string) string {
	h.t.Helper()
	out, err := h.try(line)
	if err != nil {
		h.t.Fatalf("%s# %s: %v: %s\n%s", h.name, line, err, out, &h.log)
	}
	return out
}

// daemon is a running rnbd-net.
type daemon struct {
	h    *host
	cmd  *exec.Cmd
	done chan struct{}
}

// start runs a line of shell that is a daemon, and waits until the daemon
// answers.
func (h *host) start(line string) *daemon {
	h.t.Helper()
	d := &daemon{h: h, cmd: h.command("exec " + line), done: make(chan struct{})}
	d.cmd.Stdout, d.cmd.Stderr = &h.log, &h.log
	if err := d.cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	go func() {
		d.cmd.Wait()
		close(d.done)
	}()
	h.t.Cleanup(d.kill)
	name, _, _ := strings.Cut(line, " ")
	eventually(h.t, h.name+"# "+line, func() bool {
		_, err := h.try(name + " link show")
		return err == nil
	}, h.log.String)
	return d
}

// kill ends the daemon as a crash does.
func (d *daemon) kill() {
	d.cmd.Process.Kill()
	<-d.done
}

// recipe runs the commands of a block of the README, and those after "&" as
// daemons.
func recipe(t *testing.T, hosts map[string]*host, lines []string) (daemons []*daemon) {
	t.Helper()
	for _, l := range lines {
		who, line, ok := strings.Cut(l, "# ")
		if h := hosts[who]; ok && h != nil {
			if daemonLine, is := strings.CutSuffix(line, " &"); is {
				daemons = append(daemons, h.start(daemonLine))
			} else {
				h.run(line)
			}
		} else if l != "" {
			t.Fatalf("the README has a line %q", l)
		}
	}
	return daemons
}

// readme returns the lines of code block number n below a heading of
// cmd/rnbd-net/README.md.
func readme(t *testing.T, heading string, n int) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(*root, "cmd/rnbd-net/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(text), "\n## "+heading+"\n")
	section, _, _ = strings.Cut(section, "\n## ")
	blocks := regexp.MustCompile("(?s)\n```\n(.*?)\n```\n").FindAllStringSubmatch(section, -1)
	if !ok || len(blocks) <= n {
		t.Fatalf("the README has no block %d below %q", n, heading)
	}
	return strings.Split(blocks[n][1], "\n")
}

// newNetwork makes the two hosts, on two switches.
func newNetwork(t *testing.T) (one, two *host) {
	t.Helper()
	inGuest(t)
	sw := newHost(t, "sw")
	one, two = newHost(t, "one"), newHost(t, "two")
	for link := range 2 {
		sw.run(fmt.Sprintf("ip link add br%d mtu 4200 type bridge mcast_snooping 0 && ip link set br%d up", link, link))
		for k, h := range []*host{one, two} {
			port := fmt.Sprintf("p%d%s", link, h.name)
			sw.run(fmt.Sprintf("ip link add %s mtu 4200 type veth peer name e%d mtu 4200 netns %s && ip link set %s master br%d up", port, link, h.name, port, link))
			h.run(fmt.Sprintf("ip addr add 10.%d.0.%d/24 dev e%d && ip link set e%d up", link, k+1, link, link))
		}
	}
	return one, two
}

// cut takes the carrier of a host's cable away, or gives it back.
func (h *host) cut(link int, cut bool) {
	h.t.Helper()
	state := map[bool]string{true: "down", false: "up"}[cut]
	command(h.t, "ip", "-n", "sw", "link", "set", fmt.Sprintf("p%d%s", link, h.name), state)
}

// in calls f in the namespace of the host.
func (h *host) in(f func() error) {
	h.t.Helper()
	if err := netns.Do("/run/netns/"+h.name, f); err != nil {
		h.t.Fatal(err)
	}
}

// proc reads the driver's file about the bond.
func (h *host) proc() (text string) {
	h.t.Helper()
	h.in(func() error {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/net/bonding/bond0", os.Getpid(), unix.Gettid()))
		text = string(b)
		return err
	})
	return text
}

var activeLine = regexp.MustCompile(`Currently Active Slave: (\S+)`)

// waitActive waits until the driver has made a slave the active one.
func (h *host) waitActive(slave string) {
	h.t.Helper()
	eventually(h.t, slave+" is the active slave", func() bool {
		m := activeLine.FindStringSubmatch(h.proc())
		return m != nil && m[1] == slave
	}, h.proc)
}

// linkAddress returns the 20-octet address of an interface, as rnbd-net names
// it: octets 1 to 19, without the flags.
func (h *host) linkAddress(command, name string) string {
	h.t.Helper()
	for line := range strings.Lines(h.run(command + " link show")) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == name {
			if m := regexp.MustCompile(`(?:[0-9a-f]{2}:){19}[0-9a-f]{2}`).FindString(line); m != "" {
				return m
			}
		}
	}
	h.t.Fatalf("rnbd-net shows no address of %s", name)
	return ""
}
