package bond

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/netns/netnstest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// hosts are two hosts with two ports each at one switch, a daemon rnbd-net with
// bond0 over ib0 and ib1 on both, a server and a client:
//
//	client                      sw                 server
//	e0 10.9.0.1  ib0 \          c0, c1: br0        e0 10.9.0.3  ib0 \
//	e1 10.9.0.2  ib1 / bond0    s0, s1             e1 10.9.0.4  ib1 / bond0
//	                  10.5.0.1                                       10.5.0.2
type hosts struct {
	*network
	t       *testing.T
	bin     string
	monitor []string // options of the client's bond
	net     map[string]*exec.Cmd
	client  *lab.Client
	nbd     *nbdclient.Client
}

// ways are the paths of a client to the server.
var ways = []struct {
	name     string
	resolver bool
	paths    []string
}{
	{"bond, resolver", true, []string{"10.5.0.2:1234"}},
	{"bond, by its TUN", false, []string{"10.5.0.2:1234"}},
	{"two paths", false, []string{"10.9.0.1@10.9.0.3:1234", "10.9.0.2@10.9.0.4:1234"}},
}

// programs returns the folder with rnbd-net.
func programs(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("RNBD_BIN"); dir != "" {
		return dir
	}
	dir := t.TempDir()
	cmd := exec.Command("go", "build", "-o", filepath.Join(dir, "rnbd-net"), ".")
	cmd.Dir, cmd.Env = filepath.Join(lab.Root(), "cmd/rnbd-net"), append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build rnbd-net: %v: %s", err, out)
	}
	return dir
}

// newHosts starts everything and maps a disk by the given way.
func newHosts(t *testing.T, resolver bool, paths, monitor []string) *hosts {
	t.Helper()
	netnstest.Need(t)
	h := &hosts{t: t, bin: programs(t), monitor: monitor, net: map[string]*exec.Cmd{},
		network: &network{t: t, id: fmt.Sprintf("rnbd%d-%d-", os.Getpid(), made.Add(1))}}
	h.namespaces("client", "sw", "server")
	h.network.ip("sw", "link add br0 mtu 4200 type bridge mcast_snooping 0")
	h.network.ip("sw", "link set br0 up")
	for k, host := range []string{"client", "server"} {
		for _, conf := range []string{"arp_ignore=1", "arp_announce=2", "rp_filter=0"} {
			name, value, _ := strings.Cut(conf, "=")
			h.in(host, "sh", "-c", "echo "+value+" > /proc/sys/net/ipv4/conf/all/"+name)
		}
		for i := range 2 {
			port, dev, addr := fmt.Sprintf("%c%d", host[0], i), fmt.Sprintf("e%d", i), fmt.Sprintf("10.9.0.%d", 2*k+i+1)
			h.network.ip("sw", "link add "+port+" mtu 4200 type veth peer name "+dev+" netns "+h.name(host))
			h.network.ip("sw", "link set "+port+" master br0 up")
			h.network.ip(host, "link set "+dev+" mtu 4200 up")
			h.network.ip(host, "addr add "+addr+"/24 dev "+dev)
			table := fmt.Sprint(101 + i)
			h.network.ip(host, "rule add from "+addr+" lookup "+table)
			h.network.ip(host, "route add 10.9.0.0/24 dev "+dev+" src "+addr+" table "+table)
		}
	}
	h.startNet("server")
	h.startNet("client")
	l := lab.New(t)
	l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 8<<20), Listen: []string{"0.0.0.0:1234"}, Plugins: []string{"fileio"}, Prefix: []string{"ip", "netns", "exec", h.name("server")}})
	extra := []string{"--loss", "queue:60s", "--pumps", "1"}
	if resolver {
		extra = append(extra, "--resolver", "unix:"+h.socket("client"))
	}
	h.client = l.Client(lab.ClientOptions{Extra: extra, Prefix: []string{"ip", "netns", "exec", h.name("client")}})
	h.waitOther("the bond of the server answers that of the client", func() bool {
		return exec.Command(filepath.Join(h.bin, "rnbd-net"), "--socket", h.socket("client"), "resolve", "10.5.0.2").Run() == nil
	})
	ctx, cancel := context.WithTimeout(t.Context(), lab.Patience)
	defer cancel()
	d, err := h.client.API.Map(ctx, &controlpb.MapRequest{Path: "disk.img", Paths: paths})
	if err != nil {
		t.Fatalf("map: %v\n%s", err, h.client.Log())
	}
	if h.nbd, err = nbdclient.Dial(ctx, "unix", h.client.NBD, nbdclient.Options{Export: d.Name}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.nbd.Close() })
	return h
}

// in runs a program on a host.
func (h *hosts) in(host string, argv ...string) string {
	h.t.Helper()
	out, err := exec.Command("ip", append([]string{"netns", "exec", h.name(host)}, argv...)...).CombinedOutput()
	if err != nil {
		h.t.Fatalf("%s: %s: %v: %s", host, strings.Join(argv, " "), err, out)
	}
	return string(out)
}

func (h *hosts) socket(host string) string {
	return filepath.Join(os.TempDir(), h.name(host)+".sock")
}

// startNet starts the daemon rnbd-net of a host and makes its bond.
func (h *hosts) startNet(host string) {
	h.t.Helper()
	first, own, other := 1, "10.5.0.1", "10.5.0.2"
	options := h.monitor
	if host == "server" {
		first, own, other = 3, other, own
		options = []string{"miimon 100"}
	}
	args := []string{"netns", "exec", h.name(host), filepath.Join(h.bin, "rnbd-net"), "run", "--socket", h.socket(host)}
	for i := range 2 {
		args = append(args, fmt.Sprintf("--port=10.9.0.%d=10.9.0.1,10.9.0.2,10.9.0.3,10.9.0.4", first+i))
	}
	daemon := exec.Command("ip", args...)
	log, err := os.OpenFile(filepath.Join(h.t.TempDir(), "net.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		h.t.Fatal(err)
	}
	defer log.Close()
	daemon.Stdout, daemon.Stderr = log, log
	if err := daemon.Start(); err != nil {
		h.t.Fatal(err)
	}
	if h.net[host] == nil {
		h.t.Cleanup(func() {
			h.killNet(host)
			os.Remove(h.socket(host))
		})
	}
	h.net[host] = daemon
	h.waitOther("rnbd-net listens", func() bool {
		c, err := net.Dial("unix", h.socket(host))
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	bond := func(args ...string) {
		h.t.Helper()
		h.in(host, append([]string{filepath.Join(h.bin, "rnbd-net"), "--socket", h.socket(host), "bond"}, args...)...)
	}
	bond("add", "bond0")
	for _, o := range options {
		bond(append([]string{"set", "bond0"}, strings.Fields(strings.ReplaceAll(o, "PEER", other))...)...)
	}
	bond("enslave", "bond0", "ib0")
	bond("enslave", "bond0", "ib1")
	h.network.ip(host, "addr add "+own+"/24 dev bond0")
	h.network.ip(host, "link set bond0 mtu 1400 up")
}

func (h *hosts) killNet(host string) {
	h.net[host].Process.Kill()
	h.net[host].Wait()
}

func (h *hosts) waitOther(what string, ok func() bool) {
	h.t.Helper()
	for end := time.Now().Add(3 * patience); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			log := ""
			if h.client != nil {
				log = h.client.Log()
			}
			h.t.Fatalf("timeout: %s\n%s", what, log)
		}
	}
}

// sources returns the client's addresses of its connected paths.
func (h *hosts) sources() (all []string) {
	h.t.Helper()
	list, err := h.client.API.ListSessions(h.t.Context(), &controlpb.ListRequest{})
	if err != nil {
		h.t.Fatal(err)
	}
	for _, p := range list.Sessions[0].Paths {
		if p.State == "connected" {
			all = append(all, p.Src)
		}
	}
	return all
}

// write is one write, from its submission to its end.
type write struct {
	writer     int64
	begun, end time.Time
}

// load are writers that each own a part of the disk.
type load struct {
	mu   sync.Mutex
	done []write
	errs []error
	last map[int64]uint64 // written last, by offset
	stop context.CancelFunc
	wg   sync.WaitGroup
}

const (
	writers    = 4
	block      = 4096
	ownBlocks  = 64               // of each writer
	writePause = time.Millisecond // between two writes, to leave the CPUs to others
)

func (h *hosts) load() *load {
	ctx, cancel := context.WithCancel(h.t.Context())
	l := &load{last: map[int64]uint64{}, stop: cancel}
	for w := range int64(writers) {
		l.wg.Add(1)
		go func() {
			defer l.wg.Done()
			for n := uint64(1); ctx.Err() == nil; n++ {
				off := (w*ownBlocks + int64(n)%ownBlocks) * block
				begun := time.Now()
				_, err := h.nbd.WriteAt(pattern(n), off)
				l.mu.Lock()
				l.done, l.last[off] = append(l.done, write{w, begun, time.Now()}), n
				if err != nil {
					l.errs = append(l.errs, err)
				}
				l.mu.Unlock()
				if err != nil {
					return
				}
				time.Sleep(writePause)
			}
		}()
	}
	h.t.Cleanup(l.end)
	return l
}

func (l *load) end() {
	l.stop()
	l.wg.Wait()
}

func pattern(n uint64) []byte {
	b := make([]byte, block)
	for i := 0; i < block; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], n)
	}
	return b
}

// flows reports whether every writer has ended writes that it began after start.
func (l *load) flows(start time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	var n [writers]int
	for i := len(l.done) - 1; i >= 0 && l.done[i].end.After(start); i-- {
		if l.done[i].begun.After(start) {
			n[l.done[i].writer]++
		}
	}
	return slices.Min(n[:]) >= 3
}

// longest returns the time of the longest write that ended after start: the
// time for which a user waits.
func (l *load) longest(start time.Time) (d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.done {
		if w.end.After(start) {
			d = max(d, w.end.Sub(w.begun))
		}
	}
	return d
}

// check ends the load, and compares the disk with what was written.
func (h *hosts) check(l *load) {
	h.t.Helper()
	l.end()
	if err := errors.Join(l.errs...); err != nil {
		h.t.Fatalf("a write failed: %v\n%s", err, h.client.Log())
	}
	got := make([]byte, block)
	for off, n := range l.last {
		if _, err := h.nbd.ReadAt(got, off); err != nil {
			h.t.Fatal(err)
		}
		if !slices.Equal(got, pattern(n)) {
			h.t.Errorf("at %d is not write %d", off, n)
		}
	}
}

// cuts of the client's way, each with the monitor of its bond.
var cuts = []struct {
	name    string
	monitor []string
}{
	{"carrier", []string{"miimon 50"}},
	{"silent", []string{"arp_interval 100", "arp_ip_target +PEER", "arp_validate all"}},
	{"kill", []string{"miimon 50"}},
}

// TestBO07_RNBDOverABond writes to a disk of the server while the client's active
// slave is cut off, or its rnbd-net is killed and started again. No write fails,
// and none is lost. With RNBD_LONG=1 the other ways are compared, in 20 runs each.
func TestBO07_RNBDOverABond(t *testing.T) {
	long := os.Getenv("RNBD_LONG") != ""
	for _, cut := range cuts {
		for _, way := range ways {
			if cut.name == "kill" && way.name == "two paths" {
				continue // they do not need the daemon
			}
			if !long && !way.resolver && (cut.name != "silent" || way.name == "two paths") {
				continue
			}
			t.Run(cut.name+", "+way.name, func(t *testing.T) {
				runs := 1
				if long {
					runs = 20
				}
				h := newHosts(t, way.resolver, way.paths, cut.monitor)
				l := h.load()
				var all []time.Duration
				for k := range runs {
					g := h.cutOff(l, cut.name, k%2, way.resolver, len(way.paths))
					t.Logf("run %d: longest write %v", k, g.Round(time.Millisecond))
					all = append(all, g)
				}
				h.check(l)
				slices.Sort(all)
				t.Logf("longest writes: %s, %s: median %d ms, longest %d ms of %d", cut.name, way.name, all[len(all)/2].Milliseconds(), all[len(all)-1].Milliseconds(), len(all))
			})
		}
	}
}

// cutOff cuts port k of the client, waits until writes go on, and heals it. It
// returns the time of the longest write.
func (h *hosts) cutOff(l *load, cut string, k int, resolver bool, paths int) time.Duration {
	h.t.Helper()
	began := time.Now()
	flows := func() bool { return l.flows(began) }
	port, here := fmt.Sprintf("c%d", k), fmt.Sprintf("10.9.0.%d", k+1)
	h.waitOther("writes flow by the port to be cut", func() bool {
		at := h.sources()
		return flows() && len(at) == paths && (paths == 2 || !resolver || cut == "kill" || at[0] == here)
	})
	start := time.Now()
	if cut == "kill" {
		h.killNet("client")
		time.Sleep(300 * time.Millisecond)
		h.startNet("client")
		began = time.Now()
		h.waitOther("writes flow after the kill", flows)
		return l.longest(start)
	}
	h.cut(cut, port)
	time.Sleep(100 * time.Millisecond) // until then, writes that were under way may end
	began = time.Now()
	h.waitOther("writes flow without the port", flows)
	if resolver {
		h.waitOther("the path comes from the other slave", func() bool { at := h.sources(); return len(at) == 1 && at[0] != here })
		began = time.Now()
		h.waitOther("writes flow by the other slave", flows)
	}
	g := l.longest(start)
	h.heal(cut, port)
	h.waitOther("the healed slave is up", func() bool {
		out := h.in("client", filepath.Join(h.bin, "rnbd-net"), "--socket", h.socket("client"), "bond", "show", "bond0")
		return strings.Count(out, "MII Status: up") == 3
	})
	return g
}
