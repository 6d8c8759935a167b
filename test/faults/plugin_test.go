package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// long reports whether the long forms are wanted.
func long() bool { return os.Getenv("RNBD_LONG") != "" }

// pick is the number of rounds of a test.
func pick(short, longer int) int {
	if long() {
		return longer
	}
	return short
}

// maxPause is the longest wait allowed to a user when a plugin is killed: 1 s
// on a machine without other load, more where other work takes the processors
// away.
func maxPause() time.Duration {
	if long() {
		return 2 * time.Second
	}
	return 15 * time.Second
}

func TestKillingAnIOPluginUnderLoad(t *testing.T) {
	l := lab.New(t)
	l.Image("fio.img", 64<<20)
	dir := l.Image("history.img", 16<<20)
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}, Extra: []string{"--crash-limit", "1000"}})
	c := l.Client(lab.ClientOptions{})
	verified := l.Map(c, "fio.img", s)
	judged := l.Map(c, "history.img", s)

	kills := pick(10, 100)
	f := startFio(t, time.Duration(kills)*700*time.Millisecond, "64m", "16m", c.URI(verified.Name))
	w := startLoad(t, c, judged.Name, loadOptions{})
	w.awaitProgress(100)
	pauses := killPlugins(t, s, w, kills)
	r := f.wait()
	w.stop()
	p, err := s.Plugin("fileio")
	if err != nil {
		t.Fatal(err)
	}
	if int(p.Restarts) != kills || p.State != "running" {
		t.Errorf("after %d kills the plugin is %s with %d restarts", kills, p.State, p.Restarts)
	}
	t.Logf("pauses by %d kills: %s", kills, figures(pauses))
	t.Logf("no error in %d judged and %d verified requests; fio's longest %v", w.ops.Load(), r.Requests, r.Longest.Round(time.Millisecond))
	for i, pause := range pauses {
		if pause > maxPause() {
			t.Errorf("kill %d: a request had to wait %v", i, pause)
		}
	}
}

// killPlugins kills fileio at random moments and returns how long requests had
// to wait each time.
func killPlugins(t *testing.T, s *lab.Server, w *load, kills int) (pauses []time.Duration) {
	t.Helper()
	for range kills {
		time.Sleep(time.Duration(rand.IntN(300)) * time.Millisecond)
		at := time.Now()
		pid := killPlugin(t, s, "fileio")
		eventually(t, 2*enough, "the killed plugin runs again", func() bool {
			p, err := s.Plugin("fileio")
			return err == nil && p.Pid != 0 && int(p.Pid) != pid
		})
		w.awaitProgress(100)
		time.Sleep(20 * time.Millisecond)
		pauses = append(pauses, w.pause(at))
	}
	return pauses
}

// killPlugin kills a plugin that runs and returns its process id.
func killPlugin(t *testing.T, s *lab.Server, name string) int {
	t.Helper()
	p, err := s.Plugin(name)
	if err != nil {
		t.Fatal(err)
	}
	if p.Pid == 0 {
		t.Fatalf("plugin %s is %s", name, p.State)
	}
	if err := syscall.Kill(int(p.Pid), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	return int(p.Pid)
}

// serverDevice returns the server's description of a device.
func serverDevice(t *testing.T, s *lab.Server, name string) *controlpb.ServerDevice {
	t.Helper()
	list, err := s.API.ListDevices(t.Context(), &controlpb.ListRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range list.Devices {
		if d.Name == name {
			return d
		}
	}
	t.Fatalf("the server has no device %q: %v", name, list.Devices)
	return nil
}

// A plugin that dies with more devices than a few comes back with all of them, and
// one that is given up comes back with them by command.
func TestKillingAnIOPluginWithManyDevices(t *testing.T) {
	const devices = 90
	l := lab.New(t)
	var dir string
	for k := range devices {
		dir = l.Image(fmt.Sprintf("disk%02d.img", k), 1<<20)
	}
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}, Extra: []string{"--crash-limit", "2", "--crash-window", "1h"}})
	c := l.Client(lab.ClientOptions{})
	var last *controlpb.ClientDevice
	for k := range devices {
		last = l.Map(c, fmt.Sprintf("disk%02d.img", k), s)
	}
	pid := killPlugin(t, s, "fileio")
	eventually(t, enough, "the killed plugin runs again", func() bool {
		p, err := s.Plugin("fileio")
		return err == nil && p.Pid != 0 && int(p.Pid) != pid
	})
	allDevices(t, s, devices, "open")
	killPlugin(t, s, "fileio")
	allDevices(t, s, devices, "failed: plugin fileio crashes too often")
	ctx, cancel := context.WithTimeout(t.Context(), enough)
	defer cancel()
	if p, err := s.API.ResetPlugin(ctx, &controlpb.PluginRequest{Name: "fileio"}); err != nil || p.State != "running" {
		t.Fatalf("reset: %v, %v", p, err)
	}
	allDevices(t, s, devices, "open")
	if _, err := mustDial(t, c, last.Name).WriteAt(make([]byte, 4096), 0); err != nil {
		t.Errorf("a write after the reset: %v", err)
	}
}

// allDevices waits until the server has n devices in that state.
func allDevices(t *testing.T, s *lab.Server, n int, state string) {
	t.Helper()
	eventually(t, enough, fmt.Sprintf("%d devices are %q", n, state), func() bool {
		list, err := s.API.ListDevices(t.Context(), &controlpb.ListRequest{})
		in := 0
		for _, d := range list.GetDevices() {
			if d.State == state {
				in++
			}
		}
		return err == nil && in == n
	})
}
