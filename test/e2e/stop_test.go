package e2e

import (
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// stopLimit is how long a daemon may take to end in order: less than where it
// gives up, 20 s.
const stopLimit = 15 * time.Second

// load keeps requests in flight until the device fails; errors are expected.
func load(t *testing.T, n *nbdclient.Client) {
	t.Helper()
	done := make(chan struct{}, 16)
	var written atomic.Int64
	for w := range cap(done) {
		go func() {
			buf := make([]byte, 64<<10)
			for i := int64(w); ; i += 16 {
				if _, err := n.WriteAt(buf, i%256*int64(len(buf))); err != nil {
					break
				}
				written.Add(1)
			}
			done <- struct{}{}
		}()
	}
	t.Cleanup(func() {
		n.Close()
		for range cap(done) {
			select {
			case <-done:
			case <-time.After(enough):
				t.Error("a request never ended")
				return
			}
		}
	})
	eventually(t, "requests are on their way", func() bool { return written.Load() > 100 })
}

// daemon is the common part of lab's servers and clients.
type daemon interface {
	PID() int
	Signal(syscall.Signal) error
	Exited() (bool, error)
	Log() string
}

// endsCleanly sends a signal and checks that a daemon leaves nothing.
func endsCleanly(t *testing.T, d daemon, sig syscall.Signal, plugin int, temp string, sockets ...string) {
	t.Helper()
	start := time.Now()
	if err := d.Signal(sig); err != nil {
		t.Fatal(err)
	}
	var err error
	eventually(t, "the daemon ends", func() (gone bool) { gone, err = d.Exited(); return gone })
	took := time.Since(start)
	t.Logf("ended after %v", took.Round(time.Millisecond))
	if err != nil {
		t.Errorf("it ended with %v", err)
	}
	if took > stopLimit {
		t.Errorf("it took %v, at most %v are allowed", took, stopLimit)
	}
	if alive(plugin) {
		t.Errorf("its plugin %d lives", plugin)
	}
	for _, s := range sockets {
		if _, err := os.Lstat(s); err == nil {
			t.Errorf("the socket %s is left", s)
		}
	}
	if rest, _ := filepath.Glob(filepath.Join(temp, "*")); len(rest) > 0 {
		t.Errorf("temporary files are left: %v", rest)
	}
}

// TestSignalEndsADaemonInOrder ends each daemon with devices mapped and
// requests in flight.
func TestSignalEndsADaemonInOrder(t *testing.T) {
	// The daemons would inherit ignored signals; they do not inherit handlers.
	handled := make(chan os.Signal, 1)
	signal.Notify(handled, syscall.SIGINT)
	defer signal.Stop(handled)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		for _, loss := range []string{"fail", "queue:1m"} {
			t.Run(fmt.Sprintf("%s with loss=%s, client first", sig, loss), func(t *testing.T) {
				r, temp := loaded(t, loss)
				pids := r.pids()
				endsCleanly(t, r.client, sig, pids["frontend-nbd"], temp.client, r.client.Socket, r.client.NBD)
				endsCleanly(t, r.server, sig, pids["io-fileio"], temp.server, r.server.Socket)
			})
			t.Run(fmt.Sprintf("%s with loss=%s, server first", sig, loss), func(t *testing.T) {
				r, temp := loaded(t, loss)
				pids := r.pids()
				endsCleanly(t, r.server, sig, pids["io-fileio"], temp.server, r.server.Socket)
				wantOrderlyRecord(t, temp.serverState)
				if !alive(pids["client"]) || !alive(pids["frontend-nbd"]) {
					t.Error("the client ended too")
				}
				endsCleanly(t, r.client, sig, pids["frontend-nbd"], temp.client, r.client.Socket, r.client.NBD)
			})
		}
	}
}

// temps are the folders for temporary files of the two daemons.
type temps struct{ server, client, serverState string }

// wantOrderlyRecord checks that the server has recorded its stop in order, with a device that
// was flushed.
func wantOrderlyRecord(t *testing.T, dir string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "incarnation"))
	if err != nil || !strings.Contains(string(b), "\nopen \"/") || !strings.HasSuffix(string(b), "\nclean\n") {
		t.Errorf("the record of the stop is %q, %v", b, err)
	}
}

func loaded(t *testing.T, loss string) (*rig, temps) {
	t.Helper()
	temp := temps{shortDir(t), shortDir(t), t.TempDir()}
	r := newRig(t, rigOptions{size: 16 << 20,
		server: lab.ServerOptions{Env: []string{"TMPDIR=" + temp.server, "STATE_DIRECTORY=" + temp.serverState}},
		client: lab.ClientOptions{Env: []string{"TMPDIR=" + temp.client}, Extra: []string{"--loss", loss}},
	})
	load(t, r.dial())
	return r, temp
}

// TestSecondSignalEndsADaemonAtOnce has a daemon that cannot end in order.
func TestSecondSignalEndsADaemonAtOnce(t *testing.T) {
	r := newRig(t, rigOptions{size: 16 << 20})
	plugin := r.pids()["frontend-nbd"]
	if err := lab.Freeze(plugin); err != nil {
		t.Fatal(err)
	}
	defer syscall.Kill(plugin, syscall.SIGCONT)
	if err := r.client.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the daemon has seen the first signal", func() bool {
		_, err := r.client.API.Info(t.Context(), &controlpb.InfoRequest{})
		return err != nil
	})
	time.Sleep(300 * time.Millisecond)
	if gone, _ := r.client.Exited(); gone {
		t.Skip("it could end in order")
	}
	if err := r.client.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	eventually(t, "the daemon ends", func() (gone bool) { gone, _ = r.client.Exited(); return gone })
	if d := time.Since(start); d > stopLimit {
		t.Errorf("it ended %v after the second signal", d)
	}
	for _, s := range []string{r.client.Socket, r.client.NBD} {
		if _, err := os.Lstat(s); err == nil {
			t.Errorf("the socket %s is left", s)
		}
	}
	if err := syscall.Kill(plugin, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the plugin ends with its daemon", func() bool { return !alive(plugin) })
}

// TestAStoppedDaemonStartsAgain has the leftovers of a killed one in its way.
func TestAStoppedDaemonStartsAgain(t *testing.T) {
	r := newRig(t, rigOptions{size: 16 << 20})
	for _, end := range []func() error{r.client.Kill, r.client.Stop} {
		if err := end(); err != nil {
			t.Fatal(err)
		}
		if err := r.client.Start(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the device can be mapped again", func() bool {
			_, err := r.client.Map("disk.img", r.server)
			return err == nil
		})
	}
	for _, end := range []func() error{r.server.Kill, r.server.Stop} {
		if err := end(); err != nil {
			t.Fatal(err)
		}
		if err := r.server.Start(); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the device works again", func() bool {
		d, err := r.client.Device("rnbd0")
		return err == nil && d.State == "open"
	})
	if _, err := dialNBD(t, r.client, "rnbd0").WriteAt(make([]byte, 4096), 0); err != nil {
		t.Error(err)
	}
}

// TestPluginDoesNotOutliveAKilledDaemon kills the daemons, not the plugins.
func TestPluginDoesNotOutliveAKilledDaemon(t *testing.T) {
	r := newRig(t, rigOptions{size: 16 << 20})
	pids := r.pids()
	load(t, r.dial())
	if err := r.server.Kill(); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	eventually(t, "the storage plugin ends", func() bool { return !alive(pids["io-fileio"]) })
	if err := r.client.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the front end ends", func() bool { return !alive(pids["frontend-nbd"]) })
	t.Logf("both within %v", time.Since(start).Round(time.Millisecond))
}
