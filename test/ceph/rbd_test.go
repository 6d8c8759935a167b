package ceph

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// server starts a server with io-rbd. The plugin is confined if the system has the
// libraries that it needs.
func (c *cluster) server(l *lab.T, more ...string) *lab.Server {
	confine := "try"
	if _, err := os.Stat("/usr/lib/x86_64-linux-gnu/librbd.so.1"); err != nil {
		confine = "off"
	}
	return l.Server(lab.ServerOptions{NoBlockDevices: true, Plugins: []string{"rbd"}, Extra: append([]string{"--confine", confine,
		"--crash-limit", "1000", "--io-mode", "*=rbd", "--io-mode", "*/*=rbd", "--io-config", "rbd:conf=" + c.conf,
		"--plugin-allow", "rbd=network", "--plugin-allow", "rbd=" + c.dir}, more...)})
}

// next waits until a process of the plugin other than pid runs, and returns it.
func next(t *testing.T, s *lab.Server, pid int) int {
	t.Helper()
	for end := time.Now().Add(enough); ; time.Sleep(20 * time.Millisecond) {
		p, err := s.Plugin("rbd")
		if err == nil && p.Pid != 0 && int(p.Pid) != pid {
			return int(p.Pid)
		}
		if time.Now().After(end) {
			t.Fatalf("plugin rbd: %v, %v", p, err)
		}
	}
}

func kill(t *testing.T, pid int, sig syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, sig); err != nil {
		t.Fatal(err)
	}
}

// TestRBD is about images of a cluster: what is written stays while plugin, server, OSD
// and monitor die or hang; snapshots; and the fence.
func TestRBD(t *testing.T) {
	c := startCluster(t)
	t.Run("verify while processes die", c.testVerify)
	t.Run("a stopped owner is fenced", c.testStoppedOwner)
	t.Run("another server's image is refused", c.testForeignOwner)
	t.Run("snapshots and sizes", c.testSnapshots)
}

func (c *cluster) testVerify(t *testing.T) {
	c.rbd("create", "verified", "--size", "64M", "--image-feature", "layering,exclusive-lock")
	l := lab.New(t)
	s := c.server(l)
	cl := l.Client(lab.ClientOptions{Extra: []string{"--loss", "queue:120s"}})
	d := l.Map(cl, "rbd/verified", s)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	fio := exec.CommandContext(ctx, lab.Tool(t, "fio"), "--name=rbd", "--ioengine=nbd", "--uri="+cl.URI(d.Name), "--rw=randrw", "--bsrange=4k-64k",
		"--iodepth=16", "--size=64m", "--rate=4m,4m", "--verify=crc32c", "--verify_fatal=1", "--verify_backlog=128", "--time_based", "--runtime=15s")
	fio.Dir = t.TempDir()
	var out strings.Builder
	fio.Stdout, fio.Stderr = &out, &out
	if err := fio.Start(); err != nil {
		t.Fatal(err)
	}
	pid := next(t, s, 0)
	for range 2 {
		time.Sleep(time.Second)
		kill(t, pid, syscall.SIGKILL)
		pid = next(t, s, pid)
	}
	kill(t, c.osd.Process.Pid, syscall.SIGSTOP)
	time.Sleep(2 * time.Second)
	kill(t, c.osd.Process.Pid, syscall.SIGCONT)
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	kill(t, c.mon.Process.Pid, syscall.SIGKILL)
	_ = c.mon.Wait()
	c.mon = c.daemon("ceph-mon", "-c", c.conf, "-i", "a", "-f")
	kill(t, next(t, s, 0), syscall.SIGKILL)
	if err := fio.Wait(); err != nil {
		t.Fatalf("fio: %v\n%s", err, out.String())
	}
}

// testStoppedOwner: a plugin that is stopped with a write, and wakes when another server has
// taken the image, changes nothing.
func (c *cluster) testStoppedOwner(t *testing.T) {
	c.rbd("create", "fenced", "--size", "8M", "--image-feature", "layering,exclusive-lock")
	l := lab.New(t)
	old, cl := c.server(l), l.Client(lab.ClientOptions{})
	a := l.Map(cl, "fenced", old)
	first := c.dial(t, cl, a.Name)
	write(t, first, 'a')
	pid := next(t, old, 0)
	if err := lab.Freeze(pid); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(pid, syscall.SIGCONT) }()
	late := make(chan error, 1)
	go func() {
		_, err := first.WriteAt([]byte(strings.Repeat("x", 4096)), 0)
		late <- err
	}()
	time.Sleep(200 * time.Millisecond) // for the write to reach the plugin's ring
	b := l.Map(cl, "fenced", c.server(l), func(r *controlpb.MapRequest) { r.Session = "second" })
	second := c.dial(t, cl, b.Name)
	write(t, second, 'b')
	kill(t, pid, syscall.SIGCONT)
	if err := <-late; err == nil {
		t.Error("the write of the fenced plugin succeeded")
	}
	got := make([]byte, 4096)
	if _, err := second.ReadAt(got, 0); err != nil || string(got) != strings.Repeat("b", 4096) {
		t.Errorf("the image has %q..., %v", got[:8], err)
	}
}

func (c *cluster) dial(t *testing.T, cl *lab.Client, device string) *nbdclient.Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), enough)
	defer cancel()
	conn, err := nbdclient.Dial(ctx, "unix", cl.NBD, nbdclient.Options{Export: device})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func write(t *testing.T, conn *nbdclient.Client, b byte) {
	t.Helper()
	if _, err := conn.WriteAt([]byte(strings.Repeat(string(b), 4096)), 0); err != nil {
		t.Fatal(err)
	}
}

func (c *cluster) testForeignOwner(t *testing.T) {
	c.rbd("create", "foreign", "--size", "8M", "--image-feature", "layering,exclusive-lock")
	c.rbd("create", "plain", "--size", "8M", "--image-feature", "layering")
	l := lab.New(t)
	cl := l.Client(lab.ClientOptions{})
	l.Map(cl, "foreign", c.server(l, "--io-config", "rbd:identity=one"))
	two := c.server(l, "--io-config", "rbd:identity=two")
	for name, want := range map[string]string{"foreign": "locked", "plain": "feature enable", "nosuch": "no such", "nopool/x": "nopool"} {
		if _, err := cl.Map(name, two, func(r *controlpb.MapRequest) { r.Session = "two" }); err == nil {
			t.Errorf("%s is mapped", name)
		} else if !strings.Contains(strings.ToLower(fmt.Sprint(err)), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	always := c.server(l, "--io-config", "rbd:identity=three", "--io-config", "rbd:fence=always")
	l.Map(cl, "foreign", always, func(r *controlpb.MapRequest) { r.Session = "three" })
}

func (c *cluster) testSnapshots(t *testing.T) {
	c.rbd("create", "grown", "--size", "8M", "--image-feature", "layering,exclusive-lock")
	l := lab.New(t)
	s, cl := c.server(l), l.Client(lab.ClientOptions{})
	d := l.Map(cl, "grown", s)
	conn := c.dial(t, cl, d.Name)
	write(t, conn, '1')
	c.rbd("snap", "create", "grown@one")
	c.rbd("snap", "protect", "grown@one")
	c.rbd("clone", "grown@one", "copied", "--image-feature", "layering,exclusive-lock")
	write(t, conn, '2')
	readOnly := func(r *controlpb.MapRequest) { r.AccessMode = "ro" }
	for name, with := range map[string]func(*controlpb.MapRequest){"grown@one": readOnly, "copied": func(*controlpb.MapRequest) {}} {
		m := l.Map(cl, name, s, with)
		got := make([]byte, 4096)
		if _, err := c.dial(t, cl, m.Name).ReadAt(got, 0); err != nil || string(got) != strings.Repeat("1", 4096) {
			t.Errorf("%s has %q..., %v", name, got[:8], err)
		}
	}
	if _, err := cl.Map("grown@one", s); err == nil {
		t.Error("a snapshot is mapped for writing")
	}
	c.rbd("resize", "grown", "--size", "16M")
	for end := time.Now().Add(enough); ; time.Sleep(50 * time.Millisecond) { // librbd learns it by a watch
		list, err := s.API.ResizeDevice(t.Context(), &controlpb.DeviceRequest{Device: "grown"})
		if err != nil {
			t.Fatal(err)
		}
		if list.Devices[0].GetLimits().GetSize() == 16<<20 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the new size is not seen: %v", list.Devices)
		}
	}
}

// TestTheProgramWithoutLibrbdSaysSo runs the program that a plain build makes.
func TestTheProgramWithoutLibrbdSaysSo(t *testing.T) {
	dir := t.TempDir()
	build := exec.Command("go", "build", "-o", dir, "github.com/rnbd-go/rnbd/plugins/io-rbd")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := exec.Command(filepath.Join(dir, "io-rbd")).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "librbd-dev") {
		t.Errorf("%v, %s", err, out)
	}
}
