package faults

import (
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// killFrontend kills the NBD front end of c and returns its process id.
func killFrontend(t *testing.T, c *lab.Client) int {
	t.Helper()
	p, err := c.Plugin("nbd")
	if err != nil {
		t.Fatal(err)
	}
	if p.Pid == 0 {
		t.Fatalf("the front end is %s", p.State)
	}
	if err := syscall.Kill(int(p.Pid), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	return int(p.Pid)
}

// awaitFrontend waits until another process than pid serves.
func awaitFrontend(t *testing.T, c *lab.Client, pid int) {
	t.Helper()
	eventually(t, 2*enough, "another front end serves", func() bool {
		p, err := c.Plugin("nbd")
		return err == nil && p.Pid != 0 && int(p.Pid) != pid
	})
}

// TestKillingTheFrontEnd kills frontend-nbd under load. Its users connect
// again, at once, and find all that was acknowledged.
func TestKillingTheFrontEnd(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 16<<20), Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	before := l.Map(c, "disk.img", s)
	w := startLoad(t, c, before.Name, loadOptions{reconnect: true})
	var pauses []time.Duration
	for range pick(5, 30) {
		w.awaitProgress(100)
		time.Sleep(time.Duration(rand.IntN(100)) * time.Millisecond)
		at := time.Now()
		pid := killFrontend(t, c)
		awaitFrontend(t, c, pid)
		w.awaitProgress(100)
		pauses = append(pauses, w.away(at))
	}
	w.stop()
	after, err := c.Device(before.Name)
	if err != nil {
		t.Fatal(err)
	}
	if after.State != "open" || after.DeviceId != before.DeviceId || after.Endpoint != before.Endpoint || after.Session != before.Session {
		t.Errorf("the mapping has changed:\n%v\n%v", before, after)
	}
	if w.dials != len(pauses)+1 {
		t.Errorf("%d connections for %d kills", w.dials, len(pauses))
	}
	t.Logf("until the first answer of the next process: %s", figures(pauses))
}

// TestAUserWaitsInTheBacklogWhileTheFrontEndIsAway connects in the moment of
// the kill, many times: nobody is refused.
func TestAUserWaitsInTheBacklogWhileTheFrontEndIsAway(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 16<<20), Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	d := l.Map(c, "disk.img", s)
	for range pick(3, 20) {
		pid := killFrontend(t, c)
		time.Sleep(10 * time.Millisecond) // it is dead, the next is not there
		n, err := dialDevice(c, d.Name)
		if err != nil {
			t.Fatalf("connecting while there is no front end: %v", err)
		}
		if _, err := n.WriteAt(make([]byte, 4096), 0); err != nil {
			t.Errorf("write after that: %v", err)
		}
		n.Close()
		awaitFrontend(t, c, pid)
	}
}

// TestQEMUConnectsAgain kills the front end below qemu-io; with
// reconnect-delay, qemu-io waits for the next one.
func TestQEMUConnectsAgain(t *testing.T) {
	qemu := lab.Tool(t, "qemu-io")
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 16<<20), Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	d := l.Map(c, "disk.img", s)
	args := []string{"--image-opts", fmt.Sprintf("driver=nbd,server.type=unix,server.path=%s,export=%s,reconnect-delay=30", c.NBD, d.Name)}
	const writes = 40
	for i := range writes {
		args = append(args, "-c", fmt.Sprintf("write -P %d %d 65536", i+1, i*65536), "-c", "sleep 25")
	}
	for i := range writes {
		args = append(args, "-c", fmt.Sprintf("read -P %d %d 65536", i+1, i*65536))
	}
	cmd := exec.Command(qemu, args...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	eventually(t, enough, "qemu has written", func() bool {
		x, err := c.Device(d.Name)
		return err == nil && x.TxSectors > 0
	})
	for range 3 {
		time.Sleep(200 * time.Millisecond)
		awaitFrontend(t, c, killFrontend(t, c))
	}
	select {
	case err := <-done:
		if err != nil || strings.Contains(out.String(), "failed") {
			t.Errorf("qemu-io: %v\n%s", err, out.String())
		}
	case <-time.After(time.Minute):
		cmd.Process.Kill()
		t.Errorf("qemu-io does not end\n%s", out.String())
	}
}
