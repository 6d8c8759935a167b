package faults

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

// slowTarget is a way of a server to a slow disk.
type slowTarget struct {
	name, plugin string
	// serve returns the search path and the device's name.
	serve func(*slowdisk.Disk) (search, device string)
}

var slowTargets = []slowTarget{
	{"blockio on a loop device", "blockio", func(d *slowdisk.Disk) (string, string) { return "", d.Loop() }},
	{"fileio on a file", "fileio", func(d *slowdisk.Disk) (string, string) {
		return filepath.Dir(d.Path()), filepath.Base(d.Path())
	}},
}

// load returns a load that the target can bear. Reads of files go through the
// page cache, and FUSE, unlike file systems on disks, leaves pages in it that
// were read ahead while an asynchronous direct write of them was on its way. So
// the file is read at the end only, from the medium.
func (s slowTarget) load() loadOptions {
	o := loadOptions{workers: 8, blocks: 16, maxBlocks: 4}
	if s.plugin == "fileio" {
		o.reads = never
	}
	return o
}

// finish ends a load and judges the content of the medium.
func (s slowTarget) finish(t *testing.T, w *load, disk *slowdisk.Disk) {
	t.Helper()
	w.end()
	for b := range w.h.Blocks() {
		if err := w.h.Check(b, w.h.Reading(b), disk.Bytes(int64(b)*loadBlock, loadBlock)); err != nil {
			t.Errorf("medium: %v", err)
		}
	}
}

// TestKillingAnIOPluginWithWritesHeldInTheDisk kills the plugin while its
// writes are on their way into the medium: whatever comes later, from whichever
// process, must wait for them.
func TestKillingAnIOPluginWithWritesHeldInTheDisk(t *testing.T) {
	for _, target := range slowTargets {
		t.Run(target.name, func(t *testing.T) {
			disk := slowdisk.New(t, 4<<20)
			search, device := target.serve(disk)
			l := lab.New(t)
			s := l.Server(lab.ServerOptions{SearchPath: search, Plugins: []string{target.plugin}, Extra: []string{"--crash-limit", "1000"}})
			c := l.Client(lab.ClientOptions{})
			d := l.Map(c, device, s)
			w := startLoad(t, c, d.Name, target.load())
			disk.SetDelay(2 * time.Millisecond)
			for range pick(3, 10) {
				w.awaitProgress(50)
				killWhileHeld(t, s, disk, w, target.plugin, device)
			}
			target.finish(t, w, disk)
		})
	}
}

func killWhileHeld(t *testing.T, s *lab.Server, disk *slowdisk.Disk, w *load, plugin, device string) {
	t.Helper()
	disk.HoldWrites()
	seen := allHeld(disk, w)
	pid := killPlugin(t, s, plugin)
	killed := time.Now()
	eventually(t, enough, "the server sees the death", func() bool {
		return serverDevice(t, s, device).State != "open"
	})
	time.Sleep(20 * time.Millisecond)
	answered := w.ops.Load()
	time.Sleep(300 * time.Millisecond)
	if n := w.ops.Load(); n != answered {
		t.Errorf("%d requests were answered while writes of the dead plugin were held", n-answered)
	}
	if n := len(disk.History()); n != seen {
		t.Errorf("%d writes reached the disk while those of the dead plugin were held", n-seen)
	}
	disk.Release()
	eventually(t, enough, "another process serves the device", func() bool {
		p, err := s.Plugin(plugin)
		return err == nil && p.Pid != 0 && int(p.Pid) != pid && serverDevice(t, s, device).State == "open"
	})
	w.awaitProgress(50)
	t.Logf("the disk was held for 300 ms; device %s %v after the kill", serverDevice(t, s, device).State, time.Since(killed).Round(time.Millisecond))
	inOrder(t, disk.History(), killed)
}

// inOrder fails the test if a write that arrived before the time at was applied
// after the arrival of a later one to the same place.
func inOrder(t *testing.T, history []slowdisk.Write, at time.Time) {
	t.Helper()
	later := 0
	for _, n := range history {
		if !n.Arrived.After(at) {
			continue
		}
		later++
		for _, o := range history {
			overlap := o.Off < n.Off+int64(n.Len) && n.Off < o.Off+int64(o.Len)
			if o.Arrived.Before(at) && overlap && (o.Applied.IsZero() || o.Applied.After(n.Arrived)) {
				t.Errorf("an old write of %d bytes at %d was applied %v after a new one had arrived", o.Len, o.Off, o.Applied.Sub(n.Arrived))
			}
		}
	}
	if later == 0 {
		t.Error("nothing was written after that")
	}
}

// TestKillingTheServerWithWritesHeldInTheDisk starts a server anew while writes
// of the old one's plugin are on their way into the medium. Devices are opened
// in another order than before, and the fence must hold nevertheless.
func TestKillingTheServerWithWritesHeldInTheDisk(t *testing.T) {
	for _, target := range slowTargets {
		t.Run(target.name, func(t *testing.T) {
			other, disk := slowdisk.New(t, 1<<20), slowdisk.New(t, 4<<20)
			search, device := target.serve(disk)
			l := lab.New(t)
			s := l.Server(lab.ServerOptions{SearchPath: search, Plugins: []string{target.plugin}})
			c := l.Client(lab.ClientOptions{})
			first := ""
			if target.plugin == "blockio" { // has number 0 at first, and is not opened by the next
				first = l.Map(c, other.Loop(), s, func(r *controlpb.MapRequest) { r.Session = "first" }).Name
			}
			d := l.Map(c, device, s, withLoss("queue:60s"))
			w := startLoad(t, c, d.Name, target.load())
			w.awaitProgress(50)
			disk.HoldWrites()
			seen := allHeld(disk, w)
			if err := s.Kill(); err != nil {
				t.Fatal(err)
			}
			killed := time.Now()
			if first != "" {
				if err := c.Unmap(first, true); err != nil {
					t.Fatal(err)
				}
			}
			if err := s.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
			if n := len(disk.History()); n != seen {
				t.Errorf("%d writes reached the disk while those of the dead server were held", n-seen)
			}
			disk.Release()
			w.awaitProgress(100)
			inOrder(t, disk.History(), killed)
			target.finish(t, w, disk)
		})
	}
}

// allHeld waits until every worker has come to a write that the disk holds, and
// returns how many writes the disk has seen. It judges by looks, not by time:
// where nobody gets to run, nobody looks.
func allHeld(disk *slowdisk.Disk, w *load) (seen int) {
	disk.WaitHeld(1)
	ops := int64(-1)
	for quiet := 0; quiet < 100; quiet++ {
		time.Sleep(10 * time.Millisecond)
		if n, o := len(disk.History()), w.ops.Load(); n != seen || o != ops {
			seen, ops, quiet = n, o, 0
		}
	}
	return seen
}
