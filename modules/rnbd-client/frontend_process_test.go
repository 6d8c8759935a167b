package client

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// mapHanging maps path by the test front end. That sends a read, and the server
// holds it.
func (s *target) mapHanging(c *Client, path string) (*Device, frontDir) {
	s.t.Helper()
	dir := frontDir(s.t.TempDir())
	must(s.t, dir.set("read", ""))
	s.set(func() { s.hold = true })
	d, err := s.mapIn(c, path, dir)
	must(s.t, err)
	must(s.t, os.Remove(dir.file("read"))) // the next process sends none
	eventually(s.t, "the read is on the server", func() bool { return d.inFlight() == 1 && s.holds() == 1 })
	return d, dir
}

// holds is how many requests the target does not answer.
func (s *target) holds() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.held)
}

// adds is how often a front end was given the device.
func (d frontDir) adds() (n int) {
	for _, l := range d.told() {
		if strings.HasPrefix(l, "add ") {
			n++
		}
	}
	return n
}

// sourcesLeft counts the sources that the pumps know.
func (c *Client) sourcesLeft() (n int) {
	for _, p := range c.pumps {
		p.pump.Call(func() {
			for _, s := range p.sources {
				if s != nil {
					n++
				}
			}
		})
	}
	return n
}

// retires: the device that was unmapped keeps its memory.
func (c *Client) retires(index uint32) bool {
	c.mapMu.Lock()
	defer c.mapDone()
	return c.retired[index] != nil
}

// killFront kills the process of the test front end.
func (c *Client) killFront(t *testing.T) {
	t.Helper()
	proc, err := c.frontends[0].process()
	must(t, err)
	proc.Kill()
	<-proc.Exited()
}

// A front end that dies with a request of an unmapped device under way on a server
// that hangs comes back at once for the other devices. The request is counted until
// it ends.
func TestFrontend_RestartsBesideRequestsOfAnUnmappedDevice(t *testing.T) {
	for name, unmapFirst := range map[string]bool{"unmapped before": true, "unmapped meanwhile": false} {
		t.Run(name, func(t *testing.T) {
			s := newTarget(t, 1<<20)
			c := s.newClient(withTestFront(t))
			other := newFrontDir(t)
			_, err := s.mapIn(c, "other", other)
			must(t, err)
			d, dir := s.mapHanging(c, "vol")
			if unmapFirst {
				c.unmapByForce(t, d)
				c.killFront(t)
			} else {
				c.killFront(t)
				c.unmapByForce(t, d)
			}
			eventually(t, "the other device is back", func() bool { return other.adds() == 2 })
			if d.inFlight() != 1 {
				t.Errorf("%d requests of the unmapped device are counted, and the server holds one", d.inFlight())
			}
			if unmapFirst && dir.adds() != 1 {
				t.Error("the unmapped device is shown again")
			}
			sources := len(c.pumps)
			eventually(t, "a source is left", func() bool { return c.sourcesLeft() == sources+1 })
			s.releaseAll(blk.OK)
			eventually(t, "the source ends", func() bool { return c.sourcesLeft() == sources })
			eventually(t, "the memory is given back", func() bool { return !c.retires(d.index) })
			eventually(t, "the front end has let go", func() bool { return c.isGone(t, d) })
		})
	}
}

// A device is shown to the next process only when its slots are free. The others are
// shown at once.
func TestFrontend_RestartWaitsForRequestsOfEachDevice(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient(withTestFront(t))
	other := newFrontDir(t)
	_, err := s.mapIn(c, "other", other)
	must(t, err)
	d, dir := s.mapHanging(c, "vol")
	c.killFront(t)
	eventually(t, "the other device is back", func() bool { return other.adds() == 2 })
	time.Sleep(300 * time.Millisecond) // for a process that does not wait
	if dir.adds() != 1 || d.inFlight() != 1 {
		t.Errorf("shown %d times, %d requests are under way", dir.adds(), d.inFlight())
	}
	if d.host.Load() != nil {
		t.Error("a process may send requests for a device whose slots are taken")
	}
	s.releaseAll(blk.OK)
	eventually(t, "the device is back", func() bool { return dir.adds() == 2 })
	if d.inFlight() != 0 {
		t.Errorf("%d requests", d.inFlight())
	}
}

// A client closes in bounded time while its front end waits for a server that hangs.
func TestClose_WhileTheFrontEndWaitsForItsRequests(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.clientToClose(withTestFront(t), func(cfg *Config) { cfg.StateFile = t.TempDir() + "/client.devices" })
	s.mapHanging(c, "vol")
	c.killFront(t)
	c.frontends[0].awaitDeath(t)
	_ = soon(t, "the close", async(func() error { return c.Close(t.Context()) }))
	if n := c.sourcesLeft(); n != 0 {
		t.Errorf("%d sources are left", n)
	}
}

// Nor does a request that never ends keep it.
func TestClose_BesideARequestThatNeverEnds(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.clientToClose(withTestFront(t))
	f, p := c.frontends[0], c.pumps[0]
	orphan := newSource(p, nil, nil, 16)
	orphan.orphaned, orphan.inflight = true, 1
	p.pump.Call(func() {
		orphan.index = uint32(len(p.sources))
		p.sources = append(p.sources, orphan)
	})
	f.orphans.Go(func() { f.awaitOrphan(orphan, make(chan struct{})) })
	if err := soon(t, "the close", async(func() error { return c.Close(t.Context()) })); err != nil {
		t.Errorf("close: %v", err)
	}
	if err := soon(t, "the orphan's keeper", async(func() error { f.orphans.Wait(); return nil })); err != nil {
		t.Error(err)
	}
}
