package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// heldClient is a client with a mapping "d0" of its configuration, and with
// sockets that outlive it.
func heldClient(t *testing.T, env ...string) *lab.Client {
	t.Helper()
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("a.img", 1<<20), Plugins: []string{"fileio"}})
	conf := filepath.Join(l.Dir, "client.d")
	if err := os.Mkdir(conf, 0o755); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("mappings:\n  - {device: a.img, server: [%q], name: d0, loss: \"queue:30s\"}\n", s.Addrs[0])
	if err := os.WriteFile(filepath.Join(conf, "d0.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return l.Client(lab.ClientOptions{Held: true, Extra: []string{"--config-dir", conf}, Env: env})
}

func dialHeld(t *testing.T, c *lab.Client) (*nbdclient.Client, error) {
	ctx, cancel := context.WithTimeout(t.Context(), lab.Patience)
	defer cancel()
	return nbdclient.Dial(ctx, "unix", c.NBD, nbdclient.Options{Export: "d0"})
}

// TestNBDClientsWaitForARestartedDaemon has users connect while there is no
// daemon: the socket is held by the service manager, and the next daemon maps
// the device before it serves them.
func TestNBDClientsWaitForARestartedDaemon(t *testing.T) {
	c := heldClient(t)
	user, err := dialHeld(t, c)
	if err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte("rnbd"), 1024)
	if _, err := user.WriteAt(want, 8192); err != nil {
		t.Fatal(err)
	}
	for name, end := range map[string]func() error{"stopped": c.Stop, "killed": c.Kill} {
		front, err := c.Plugin("nbd")
		if err != nil {
			t.Fatal(err)
		}
		if err := end(); err != nil {
			t.Fatal(err)
		}
		user.Close()
		sdktest.Eventually(t, "the front end has followed its daemon", func() bool {
			line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", front.Pid)) // empty: nobody has reaped it yet
			return len(line) == 0
		})
		type dialled struct {
			*nbdclient.Client
			error
		}
		waits := make(chan dialled, 1)
		go func() {
			u, err := dialHeld(t, c)
			waits <- dialled{u, err}
		}()
		select {
		case u := <-waits:
			t.Fatalf("%s: the user does not wait for the next daemon: %v", name, u.error)
		case <-time.After(300 * time.Millisecond):
		}
		if err := c.Start(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		u := <-waits
		if u.error != nil {
			t.Fatalf("%s: %v", name, u.error)
		}
		user = u.Client
		got := make([]byte, len(want))
		if _, err := user.ReadAt(got, 8192); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%s: %v, equal %v", name, err, bytes.Equal(got, want))
		}
	}
	user.Close()
	if d, err := c.Device("d0"); err != nil || !strings.HasPrefix(d.Endpoint, "nbd+unix:///d0?socket=") {
		t.Errorf("endpoint of the device: %v, %v", d, err)
	}
}

// TestNBDClientsThatConnectAgainAtOnce find their device whenever they come: no
// daemon on its way down or up refuses them.
func TestNBDClientsThatConnectAgainAtOnce(t *testing.T) {
	c := heldClient(t)
	ctx, stop := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		defer close(failed)
		buf := make([]byte, 4096)
		for ctx.Err() == nil {
			u, err := dialHeld(t, c)
			// A daemon that ends cuts off users that it has just accepted.
			cut := err != nil && (strings.Contains(err.Error(), "EOF") || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE))
			if err != nil && !cut && ctx.Err() == nil {
				failed <- err
				return
			}
			for err == nil && ctx.Err() == nil {
				_, err = u.ReadAt(buf, 0)
				time.Sleep(time.Millisecond)
			}
			if u != nil {
				u.Close()
			}
		}
	}()
	for range 4 {
		time.Sleep(200 * time.Millisecond)
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
	}
	sdktest.Eventually(t, "the user is back", func() bool {
		d, err := c.Device("d0")
		return len(failed) > 0 || err == nil && d.Openers > 0
	})
	stop()
	if err := <-failed; err != nil {
		t.Errorf("a user is refused: %v", err)
	}
}

// TestServiceManagerFollowsAnUpgrade has the messages of both processes of a server
// read: the manager is told of the new main process before the old one ends, and never
// that the service ends.
func TestServiceManagerFollowsAnUpgrade(t *testing.T) {
	l := lab.New(t)
	path := filepath.Join(l.Dir, "notify")
	told, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer told.Close()
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("a.img", 1<<20), Plugins: []string{"fileio"}, Env: []string{"NOTIFY_SOCKET=" + path, "WATCHDOG_USEC=600000"}})
	first := s.PID()
	if _, err := s.Upgrade(""); err != nil {
		t.Fatal(err)
	}
	next := fmt.Sprintf("MAINPID=%d", s.PID())
	var all []string
	told.SetReadDeadline(time.Now().Add(lab.Patience))
	for b := make([]byte, 4096); ; {
		n, err := told.Read(b)
		if err != nil {
			t.Fatalf("messages %q, then %v", all, err)
		}
		all = append(all, string(b[:n]))
		if i := slices.Index(all, next); i >= 0 && len(all) > i+2 && all[len(all)-1] == "WATCHDOG=1" { // the new one's
			break
		}
	}
	text := strings.Join(all, "|")
	if before, after, _ := strings.Cut(text, next); !strings.Contains(before, "READY=1") || !strings.Contains(after, "READY=1") || strings.Contains(text, "STOPPING=1") {
		t.Errorf("messages %q", all)
	}
	sdktest.Eventually(t, "the old process has ended", func() bool { return errors.Is(syscall.Kill(first, 0), syscall.ESRCH) })
}

// TestServiceManagerIsTold has the daemon's messages read, from its start to its
// end.
func TestServiceManagerIsTold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	told, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer told.Close()
	await := func(want string) {
		t.Helper()
		told.SetReadDeadline(time.Now().Add(lab.Patience))
		b := make([]byte, 4096)
		for {
			n, err := told.Read(b)
			if err != nil {
				t.Fatalf("no message %q: %v", want, err)
			}
			if strings.Contains(string(b[:n]), want) {
				return
			}
		}
	}
	c := heldClient(t, "NOTIFY_SOCKET="+path, "WATCHDOG_USEC=600000")
	await("READY=1")
	await("WATCHDOG=1")
	if err := c.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	await("RELOADING=1")
	await("READY=1")
	await("WATCHDOG=1")
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	await("STOPPING=1")
	for _, name := range []string{c.Socket, c.NBD} {
		if _, err := os.Stat(name); err != nil {
			t.Errorf("the socket of the service manager is gone: %v", err)
		}
	}
}
