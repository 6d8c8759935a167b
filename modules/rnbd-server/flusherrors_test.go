package server

import (
	"context"
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// onceDescriptor is fdatasync of a description with an error of write-back, which the kernel
// reports once.
type onceDescriptor struct{ errno atomic.Uint32 }

func (o *onceDescriptor) fdatasync(int) error {
	if errno := o.errno.Swap(0); errno != 0 {
		return syscall.Errno(errno)
	}
	return nil
}

// flushRig is a server with a disk on a file and with events.
func flushRig(t *testing.T, more ...netip.AddrPort) (*rig, *memory, *onceDescriptor) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	dir := filesOf(t, mem, "vol")
	r := newRig(t, mem, func(c *Config) {
		c.SearchPath, c.Journal = dir, journal.New(100)
		for _, addr := range more {
			c.Listen = append(c.Listen, Listen{Device: c.Listen[0].Device, Addr: addr})
		}
	})
	own := &onceDescriptor{}
	r.server.fdatasync = own.fdatasync
	return r, mem, own
}

// paths counts the paths of all sessions.
func (r *rig) paths() (n int) {
	for k := range r.server.sessions {
		if sess := r.server.sessions[k].Load(); sess != nil {
			n += len(sess.transport.Paths())
		}
	}
	return n
}

// reopened returns a client in another session, and its device.
func (r *rig) reopened() (*initiator, uint32) {
	r.t.Helper()
	i := r.connect("again")
	vol, err := i.open("vol", blk.ReadWrite)
	must(r.t, err)
	return i, vol.DeviceID
}

// flush sends a flush as the kernel's client does.
func (i *initiator) flush(id uint32) blk.Errno {
	i.t.Helper()
	return i.bare(id, blk.Flush, 0, ^uint64(0), 0, true)
}

// writeFUA writes a sector with FUA.
func (i *initiator) writeFUA(id uint32) blk.Errno {
	i.t.Helper()
	return i.await(i.start(false, 512, ioMessage(id, blk.Write, rnbdwire.FlagFUA, 0, 512)))
}

// A plugin that dies after its fsync has failed takes the error with it. The flush is sent to
// the next process, whose description has no error: it fails by that of the server's.
func TestFlushThatADeadPluginHadFailsByTheServersDescriptor(t *testing.T) {
	for _, x := range []struct {
		name  string
		error syscall.Errno
		start func(i *initiator, id uint32) <-chan int
		want  blk.Errno
	}{
		{"a flush", syscall.EIO, func(i *initiator, id uint32) <-chan int {
			return i.start(true, 0, ioMessage(id, blk.Flush, 0, ^uint64(0), 0))
		}, blk.EIO},
		{"a flush without room", syscall.ENOSPC, func(i *initiator, id uint32) <-chan int {
			return i.start(true, 0, ioMessage(id, blk.Flush, 0, ^uint64(0), 0))
		}, blk.ENOSPC},
		{"a write with FUA", syscall.EIO, func(i *initiator, id uint32) <-chan int {
			return i.start(false, 512, ioMessage(id, blk.Write, rnbdwire.FlagFUA, 0, 512))
		}, blk.EIO},
		{"a write", syscall.EIO, func(i *initiator, id uint32) <-chan int {
			return i.start(false, 512, ioMessage(id, blk.Write, 0, 0, 512))
		}, blk.OK},
		{"without an error", 0, func(i *initiator, id uint32) <-chan int {
			return i.start(true, 0, ioMessage(id, blk.Flush, 0, ^uint64(0), 0))
		}, blk.OK},
	} {
		t.Run(x.name, func(t *testing.T) {
			r, mem, own := flushRig(t)
			i := r.connect("s")
			vol, err := i.open("vol", blk.ReadWrite)
			must(t, err)
			mem.setHold(true)
			done := x.start(i, vol.DeviceID)
			eventually(t, "the plugin has it", func() bool { return len(mem.requests()) == 1 })
			own.errno.Store(uint32(x.error))
			r.process().Kill()
			mem.setHold(false)
			if errno := i.await(done); errno != x.want {
				t.Errorf("errno %d, want %d", errno, x.want)
			}
			then := blk.OK
			if x.want == blk.OK && x.error != 0 {
				then = blk.EIO
			}
			if errno := i.flush(vol.DeviceID); errno != then {
				t.Errorf("the next flush: errno %d, want %d", errno, then)
			}
			if errno := i.flush(vol.DeviceID); errno != blk.OK {
				t.Errorf("a later flush: errno %d", errno)
			}
			events := 0
			for _, e := range r.server.cfg.Journal.After(0) {
				if e.To == "writes lost" && e.Device == "vol" {
					events++
				}
			}
			if (events == 1) != (x.error != 0) {
				t.Errorf("%d events", events)
			}
		})
	}
}

// The error of a flush is kept until the client has it for sure: it is told again if a path
// is lost, and to the next session. A client that has used the chunk again, or has closed the
// device, has it.
func TestE063_FailedFlushIsToldUntilTheClientHasIt(t *testing.T) {
	second := netip.MustParseAddrPort("10.0.0.2:1234")
	for _, x := range []struct {
		name string
		then func(r *rig, i *initiator, id uint32) (*initiator, uint32)
		want blk.Errno
	}{
		{"a lost path", func(r *rig, i *initiator, id uint32) (*initiator, uint32) {
			must(t, i.session.DisconnectPath(i.ctx(), i.session.Paths()[0].ID))
			eventually(t, "one path", func() bool { return r.paths() == 1 })
			return i, id
		}, blk.EIO},
		{"a lost session", func(r *rig, i *initiator, _ uint32) (*initiator, uint32) {
			i.close() // of the transport: nothing closes the device
			eventually(t, "no session", func() bool { return r.paths() == 0 })
			return r.reopened()
		}, blk.EIO},
		{"a closed device", func(r *rig, i *initiator, id uint32) (*initiator, uint32) {
			must(t, i.closeDevice(id))
			return r.reopened()
		}, blk.OK},
	} {
		t.Run(x.name, func(t *testing.T) {
			r, mem, _ := flushRig(t, second)
			i := r.connectTo("s", r.addr, second)
			vol, err := i.open("vol", blk.ReadWrite)
			must(t, err)
			mem.disks["vol"].flushErrno.Store(uint32(blk.EIO))
			if errno := i.flush(vol.DeviceID); errno != blk.EIO {
				t.Fatalf("flush: errno %d", errno)
			}
			mem.disks["vol"].flushErrno.Store(0)
			j, id := x.then(r, i, vol.DeviceID)
			if errno := j.flush(id); errno != x.want {
				t.Errorf("errno %d, want %d", errno, x.want)
			}
		})
	}
}

// Each client that writes to a node is told of its errors, also by a write with FUA. The
// plugin has one description for all, so it tells only one.
func TestE063_FailedFlushIsToldToEveryClient(t *testing.T) {
	r, mem, _ := flushRig(t)
	a, b := r.connect("a"), r.connect("b")
	va, err := a.open("vol", blk.ReadWrite)
	must(t, err)
	vb, err := b.open("vol", blk.Migration)
	must(t, err)
	mem.disks["vol"].flushErrno.Store(uint32(blk.EIO))
	if errno := a.flush(va.DeviceID); errno != blk.EIO {
		t.Fatalf("flush: errno %d", errno)
	}
	mem.disks["vol"].flushErrno.Store(0)
	for range 3 {
		if errno := a.flush(va.DeviceID); errno != blk.OK {
			t.Errorf("flush again: errno %d", errno)
		}
	}
	if errno := b.rw(vb.DeviceID, blk.Write, 0, make([]byte, 512)); errno != blk.OK {
		t.Errorf("a write of the other client: errno %d", errno)
	}
	if errno := b.writeFUA(vb.DeviceID); errno != blk.EIO {
		t.Errorf("a write with FUA of the other client: errno %d, want EIO", errno)
	}
	if errno := b.flush(vb.DeviceID); errno != blk.OK {
		t.Errorf("its next flush: errno %d", errno)
	}
}

// A plugin that comes back with another verifier has lost writes. Sessions that stay up are
// told by their next flush.
func TestVerifierThatChangesWhileTheSessionIsUp(t *testing.T) {
	for _, x := range []struct {
		name string
		next string
		want blk.Errno
	}{{"another", "y", blk.EIO}, {"the same", "x", blk.OK}} {
		t.Run(x.name, func(t *testing.T) {
			mem := newMemory()
			mem.crash = plugin.KeepsAcknowledged
			mem.add("vol", 1<<20)
			var says atomic.Pointer[string]
			first := "x"
			says.Store(&first)
			mem.wrap = func(_ context.Context, _ plugin.OpenRequest, d *memDisk) (plugin.Disk, error) {
				return &verifyingDisk{d, *says.Load()}, nil
			}
			r := newRig(t, mem, func(c *Config) { c.Journal = journal.New(100) })
			i := r.connect("s")
			vol, err := i.open("vol", blk.ReadWrite)
			must(t, err)
			if errno := i.rw(vol.DeviceID, blk.Write, 0, make([]byte, 512)); errno != blk.OK {
				t.Fatalf("write: errno %d", errno)
			}
			says.Store(&x.next)
			r.process().Kill()
			if errno := i.flush(vol.DeviceID); errno != x.want {
				t.Errorf("flush: errno %d, want %d", errno, x.want)
			}
			if errno := i.flush(vol.DeviceID); errno != blk.OK {
				t.Errorf("the next flush: errno %d", errno)
			}
			if told := r.server.openDevicesByName("vol").describe(); (told.WritesLost != "") != (x.want != blk.OK) || (told.WriteLosses == 1) != (x.want != blk.OK) {
				t.Errorf("%d losses, %q", told.WriteLosses, told.WritesLost)
			}
		})
	}
}

// The next process of the server tells what no client was told for sure.
func TestHandOverTellsOfFailedFlushes(t *testing.T) {
	r, mem, own := flushRig(t)
	i := r.connect("s")
	_, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	own.errno.Store(uint32(syscall.EIO))
	r.process().Kill()
	eventually(t, "the error is known", func() bool { return r.server.openDevicesByName("vol").describe().WriteLosses == 1 })
	eventually(t, "the device is back", func() bool { return r.deviceState("vol") == "open" })
	state := r.server.FlushErrors()
	next := newRig(t, mem, func(c *Config) { c.SearchPath = r.server.cfg.SearchPath })
	i.close()
	next.server.InheritFlushErrors(state)
	j := next.connect("s")
	vol, err := j.open("vol", blk.ReadWrite)
	must(t, err)
	if errno := j.flush(vol.DeviceID); errno != blk.EIO {
		t.Errorf("flush at the next process: errno %d, want EIO", errno)
	}
	if errno := j.flush(vol.DeviceID); errno != blk.OK {
		t.Errorf("the next flush: errno %d", errno)
	}
}
