package faults

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// withLoss maps with loss, the policy for times without a path.
func withLoss(loss string) func(*controlpb.MapRequest) {
	return func(r *controlpb.MapRequest) { r.Loss = loss }
}

// outage is a rig for tests with a server that goes away: one device, one NBD
// connection.
type outage struct {
	t      *testing.T
	lab    *lab.T
	image  string
	server *lab.Server
	client *lab.Client
	device string
	nbd    *nbdclient.Client
}

func newOutage(t *testing.T, loss string) *outage {
	t.Helper()
	o := &outage{t: t, lab: lab.New(t)}
	dir := o.lab.Image("disk.img", 16<<20)
	o.image = filepath.Join(dir, "disk.img")
	o.server = o.lab.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	o.client = o.lab.Client(lab.ClientOptions{})
	o.device = o.lab.Map(o.client, "disk.img", o.server, withLoss(loss)).Name
	o.nbd = mustDial(t, o.client, o.device)
	return o
}

func (o *outage) kill() {
	o.t.Helper()
	if err := o.server.Kill(); err != nil {
		o.t.Fatal(err)
	}
}

func (o *outage) start() {
	o.t.Helper()
	if err := o.server.Start(); err != nil {
		o.t.Fatal(err)
	}
}

func (o *outage) awaitState(state string) *controlpb.ClientDevice {
	o.t.Helper()
	var d *controlpb.ClientDevice
	eventually(o.t, enough, "the device is "+state, func() (ok bool) {
		var err error
		d, err = o.client.Device(o.device)
		return err == nil && d.State == state
	})
	return d
}

// write writes a block of fill and returns how long that took.
func (o *outage) write(fill byte) (time.Duration, error) {
	start := time.Now()
	_, err := o.nbd.WriteAt(bytes.Repeat([]byte{fill}, 4096), 0)
	return time.Since(start), err
}

// mustWork writes and reads.
func (o *outage) mustWork(fill byte) {
	o.t.Helper()
	if _, err := o.write(fill); err != nil {
		o.t.Errorf("write: %v", err)
	}
	got := make([]byte, 4096)
	if _, err := o.nbd.ReadAt(got, 0); err != nil || got[17] != fill {
		o.t.Errorf("read: %#x, %v; want %#x", got[17], err, fill)
	}
}

// mustFail writes, and wants EIO at once. A busy machine may delay one write,
// but hardly five; a write that waits takes a second at least.
func (o *outage) mustFail() {
	o.t.Helper()
	for range 5 {
		took, err := o.write(0xbb)
		if !errors.Is(err, syscall.EIO) {
			o.t.Errorf("write: %v after %v, want EIO", err, took)
		}
		if took < time.Second {
			return
		}
	}
	o.t.Error("no write failed at once")
}

func (o *outage) remap() error {
	_, err := o.client.API.Remap(o.t.Context(), &controlpb.RemapRequest{Device: o.device})
	return err
}

func (o *outage) awaitConnected() {
	o.t.Helper()
	eventually(o.t, 2*enough, "the session is connected", func() bool {
		l, err := o.client.API.ListSessions(o.t.Context(), &controlpb.ListRequest{})
		return err == nil && len(l.Sessions) == 1 && l.Sessions[0].State == "connected"
	})
}

func TestLossQueueCarriesAServerRestart(t *testing.T) {
	l := lab.New(t)
	l.Image("fio.img", 64<<20)
	dir := l.Image("history.img", 16<<20)
	s := l.Server(lab.ServerOptions{SearchPath: dir, Addrs: []string{"127.0.0.1", "127.0.0.2"}, Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	verified := l.Map(c, "fio.img", s, withLoss("queue:30s"))
	judged := l.Map(c, "history.img", s, withLoss("queue:30s"))
	outages := pick(2, 20)
	f := startFio(t, time.Duration(outages)*2500*time.Millisecond, "64m", "16m", c.URI(verified.Name))
	w := startLoad(t, c, judged.Name, loadOptions{})
	var pauses []time.Duration
	for range outages {
		w.awaitProgress(100)
		at := time.Now()
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(300 * time.Millisecond)
		if err := s.Start(); err != nil {
			t.Fatal(err)
		}
		w.awaitProgress(100)
		pauses = append(pauses, w.pause(at))
	}
	r := f.wait()
	w.stop()
	t.Logf("pauses by outages of 0.3 s and the start of a server: %s", figures(pauses))
	t.Logf("no error in %d judged and %d verified requests", w.ops.Load(), r.Requests)
}

func TestLossFailEndsRequestsAtOnce(t *testing.T) {
	o := newOutage(t, "fail")
	o.mustWork(1)
	ended := make(chan time.Time, 1)
	go func() {
		for {
			if _, err := o.write(2); err != nil {
				ended <- time.Now()
				return
			}
		}
	}()
	time.Sleep(20 * time.Millisecond)
	o.kill()
	at := time.Now()
	took := max(0, (<-ended).Sub(at))
	if took > 3*time.Second { // a heartbeat would notice later
		t.Errorf("the first request failed %v after the kill", took)
	}
	o.awaitState("closed")
	o.mustFail()
	t.Logf("the first error came %v after the kill", took.Round(time.Millisecond))
	o.start()
	o.awaitState("open")
	o.mustWork(3) // on the same NBD connection, without a remap
}

func TestLossQueueEndsWithItsTime(t *testing.T) {
	o := newOutage(t, "queue:1s")
	o.mustWork(1)
	at := time.Now()
	o.kill()
	_, err := o.write(2)
	took := time.Since(at)
	if !errors.Is(err, syscall.EIO) || took < time.Second || took > enough {
		t.Errorf("the write that waited: %v after %v, want EIO after 1 s", err, took)
	}
	t.Logf("a request failed after %v of loss=queue:1s", took.Round(time.Millisecond))
	o.mustFail()
	o.start()
	o.awaitConnected()
	time.Sleep(700 * time.Millisecond) // longer than the pause between tries to open
	if d := o.awaitState("closed"); d.LastError == "" {
		t.Error("the closed device does not say why")
	}
	o.mustFail()
	if err := o.remap(); err != nil {
		t.Fatalf("remap: %v", err)
	}
	o.awaitState("open")
	o.mustWork(3)
}

func TestAnImageThatShrankStaysClosedForThoseWhoWaited(t *testing.T) {
	o := newOutage(t, "queue:30s")
	o.mustWork(1)
	o.kill()
	o.awaitState("closed")
	if err := os.Truncate(o.image, 8<<20); err != nil {
		t.Fatal(err)
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := o.write(2)
		waiting <- err
	}()
	o.start()
	if err := <-waiting; !errors.Is(err, syscall.EIO) {
		t.Errorf("the write that waited ends with %v, want EIO", err)
	}
	o.givenUp("shrank")
	if err := o.remap(); err != nil {
		t.Fatalf("remap: %v", err)
	}
	o.mustWork(3)
}

func TestAnImageThatShrankOpensWhenNobodyWaited(t *testing.T) {
	o := newOutage(t, "fail")
	o.mustWork(1)
	o.kill()
	o.awaitState("closed")
	if err := os.Truncate(o.image, 8<<20); err != nil {
		t.Fatal(err)
	}
	o.start()
	o.awaitState("open")
	o.mustWork(2)
}

func TestAnImageThatIsBackAfterItsServer_IsWaitedFor(t *testing.T) {
	o := newOutage(t, "queue:60s")
	o.mustWork(1)
	o.kill()
	hidden := o.image + ".away"
	if err := os.Rename(o.image, hidden); err != nil {
		t.Fatal(err)
	}
	o.start()
	o.awaitConnected()
	eventually(t, enough, "the device says why it is closed", func() bool {
		return strings.Contains(o.awaitState("closed").LastError, "no such file")
	})
	if err := o.remap(); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("remap says %v, want that there is no such file", err)
	}
	if err := os.Rename(hidden, o.image); err != nil {
		t.Fatal(err)
	}
	o.mustWork(3)
}

// givenUp: the server is there, and the device is closed all the same.
func (o *outage) givenUp(why string) {
	o.t.Helper()
	o.awaitConnected()
	eventually(o.t, enough, "the device says why it is closed", func() bool {
		return strings.Contains(o.awaitState("closed").LastError, why)
	})
	o.mustFail()
}
