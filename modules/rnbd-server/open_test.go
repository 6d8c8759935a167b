package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// soon fails the test if f does not return within a time that no wait for a thing
// that hangs fits into.
func soon(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Fatalf("%s takes more than 5 s", what)
	}
}

// A plugin that does not open or close one device holds up nothing but that.
func TestAnOpenThatHangsHoldsUpItsNodeOnly(t *testing.T) {
	for _, tt := range []struct {
		name string
		hang func(d *memDisk, gate chan struct{})
	}{
		{"opening hangs", func(d *memDisk, gate chan struct{}) { d.opening = gate }},
		{"closing hangs", func(d *memDisk, gate chan struct{}) { d.closing = gate }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mem := newMemory()
			slow := mem.add("slow", 1<<20)
			mem.add("a", 1<<20)
			mem.add("b", 1<<20)
			r := newRig(t, mem)
			first, second := r.connect("first"), r.connect("second")
			old, err := first.open("a", blk.ReadWrite)
			must(t, err)
			gate := make(chan struct{})
			opened := sync.OnceFunc(func() { close(gate) })
			t.Cleanup(opened)
			tt.hang(slow, gate)
			go func() {
				if dev, err := first.open("slow", blk.ReadWrite); err == nil {
					_ = first.closeDevice(dev.DeviceID)
				}
			}()
			eventually(t, "the device that hangs has its turn", func() bool { return mem.opened() == 2 })
			for _, i := range []*initiator{first, second} {
				soon(t, "OPEN and CLOSE of another device", func() {
					dev, err := i.open("b", blk.ReadWrite)
					must(t, err)
					must(t, i.closeDevice(dev.DeviceID))
				})
			}
			soon(t, "CLOSE of a device that was open", func() { must(t, first.closeDevice(old.DeviceID)) })
			soon(t, "OPEN of that device elsewhere", func() {
				_, err := second.open("a", blk.ReadWrite)
				must(t, err)
			})
			opened()
			eventually(t, "the device that hung opens for the next one", func() bool {
				_, err := second.open("slow", blk.ReadWrite)
				return err == nil
			})
		})
	}
}

// hungNames makes a rig with a file system that does not answer for names with
// a folder "hung".
func hungNames(t *testing.T) (r *rig, answer func()) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "hung"), 0o700))
	mem := newMemory()
	mem.names = plugin.NamesPath
	for n := range 3 * maxSessionLookUps {
		for _, folder := range []string{"", "hung/"} {
			name := fmt.Sprintf("%svol%d", folder, n)
			must(t, os.WriteFile(filepath.Join(dir, name), make([]byte, 4096), 0o600))
			mem.add(name, 4096)
		}
	}
	gate := make(chan struct{})
	answer = sync.OnceFunc(func() { close(gate) })
	t.Cleanup(answer)
	return newRig(t, mem, func(c *Config) {
		c.SearchPath, c.lookUpTimeout, c.QueueDepth = dir, 200*time.Millisecond, 64
		c.lookUp = func(j jail, session, name string) (*node, error) {
			if strings.HasPrefix(name, "hung/") {
				<-gate
			}
			return j.openName(session, name)
		}
	}), answer
}

// A name that does not resolve keeps a place of its session; other names do until all
// places are taken, and other sessions always.
func TestNamesThatDoNotResolve(t *testing.T) {
	r, answer := hungNames(t)
	first, second := r.connect("first"), r.connect("second")
	open := func(i *initiator, name string) (err error) {
		soon(t, "OPEN of "+name, func() { _, err = i.open(name, blk.ReadOnly) })
		return err
	}
	if err := open(first, "hung/vol0"); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("a file system that does not answer: %v, want ETIMEDOUT", err)
	}
	must(t, open(first, "vol0"))
	var wg sync.WaitGroup
	for n := range 2 * maxSessionLookUps {
		wg.Go(func() {
			_, err := first.open(fmt.Sprintf("hung/vol%d", n+1), blk.ReadOnly)
			if !errors.Is(err, syscall.ETIMEDOUT) && !errors.Is(err, syscall.EBUSY) {
				t.Errorf("OPEN number %d: %v, want ETIMEDOUT or EBUSY", n, err)
			}
		})
	}
	soon(t, "OPEN of many names that hang", wg.Wait)
	if err := open(first, "vol1"); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("OPEN without a place left: %v, want EBUSY", err)
	}
	if n := len(r.server.lookUps); n != maxSessionLookUps {
		t.Errorf("one session has %d places, want %d", n, maxSessionLookUps)
	}
	must(t, open(first, "vol0")) // is open already
	must(t, open(second, "vol1"))
	answer()
	eventually(t, "all places are free", func() bool { return len(r.server.lookUps) == 0 })
	must(t, open(first, "vol1"))
	must(t, open(first, "hung/vol0"))
}

// A server ends in time while clients wait for names.
func TestServerClosesWhileNamesDoNotResolve(t *testing.T) {
	r, _ := hungNames(t)
	r.server.cfg.lookUpTimeout = time.Minute
	i := r.connect("s")
	i.openAsync("hung/vol0")
	eventually(t, "the name is looked up", func() bool { return len(r.server.lookUps) == 1 })
	r.closed = true
	soon(t, "close", func() { must(t, r.server.Close(t.Context())) })
}

// Whatever comes at the same time, a node has one writer, and nothing is left of
// those that were refused.
func TestOpensOfOneNodeAtTheSameTime(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	r := newRig(t, mem)
	var clients []*initiator
	for n := range 4 {
		clients = append(clients, r.connect(fmt.Sprint("s", n)))
	}
	var writer sync.Mutex
	var wg sync.WaitGroup
	for _, i := range clients {
		wg.Go(func() {
			for range 25 {
				dev, err := i.open("a", blk.ReadWrite)
				if errors.Is(err, syscall.EPERM) {
					continue
				}
				if err != nil || !writer.TryLock() {
					t.Errorf("a second writer, or %v", err)
					return
				}
				if errno := i.rw(dev.DeviceID, blk.Write, 0, make([]byte, 512)); errno != blk.OK {
					t.Errorf("write: errno %d", errno)
				}
				writer.Unlock()
				if err := i.closeDevice(dev.DeviceID); err != nil {
					t.Errorf("close: %v", err)
				}
			}
		})
	}
	soonest := time.Now()
	wg.Wait()
	t.Logf("took %s", time.Since(soonest))
	s := r.server
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nodes.mu.Lock()
	defer s.nodes.mu.Unlock()
	if len(s.writers) != 0 || len(s.devices) != 0 || len(s.nodes.nodes) != 0 {
		t.Errorf("left behind: %d writers, %d devices, %d turns", len(s.writers), len(s.devices), len(s.nodes.nodes))
	}
}

// One name that is asked for many times at once has one id.
func TestOpensOfOneNameAtTheSameTime(t *testing.T) {
	mem := newMemory()
	d := mem.add("a", 1<<20)
	d.opening = make(chan struct{})
	r := newRig(t, mem)
	i := r.connect("s")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			dev, err := i.open("a", blk.ReadWrite)
			if err != nil || dev.DeviceID != 0 {
				t.Errorf("id %d, %v", dev.DeviceID, err)
			}
		})
	}
	eventually(t, "all are under way", func() bool { return r.adminUnderWay(0) == 8 })
	close(d.opening)
	wg.Wait()
	if n := mem.opened(); n != 1 {
		t.Errorf("the plugin was asked %d times", n)
	}
}

// A device that one client has opened by a plugin of its choice is shared as it is:
// that plugin is shown the memory of the next client, whatever plugin an OPEN
// without a choice would take.
func TestASharedDeviceServesASessionThatWouldHaveTakenAnotherPlugin(t *testing.T) {
	mem := newMemory()
	mem.names = plugin.NamesPath
	mem.add("vol", 1<<20).data[0] = 7
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "vol"), make([]byte, 1<<20), 0o600))
	r := newRig(t, mem, func(c *Config) {
		c.SearchPath, c.Rules = dir, nil
		c.Plugins = []PluginConfig{{Name: "usual", Path: "in process"}, {Name: "other", Path: "in process"}}
	})
	first, second := r.connect("first"), r.connect("second")
	msg, rsp := make([]byte, rnbdwire.OpenAsSize), make(rnbdwire.OpenRsp, rnbdwire.OpenRspSize)
	must(t, rnbdwire.OpenAsFields{OpenFields: rnbdwire.OpenFields{AccessMode: uint8(blk.ReadOnly), Name: "vol"}, IOMode: "other"}.Put(msg))
	must(t, first.session.AdminRead(first.ctx(), msg, rsp))
	got, err := second.open("vol", blk.ReadOnly)
	must(t, err)
	data := make([]byte, 4096)
	if e := second.rw(got.DeviceID, blk.Read, 0, data); e != blk.OK || data[0] != 7 {
		t.Errorf("read of the second client: %v, first byte %d, want 7", e, data[0])
	}
}

// A client whose CLOSE was lost opens the device again while its old requests are in
// the plugin. They would overwrite what it writes then, so the OPEN waits for them.
func TestOpenBesideRequestsOfTheMappingBefore(t *testing.T) {
	mem := newMemory()
	mem.add("vol", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s")
	before, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	mem.setHold(true)
	written := i.start(false, 512, ioMessage(before.DeviceID, blk.Write, 0, 0, 512))
	eventually(t, "the plugin has the write", func() bool { return len(mem.requests()) == 1 })

	brief, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := r.server.openMapping(brief, r.server.sessions[0].Load(), "vol", "", blk.ReadWrite); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("OPEN beside a request that does not end: %v, want EBUSY", err)
	}
	opened := make(chan error, 1)
	go func() { _, err := i.open("vol", blk.ReadWrite); opened <- err }()
	select {
	case err := <-opened:
		t.Fatalf("OPEN does not wait for the request: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	mem.setHold(false)
	if errno := i.await(written); errno != blk.OK {
		t.Errorf("the write: errno %d", errno)
	}
	select {
	case err := <-opened:
		must(t, err)
	case <-time.After(20 * time.Second):
		t.Fatal("OPEN does not return after the end of the request")
	}
}
