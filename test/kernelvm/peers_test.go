package kernelvm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// server exports one disk of diskSize bytes, and may do so again after Stop.
type server interface {
	Start(t testing.TB)
	Stop(t testing.TB)
	Disk() string            // its name for clients
	Sum(t testing.TB) string // of the disk, read on the server
	Addr(link int) string    // IP address
	Sessions(t testing.TB) int
}

// client maps disks.
type client interface {
	// Map fails with an errno in its chain where the client tells one.
	Map(ctx context.Context, r mapping) (disk, error)
	Unmap(t testing.TB, d disk)
	Exercise(ctx context.Context, d disk, args ...string) (string, error)
	StartExercise(t testing.TB, d disk, args ...string) process
	Addr(link int) string
	// Paths are the states of a session's paths, in order.
	Paths(t testing.TB, session string) []string
	// TryReconnect asks for a path to be connected now.
	TryReconnect(t testing.TB, session string, path int) error
	// Reconnects counts how often paths of a session were connected again.
	Reconnects(t testing.TB, session string) int
	State(t testing.TB, d disk) string
	// Fio runs fio on a device.
	Fio(ctx context.Context, d disk, args ...string) (string, error)
}

// mapping is the request of a map.
type mapping struct {
	session, name, access string
	links                 []int // one path over each
	to                    server
	port                  int    // default 1234
	from                  string // address of the client; empty: its own on the link
	gid                   bool   // addresses are given as GIDs
	loss                  string // of our client; empty: requests wait for a path
}

// path is the two ends of one over a link, as both clients read them.
func (m mapping) path(c client, link int) (src, dst string) {
	if src = m.from; src == "" {
		src = c.Addr(link)
	}
	return m.spell(src), m.spell(m.to.Addr(link))
}

// spell is an address in the words of control files.
func (m mapping) spell(addr string) string {
	switch {
	case !m.gid:
		return "ip:" + addr
	case strings.Contains(addr, ":"):
		return "gid:" + addr
	}
	return "gid:::ffff:" + addr
}

// disk is a mapped device.
type disk struct {
	name string // rnbd0
	path string
}

const diskSize = 16 << 20

// sized returns the size of a server's disk in bytes: the usual one unless n says
// otherwise.
func sized(n int64) string {
	if n == 0 {
		n = diskSize
	}
	return fmt.Sprint(n)
}

// kernelServer is rnbd-server of the guest with a loop device.
type kernelServer struct {
	g      *vm.Guest
	addr   func(link int) string
	params []string // of rtrs-server
	size   int64    // of the disk in bytes; 0: diskSize
	loop   string
}

func (s *kernelServer) Addr(link int) string { return s.addr(link) }
func (s *kernelServer) Disk() string         { return s.loop }

func (s *kernelServer) Start(t testing.TB) {
	t.Helper()
	if s.loop == "" {
		s.g.Run(t, "truncate", "-s", sized(s.size), "/tmp/disk.img")
		s.loop = strings.TrimSpace(s.g.Run(t, "losetup", "-f", "--show", "/tmp/disk.img"))
		t.Cleanup(func() { s.g.Run(t, "losetup", "-d", s.loop); s.g.Run(t, "rm", "/tmp/disk.img") })
	}
	s.g.Modprobe(t, "rtrs-server", s.params...)
	s.g.Modprobe(t, "rnbd-server")
	t.Cleanup(func() { s.Stop(t) })
}

func (s *kernelServer) Stop(t testing.TB) {
	t.Helper()
	if _, err := s.g.Read("/sys/module/rnbd_server/refcnt"); err == nil {
		s.g.Rmmod(t, "rnbd_server", "rtrs_server")
	}
}

func (s *kernelServer) Sum(t testing.TB) string {
	t.Helper()
	return strings.TrimSpace(s.g.Run(t, exercisePath, "--sum", s.loop))
}

func (s *kernelServer) Sessions(t testing.TB) int {
	return count(s.g.Run(t, "sh", "-c", "ls /sys/class/rtrs-server 2>/dev/null | grep -v ^ctl$ || true"))
}

func count(lines string) (n int) {
	for range strings.Lines(lines) {
		n++
	}
	return n
}

// kernelClient is rnbd-client of the guest.
type kernelClient struct {
	g    *vm.Guest
	addr func(link int) string
}

func (c *kernelClient) Addr(link int) string { return c.addr(link) }

func (c *kernelClient) load(t testing.TB) {
	t.Helper()
	c.g.Modprobe(t, "rnbd-client")
	t.Cleanup(func() { c.g.Rmmod(t, "rnbd_client", "rtrs_client") })
}

func (c *kernelClient) Map(ctx context.Context, r mapping) (disk, error) {
	line := fmt.Sprintf("dest_port=%d sessname=%s device_path=%s", r.port, r.session, r.name)
	if r.access != "" {
		line += " access_mode=" + r.access
	}
	for _, link := range r.links {
		src, dst := r.path(c, link)
		line += " path=" + src + "@" + dst
	}
	if err := c.g.Write("/sys/class/rnbd-client/ctl/map_device", line); err != nil {
		return disk{}, fmt.Errorf("%s: %w", line, err)
	}
	link := "/sys/class/rnbd-client/ctl/devices/" + strings.ReplaceAll(r.name, "/", "!") + "@" + r.session
	target, err := c.g.Try(ctx, "readlink", link)
	name := filepath.Base(strings.TrimSpace(target))
	return disk{name: name, path: "/dev/" + name}, err
}

func (c *kernelClient) Unmap(t testing.TB, d disk) {
	t.Helper()
	c.g.WriteFile(t, "/sys/block/"+d.name+"/rnbd/unmap_device", "normal")
}

func (c *kernelClient) Exercise(ctx context.Context, d disk, args ...string) (string, error) {
	return guestPlace{c.g}.Try(ctx, append([]string{exercisePath, "--device", d.path}, args...)...)
}

func (c *kernelClient) StartExercise(t testing.TB, d disk, args ...string) process {
	return guestPlace{c.g}.Start(t, append([]string{exercisePath, "--device", d.path}, args...)...)
}

func (c *kernelClient) pathDirs(t testing.TB, session string) []string {
	t.Helper()
	return strings.Fields(c.g.Run(t, "sh", "-c", `ls -d "$0"/*`, "/sys/class/rtrs-client/"+session+"/paths"))
}

func (c *kernelClient) Paths(t testing.TB, session string) (states []string) {
	t.Helper()
	for _, d := range c.pathDirs(t, session) {
		states = append(states, strings.TrimSpace(c.g.ReadFile(t, d+"/state")))
	}
	return states
}

func (c *kernelClient) TryReconnect(t testing.TB, session string, path int) error {
	t.Helper()
	return c.g.Write(c.pathDirs(t, session)[path]+"/reconnect", "1")
}

func (c *kernelClient) Reconnects(t testing.TB, session string) (n int) {
	t.Helper()
	for _, d := range c.pathDirs(t, session) {
		var good, bad int
		fmt.Sscan(c.g.ReadFile(t, d+"/stats/reconnects"), &good, &bad)
		n += good + bad
	}
	return n
}

func (c *kernelClient) Fio(ctx context.Context, d disk, args ...string) (string, error) {
	return c.g.Try(ctx, append([]string{"fio", "--name=verify", "--ioengine=libaio", "--direct=1", "--filename=" + d.path}, args...)...)
}

func (c *kernelClient) State(t testing.TB, d disk) string {
	t.Helper()
	return strings.TrimSpace(c.g.ReadFile(t, "/sys/block/"+d.name+"/rnbd/state"))
}

// ourServer is rnbd server run.
type ourServer struct {
	at     place
	fabric string
	addr   func(link int) string
	size   int64 // of the disk in bytes; 0: diskSize
	flags  []string
	dir    string
	proc   process
}

func (s *ourServer) Addr(link int) string { return s.addr(link) }
func (s *ourServer) Disk() string         { return "disk.img" }
func (s *ourServer) socket() string       { return s.dir + "/server.sock" }

func (s *ourServer) Start(t testing.TB) {
	t.Helper()
	if s.dir == "" {
		s.dir = strings.TrimSpace(run(t, s.at, "mktemp", "-d", "/tmp/rnbdkvXXXXXX"))
		t.Cleanup(func() { run(t, s.at, "rm", "-r", s.dir) })
		run(t, s.at, "mkdir", s.dir+"/images")
		run(t, s.at, "truncate", "-s", sized(s.size), s.dir+"/images/disk.img")
	}
	args := []string{rnbdPath, "server", "run", "--socket", s.socket(), "--search-path", s.dir + "/images"}
	for link := range 2 {
		if link == 0 || s.addr(link) != s.addr(0) {
			args = append(args, "--listen", s.fabric+"://"+net.JoinHostPort(s.addr(link), "1234"))
		}
	}
	s.proc = s.at.Start(t, append(args, s.flags...)...)
	up(t, s.at, s.proc, "server", s.socket())
	t.Cleanup(func() {
		s.Stop(t)
		if t.Failed() {
			t.Logf("our server:\n%s", s.proc.Output())
		}
	})
}

func (s *ourServer) Stop(testing.TB) { s.proc.Stop() }

func (s *ourServer) Sum(t testing.TB) string {
	t.Helper()
	return strings.TrimSpace(run(t, s.at, exercisePath, "--sum", s.dir+"/images/disk.img"))
}

func (s *ourServer) Sessions(t testing.TB) int {
	t.Helper()
	var all []struct{}
	out := run(t, s.at, rnbdPath, "--timeout", cliLimit, "--socket", s.socket(), "--output", "json", "server", "session", "list")
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		t.Fatalf("session list: %v\n%s", err, out)
	}
	return len(all)
}

// cliLimit is for commands of ours in a guest.
const cliLimit = "3m"

// up waits until a daemon answers.
func up(t testing.TB, at place, p process, kind, socket string) {
	t.Helper()
	for end := time.Now().Add(3 * time.Minute); ; {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		_, err := at.Try(ctx, rnbdPath, "--socket", socket, kind, "show")
		cancel()
		if err == nil {
			return
		}
		if ended := p.Wait(50 * time.Millisecond); !errors.Is(ended, context.DeadlineExceeded) || time.Now().After(end) {
			t.Fatalf("our %s does not come up: %v\n%s", kind, err, p.Output())
		}
	}
}

// ourClient is rnbd client run, with the NBD front end.
type ourClient struct {
	at     place
	fabric string
	addr   func(link int) string
	flags  []string
	dir    string
	proc   process
}

func (c *ourClient) Addr(link int) string { return c.addr(link) }

func (c *ourClient) start(t testing.TB) {
	t.Helper()
	c.dir = strings.TrimSpace(run(t, c.at, "mktemp", "-d", "/tmp/rnbdkvXXXXXX"))
	t.Cleanup(func() { run(t, c.at, "rm", "-r", c.dir) })
	args := []string{rnbdPath, "client", "run", "--socket", c.dir + "/client.sock", "--pumps", "2", "--frontend", "nbd-socket", "--nbd-listen", "unix:" + c.dir + "/nbd.sock"}
	c.proc = c.at.Start(t, append(args, c.flags...)...)
	t.Cleanup(func() {
		c.proc.Stop()
		if t.Failed() {
			t.Logf("our client:\n%s", c.proc.Output())
		}
	})
	up(t, c.at, c.proc, "client", c.dir+"/client.sock")
}

// cli runs a command of our client; the answer is JSON. An errno of the
// daemon is in the chain of the error.
func (c *ourClient) cli(ctx context.Context, answer any, args ...string) error {
	argv := append([]string{rnbdPath, "--timeout", cliLimit, "--socket", c.dir + "/client.sock", "--output", "json", "client"}, args...)
	out, err := c.at.Try(ctx, argv...)
	if err != nil {
		var said struct {
			Error string
			Errno syscall.Errno
		}
		if json.Unmarshal([]byte(out), &said) == nil && said.Errno != 0 {
			return fmt.Errorf("%s: %w", said.Error, said.Errno)
		}
		return err
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal([]byte(out), answer)
}

func (c *ourClient) Map(ctx context.Context, r mapping) (disk, error) {
	args := []string{"device", "map", r.name, "from"}
	for _, link := range r.links {
		src, dst := r.path(c, link)
		kind, addr, _ := strings.Cut(dst, ":")
		args = append(args, fmt.Sprintf("%s@%s:[%s]:%d%%%s", src, kind, addr, r.port, c.fabric))
	}
	loss := r.loss
	if loss == "" {
		// A stalled machine loses paths, and rxe does when it has to repeat an answer:
		// see docs/extend/protocol/rocev2.md, "Lost packets".
		loss = "queue:60s"
	}
	args = append(args, "--session", r.session, "--loss", loss)
	if r.access != "" {
		args = append(args, "--access", r.access)
	}
	var d struct{ Devname string }
	err := c.cli(ctx, &d, args...)
	return disk{name: d.Devname}, err
}

// Unmap waits for the front end of a slow guest to notice that its users have gone.
func (c *ourClient) Unmap(t testing.TB, d disk) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		err := c.cli(t.Context(), nil, "device", "unmap", d.name)
		if err == nil {
			return
		}
		if !errors.Is(err, syscall.EBUSY) || time.Now().After(end) {
			t.Fatalf("unmap: %v", err)
		}
	}
}

func (c *ourClient) argv(d disk, args []string) []string {
	return append([]string{exercisePath, "--nbd", c.dir + "/nbd.sock", "--export", d.name}, args...)
}

func (c *ourClient) Exercise(ctx context.Context, d disk, args ...string) (string, error) {
	return c.at.Try(ctx, c.argv(d, args)...)
}

func (c *ourClient) StartExercise(t testing.TB, d disk, args ...string) process {
	return c.at.Start(t, c.argv(d, args)...)
}

func (c *ourClient) Paths(t testing.TB, session string) (states []string) {
	t.Helper()
	for _, p := range c.paths(t, session) {
		states = append(states, p.State)
	}
	return states
}

type pathInfo struct {
	Sessname   string
	ID         uint32
	State      string
	Reconnects int
}

func (c *ourClient) paths(t testing.TB, session string) (paths []pathInfo) {
	t.Helper()
	var all []pathInfo
	if err := c.cli(t.Context(), &all, "path", "list", "-f", "sessname,id,state,reconnects"); err != nil {
		t.Fatalf("path list: %v", err)
	}
	for _, p := range all {
		if p.Sessname == session {
			paths = append(paths, p)
		}
	}
	return paths
}

func (c *ourClient) TryReconnect(t testing.TB, session string, path int) error {
	t.Helper()
	return c.cli(t.Context(), nil, "path", "reconnect", session, fmt.Sprint(c.paths(t, session)[path].ID))
}

func (c *ourClient) Reconnects(t testing.TB, session string) (n int) {
	t.Helper()
	for _, p := range c.paths(t, session) {
		n += p.Reconnects
	}
	return n
}

func (c *ourClient) Fio(ctx context.Context, d disk, args ...string) (string, error) {
	uri := "nbd+unix:///" + d.name + "?socket=" + c.dir + "/nbd.sock"
	return c.at.Try(ctx, append([]string{"sh", "-c", `cd "$0" && exec fio "$@"`, c.dir, "--name=verify", "--ioengine=nbd", "--uri=" + uri}, args...)...)
}

func (c *ourClient) State(t testing.TB, d disk) string {
	t.Helper()
	var all []struct{ Devname, State string }
	if err := c.cli(t.Context(), &all, "device", "list", "-f", "devname,state"); err != nil {
		t.Fatalf("device list: %v", err)
	}
	for _, x := range all {
		if x.Devname == d.name {
			return x.State
		}
	}
	return "unmapped"
}
