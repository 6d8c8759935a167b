package server

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// lasting is a plugin whose devices another process can go on with.
func lasting() *memory {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	return mem
}

// handOver calls HandOver; the error comes on the channel.
func (r *rig) handOver() <-chan error {
	done := make(chan error, 1)
	go func() {
		_, _, err := r.server.HandOver(r.t.Context())
		done <- err
	}()
	return done
}

// awaitConnected waits until the session has a path again.
func (i *initiator) awaitConnected() {
	i.t.Helper()
	for end := time.Now().Add(10 * time.Second); !i.session.Connected(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			i.t.Fatal("the session is not connected again")
		}
	}
}

// openAgain opens a device after a hand-over. The session may not have noticed yet that
// its paths are closed: the first tries are lost with them.
func (i *initiator) openAgain(path string) rnbdwire.OpenRspFields {
	i.t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		dev, err := i.open(path, blk.ReadWrite)
		switch {
		case err == nil:
			return dev
		case time.Now().After(end):
			i.t.Fatalf("open after a hand-over: %v", err)
		}
	}
}

func TestE035_E036_HandOverWaitsForRequestsOfAClientThatHoldsBack(t *testing.T) {
	mem := lasting()
	disk := mem.add("vol", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s")
	dev, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	news := i.listen(0)
	r.parked("s")
	disk.hung.Store(true)
	read := i.start(true, 512, ioMessage(dev.DeviceID, blk.Read, 0, 0, 512))
	for len(mem.requests()) == 0 {
		time.Sleep(time.Millisecond)
	}
	left := r.handOver()
	x := await(t, news)
	if x.Kind != rnbdwire.EventHandOver || x.Sectors != uint64(HandOverGrace.Milliseconds()) {
		t.Fatalf("E-035: told %+v, %v", x.EventRspFields, x.err)
	}
	i.ask(rnbdwire.EventFields{Seen: x.Number, Holds: true})
	r.parked("s")
	disk.hung.Store(false)
	if errno := i.await(read); errno != blk.OK {
		t.Errorf("E-036: the request in flight ends with errno %d", errno)
	}
	must(t, await(t, left))
	if n := disk.closes.Load(); n != 1 {
		t.Errorf("the disk was closed %d times: another process could not open it", n)
	}
	if n := r.server.Devices(); n != 0 {
		t.Errorf("%d devices are open", n)
	}
	must(t, r.server.Serve(r.server.cfg.Listen))
	dev = i.openAgain("vol")
	if errno := i.await(i.start(true, 512, ioMessage(dev.DeviceID, blk.Read, 0, 0, 512))); errno != blk.OK {
		t.Errorf("read: errno %d", errno)
	}
}

func TestE037_HandOverIsCalledOffIfRequestsDoNotEnd(t *testing.T) {
	mem := lasting()
	disk := mem.add("vol", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s")
	dev, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	news := i.listen(0)
	r.parked("s")
	disk.hung.Store(true)
	read := i.start(true, 512, ioMessage(dev.DeviceID, blk.Read, 0, 0, 512))
	for len(mem.requests()) == 0 {
		time.Sleep(time.Millisecond)
	}
	left := r.handOver()
	x := await(t, news)
	news = i.ask(rnbdwire.EventFields{Seen: x.Number, Holds: true})
	if err := await(t, left); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("error %v, want EBUSY", err)
	}
	if x := await(t, news); x.Kind != rnbdwire.EventHandOver || x.Sectors != 0 {
		t.Errorf("E-037: told %+v, %v", x.EventRspFields, x.err)
	}
	disk.hung.Store(false)
	if errno := i.await(read); errno != blk.OK {
		t.Errorf("errno %d: the session has not gone on", errno)
	}
}

// The kernel's client asks for no news, and sends requests up to the end. Those in
// flight are lost with their paths, which it connects again.
func TestE038_HandOverDoesNotWaitForClientsThatDoNotListen(t *testing.T) {
	mem := lasting()
	mem.add("vol", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s")
	_, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	must(t, await(t, r.handOver()))
	must(t, r.server.Serve(r.server.cfg.Listen))
	i.openAgain("vol")
}

// A client of an earlier version asks for news and passes over this kind.
func TestE011_E038_HandOverWithAClientThatDoesNotKnowIt(t *testing.T) {
	mem := lasting()
	disk := mem.add("vol", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s")
	dev, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	news := i.listen(0)
	r.parked("s")
	disk.hung.Store(true)
	i.start(true, 512, ioMessage(dev.DeviceID, blk.Read, 0, 0, 512))
	for len(mem.requests()) == 0 {
		time.Sleep(time.Millisecond)
	}
	left := r.handOver()
	i.listen(await(t, news).Number)
	time.AfterFunc(100*time.Millisecond, func() { disk.hung.Store(false) }) // while its path closes
	must(t, await(t, left))
}

// A hand-over stops at the first step that fails. The server goes on, or serves again
// after Serve, and clients find their devices, also after the loss of all paths.
func TestHandOver_StepFails(t *testing.T) {
	for name, step := range map[string]struct {
		fail   func(r *rig, disk *memDisk, i *initiator, dev uint32) (undo func())
		closed bool // Serve must follow
	}{
		"it may not leave": {func(r *rig, _ *memDisk, _ *initiator, _ uint32) func() {
			d := r.server.openDevices()[0]
			d.retired.Add(1)
			return func() { d.retired.Add(-1) }
		}, false},
		"sessions do not end": {func(r *rig, disk *memDisk, i *initiator, dev uint32) func() { // of a client that does not listen
			disk.hung.Store(true)
			i.start(true, 512, ioMessage(dev, blk.Read, 0, 0, 512))
			for len(r.mem.requests()) == 0 {
				time.Sleep(time.Millisecond)
			}
			return func() { disk.hung.Store(false) }
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			mem := lasting()
			disk := mem.add("vol", 1<<20)
			r := newRig(t, mem)
			i := r.connect("s")
			dev, err := i.open("vol", blk.ReadWrite)
			must(t, err)
			undo := step.fail(r, disk, i, dev.DeviceID)
			_, closed, err := r.server.HandOver(t.Context())
			undo()
			if err == nil || closed != step.closed {
				t.Fatalf("closed %t, %v", closed, err)
			}
			if closed {
				must(t, r.server.Serve(r.server.cfg.Listen))
			} else if errno := i.await(i.start(true, 512, ioMessage(dev.DeviceID, blk.Read, 0, 0, 512))); errno != blk.OK {
				t.Errorf("read: errno %d", errno)
			}
			for range 2 { // all paths are lost, twice
				if closed || r.server.Devices() == 0 {
					dev = i.openAgain("vol")
				}
				if errno := i.await(i.start(true, 512, ioMessage(dev.DeviceID, blk.Read, 0, 0, 512))); errno != blk.OK {
					t.Errorf("read: errno %d", errno)
				}
				must(t, await(t, r.handOver()))
				must(t, r.server.Serve(r.server.cfg.Listen))
				closed = true
			}
		})
	}
}

func TestHandOverIsRefusedWhereItWouldLoseWrites(t *testing.T) {
	mem := newMemory()
	mem.add("vol", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s")
	dev, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	if _, closed, err := r.server.HandOver(t.Context()); closed || !errors.Is(err, syscall.EBUSY) {
		t.Errorf("closed %t, %v", closed, err)
	}
	must(t, i.closeDevice(dev.DeviceID))
	must(t, await(t, r.handOver()))
}

func TestStandby(t *testing.T) {
	mem := lasting()
	mem.add("vol", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.Standby = true })
	if len(r.server.boundAddresses()) != 0 || r.server.Devices() != 0 {
		t.Error("it listens")
	}
	if _, _, err := r.server.HandOver(t.Context()); err == nil {
		t.Error("a server that does not serve hands over")
	}
	must(t, r.server.Serve(r.server.cfg.Listen))
	_, err := r.connect("s").open("vol", blk.ReadWrite)
	must(t, err)
	if n := r.server.Devices(); n != 1 {
		t.Errorf("%d devices", n)
	}
}
