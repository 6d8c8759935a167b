package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/netns/netnstest"
)

// TestMain makes the test binary the command itself when a test asks for it.
func TestMain(m *testing.M) {
	if os.Getenv("RNBD_NET_COMMAND") != "" {
		main()
	}
	os.Exit(m.Run())
}

// node is a network namespace with a daemon.
type node struct {
	t      *testing.T
	ns     string
	tree   string
	socket string
	daemon *exec.Cmd
	ended  chan error
	log    lockedBuffer
}

// lockedBuffer may be read while a process writes to it.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func run(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// nodes makes two namespaces on a cable, with the addresses 10.9.0.1 and 10.9.0.2,
// and starts their daemons.
func nodes(t *testing.T) (a, b *node) {
	t.Helper()
	return cabled(t, [2][]string{{"--port=10.9.0.1=10.9.0.2"}, {"--port=10.9.0.2=10.9.0.1"}}, nil)
}

// cabled makes two nodes that run the daemons with the arguments given, and
// calls prepare before they start.
func cabled(t *testing.T, daemons [2][]string, prepare func(a, b *node)) (a, b *node) {
	t.Helper()
	netnstest.Need(t)
	for _, f := range []string{"/dev/net/tun", "/dev/fuse"} {
		if _, err := os.Stat(f); err != nil {
			t.Skip(err)
		}
	}
	for _, tool := range []string{"ip", "nsenter"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(tool + " is not installed")
		}
	}
	for i, n := range []**node{&a, &b} {
		*n = &node{t: t, ns: fmt.Sprintf("rnbd-net-%d-%d", os.Getpid(), i), ended: make(chan error, 1)}
		dir := t.TempDir()
		(*n).tree, (*n).socket = filepath.Join(dir, "sys"), filepath.Join(dir, "net.sock")
		run(t, "ip", "netns", "add", (*n).ns)
		t.Cleanup(func() { run(t, "ip", "netns", "del", (*n).ns) })
	}
	run(t, "ip", "-n", a.ns, "link", "add", "eth0", "mtu", "4200", "type", "veth", "peer", "name", "eth0", "mtu", "4200", "netns", b.ns)
	for i, n := range []*node{a, b} {
		run(t, "ip", "-n", n.ns, "addr", "add", fmt.Sprintf("10.9.0.%d/24", i+1), "dev", "eth0")
		run(t, "ip", "-n", n.ns, "link", "set", "eth0", "up")
	}
	if prepare != nil {
		prepare(a, b)
	}
	a.start(daemons[0]...)
	b.start(daemons[1]...)
	return a, b
}

// command returns the command rnbd-net in the namespace.
func (n *node) command(args ...string) *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		n.t.Fatal(err)
	}
	// Unlike ip-netns(8), nsenter leaves the mounts alone: the tree is seen here.
	c := exec.Command("nsenter", append([]string{"--net=/run/netns/" + n.ns, self, "--socket", n.socket}, args...)...)
	c.Env = append(os.Environ(), "RNBD_NET_COMMAND=1", "GORACE=atexit_sleep_ms=0") // else each command waits for 1 s
	return c
}

func (n *node) start(args ...string) {
	n.t.Helper()
	n.daemon = n.command(append([]string{"run", "--tree", n.tree}, args...)...)
	n.daemon.Stderr = &n.log
	if err := n.daemon.Start(); err != nil {
		n.t.Fatal(err)
	}
	go func() { n.ended <- n.daemon.Wait() }()
	n.t.Cleanup(func() {
		if err := n.stop(); err != nil {
			n.t.Errorf("daemon: %v\n%s", err, &n.log)
		}
	})
	eventually(n.t, "the daemon answers", func() bool { return n.command("link", "show").Run() == nil })
}

// stop ends the daemon by SIGTERM.
func (n *node) stop() error {
	if n.daemon == nil {
		return nil
	}
	n.daemon.Process.Signal(syscall.SIGTERM)
	n.daemon = nil
	select {
	case err := <-n.ended:
		return err
	case <-time.After(20 * time.Second):
		return errors.New("not ended 20 s after SIGTERM")
	}
}

// net runs rnbd-net and returns its output and its exit code.
func (n *node) net(args ...string) (string, int) {
	n.t.Helper()
	c := n.command(args...)
	out, err := c.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		n.t.Fatal(err)
	}
	return string(out), c.ProcessState.ExitCode()
}

// read returns the text of a control file, or the error.
func (n *node) read(file string) string {
	b, err := os.ReadFile(filepath.Join(n.tree, file))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func (n *node) write(file, text string) error {
	return os.WriteFile(filepath.Join(n.tree, file), []byte(text), 0)
}

// inKernel reports whether the kernel has the interface.
func (n *node) inKernel(name string) bool {
	return exec.Command("ip", "-n", n.ns, "link", "show", name).Run() == nil
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not after 30 s", what)
		}
	}
}

// capture starts rnbd-net pcap, and waits until it has the header of the file.
// stop ends it by SIGINT and returns the captured bytes.
func (n *node) capture(t *testing.T, name string) (stop func() []byte) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "pcap")
	var c *exec.Cmd
	ended := make(chan error, 1)
	eventually(t, "the capture has started", func() bool {
		if c == nil {
			c = n.command("pcap", name, "-w", file)
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			go func(c *exec.Cmd) { ended <- c.Wait() }(c)
		}
		select {
		case <-ended: // the one before is not over yet
			c = nil
			return false
		default:
		}
		b, _ := os.ReadFile(file)
		return len(b) >= 24
	})
	return func() []byte {
		t.Helper()
		c.Process.Signal(syscall.SIGINT)
		if err := <-ended; err != nil {
			t.Errorf("rnbd-net pcap: %v", err)
		}
		b, err := os.ReadFile(file)
		if err != nil {
			t.Error(err)
		}
		return b
	}
}

func TestDaemon(t *testing.T) {
	a, b := nodes(t)
	t.Run("IP-04 a main interface", func(t *testing.T) {
		if got := a.read("class/net/ib0/pkey"); got != "0xffff\n" || !a.inKernel("ib0") {
			t.Errorf("pkey %q", got)
		}
	})
	t.Run("IP-02 IP-03 type and address", func(t *testing.T) {
		address := regexp.MustCompile(`^00(:[0-9a-f]{2}){3}(:00){10}:ff:ff:0a:09:00:01\n$`)
		if got := a.read("class/net/ib0/address"); !address.MatchString(got) {
			t.Errorf("address %q", got)
		}
		for file, want := range map[string]string{"type": "32\n", "addr_len": "20\n", "mtu": "2044\n", "mode": "datagram\n",
			"broadcast": "00:ff:ff:ff:ff:12:40:1b:ff:ff:00:00:00:00:00:00:ff:ff:ff:ff\n"} {
			if got := a.read("class/net/ib0/" + file); got != want {
				t.Errorf("%s: %q, want %q", file, got, want)
			}
		}
	})
	t.Run("over /sys/class/net nothing of the kernel's is missing", func(t *testing.T) {
		// The look at ib0/mtu is answered by the daemon, the others by the kernel.
		const script = `mount -t sysfs sysfs /sys && before=$(ls /sys/class/net/ib0) && mount --rbind "$1" /sys/class/net && cd /sys/class/net &&
			cat lo/ifindex lo/operstate eth0/carrier eth0/flags ib0/carrier ib0/ifindex ib0/operstate ib0/flags ib0/mtu ib0/statistics/rx_errors &&
			for f in $before; do test -e ib0/$f || echo no $f; done; ls; basename $(readlink -f eth0)`
		out := run(t, "nsenter", "--net=/run/netns/"+a.ns, "unshare", "-m", "sh", "-c", script, "sh", filepath.Join(a.tree, "class/net"))
		lines := strings.Split(out, "\n")
		if len(lines) < 15 || lines[0] != "1" || lines[2] != "1" || !strings.HasPrefix(lines[3], "0x") || lines[8] != "2044" || strings.Contains(out, "no ") ||
			!regexp.MustCompile(`(?s)\nbonding_masters\neth0\nib0\nlo\n`).MatchString(out) || !strings.HasSuffix(out, "\neth0\n") {
			t.Errorf("seen over /sys/class/net:\n%s", out)
		}
	})
	t.Run("IP-05 IP-06 IP-08 IP-09 a child by file", func(t *testing.T) {
		if err := a.write("class/net/ib0/create_child", "0x8001\n"); err != nil {
			t.Fatal(err)
		}
		if !a.inKernel("ib0.8001") || a.read("class/net/ib0.8001/pkey") != "0x8001\n" || a.read("class/net/ib0.8001/parent") != "ib0\n" {
			t.Errorf("the child is not there, or says another pkey or parent")
		}
		if _, err := os.Stat(filepath.Join(a.tree, "class/net/ib0.8001/create_child")); err == nil {
			t.Error("a child has a file create_child")
		}
		if err := a.write("class/net/ib0/create_child", "1"); !errors.Is(err, syscall.ENOTUNIQ) {
			t.Errorf("the same partition again: %v", err)
		}
		for _, bad := range []string{"0", "0x8000", "0x10000", "-1", "", "storage", strings.Repeat("9", 4000)} {
			if err := a.write("class/net/ib0/create_child", bad+"\n"); !errors.Is(err, syscall.EINVAL) {
				t.Errorf("P_Key %.20q: %v, want EINVAL", bad, err)
			}
		}
		if err := a.write("class/net/ib0/create_child", strings.Repeat("1", 1<<20)); err == nil {
			t.Error("a command of 1 MiB was taken")
		}
	})
	t.Run("IP-07 a child is removed by file", func(t *testing.T) {
		if err := a.write("class/net/ib0/delete_child", "0x8001\n"); err != nil || a.inKernel("ib0.8001") {
			t.Errorf("delete: %v; in the kernel: %t", err, a.inKernel("ib0.8001"))
		}
		if err := a.write("class/net/ib0/delete_child", "0x8001\n"); !errors.Is(err, syscall.ENODEV) {
			t.Errorf("delete again: %v, want ENODEV", err)
		}
	})
	t.Run("IP-12 the mode by file and by command", func(t *testing.T) {
		mode := func() string { return a.read("class/net/ib0/mode") + a.read("class/net/ib0/mtu") }
		for _, word := range []string{"connected\n", "datagram\n", "datagram"} {
			if err := a.write("class/net/ib0/mode", word); err != nil {
				t.Errorf("mode %q: %v", word, err)
			}
			want := map[bool]string{true: "connected\n65520\n", false: "datagram\n2044\n"}[word == "connected\n"]
			if got := mode(); got != want {
				t.Errorf("after %q: %q, want %q", word, got, want)
			}
		}
		for _, word := range []string{"fast\n", "\n", "Connected\n", strings.Repeat("connected", 400)} {
			if err := a.write("class/net/ib0/mode", word); !errors.Is(err, syscall.EINVAL) {
				t.Errorf("mode %.20q: %v, want EINVAL", word, err)
			}
		}
		for _, tc := range []struct {
			line string
			code int
			want string
		}{
			{"set ib0 mode connected umcast 1", 0, "connected\n65520\n"},
			{"set ib0 mtu 9000", 0, "connected\n9000\n"},
			{"set ib0 mtu 65521", 2, "connected\n9000\n"},
			{"set ib0 mode datagram", 0, "datagram\n2044\n"},
			{"set ib0 mode rapid", 2, "datagram\n2044\n"},
			{"set ib0 umcast maybe", 2, "datagram\n2044\n"},
			{"set ib0 colour red", 2, "datagram\n2044\n"},
			{"set ib0 mode", 2, "datagram\n2044\n"},
			{"set ib7 mode connected", 3, "datagram\n2044\n"},
		} {
			if out, code := a.net(append([]string{"link"}, strings.Fields(tc.line)...)...); code != tc.code || mode() != tc.want {
				t.Errorf("link %s: exit code %d, want %d: %s; the interface is %q", tc.line, code, tc.code, out, mode())
			}
		}
		if got := a.read("class/net/ib0/umcast"); got != "1\n" {
			t.Errorf("umcast %q", got)
		}
		if err := a.write("class/net/ib0/umcast", "0\n"); err != nil || a.read("class/net/ib0/umcast") != "0\n" {
			t.Errorf("umcast: %v", err)
		}
	})
	t.Run("IP-24 IP-27 offloads and moderation", func(t *testing.T) {
		for _, tc := range []struct {
			file, text string
			want       error
			after      string
		}{
			{"features/tso", "off", syscall.EACCES, "on\n"},
			{"features/lro", "off\n", nil, "off\n"},
			{"features/lro", "on\n", nil, "on\n"},
			{"features/lro", "1\n", syscall.EINVAL, "on\n"},
			{"features/rx-checksum", "off\n", nil, "off\n"},
			{"features/lro", "on\n", syscall.EOPNOTSUPP, "off\n"},
			{"features/rx-checksum", "on\n", nil, "on\n"},
			{"features/lro", "on\n", nil, "on\n"},
			{"rx_usecs", "50\n", nil, "50\n"},
			{"rx_frames", "64\n", nil, "64\n"},
			{"rx_usecs", "65536\n", syscall.EINVAL, "50\n"},
			{"rx_frames", "many\n", syscall.EINVAL, "64\n"},
			{"rx_usecs", "0\n", nil, "0\n"},
			{"tx_usecs", "50\n", syscall.EOPNOTSUPP, "0\n"},
			{"tx_frames", "1\n", syscall.EOPNOTSUPP, "0\n"},
		} {
			file := "class/net/ib0/ipoib/" + tc.file
			err := a.write(file, tc.text)
			if tc.want == syscall.EACCES && err != nil { // root is refused by the file itself
				err = syscall.EACCES
			}
			if !errors.Is(err, tc.want) || a.read(file) != tc.after {
				t.Errorf("%q to %s: %v, want %v; it says %q", tc.text, tc.file, err, tc.want, a.read(file))
			}
		}
	})
	t.Run("IP-10 links by command", func(t *testing.T) {
		for _, tc := range []struct {
			args []string
			code int
		}{
			{[]string{"link", "add", "my0", "link", "ib0", "pkey", "0x8001"}, 0},
			{[]string{"link", "add", "my0", "link", "ib0"}, 5},
			{[]string{"link", "add", "my2", "link", "ib0", "mode", "connected", "mtu", "65521"}, 2},
			{[]string{"link", "add", "my2", "link", "ib0", "mode", "connected", "mtu", "4000"}, 0},
			{[]string{"link", "del", "my2"}, 0},
			{[]string{"link", "add", "my1", "link", "ib9"}, 3},
			{[]string{"link", "add", "my1", "link", "ib0", "pkey", "0x10000"}, 2},
			{[]string{"link", "add", "my1", "on", "ib0"}, 2},
			{[]string{"link", "add", "my1"}, 2},
			{[]string{"link", "add", "a-name-of-16-bytes", "link", "ib0"}, 2},
			{[]string{"link", "del", "ib0"}, 1},
			{[]string{"link", "show", "my7"}, 3},
			{[]string{"link", "show", "-o", "xml"}, 2},
		} {
			if out, code := a.net(tc.args...); code != tc.code {
				t.Errorf("rnbd-net %s: exit code %d, want %d: %s", strings.Join(tc.args, " "), code, tc.code, out)
			}
		}
		var links []linkInfo
		out, _ := a.net("link", "show", "my0", "-o", "json")
		if err := json.Unmarshal([]byte(out), &links); err != nil || len(links) != 1 || links[0].PKey != "0x8001" || links[0].Parent != "ib0" {
			t.Errorf("link show: %v: %s", err, out)
		}
		if _, err := os.Stat(filepath.Join(a.tree, "class/net/my0/pkey")); err == nil {
			t.Error("a link made by name has a file pkey")
		}
		if err := a.write("class/net/ib0/delete_child", "0x8001\n"); !errors.Is(err, syscall.ENODEV) {
			t.Errorf("delete_child of a link made by name: %v, want ENODEV", err)
		}
		if out, code := a.net("link", "del", "my0"); code != 0 || a.inKernel("my0") {
			t.Errorf("link del: %s", out)
		}
	})
	for i, n := range []*node{a, b} {
		run(t, "ip", "-n", n.ns, "addr", "add", fmt.Sprintf("192.168.70.%d/24", i+1), "dev", "ib0")
		run(t, "ip", "-n", n.ns, "link", "set", "ib0", "up")
	}
	t.Run("IP-29 the groups", func(t *testing.T) {
		want := regexp.MustCompile(`(?s)^GID: ff12:401b:ffff:0:0:0:ffff:ffff\n  created: {1,9}\d+\n  queuelen:         0\n  complete:       yes\n  send_only:       no\n\n` +
			`.*GID: ff12:401b:ffff:0:0:0:0:1\n`)
		eventually(t, "groups are joined", func() bool { return want.MatchString(a.read("kernel/debug/ipoib/ib0_mcg")) })
		if out, code := a.net("mcg", "ib0"); code != 0 || !want.MatchString(out) {
			t.Errorf("mcg: exit code %d: %s", code, out)
		}
	})
	t.Run("IP-28 debug switches", func(t *testing.T) {
		run(t, "ip", "-n", a.ns, "route", "add", "239.0.0.0/8", "dev", "ib0")
		send := func(ip string) {
			exec.Command("nsenter", "--net=/run/netns/"+a.ns, "bash", "-c", "echo x > /dev/udp/"+ip+"/9").Run()
		}
		for round, level := range []string{"0", "1", "0"} {
			for _, file := range []string{"debug_level", "mcast_debug_level"} {
				if err := a.write("module/ib_ipoib/parameters/"+file, level+"\n"); err != nil || a.read("module/ib_ipoib/parameters/"+file) != level+"\n" {
					t.Fatalf("%s: %v", file, err)
				}
			}
			// Earlier log lines are here when a later one is.
			child := fmt.Sprintf("ib0.81%02d", round)
			if err := a.write("class/net/ib0/create_child", "0x"+child[4:]); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the log is read", func() bool { return strings.Contains(a.log.String(), "name="+child) })
			before := len(a.log.String())
			mgid, ip := fmt.Sprintf(":f09:91%d", round), fmt.Sprintf("192.168.70.7%d", round)
			eventually(t, "a group and a neighbour are looked for", func() bool {
				send(fmt.Sprintf("239.9.9.%d", 16+round))
				send(ip)
				peers, _ := a.net("peers")
				return strings.Contains(a.read("kernel/debug/ipoib/ib0_mcg"), mgid+"\n") && strings.Contains(peers, ip)
			})
			log := func() string { return a.log.String()[before:] }
			if level == "1" {
				eventually(t, "both are traced", func() bool { return strings.Contains(log(), mgid) && strings.Contains(log(), "target="+ip) })
			} else if strings.Contains(log(), mgid) || strings.Contains(log(), "target=") {
				t.Errorf("level 0: %s", log())
			}
		}
		if err := a.write("module/ib_ipoib/parameters/debug_level", "much\n"); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("level much: %v", err)
		}
	})
	t.Run("peers and a capture", func(t *testing.T) {
		first := a.capture(t, "ib0")
		if out, code := a.net("pcap", "ib0"); code != 5 {
			t.Errorf("a second capture: exit code %d: %s", code, out)
		}
		eventually(t, "the neighbour is known", func() bool {
			exec.Command("nsenter", "--net=/run/netns/"+a.ns, "bash", "-c", "echo x > /dev/udp/192.168.70.2/9").Run()
			out, _ := a.net("peers")
			return strings.Contains(out, "192.168.70.2") && strings.Contains(out, "REACHABLE")
		})
		if out := first(); !bytes.Contains(out, []byte{0, 32, 8, 0, 20, 4, 0, 1}) {
			t.Errorf("%d bytes of capture without an ARP request", len(out))
		}
		a.capture(t, "ib0")() // when one has ended, another can start
		if b.read("class/net/ib0/statistics/rx_packets") == "0\n" {
			t.Error("the other end has received nothing")
		}
	})
	t.Run("the paths", func(t *testing.T) {
		want := "GID: 0:0:0:0:0:ffff:a09:2\n  complete:    yes\n  DLID:     0x0000\n  SL:            0\n  rate:        0.0 Gb/sec\n\n"
		if got := a.read("kernel/debug/ipoib/ib0_path"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	})
	t.Run("a second daemon is refused", func(t *testing.T) {
		if out, code := a.net("run", "--port", "10.9.0.1"); code == 0 {
			t.Errorf("it ran: %s", out)
		}
		if _, code := a.net("link", "show"); code != 0 {
			t.Error("the first one does not answer any more")
		}
	})
	t.Run("SIGTERM ends it without a trace", func(t *testing.T) {
		if err := a.stop(); err != nil {
			t.Fatalf("%v\n%s", err, &a.log)
		}
		if a.inKernel("ib0") {
			t.Error("the interface is there")
		}
		if _, err := os.Stat(a.socket); err == nil {
			t.Error("the socket is there")
		}
		if out, code := a.net("link", "show"); code != 7 || !strings.Contains(out, "no daemon") {
			t.Errorf("exit code %d: %s", code, out)
		}
	})
}

func TestBadCommandLines(t *testing.T) {
	for _, args := range [][]string{
		{"run"}, {"run", "--port", "here"}, {"run", "--port", "10.0.0.1=there"}, {"run", "--port", "10.0.0.1", "--pkey", "0x12345"},
		{"link", "show", "a", "b"}, {"mcg"}, {"pcap"}, {"--nonsense"},
	} {
		root := newRoot()
		root.SetArgs(append(args, "--socket", filepath.Join(t.TempDir(), "s")))
		root.SetOut(&bytes.Buffer{})
		root.SetErr(&bytes.Buffer{})
		if err := root.Execute(); exitCode(err) != 2 {
			t.Errorf("rnbd-net %s: %v, exit code %d, want 2", strings.Join(args, " "), err, exitCode(err))
		}
	}
}
