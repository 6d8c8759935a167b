package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// result is how a command ended.
type result struct {
	code     int
	out, err string
	took     time.Duration
}

// program is the file of rnbd.
func program(t *testing.T) string {
	t.Helper()
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(bin, "rnbd")
}

// rnbd runs a command on the client c.
func rnbd(t *testing.T, c *lab.Client, args ...string) result {
	t.Helper()
	return rnbdAt(t, c.Socket, args...)
}

// rnbdAt runs a command on the daemon with that socket.
func rnbdAt(t *testing.T, socket string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, program(t), args...)
	cmd.Env = append(os.Environ(), "RNBD_SOCKET="+socket)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	start := time.Now()
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), errOut.String(), time.Since(start)}
}

// TestForcedUnmapEndsWithADeadServer stops the server's process while a
// request is under way: the unmap does not wait for it. Another device keeps
// the session, so the request can only end with the path, half a minute later
// by the kernel's timing.
func TestForcedUnmapEndsWithADeadServer(t *testing.T) {
	l := lab.New(t)
	dir := l.Image("a.img", 1<<20)
	l.Image("b.img", 1<<20)
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{Extra: []string{"--loss", "queue:60s", "--kernel-timing"}})
	a := l.Map(c, "a.img", s)
	l.Map(c, "b.img", s)
	user := dial(t, c, a.Name)
	if err := s.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer s.Signal(syscall.SIGCONT)
	written := make(chan error, 1)
	go func() {
		_, err := user.WriteAt(make([]byte, 4096), 0)
		written <- err
	}()
	awaitInflight(t, c, a.Name)

	if r := rnbd(t, c, "unmap", a.Name); r.code != 5 || r.took > 15*time.Second {
		t.Errorf("unmap without force: exit code %d after %v: %s", r.code, r.took, r.err)
	}
	r := rnbd(t, c, "unmap", a.Name, "force")
	if r.code != 0 || r.took > 15*time.Second {
		t.Errorf("unmap by force: exit code %d after %v: %s", r.code, r.took, r.err)
	}
	t.Logf("the forced unmap took %v", r.took)
	if err := <-written; err == nil {
		t.Error("the write that nobody answered succeeded")
	}
	if r := rnbd(t, c, "device", "list", "devname", "csv", "noheaders"); strings.TrimSpace(r.out) != "rnbd1" {
		t.Errorf("devices after the unmap: %s%s", r.out, r.err)
	}

	// The number of the device is free again once its request is over.
	if err := s.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		d, err := c.Map("a.img", s)
		if err == nil && d.Name == a.Name {
			break
		}
		if err == nil {
			err = c.Unmap(d.Name, false)
		}
		if time.Now().After(end) {
			t.Fatalf("%s cannot be mapped again: %v, %v", a.Name, d, err)
		}
	}
	if _, err := dial(t, c, a.Name).WriteAt(make([]byte, 4096), 0); err != nil {
		t.Errorf("the device that was mapped again: %v", err)
	}
}

func dial(t *testing.T, c *lab.Client, device string) *nbdclient.Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	n, err := nbdclient.Dial(ctx, "unix", c.NBD, nbdclient.Options{Export: device})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

func awaitInflight(t *testing.T, c *lab.Client, device string) {
	t.Helper()
	sdktest.Eventually(t, "a request is under way", func() bool {
		d, err := c.Device(device)
		return err == nil && d.Inflight > 0
	})
}

// TestCommandsEndByTheirDeadline has a daemon that never answers.
func TestCommandsEndByTheirDeadline(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("a.img", 1<<20), Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	l.Map(c, "a.img", s)
	if err := c.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer c.Signal(syscall.SIGCONT)
	for _, args := range [][]string{
		{"list"}, {"client", "device", "list"}, {"unmap", "rnbd0", "force"}, {"recover", "all"}, {"map", "b.img", "from", s.Addrs[0]},
		{"path", "disconnect", "1"}, {"client", "show"},
	} {
		r := rnbd(t, c, append([]string{"--timeout", "1s"}, args...)...)
		if r.code != 8 || r.took > 15*time.Second {
			t.Errorf("rnbd %s: exit code %d after %v: %s", strings.Join(args, " "), r.code, r.took, r.err)
		}
	}
	if r := rnbd(t, c, "__complete", "unmap", ""); r.code != 0 || r.took > 15*time.Second {
		t.Errorf("completion: exit code %d after %v", r.code, r.took)
	}
}

// TestFrontEndThatHangsDoesNotHideDevices stops the processes of front ends.
func TestFrontEndThatHangsDoesNotHideDevices(t *testing.T) {
	l := lab.New(t)
	dir := l.Image("d0.img", 1<<20)
	for i := range 20 {
		l.Image(fmt.Sprintf("d%d.img", i), 1<<20)
	}
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	for i := range 20 {
		l.Map(c, fmt.Sprintf("d%d.img", i), s)
	}
	info, err := c.API.Info(t.Context(), &controlpb.InfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range info.Plugins {
		if err := lab.Freeze(int(p.Pid)); err != nil {
			t.Fatal(err)
		}
		defer syscall.Kill(int(p.Pid), syscall.SIGCONT)
	}
	r := rnbd(t, c, "device", "list", "devname,state", "csv", "noheaders")
	if r.code != 0 || strings.Count(r.out, ",open\n") != 20 || r.took > 8*time.Second {
		t.Errorf("exit code %d after %v: %s%s", r.code, r.took, r.out, r.err)
	}
}

// TestThousandDevices maps them over one session, by lines. The bounds are
// wide: the cost of one command for a device must not grow with the number of
// devices.
func TestThousandDevices(t *testing.T) {
	const n = 1000
	l := lab.New(t)
	var lines strings.Builder
	dir := ""
	for i := range n {
		dir = l.Image(fmt.Sprintf("d%d.img", i), 4096)
	}
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	host, port, _ := strings.Cut(s.Addrs[0], ":")
	for i := range n {
		fmt.Fprintf(&lines, "sessname=s dest_port=%s path=ip:%s device_path=d%d.img\n", port, host, i)
	}
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "rnbd"), "--timeout", "2m", "map-line", "-", "devname", "noheaders")
	cmd.Env = append(os.Environ(), "RNBD_SOCKET="+c.Socket)
	cmd.Stdin = strings.NewReader(lines.String())
	start := time.Now()
	out, err := cmd.CombinedOutput()
	mapped := time.Since(start)
	if err != nil || bytes.Count(out, []byte("\n")) != n {
		t.Fatalf("%v after %d devices: %s", err, bytes.Count(out, []byte("\n")), out[max(0, len(out)-200):])
	}
	list := rnbd(t, c, "device", "list", "noheaders", "nototals")
	if list.code != 0 || strings.Count(list.out, "\n") != n {
		t.Fatalf("exit code %d, %d lines: %s", list.code, strings.Count(list.out, "\n"), list.err)
	}
	one := rnbd(t, c, "unmap", "rnbd500")
	if one.code != 0 {
		t.Errorf("unmap: %s", one.err)
	}
	t.Logf("%d devices: mapped in %v, listed in %v, one unmapped in %v", n, mapped, list.took, one.took)
	if mapped > 110*time.Second || list.took > 15*time.Second || one.took > 15*time.Second {
		t.Errorf("%d devices: mapped in %v, listed in %v, one unmapped in %v", n, mapped, list.took, one.took)
	}
	sessions, err := c.API.ListSessions(t.Context(), &controlpb.ListRequest{})
	if err != nil || len(sessions.Sessions) != 1 || sessions.Sessions[0].Devices != n-1 {
		t.Errorf("sessions: %v, %v", sessions, err)
	}
}

// TestJunkIsRefused gives every command a wrong argument.
func TestJunkIsRefused(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("a.img", 1<<20), Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	l.Map(c, "a.img", s)
	junk := []string{"\xff\xfe\x01", "\x1b[2J", strings.Repeat("A", 100_000), "%s%n%d", "-", "+", ",", "../../etc/passwd", "\u202e", "=", "@", "%", ":", "9999999999999999999999"}
	for _, args := range [][]string{
		{"unmap"}, {"remap"}, {"show"}, {"device", "show"}, {"session", "show"}, {"path", "show"}, {"path", "delete"}, {"map-line"},
		{"device", "list"}, {"list"}, {"resize", "rnbd0"}, {"map", "a.img", "from"}, {"path", "add", "s"}, {"session", "set", "s"}, {"recover"}, {"help"}, {},
	} {
		for _, j := range junk {
			r := rnbd(t, c, append(args[:len(args):len(args)], j)...)
			switch {
			case strings.Contains(r.err, "goroutine ") || r.code < 0:
				t.Fatalf("rnbd %q %.20q: %s", args, j, r.err)
			case r.code == 0 && j != "+" && j != "," && j != "-", r.code == 1, r.code > 7:
				t.Errorf("rnbd %q %.20q: exit code %d: %.200s%.200s", args, j, r.code, r.out, r.err)
			}
		}
	}
	if r := rnbd(t, c, "device", "list", "devname,state", "csv", "noheaders"); r.out != "rnbd0,open\n" {
		t.Errorf("devices: %s%s", r.out, r.err)
	}
}
