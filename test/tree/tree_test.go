package tree

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// pair is a server and a client with one tree.
type pair struct {
	*lab.T
	t      *testing.T
	sys    string
	server *lab.Server
	client *lab.Client
}

func newPair(t *testing.T) *pair {
	t.Helper()
	mayMount(t)
	l := lab.New(t)
	p := &pair{T: l, t: t, sys: filepath.Join(l.Dir, "sys")}
	p.server = l.Server(lab.ServerOptions{SearchPath: l.Image("disk", 1<<20), Plugins: []string{"fileio"}, Sys: p.sys})
	p.client = l.Client(lab.ClientOptions{Sys: p.sys})
	return p
}

func (p *pair) write(file, text string) error {
	return os.WriteFile(filepath.Join(p.sys, file), []byte(text), 0)
}

func (p *pair) read(file string) string {
	p.t.Helper()
	b, err := os.ReadFile(filepath.Join(p.sys, file))
	if err != nil {
		p.t.Fatal(err)
	}
	return string(b)
}

const mapDevice = "class/rnbd-client/ctl/map_device"

// line maps dev in session.
func (p *pair) line(session, dev string) string {
	_, port, _ := strings.Cut(p.server.Addrs[0], ":")
	return fmt.Sprintf("sessname=%s dest_port=%s path=ip:127.0.0.1@ip:127.0.0.1 device_path=%s\n", session, port, dev)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestR161_UnmapWhileInUse(t *testing.T) {
	p := newPair(t)
	must(t, p.write(mapDevice, p.line("s", "disk")))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	user, err := nbdclient.Dial(ctx, "unix", p.client.NBD, nbdclient.Options{Export: "rnbd0"})
	must(t, err)
	defer user.Close()
	const file = "block/rnbd0/rnbd/unmap_device"
	if err := p.write(file, "normal"); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("normal, while somebody has it open: %v, want EBUSY", err)
	}
	if _, err := user.WriteAt(make([]byte, 512), 0); err != nil {
		t.Errorf("the user's device: %v", err)
	}
	must(t, p.write(file, "force"))
	if _, err := os.Stat(filepath.Join(p.sys, "block/rnbd0")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after force: %v", err)
	}
}

// TestInterruptedMapReturnsAtOnce: the server takes connections and says
// nothing.
func TestInterruptedMapReturnsAtOnce(t *testing.T) {
	p := newPair(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer silent.Close()
	_, port, _ := strings.Cut(silent.Addr().String(), ":")
	cmd := exec.Command("bash", "-c", "echo sessname=mute dest_port="+port+" path=ip:127.0.0.1 device_path=disk > "+filepath.Join(p.sys, mapDevice))
	must(t, cmd.Start())
	conn, err := silent.Accept()
	must(t, err)
	defer conn.Close()
	if got := p.read("class/rtrs-server/../rtrs-client/../../module/rtrs_server/parameters/sess_queue_depth"); got != "512\n" {
		t.Errorf("another file meanwhile: %q", got)
	}
	start := time.Now()
	must(t, cmd.Process.Signal(syscall.SIGTERM)) // a process in the background ignores interrupts
	_ = cmd.Wait()
	if took := time.Since(start); took > 8*time.Second { // after 10 s it would give up itself
		t.Errorf("the writer came back after %s", took)
	}
	must(t, p.write(mapDevice, p.line("s", "disk"))) // the next is not held up
	// It is rnbd1 if the end of the first map has not given its name back yet.
	disks, err := filepath.Glob(filepath.Join(p.sys, "block/rnbd*/rnbd/session"))
	if err != nil || len(disks) != 1 {
		t.Fatalf("mapped are %q, %v", disks, err)
	}
	if got, err := os.ReadFile(disks[0]); err != nil || string(got) != "s\n" {
		t.Errorf("session %q, %v", got, err)
	}
}

func TestTwoClientsOfOneTree(t *testing.T) {
	p := newPair(t)
	_, err := p.StartClient(lab.ClientOptions{Sys: p.sys})
	if err == nil || !strings.Contains(err.Error(), "is mounted there already") || !strings.Contains(err.Error(), p.sys) {
		t.Errorf("a client that was told to use the folder: %v; want who has it", err)
	}
	second, err := p.StartClient(lab.ClientOptions{Sys: "auto"}) // sys beside its socket is the same
	must(t, err)
	if log := second.Log(); !strings.Contains(log, "there are no control files") || !strings.Contains(log, "device or resource busy") {
		t.Errorf("a client that was not told says\n%s", log)
	}
	must(t, p.write(mapDevice, p.line("s", "disk")))
}

// TestWithoutTheRightToMount: everything else works.
func TestWithoutTheRightToMount(t *testing.T) {
	mayMount(t)
	setpriv := lab.Tool(t, "setpriv")
	l := lab.New(t)
	// Root without the capability, and without the program that has it.
	c := l.Client(lab.ClientOptions{Sys: "auto", Env: []string{"PATH=/nowhere"},
		Prefix: []string{setpriv, "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"}})
	if log := c.Log(); strings.Count(log, "there are no control files") != 1 {
		t.Errorf("it says\n%s", log)
	}
	if _, err := c.API.ListDevices(t.Context(), &controlpb.ListRequest{}); err != nil {
		t.Error(err)
	}
}

// openFUSE gives /dev/fuse the rights that it usually has, for the time of a test:
// where no udev runs, it has those that the kernel gave it.
func openFUSE(t *testing.T) {
	const usual = 0o666
	info, err := os.Stat("/dev/fuse")
	must(t, err)
	if info.Mode().Perm() != usual {
		must(t, os.Chmod("/dev/fuse", usual))
		t.Cleanup(func() { _ = os.Chmod("/dev/fuse", info.Mode().Perm()) })
	}
}

// TestAsAnotherUser: fusermount3 mounts for users without the right to, and
// takes the mounts of a killed daemon away.
func TestAsAnotherUser(t *testing.T) {
	mayMount(t)
	setpriv := lab.Tool(t, "setpriv")
	lab.Tool(t, "fusermount3")
	openFUSE(t)
	bin, err := lab.Bin()
	must(t, err)
	home, err := os.MkdirTemp("", "tree-nobody-")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(home) })
	must(t, os.Chmod(home, 0o755))
	for _, name := range []string{"rnbd", "io-fileio"} {
		program, err := os.ReadFile(filepath.Join(bin, name))
		must(t, err)
		must(t, os.WriteFile(filepath.Join(home, name), program, 0o755))
	}
	run := filepath.Join(home, "run")
	must(t, os.Mkdir(run, 0o700))
	must(t, os.Chown(run, 65534, 65534))
	asNobody := func(args ...string) *exec.Cmd {
		cmd := exec.Command(setpriv, append([]string{"--reuid=65534", "--regid=65534", "--clear-groups"}, args...)...)
		cmd.Dir = run
		return cmd
	}
	file := filepath.Join(run, "sys/module/rtrs_server/parameters/sess_queue_depth")
	for _, sig := range []os.Signal{os.Kill, syscall.SIGTERM} {
		var said strings.Builder
		daemon := asNobody(filepath.Join(home, "rnbd"), "server", "run", "--socket", filepath.Join(run, "server.sock"), "--listen", "127.0.0.1:0",
			"--search-path", run, "--plugin-dir", home, "--io-plugin", "fileio="+filepath.Join(home, "io-fileio"))
		daemon.Stdout, daemon.Stderr = &said, &said
		must(t, daemon.Start())
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
			if out, err := asNobody("cat", file).Output(); err == nil && string(out) == "512\n" {
				break
			}
			if time.Now().After(end) {
				t.Error("the user's daemon has no control files")
				break
			}
		}
		must(t, daemon.Process.Signal(sig))
		_ = daemon.Wait()
		if t.Failed() {
			t.Fatal(said.String())
		}
	}
	if entries, err := os.ReadDir(filepath.Join(run, "sys")); err != nil || len(entries) != 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

// TestStressOfAPair: many users of both trees while devices, sessions and paths
// come and go.
func TestStressOfAPair(t *testing.T) {
	p := newPair(t)
	for i := range 8 {
		p.Image(fmt.Sprintf("d%d", i), 1<<20)
	}
	const users = 100
	end := time.Now().Add(8 * time.Second)
	var calls, changes atomic.Int64
	var wg sync.WaitGroup
	for u := range users {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(u), 2))
			for time.Now().Before(end) {
				var err error
				if u%2 == 0 {
					err = walk(p.sys, &calls)
				} else if err = p.change(r); err == nil {
					changes.Add(1)
				}
				calls.Add(1)
				var errno syscall.Errno
				if err != nil && (!errors.As(err, &errno) || !slices.Contains(expected, errno)) {
					t.Errorf("user %d: %v", u, err)
					return
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d calls, %d changes", calls.Load(), changes.Load())
	if changes.Load() < 20 {
		t.Errorf("only %d changes worked", changes.Load())
	}
	for range 100 { // devices change their numbers while one is unmapped
		left, err := filepath.Glob(filepath.Join(p.sys, "block/*/rnbd/unmap_device"))
		must(t, err)
		if len(left) == 0 {
			break
		}
		_ = os.WriteFile(left[0], []byte("force"), 0)
	}
	for limit := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		left, err := filepath.Glob(filepath.Join(p.sys, "class/rtrs-*/*/paths/*"))
		must(t, err)
		devices, err := filepath.Glob(filepath.Join(p.sys, "class/rnbd-server/ctl/devices/*"))
		must(t, err)
		if len(left)+len(devices) == 0 {
			break
		}
		if time.Now().After(limit) {
			t.Fatalf("left: %q %q", left, devices)
		}
	}
	must(t, p.write(mapDevice, p.line("after", "disk")))
}

// expected are the errnos that files may answer with while everything comes
// and goes.
var expected = []syscall.Errno{
	syscall.EINVAL, syscall.EEXIST, syscall.ENOENT, syscall.ENODEV, syscall.EBUSY, syscall.EALREADY, syscall.ENXIO, syscall.EPERM,
	syscall.ENOTCONN, syscall.ECONNRESET, syscall.ECONNREFUSED, syscall.ECONNABORTED, syscall.ETIMEDOUT, syscall.EPROTONOSUPPORT, syscall.ERANGE, syscall.ECANCELED,
}

// walk reads every file that it finds.
func walk(root string, calls *atomic.Int64) error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}
		if d.Type().IsRegular() {
			calls.Add(1)
			if _, err = os.ReadFile(path); errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV) {
				return nil
			}
		}
		return err
	})
}

// change writes something to some file.
func (p *pair) change(r *rand.Rand) error {
	pick := func(words ...string) string { return words[r.IntN(len(words))] }
	session, dev := fmt.Sprintf("s%d", r.IntN(3)), fmt.Sprintf("rnbd%d", r.IntN(8))
	const path = "/paths/ip:127.0.0.1@ip:127.0.0.1/"
	switch r.IntN(8) {
	case 0, 1, 2:
		return p.write(mapDevice, p.line(session, fmt.Sprintf("d%d", r.IntN(8))))
	case 3:
		return p.write("block/"+dev+"/rnbd/unmap_device", pick("normal", "force"))
	case 4:
		return p.write("class/rtrs-client/"+session+path+pick("disconnect", "reconnect", "stats/rdma"), "1")
	case 5:
		return p.write("class/rtrs-server/"+session+path+pick("disconnect", "stats/rdma"), "1")
	case 6:
		files, err := filepath.Glob(filepath.Join(p.sys, "class/rnbd-server/ctl/devices/*/sessions/"+session+"/force_close"))
		if err != nil || len(files) == 0 {
			return err
		}
		return os.WriteFile(files[0], []byte("1"), 0)
	}
	junk := make([]byte, 1+r.IntN(100000))
	for i := range junk {
		junk[i] = byte(r.Uint32())
	}
	return p.write(pick(mapDevice, "class/rtrs-client/"+session+"/add_path"), string(junk))
}
