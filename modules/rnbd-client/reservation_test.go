package client

import (
	"context"
	"errors"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// twoServers are two targets. The OPEN of the first hangs, with a map of it
// under way; the second works, and c reaches it as "10.0.0.1%other".
func twoServers(t *testing.T) (slow, fast *target, c *Client, mapped <-chan error) {
	t.Helper()
	slow, fast = newTarget(t, 1<<20), newTarget(t, 1<<20)
	c = slow.newClient(func(cfg *Config) {
		cfg.Fabrics["other"] = fast.net.Device("clt")
		cfg.MapTimeout = 2 * time.Minute
	})
	slow.set(func() { slow.holdOpen = true })
	mapped = async(func() error {
		_, err := c.Map(context.Background(), MapRequest{Name: "slow", Path: "vol", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Frontend: "none"})
		return err
	})
	eventually(t, "OPEN is there", slow.hasOpen)
	return slow, fast, c, mapped
}

func onOther(path string) MapRequest {
	return MapRequest{Path: path, Session: "other", Paths: []string{"10.0.0.1%other"}, Mode: blk.ReadWrite, Frontend: "none"}
}

// A map with a silent server does not delay maps and unmaps of devices of
// another server.
func TestMapAndUnmapBesideAMapThatHangs(t *testing.T) {
	slow, _, c, mapped := twoServers(t)
	for _, force := range []bool{false, true} {
		d, err := c.Map(t.Context(), onOther("vol"))
		must(t, err)
		start := time.Now()
		must(t, c.Unmap(t.Context(), d.name, force))
		if took := time.Since(start); took > 20*time.Second {
			t.Errorf("forced %t: the unmap took %s", force, took)
		}
	}
	slow.answerOpen()
	if err := soon(t, "the map", mapped); err != nil {
		t.Error(err)
	}
}

// The name and path of a map under way are not given to another.
func TestMapTakesItsPlaceBeforeItIsOpen(t *testing.T) {
	slow, _, c, mapped := twoServers(t)
	r := onOther("vol")
	r.Name = "slow"
	if _, err := c.Map(t.Context(), r); !errors.Is(err, syscall.EEXIST) {
		t.Errorf("its name: %v, want EEXIST", err)
	}
	if _, err := c.Map(t.Context(), MapRequest{Path: "vol", Paths: []string{"10.0.0.1"}, Frontend: "none"}); !errors.Is(err, syscall.EEXIST) {
		t.Errorf("its path: %v, want EEXIST", err)
	}
	d, err := c.Map(t.Context(), onOther("vol"))
	must(t, err)
	if d.index != 1 || d.name != "rnbd1" {
		t.Errorf("the next is %s at %d", d.name, d.index)
	}
	slow.answerOpen()
	if err := soon(t, "the map", mapped); err != nil {
		t.Error(err)
	}
}

// An unmap of a device that is being mapped is refused, and gives the map up if it
// is forced.
func TestUnmapOfADeviceThatIsBeingMapped(t *testing.T) {
	slow, _, c, mapped := twoServers(t)
	if err := c.Unmap(t.Context(), "slow", false); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("unmap: %v, want EBUSY", err)
	}
	must(t, c.Unmap(t.Context(), "slow", true))
	if err := soon(t, "the map", mapped); !errors.Is(err, syscall.ECANCELED) {
		t.Errorf("map: %v, want ECANCELED", err)
	}
	if err := c.Unmap(t.Context(), "slow", true); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("unmap again: %v, want ENOENT", err)
	}
	slow.set(func() { slow.holdOpen = false })
	slow.answerOpen()
	_, err := c.Map(t.Context(), MapRequest{Name: "slow", Path: "vol", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Frontend: "none"})
	must(t, err)
}

// A forced unmap gives one up that waits for a front end.
func TestForcedUnmapAfterOneThatHangs(t *testing.T) {
	_, c, d, dir := mapShown(t)
	must(t, dir.set("hold-remove", ""))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	unmapped := async(func() error { return c.Unmap(ctx, d.name, false) })
	eventually(t, "the front end is asked", func() bool { return len(dir.told()) > 1 })
	if err := c.Unmap(t.Context(), d.name, false); !errors.Is(err, syscall.EALREADY) {
		t.Errorf("a second one: %v, want EALREADY", err)
	}
	must(t, c.Unmap(t.Context(), d.name, true))
	if err := soon(t, "the first unmap", unmapped); err == nil {
		t.Error("the unmap that was given up succeeded")
	}
}

// Maps of one session wait for the one that opens it.
func TestMapsOfOneSessionShareIt(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	var mapped []<-chan error
	for _, path := range []string{"a", "b", "c", "d"} {
		mapped = append(mapped, async(func() error { _, err := s.mapIn(c, path, ""); return err }))
	}
	for _, m := range mapped {
		if err := soon(t, "a map", m); err != nil {
			t.Error(err)
		}
	}
	if n := s.sessions.Load(); n != 1 {
		t.Errorf("%d sessions", n)
	}
}

// Whether a path is open is asked, by OPENs that were given up, while other devices
// join and leave their sessions: the race detector looks on.
func TestOpensPathBesideMaps(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	d, err := s.mapIn(c, "vol", "")
	must(t, err)
	stop := make(chan struct{})
	asked := async(func() error {
		for {
			select {
			case <-stop:
				return nil
			default:
			}
			if !c.opensPath(d.session, "vol") || c.opensPath(d.session, "none") {
				return errors.New("opensPath is wrong")
			}
			time.Sleep(10 * time.Microsecond)
		}
	})
	for range 20 {
		other, err := s.mapIn(c, "other", "")
		must(t, err)
		must(t, c.Unmap(t.Context(), other.name, true))
	}
	close(stop)
	if err := soon(t, "the questions", asked); err != nil {
		t.Error(err)
	}
}

// After a restart a disk of a server that answers does not wait behind one of a
// server that is silent.
func TestRestore_BesideASilentServer(t *testing.T) {
	slow, fast := newTarget(t, 1<<20), newTarget(t, 1<<20)
	state := filepath.Join(t.TempDir(), "client.devices")
	disk := func(name, session, path string) savedDevice {
		d := savedSample()
		d.Name, d.Identity, d.Location = name, name, "/dev/"+name
		d.Session, d.Paths, d.Frontend = savedName(session), []string{path}, "test"
		d.Settings = map[string]string{"dir": t.TempDir()}
		return d
	}
	must(t, writeState(state, &savedState{Version: stateVersion, Devices: []savedDevice{disk("slow", "one", "10.0.0.1"), disk("fast", "two", "10.0.0.1%other")}}))
	slow.set(func() { slow.holdOpen = true })
	c := slow.newClient(withTestFront(t), func(cfg *Config) {
		cfg.Fabrics["other"] = fast.net.Device("clt")
		cfg.StateFile = state
		cfg.MapTimeout = 2 * time.Minute
	})
	start := time.Now()
	eventually(t, "the disk of the other server is served", func() bool { _, err := c.Device("fast"); return err == nil })
	if took := time.Since(start); took > 40*time.Second {
		t.Errorf("it took %s", took)
	}
	eventually(t, "the silent server is asked", slow.hasOpen)
	must(t, c.Unmap(t.Context(), "slow", true))
	if _, err := c.Device("slow"); err == nil {
		t.Error("the disk that is given up is mapped")
	}
	slow.answerOpen()
}

// A client that closes gives up maps under way.
func TestClose_GivesUpAMap(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.clientToClose(func(cfg *Config) { cfg.MapTimeout = 2 * time.Minute })
	s.set(func() { s.holdOpen = true })
	mapped := async(func() error { _, err := s.mapIn(c, "vol", ""); return err })
	eventually(t, "OPEN is there", s.hasOpen)
	if err := soon(t, "the close", async(func() error { return c.Close(context.Background()) })); err != nil {
		t.Errorf("close: %v", err)
	}
	if err := soon(t, "the map", mapped); !errors.Is(err, syscall.ECANCELED) {
		t.Errorf("map: %v, want ECANCELED", err)
	}
	if _, err := s.mapIn(c, "vol2", ""); !errors.Is(err, syscall.ESHUTDOWN) {
		t.Errorf("the next map: %v, want ESHUTDOWN", err)
	}
}

// News of a device does not wait for the OPEN of another one.
func TestNewsBesideAnOpenThatHangs(t *testing.T) {
	s := newTarget(t, 1<<20)
	s.features = rnbdwire.FeatureEvents
	c := s.newClient(func(cfg *Config) { cfg.MapTimeout = 2 * time.Minute })
	d, err := s.mapIn(c, "vol", "")
	must(t, err)
	s.set(func() { s.holdOpen = true })
	mapped := async(func() error { _, err := s.mapIn(c, "slow", ""); return err })
	eventually(t, "OPEN is there", s.hasOpen)
	s.tell(rnbdwire.EventRspFields{Kind: rnbdwire.EventResize, Number: 1, DeviceID: d.id.Load(), Sectors: 4096})
	eventually(t, "the new size is there", func() bool { return d.Limits().Size == 4096*512 })
	// News of a device without an answer to its OPEN wait for the answer.
	s.tell(rnbdwire.EventRspFields{Kind: rnbdwire.EventResize, Number: 2, DeviceID: d.id.Load() + 1, Sectors: 8192})
	eventually(t, "the next EVENT waits", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.events) == 1 })
	s.answerOpen()
	if err := soon(t, "the map", mapped); err != nil {
		t.Fatal(err)
	}
	slow, err := c.Device("slow")
	must(t, err)
	if got := slow.Limits().Size; got != 8192*512 {
		t.Errorf("size %d, the server told %d before", got, 8192*512)
	}
}
