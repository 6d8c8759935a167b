package faults

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// TestClientUpgradeOfManyDevices upgrades a client with many devices, some of them in use.
// All serve afterwards, and the front end has let go of the memory of the process before.
func TestClientUpgradeOfManyDevices(t *testing.T) {
	n := pick(100, 1000)
	l := lab.New(t)
	dir := ""
	for i := range n {
		dir = l.Image(fmt.Sprintf("d%d.img", i), 1<<20)
	}
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{Extra: []string{"--config-dir", keepAll(t, l, s, n)}})
	awaitOpen(t, c, n)
	w := startLoad(t, c, "d7", loadOptions{workers: 2})
	for range 2 {
		before := arenasOf(t, c)
		at := time.Now()
		r, err := c.Upgrade("")
		if err != nil {
			t.Fatalf("after %v: %v\n%s", time.Since(at), err, lastOf(c.Log(), 4000))
		}
		w.awaitProgress(100)
		t.Logf("%d devices: the upgrade took %v, users waited for %v; arenas of the front end: %d before, %d after", n, time.Since(at), time.Duration(r.PauseUs)*time.Microsecond, before, arenasOf(t, c))
		awaitOpen(t, c, n)
		eventually(t, enough, "the front end has one arena for each device", func() bool { return arenasOf(t, c) == n })
	}
	w.stop()
}

// TestClientUpgradeOfManyDevicesThatFails has a next process die while it takes over many
// devices. The running one gets all of them back, with their users, and keeps none of the
// memory of the attempt. Then all paths are lost and come back, and all devices serve.
func TestClientUpgradeOfManyDevicesThatFails(t *testing.T) {
	n := pick(60, 1000)
	l := lab.New(t)
	dir := ""
	for i := range n {
		dir = l.Image(fmt.Sprintf("d%d.img", i), 1<<20)
	}
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{
		Extra: []string{"--config-dir", keepAll(t, l, s, n)},
		Env:   []string{nextProcess + "=yes", realProgram + "=" + filepath.Join(l.Bin, "rnbd")},
	})
	awaitOpen(t, c, n)
	users := make([]*nbdclient.Client, min(n, 200)) // a pump of the front end has room for 256
	for i := range users {
		users[i] = mustDial(t, c, fmt.Sprint("d", i))
	}
	serve := func(when string) {
		t.Helper()
		for i, u := range users {
			if _, err := u.ReadAt(make([]byte, 512), 0); err != nil {
				t.Fatalf("%s: user of d%d: %v", when, i, err)
			}
		}
	}
	serve("before")
	for _, behaviour := range []string{"dies when it begins", "dies when it could serve"} {
		ctx, cancel := context.WithTimeout(t.Context(), 4*enough)
		_, err := c.API.Upgrade(ctx, &controlpb.UpgradeRequest{Binary: actor(t, l, behaviour)})
		cancel()
		t.Logf("one that %s: %v", behaviour, err)
		if err == nil {
			t.Fatal("no error")
		}
		awaitOpen(t, c, n)
		serve("after one that " + behaviour)
		eventually(t, enough, "the front end has one arena for each device", func() bool { return arenasOf(t, c) == n })
	}
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, enough, "all paths are lost", func() bool {
		d, err := c.Device("d0")
		return err == nil && d.State == "closed"
	})
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	awaitOpen(t, c, n)
	serve("after the loss of all paths")
}

func lastOf(text string, n int) string { return text[max(0, len(text)-n):] }

// arenasOf counts the arenas among the descriptors of the NBD front end.
func arenasOf(t *testing.T, c *lab.Client) (n int) {
	t.Helper()
	p, err := c.Plugin("nbd")
	if err != nil || p.Pid == 0 {
		return -1
	}
	dir := fmt.Sprintf("/proc/%d/fd", p.Pid)
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if to, _ := os.Readlink(dir + "/" + e.Name()); strings.HasPrefix(to, "/memfd:rnbd-rnbd-") {
			n++
		}
	}
	return n
}
