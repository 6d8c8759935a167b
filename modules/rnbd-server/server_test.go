package server

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

func TestR122_VersionIsTheSmaller(t *testing.T) {
	r := newRig(t, newMemory())
	i := r.connect("s1")
	for ask, want := range map[uint8]uint8{2: 2, 9: 2, 1: 1} {
		rsp, err := i.sessInfo(ask)
		must(t, err)
		if !rsp.IsValid() || rsp.Version() != want {
			t.Errorf("R-122: asked with version %d: got %d, want %d", ask, rsp.Version(), want)
		}
	}
}

func TestOpen(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	mem.add("b", 1<<20)
	mem.fail["broken"] = syscall.EIO
	r := newRig(t, mem)
	i := r.connect("s1")
	first, err := i.open("a", blk.ReadWrite)
	must(t, err)

	t.Run("R-131 ids start at 0 and belong to the session", func(t *testing.T) {
		if first.DeviceID != 0 {
			t.Errorf("first id %d", first.DeviceID)
		}
		second, err := i.open("b", blk.ReadOnly)
		must(t, err)
		other, err := r.connect("s2").open("b", blk.ReadOnly)
		must(t, err)
		if second.DeviceID != 1 || other.DeviceID != 0 {
			t.Errorf("ids %d and %d, want 1 and 0", second.DeviceID, other.DeviceID)
		}
	})
	t.Run("R-131 the id of another session is none", func(t *testing.T) {
		if errno := r.connect("s5").bare(first.DeviceID, blk.Flush, 0, 0, 0, false); errno != blk.ENOTCONN {
			t.Errorf("errno %d, want ENOTCONN", errno)
		}
	})
	t.Run("R-130 opening the same name again gives the same id", func(t *testing.T) {
		again, err := i.open("a", blk.ReadOnly)
		must(t, err)
		if again.DeviceID != first.DeviceID {
			t.Errorf("id %d, want %d", again.DeviceID, first.DeviceID)
		}
	})
	t.Run("R-132 the answer describes the device in sectors", func(t *testing.T) {
		want := rnbdwire.OpenRspFields{
			Sectors: 2048, MaxHWSectors: 2048, MaxWriteZeroesSects: 1 << 20, MaxDiscardSectors: 1 << 21,
			DiscardGranularity: 4096, PhysicalBlockSize: 4096, LogicalBlockSize: 512, MaxSegments: 64,
			CachePolicy: rnbdwire.CacheFUA | rnbdwire.CacheWriteBack,
		}
		got := first
		got.Volume, got.Properties = 0, 0 // the last ten bytes: E-018
		if got != want {
			t.Errorf("got %+v\nwant %+v", got, want)
		}
	})
	for _, c := range []struct {
		name, dev string
		mode      blk.AccessMode
		want      syscall.Errno
	}{
		{"R-128 missing", "nope", blk.ReadWrite, syscall.ENOENT},
		{"R-129 unknown mode", "b", 7, syscall.EINVAL},
		{"the plugin's errno arrives", "broken", blk.ReadWrite, syscall.EIO},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := i.open(c.dev, c.mode); !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
		})
	}
	t.Run("R-129 second writer in another session", func(t *testing.T) {
		j := r.connect("s3")
		if _, err := j.open("a", blk.ReadWrite); !errors.Is(err, syscall.EPERM) {
			t.Errorf("rw: %v, want EPERM", err)
		}
		if _, err := j.open("a", blk.Migration); err != nil {
			t.Errorf("migration: %v", err)
		}
		k := r.connect("s4")
		if _, err := k.open("a", blk.Migration); !errors.Is(err, syscall.EPERM) {
			t.Errorf("third writer: %v, want EPERM", err)
		}
		if _, err := k.open("a", blk.ReadOnly); err != nil {
			t.Errorf("ro: %v", err)
		}
	})
}

func TestR124_ReservedBytesAreIgnored(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	i := newRig(t, mem).connect("s1")
	_, err := i.sessInfo(2) // its reserved bytes are junk, and so are open's
	must(t, err)
	_, err = i.open("a", blk.ReadWrite)
	must(t, err)
	msg := ioMessage(0, blk.Read, 0, 0, 512)
	copy(msg[26:], "\xa5\xa5\xa5\xa5\xa5\xa5")
	msg[2], msg[3] = 0xa5, 0xa5
	if errno := i.await(i.start(true, 512, msg)); errno != blk.OK {
		t.Errorf("R-124: read with junk in the padding: errno %d", errno)
	}
}

func TestSessionEndClosesDevices(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s1")
	_, err := i.open("a", blk.ReadWrite)
	must(t, err)
	i.close()
	j := r.connect("s2")
	deadline := time.Now().Add(5 * time.Second)
	for {
		if _, err = j.open("a", blk.ReadWrite); err == nil || time.Now().After(deadline) {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	if err != nil {
		t.Errorf("R-104: the writer's place is not given back: %v", err)
	}
}

func TestIO(t *testing.T) {
	mem := newMemory()
	disk := mem.add("a", 1<<20)
	mem.add("plain", 1<<20, func(l *blk.Limits) { l.MaxDiscard, l.MaxWriteZeroes = 0, 0 })
	r := newRig(t, mem)
	i := r.connect("s1")
	rsp, err := i.open("a", blk.ReadWrite)
	must(t, err)
	plain, err := i.open("plain", blk.ReadOnly)
	must(t, err)
	id := rsp.DeviceID

	t.Run("R-136 write and read", func(t *testing.T) {
		for _, n := range []int{512, 4096, 65536, 126976} {
			data := make([]byte, n)
			rand.NewChaCha8([32]byte{byte(n)}).Read(data)
			if errno := i.rw(id, blk.Write, 8, data); errno != blk.OK {
				t.Fatalf("write of %d: errno %d", n, errno)
			}
			if !bytes.Equal(disk.data[4096:4096+n], data) {
				t.Fatalf("write of %d: other bytes on the disk", n)
			}
			got := make([]byte, n)
			if errno := i.rw(id, blk.Read, 8, got); errno != blk.OK || !bytes.Equal(got, data) {
				t.Fatalf("read of %d: errno %d, equal %t", n, errno, bytes.Equal(got, data))
			}
		}
	})
	t.Run("R-122 no priority below version 2", func(t *testing.T) {
		for _, ver := range []uint8{0, 1} {
			if ver > 0 { // before SESS_INFO it is 0
				_, err := i.sessInfo(ver)
				must(t, err)
			}
			i.await(i.start(false, 512, ioMessage(id, blk.Write, 0, 16, 512)))
			seen := mem.requests()
			if got := seen[len(seen)-1].Prio; got != 0 {
				t.Errorf("version %d: priority %#x reached the plugin", ver, got)
			}
		}
	})
	t.Run("R-136 the plugin sees operation, flags and priority", func(t *testing.T) {
		_, err := i.sessInfo(2)
		must(t, err)
		i.bare(id, blk.Flush, rnbdwire.FlagSync|rnbdwire.FlagFUA, ^uint64(0), 0, true)
		i.await(i.start(false, 512, ioMessage(id, blk.Write, rnbdwire.FlagSync|rnbdwire.FlagFUA, 16, 512)))
		seen := mem.requests()
		flush, write := seen[len(seen)-2], seen[len(seen)-1]
		if flush.Op != blk.Flush || flush.Off != 0 || flush.Len != 0 {
			t.Errorf("flush arrived as %+v", flush)
		}
		if write.Op != blk.Write || write.Flags != blk.FUA|blk.Sync || write.Prio != 0x4004 || write.Off != 8192 || write.Len != 512 {
			t.Errorf("write arrived as %+v", write)
		}
	})
	t.Run("R-137 operations without data in both directions", func(t *testing.T) {
		for _, read := range []bool{true, false} {
			for _, op := range []blk.Op{blk.Flush, blk.Discard, blk.WriteZeroes} {
				n := 4096
				if op == blk.Flush {
					n = 0
				}
				if errno := i.bare(id, op, 0, 0, n, read); errno != blk.OK {
					t.Errorf("%s, as RTRS read %t: errno %d", op, read, errno)
				}
			}
		}
	})
	t.Run("R-125 message without a priority", func(t *testing.T) {
		msg := ioMessage(id, blk.Read, 0, 0, 512)
		if errno := i.await(i.start(true, 512, msg[:26])); errno != blk.OK {
			t.Fatalf("errno %d", errno)
		}
		seen := mem.requests()
		if got := seen[len(seen)-1].Prio; got != 0 {
			t.Errorf("priority %#x, want 0", got)
		}
	})
	short := func(op blk.Op, sector uint64, n, data int) blk.Errno {
		return i.await(i.start(op == blk.Read, data, ioMessage(id, op, 0, sector, n)))
	}
	for _, c := range []struct {
		name string
		got  func() blk.Errno
		want blk.Errno
	}{
		{"R-139 unknown device", func() blk.Errno { return i.bare(99, blk.Flush, 0, 0, 0, false) }, blk.ENOTCONN},
		{"R-139 size differs from data", func() blk.Errno { return short(blk.Write, 0, 1024, 512) }, blk.EINVAL},
		{"R-139 size differs from a read's data", func() blk.Errno { return short(blk.Read, 0, 1024, 512) }, blk.EINVAL},
		{"R-139 unknown message", func() blk.Errno { return i.await(i.start(false, 0, []byte{9, 0, 0, 0, 0, 0, 0, 0})) }, blk.EINVAL},
		{"message too short to have a type", func() blk.Errno { return i.await(i.start(false, 0, []byte{4})) }, blk.EINVAL},
		{"write as an RTRS read", func() blk.Errno { return i.await(i.start(true, 512, ioMessage(id, blk.Write, 0, 0, 512))) }, blk.EINVAL},
		{"read as an RTRS write", func() blk.Errno { return i.await(i.start(false, 512, ioMessage(id, blk.Read, 0, 0, 512))) }, blk.EINVAL},
		{"read without data", func() blk.Errno { return i.bare(id, blk.Read, 0, 0, 512, true) }, blk.EINVAL},
		{"unaligned", func() blk.Errno { return short(blk.Write, 0, 100, 100) }, blk.EINVAL},
		{"R-140 beyond the end", func() blk.Errno { return short(blk.Read, 2048, 512, 512) }, blk.EIO},
		{"R-140 across the end", func() blk.Errno { return short(blk.Read, 2047, 1024, 1024) }, blk.EIO},
		{"R-140 a sector that wraps", func() blk.Errno { return short(blk.Read, ^uint64(0), 512, 512) }, blk.EIO},
		{"R-140 operation that the device has not", func() blk.Errno { return i.bare(plain.DeviceID, blk.Flush+100, 0, 0, 0, false) }, blk.EOPNOTSUPP},
		{"R-140 secure erase without support", func() blk.Errno { return i.bare(id, blk.SecureErase, 0, 0, 4096, false) }, blk.EOPNOTSUPP},
		{"writing a read-only mapping", func() blk.Errno {
			return i.await(i.start(false, 512, ioMessage(plain.DeviceID, blk.Write, 0, 0, 512)))
		}, blk.EPERM},
		{"discarding a read-only mapping", func() blk.Errno { return i.bare(plain.DeviceID, blk.Discard, 0, 0, 4096, false) }, blk.EPERM},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := c.got(); got != c.want {
				t.Errorf("errno %d, want %d", got, c.want)
			}
		})
	}
}

func TestR139_DataThatGoWithAMessage(t *testing.T) {
	for _, tt := range []struct {
		name           string
		op             blk.Op
		read           bool
		n, data, reply uint64
		want           bool
	}{
		{"a read", blk.Read, true, 512, 512, 512, true},
		{"a read whose descriptor is longer than the data", blk.Read, true, 512, 512, 4096, true},
		{"a read whose descriptor is shorter than the data", blk.Read, true, 1024, 1024, 512, false},
		{"a read of another size than its data", blk.Read, true, 1024, 512, 1024, false},
		{"a read without data", blk.Read, true, 512, 0, 0, false},
		{"a read as an RTRS write", blk.Read, false, 512, 512, 0, false},
		{"a write", blk.Write, false, 512, 512, 0, true},
		{"a write of more than came", blk.Write, false, 1024, 512, 0, false},
		{"a write as an RTRS read", blk.Write, true, 512, 512, 512, false},
		{"a flush as an RTRS read", blk.Flush, true, 0, 0, 0, true},
		{"a flush with data", blk.Flush, false, 0, 512, 0, false},
		{"a discard", blk.Discard, false, 1 << 20, 0, 0, true},
	} {
		if got := dataFits(tt.op, tt.read, tt.n, tt.data, tt.reply); got != tt.want {
			t.Errorf("%s: fits %t, want %t", tt.name, got, tt.want)
		}
	}
}

func TestR135_CloseWaitsForIO(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s1")
	rsp, err := i.open("a", blk.ReadWrite)
	must(t, err)
	_, err = r.connect("s2").open("a", blk.Migration) // the plugin keeps it open
	must(t, err)
	mem.setHold(true)
	write := i.start(false, 512, ioMessage(rsp.DeviceID, blk.Write, 0, 0, 512))
	for len(mem.requests()) == 0 { // the close travels on another connection
		time.Sleep(time.Millisecond)
	}
	closed := make(chan error, 1)
	go func() { closed <- i.closeDevice(rsp.DeviceID) }()
	select {
	case err := <-closed:
		t.Fatalf("R-135: closed with a write in flight: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	mem.setHold(false)
	if errno := i.await(write); errno != blk.OK {
		t.Errorf("write: errno %d", errno)
	}
	must(t, <-closed)
	if err := i.closeDevice(77); err != nil {
		t.Errorf("R-135: close of an unknown id: %v", err)
	}
	if errno := i.bare(rsp.DeviceID, blk.Flush, 0, 0, 0, false); errno != blk.ENOTCONN {
		t.Errorf("I/O after close: errno %d, want ENOTCONN", errno)
	}
	again, err := i.open("a", blk.Migration)
	must(t, err)
	if again.DeviceID != rsp.DeviceID {
		t.Errorf("R-131: id %d, want the free %d", again.DeviceID, rsp.DeviceID)
	}
}

func TestR146_ForcedCloseReservesTheID(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s1")
	rsp, err := i.open("a", blk.ReadWrite)
	must(t, err)
	api := r.server.Control("test")
	_, err = api.CloseDevice(t.Context(), &controlpb.CloseDeviceRequest{Session: "s1", DeviceId: rsp.DeviceID})
	must(t, err)
	if errno := i.bare(rsp.DeviceID, blk.Flush, 0, 0, 0, false); errno != blk.ENOTCONN {
		t.Errorf("errno %d, want ENOTCONN", errno)
	}
	again, err := i.open("a", blk.ReadWrite)
	must(t, err)
	if again.DeviceID == rsp.DeviceID {
		t.Errorf("id %d was given out again", again.DeviceID)
	}
}

func TestPluginDeath(t *testing.T) {
	for _, c := range []struct {
		name  string
		crash plugin.CrashClass
		want  blk.Errno
	}{
		{"a plugin that keeps acknowledged writes is replayed", plugin.KeepsAcknowledged, blk.OK},
		{"one that keeps flushed writes only fails", plugin.KeepsFlushed, blk.EIO},
		{"one that loses all fails", plugin.LosesAll, blk.EIO},
	} {
		t.Run(c.name, func(t *testing.T) {
			mem := newMemory()
			mem.crash = c.crash
			mem.add("a", 1<<20)
			r := newRig(t, mem)
			i := r.connect("s1")
			rsp, err := i.open("a", blk.ReadWrite)
			must(t, err)
			mem.setHold(true)
			var writes []<-chan int
			for k := range 12 {
				writes = append(writes, i.start(false, 512, ioMessage(rsp.DeviceID, blk.Write, 0, uint64(k), 512)))
			}
			for len(mem.requests()) < len(writes) {
				time.Sleep(time.Millisecond)
			}
			r.process().Kill()
			time.Sleep(50 * time.Millisecond)
			mem.setHold(false)
			for _, w := range writes {
				if errno := i.await(w); errno != c.want {
					t.Errorf("write in flight: errno %d, want %d", errno, c.want)
				}
			}
			if errno := i.bare(rsp.DeviceID, blk.Flush, 0, 0, 0, false); errno != c.want {
				t.Errorf("later flush: errno %d, want %d", errno, c.want)
			}
			devices, err := r.server.Control("").ListDevices(t.Context(), &controlpb.ListRequest{})
			must(t, err)
			want := "open"
			if c.want != blk.OK {
				want = "failed: plugin state lost"
			}
			if got := devices.Devices[0].State; got != want {
				t.Errorf("state %q, want %q", got, want)
			}
		})
	}
}

// A new process that waits for its fence has a ring already; nothing may go
// into it before the device is open.
func TestNothingIsSentBeforeTheFence(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("a", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s1")
	rsp, err := i.open("a", blk.ReadWrite)
	must(t, err)
	opens := func() int {
		mem.mu.Lock()
		defer mem.mu.Unlock()
		return mem.opens
	}
	gate := make(chan struct{})
	mem.mu.Lock()
	mem.gate = gate
	mem.mu.Unlock()
	r.process().Kill()
	for opens() < 2 {
		time.Sleep(time.Millisecond)
	}
	write := i.start(false, 512, ioMessage(rsp.DeviceID, blk.Write, 0, 0, 512))
	time.Sleep(30 * time.Millisecond)
	if n := len(mem.requests()); n != 0 {
		t.Errorf("%d requests reached the plugin while it waited for its fence", n)
	}
	close(gate)
	if errno := i.await(write); errno != blk.OK {
		t.Errorf("write: errno %d", errno)
	}
}

// A device that is closed while a new process opens it again is not left open there.
func TestClosedWhileItIsOpenedAgain(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	disk := mem.add("a", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s1")
	rsp, err := i.open("a", blk.ReadWrite)
	must(t, err)
	gate := make(chan struct{})
	mem.mu.Lock()
	mem.gate = gate
	mem.mu.Unlock()
	r.process().Kill()
	eventually(t, "the new process opens it", func() bool {
		mem.mu.Lock()
		defer mem.mu.Unlock()
		return mem.opens == 2
	})
	closed := disk.closes.Load()
	must(t, i.closeDevice(rsp.DeviceID))
	close(gate)
	eventually(t, "it is closed", func() bool { return disk.closes.Load() > closed })
}

// TestErrnoBeyondTheWire: a plugin's completion has 32 bits of errno, and the
// plugin is not to be trusted with them.
func TestErrnoBeyondTheWire(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s1")
	rsp, err := i.open("a", blk.ReadWrite)
	must(t, err)
	mem.setHold(true)
	for k, errno := range []uint32{512, 1 << 16, 1<<32 - 1} {
		write := i.start(false, 512, ioMessage(rsp.DeviceID, blk.Write, 0, 0, 512))
		for len(mem.requests()) <= k {
			time.Sleep(time.Millisecond)
		}
		s := r.server.sessionAt(0)
		r.server.pumps[0].pump.Call(func() {
			q := r.server.plugins[0].queues[0]
			q.eachRequest(func(req *request) { q.onDone(&shm.CQE{Tag: req.sqe.Tag, Errno: errno}) })
		})
		if got := i.await(write); got != blk.EIO {
			t.Errorf("errno %d of the plugin arrives as %d in session %s, want EIO", errno, got, s.name)
		}
	}
}

func TestPluginThatCrashesTooOften(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("a", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s1")
	rsp, err := i.open("a", blk.ReadWrite)
	must(t, err)
	for n := 1; n <= 3; n++ {
		r.process().Kill()
		want := blk.OK
		if n == 3 {
			want = blk.EIO
			eventually(t, "the plugin is given up", func() bool { return r.deviceState("a") == "failed: plugin memory crashes too often" })
		}
		if errno := i.bare(rsp.DeviceID, blk.Flush, 0, 0, 0, false); errno != want {
			t.Fatalf("flush after crash %d: errno %d, want %d", n, errno, want)
		}
	}
	if _, err := i.open("b", blk.ReadOnly); !errors.Is(err, syscall.EIO) {
		t.Errorf("open: %v, want EIO", err)
	}
	info, err := r.server.Control("").Info(t.Context(), &controlpb.InfoRequest{})
	must(t, err)
	if got := info.Plugins[0].State; got != "failed: crashes too often" {
		t.Errorf("state %q", got)
	}
}

func TestDeviceIsOpenedOnceForAllSessions(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	r := newRig(t, mem)
	for _, name := range []string{"s1", "s2", "s3"} {
		if _, err := r.connect(name).open("a", blk.ReadOnly); err != nil {
			t.Fatal(err)
		}
	}
	if mem.opens != 1 {
		t.Errorf("the plugin opened it %d times", mem.opens)
	}
}

func TestPluginThatDiesAgainAtOnce(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("a", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.CrashLimit = 1000 })
	i := r.connect("s1")
	rsp, err := i.open("a", blk.ReadWrite)
	must(t, err)
	for k := range 10 {
		n := r.launched()
		r.process().Kill()
		for r.launched() == n { // and the next one while it is being set up
			time.Sleep(50 * time.Microsecond)
		}
		r.process().Kill()
		if errno := i.rw(rsp.DeviceID, blk.Write, uint64(k), make([]byte, 512)); errno != blk.OK {
			t.Fatalf("round %d: errno %d", k, errno)
		}
	}
	info, err := r.server.Control("").Info(t.Context(), &controlpb.InfoRequest{})
	must(t, err)
	if got, most := int(info.Plugins[0].Restarts), r.launched()-1; got < 10 || got > most {
		t.Errorf("%d restarts counted, %d processes were started again", got, most)
	}
}
