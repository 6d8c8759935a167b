package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// ended waits until the server has closed the connection.
func (c *client) ended(t *testing.T) {
	t.Helper()
	c.conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	if n, err := io.Copy(io.Discard, c.conn); err != nil || n != 0 {
		t.Errorf("%d bytes, then %v, instead of the end", n, err)
	}
}

func TestGarbageEndsThatConnectionOnly(t *testing.T) {
	r := newRig(t, rigConfig{})
	good := r.connect(false)
	for _, garbage := range [][]byte{
		bytes.Repeat([]byte("garbage!"), 100),
		append(command(nbdwire.CmdFlush, 0, 1, 0, 0)[:3], make([]byte, 40)...),
	} {
		c := dial(t, "unix", r.addr, "disk0", false)
		c.conn.Write(garbage)
		c.ended(t)
	}
	if code := good.read(0, make([]byte, 4096)); code != 0 {
		t.Error("the other connection suffers")
	}
	eventually(t, "one opener", func() bool { return r.f.Openers(0) == 1 })
}

func TestDisconnectInTheMiddle(t *testing.T) {
	for _, v := range []struct {
		name string
		send []byte
	}{
		{"of a header", command(nbdwire.CmdWrite, 0, 1, 0, 4096)[:20]},
		{"of a small payload", append(command(nbdwire.CmdWrite, 0, 1, 0, 4096), make([]byte, 1000)...)},
		{"of a large payload", append(command(nbdwire.CmdWrite, 0, 1, 0, 1<<20), make([]byte, 300000)...)},
		{"of a partial block", append(command(nbdwire.CmdWrite, 0, 1, 7, 100), make([]byte, 50)...)},
		{"of a refused payload", append(command(nbdwire.CmdWrite, 0, 1, 1<<40, 1<<20), make([]byte, 300000)...)},
		{"of nothing", nil},
		{"after a request", append(command(nbdwire.CmdWrite, 0, 1, 0, 64<<10), make([]byte, 64<<10)...)},
		{"after DISC", command(nbdwire.CmdDisc, 0, 0, 0, 0)},
	} {
		t.Run(v.name, func(t *testing.T) {
			r := newRig(t, rigConfig{slots: 8, seed: 1})
			c := dial(t, "unix", r.addr, "disk0", false)
			c.conn.Write(v.send)
			c.conn.Close()
			eventually(t, "no opener", func() bool { return r.f.Openers(0) == 0 })
			if !r.free(0) {
				t.Error("slots are lost")
			}
		})
	}
}

func TestDisconnectWithRequestsAtTheDevice(t *testing.T) {
	r := newRig(t, rigConfig{slots: 8})
	r.hosts[0].hold.Store(true)
	c := dial(t, "unix", r.addr, "disk0", false)
	for i := range 6 {
		c.conn.Write(command(nbdwire.CmdRead, 0, uint64(i), 0, 4096))
	}
	eventually(t, "slots are taken", func() bool { return !r.free(0) })
	c.conn.Close()
	time.Sleep(20 * time.Millisecond)
	if r.f.Openers(0) != 1 {
		t.Error("connection is forgotten while the device has its slots")
	}
	r.hosts[0].hold.Store(false)
	eventually(t, "no opener", func() bool { return r.f.Openers(0) == 0 })
	if !r.free(0) {
		t.Error("slots are lost")
	}
}

// DISC and a half-closed socket: outstanding requests are answered first.
func TestOutstandingRequestsAreAnsweredBeforeTheEnd(t *testing.T) {
	for _, disc := range []bool{true, false} {
		t.Run(fmt.Sprintf("disc=%v", disc), func(t *testing.T) {
			r := newRig(t, rigConfig{})
			r.hosts[0].hold.Store(true)
			c := dial(t, "unix", r.addr, "disk0", false)
			c.conn.Write(command(nbdwire.CmdRead, 0, 1, 0, 1024))
			if disc {
				c.conn.Write(command(nbdwire.CmdDisc, 0, 0, 0, 0))
			} else {
				c.conn.(interface{ CloseWrite() error }).CloseWrite()
			}
			time.Sleep(10 * time.Millisecond)
			r.hosts[0].hold.Store(false)
			c.conn.SetReadDeadline(time.Now().Add(5 * time.Second))
			if b, err := io.ReadAll(c.conn); err != nil || len(b) != nbdwire.SimpleSize+1024 {
				t.Errorf("%d bytes, error %v", len(b), err)
			}
		})
	}
}

// A client that asks and never listens must not stall others of its queue and
// device.
func TestSlowReaderDoesNotStallOthers(t *testing.T) {
	bothReplies(t, func(t *testing.T, structured bool) {
		r := newRig(t, rigConfig{slots: 32, slotSize: 64 << 10})
		slow := dial(t, "unix", r.addr, "disk0", structured)
		slow.conn.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
		for i := range 200 {
			if _, err := slow.conn.Write(command(nbdwire.CmdRead, 0, uint64(i), 0, 1<<20)); err != nil {
				break
			}
		}
		big := dial(t, "unix", r.addr, "disk0", false) // gathers, and does not listen either
		for i := range 3 {
			big.conn.Write(command(nbdwire.CmdRead, 0, uint64(i), 0, 512<<10))
		}
		c := r.connect(false)
		for i := range 50 {
			want := pattern(200000, uint64(i))
			got := make([]byte, len(want))
			if c.write(4096, want) != 0 || c.read(4096, got) != 0 || !bytes.Equal(got, want) {
				t.Fatal("the other connection fails")
			}
		}
	})
}

// Many such clients can hold every slot; when another one starves they go.
func TestClientsThatHoldEverySlotAreClosed(t *testing.T) {
	r := newRig(t, rigConfig{slots: 8, slotSize: 64 << 10, limits: testLimits(4 << 20)})
	var slow []*client
	for range 12 {
		slow = append(slow, dial(t, "unix", r.addr, "disk0", true))
	}
	conns := func() (n, free int) {
		r.onQueue(0, func(q *queue) {
			if n = len(q.conns); n > 0 {
				free = len(q.conns[0].sh.free)
			}
		})
		return n, free
	}
	eventually(t, "all are here", func() bool { n, _ := conns(); return n == len(slow) })
	for _, c := range slow {
		go func() {
			for i := range 16 {
				c.conn.Write(command(nbdwire.CmdRead, 0, uint64(i), 0, 1<<20))
			}
		}()
	}
	eventually(t, "slots are gone, or the first who held them", func() bool { n, free := conns(); return free == 0 || n < len(slow) })
	good := r.connect(false)
	for range 10 {
		if code := good.read(0, make([]byte, 100000)); code != 0 {
			t.Fatal(code)
		}
	}
	if n := r.f.Openers(0); n == len(slow)+1 {
		t.Error("nobody was closed")
	}
}

func TestSlowWriterHoldsOneSlot(t *testing.T) {
	r := newRig(t, rigConfig{slots: 8, slotSize: 4096})
	slow := dial(t, "unix", r.addr, "disk0", false)
	slow.conn.Write(append(command(nbdwire.CmdWrite, 0, 1, 0, 1<<20), make([]byte, 100)...))
	c := r.connect(false)
	if code := c.write(1<<20, make([]byte, 300000)); code != 0 {
		t.Error(code)
	}
	held := 0
	r.onQueue(0, func(q *queue) {
		for _, c := range q.conns {
			held += c.held
		}
	})
	if held != 1 {
		t.Errorf("%d slots are held", held)
	}
}

func TestDurability(t *testing.T) {
	cached := testLimits(1 << 20)
	noFUA, noCache := cached, cached
	noFUA.FUA = false
	noCache.WriteCache = false
	for _, v := range []struct {
		name   string
		limits blk.Limits
		cmd    uint16
		flags  uint16
		want   string // operations at the device
	}{
		{"write", cached, nbdwire.CmdWrite, 0, "write "},
		{"write with FUA", cached, nbdwire.CmdWrite, nbdwire.CmdFlagFUA, "write+fua "},
		{"write with FUA where the device has none", noFUA, nbdwire.CmdWrite, nbdwire.CmdFlagFUA, "write flush "},
		{"write with FUA without a cache", noCache, nbdwire.CmdWrite, nbdwire.CmdFlagFUA, "write "},
		{"flush", cached, nbdwire.CmdFlush, 0, "flush "},
		{"write zeroes", cached, nbdwire.CmdWriteZeroes, 0, "write-zeroes "},
		{"write zeroes with FUA, allocated", cached, nbdwire.CmdWriteZeroes, nbdwire.CmdFlagFUA | nbdwire.CmdFlagNoHole, "write-zeroes+fua+nounmap "},
		{"trim", cached, nbdwire.CmdTrim, 0, "discard "},
		{"trim with FUA", cached, nbdwire.CmdTrim, nbdwire.CmdFlagFUA, "discard flush "},
	} {
		t.Run(v.name, func(t *testing.T) {
			r := newRig(t, rigConfig{limits: v.limits})
			r.disks[0].with(func() { r.disks[0].keep = true })
			n := 4096
			if v.cmd == nbdwire.CmdFlush {
				n = 0
			}
			if code := r.connect(false).do(v.cmd, v.flags, 0, n, make([]byte, n)); code != 0 {
				t.Fatal(code)
			}
			if got := trace(r.disks[0].requests()); got != v.want {
				t.Errorf("the device sees %q, want %q", got, v.want)
			}
		})
	}
}

func trace(log []shm.SQE) string {
	s := ""
	for _, e := range log {
		s += e.Op.String()
		if e.Flags&blk.FUA != 0 {
			s += "+fua"
		}
		if e.Flags&blk.NoUnmap != 0 {
			s += "+nounmap"
		}
		s += " "
	}
	return s
}

// Emulated FUA of a request of many children: one flush, after all of them.
func TestEmulatedFUAFlushesOnceAtTheEnd(t *testing.T) {
	l := testLimits(1 << 20)
	l.FUA = false
	r := newRig(t, rigConfig{limits: l, slots: 5, slotSize: 4096, seed: 8})
	r.disks[0].with(func() { r.disks[0].keep = true })
	if code := r.connect(true).do(nbdwire.CmdWrite, nbdwire.CmdFlagFUA, 100, 60000, make([]byte, 60000)); code != 0 {
		t.Fatal(code)
	}
	log := r.disks[0].requests()
	if last := log[len(log)-1]; last.Op != blk.Flush || r.disks[0].flushed() != 1 {
		t.Errorf("%s", trace(log))
	}
}

// A flush on one connection reaches the device after the acknowledged writes of
// another.
func TestFlushCoversOtherConnections(t *testing.T) {
	r := newRig(t, rigConfig{queues: 2, seed: 6})
	r.disks[0].with(func() { r.disks[0].keep = true })
	a, b := r.connect(false), r.connect(false)
	for i := range 50 {
		if a.write(uint64(i*4096), make([]byte, 4096)) != 0 || b.do(nbdwire.CmdFlush, 0, 0, 0, nil) != 0 {
			t.Fatal("error")
		}
	}
	for i, e := range r.disks[0].requests() {
		if (i%2 == 1) != (e.Op == blk.Flush) {
			t.Fatalf("%s", trace(r.disks[0].requests()))
		}
	}
}

// An unmap right after the end of the last client is not refused as in use.
func TestRemoveDevice_ConnectionsThatJustEnded(t *testing.T) {
	r := newRig(t, rigConfig{queues: 2})
	c := r.connect(false)
	c.read(0, make([]byte, 512))
	for _, p := range r.pumps {
		p.Do(func() { time.Sleep(100 * time.Millisecond) })
	}
	c.conn.Close()
	if err := r.f.RemoveDevice(t.Context(), 0, false); err != nil {
		t.Error(err)
	}
}

func TestRemoveDevice(t *testing.T) {
	r := newRig(t, rigConfig{queues: 2})
	ctx := context.Background()
	c := r.connect(false)
	c.read(0, make([]byte, 512))
	if err := r.f.RemoveDevice(ctx, 0, false); blk.ToErrno(err) != blk.EBUSY {
		t.Fatalf("remove while open: %v", err)
	}
	if code := c.read(0, make([]byte, 512)); code != 0 {
		t.Fatal("the refused removal breaks the connection")
	}
	for _, h := range r.hosts {
		h.hold.Store(true)
	}
	inFlight := c.start(nbdwire.CmdRead, 0, 0, 4096, make([]byte, 4096))
	eventually(t, "slot is taken", func() bool { return !r.free(0) })

	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if err := r.f.RemoveDevice(short, 0, true); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("removal does not wait for the device: %v", err)
	}
	if _, err := inFlight.wait(); !errors.Is(err, errEnded) {
		t.Errorf("connection survives: %v", err)
	}
	if _, err := r.f.openExport("disk0"); err == nil {
		t.Error("a device on its way out can be opened")
	}
	for _, h := range r.hosts {
		h.hold.Store(false)
	}
	if err := r.f.RemoveDevice(ctx, 0, true); err != nil {
		t.Fatal(err)
	}
	if err := r.f.RemoveDevice(ctx, 0, true); blk.ToErrno(err) != blk.ENODEV {
		t.Errorf("second removal: %v", err)
	}
	r.addDisk(0, "disk0") // the index can be used again
	if code := r.connect(true).read(0, make([]byte, 512)); code != 0 {
		t.Error(code)
	}
}

func TestAddDeviceRefuses(t *testing.T) {
	r := newRig(t, rigConfig{})
	good := r.f.exportAt(0)
	l := *good.limits.Load()
	for _, v := range []struct {
		name   string
		change func(s *spec)
		want   blk.Errno
	}{
		{"a taken index", func(s *spec) { s.Index = 0 }, blk.EEXIST},
		{"a taken name", func(s *spec) { s.Name = "disk0" }, blk.EEXIST},
		{"no name", func(s *spec) { s.Name = "" }, blk.EINVAL},
		{"an absurd index", func(s *spec) { s.Index = 1 << 20 }, blk.EINVAL},
		{"no slots", func(s *spec) { s.Slots = 0 }, blk.EINVAL},
		{"an arena that is too small", func(s *spec) { s.Slots++ }, blk.EINVAL},
		{"slots smaller than a block", func(s *spec) { s.SlotSize = 256 }, blk.EINVAL},
		{"a block size of 1000", func(s *spec) { s.Limits.LogicalBlockSize = 1000 }, blk.EINVAL},
		{"nothing wrong", func(*spec) {}, blk.OK},
	} {
		s := spec{Index: 1, Name: "new", Limits: l, Arena: good.arena, SlotSize: good.slotSize, Slots: good.slots}
		v.change(&s)
		if err := r.f.AddDevice(t.Context(), s); blk.ToErrno(err) != v.want {
			t.Errorf("%s: %v, want %v", v.name, err, v.want)
		}
	}
}

func TestResize(t *testing.T) {
	r := newRig(t, rigConfig{})
	old := r.connect(false)
	l := testLimits(2 << 20)
	if err := r.f.ResizeDevice(t.Context(), 0, l); err != nil {
		t.Fatal(err)
	}
	if c := r.connect(false); c.size != 2<<20 || old.size != 4<<20 {
		t.Errorf("sizes %d and %d", c.size, old.size)
	}
	if code := old.read(3<<20, make([]byte, 512)); code != nbdEINVAL {
		t.Errorf("read beyond the new end: error %d", code)
	}
	l.LogicalBlockSize = 4096
	if err := r.f.ResizeDevice(t.Context(), 0, l); blk.ToErrno(err) != blk.EINVAL {
		t.Errorf("block size changes: %v", err)
	}
	if err := r.f.ResizeDevice(t.Context(), 5, l); blk.ToErrno(err) != blk.ENODEV {
		t.Errorf("unknown device: %v", err)
	}
}

// More slots than the ring has entries: requests without room wait.
func TestRingSmallerThanSlots(t *testing.T) {
	r := newRig(t, rigConfig{slots: 64, slotSize: 4096, entries: 256})
	r.hosts[0].hold.Store(true)
	c := r.connect(false)
	var calls []*call
	for i := range 40 {
		calls = append(calls, c.start(nbdwire.CmdRead, 0, uint64(i)*4096, 4096, make([]byte, 4096)))
	}
	r.hosts[0].hold.Store(false)
	for _, p := range calls {
		if code, err := p.wait(); code != 0 || err != nil {
			t.Fatal(code, err)
		}
	}
}

func TestStrayCompletionsAreDropped(t *testing.T) {
	ring, _ := shm.NewHeapRing(16)
	q, err := newQueue(ring.Submitter(), quiet())
	if err != nil {
		t.Fatal(err)
	}
	defer q.close()
	e, err := newExport(spec{Name: "x", Limits: testLimits(1 << 20), Arena: make([]byte, 8192), SlotSize: 4096, Slots: 2})
	if err != nil {
		t.Fatal(err)
	}
	q.shares = []*slotShare{e.assignShare([]*queue{q})}
	for _, tag := range []uint64{0, 1, 2, 1 << 32, 1<<64 - 1} {
		q.onCompletion(&shm.CQE{Tag: tag})
	}
	if n := q.stats.strayCompletions.Load(); n != 5 {
		t.Errorf("%d of 5 are dropped", n)
	}
}

func TestErrnoTable(t *testing.T) {
	for e, want := range map[blk.Errno]uint32{
		blk.OK: 0, blk.EPERM: 1, blk.EROFS: 1, blk.EACCES: 1, blk.EIO: 5, blk.ENOMEM: 12, blk.EINVAL: 22,
		blk.ENOSPC: 28, blk.EOPNOTSUPP: 95, blk.ENODEV: 5, blk.ENOTCONN: 5, blk.ETIMEDOUT: 5, 9999: 5,
	} {
		if got := nbdErrno(e); got != want {
			t.Errorf("%d becomes %d, want %d", e, got, want)
		}
	}
}

func TestAnExportMayHaveOneQueue(t *testing.T) {
	queues := []*queue{{}, {}, {}}
	with := func(setting string) (*export, error) {
		return newExport(spec{Name: "x", Limits: testLimits(1 << 20), Arena: make([]byte, 6*4096), SlotSize: 4096, Slots: 6, Config: map[string]string{"queues": setting}})
	}
	for setting, want := range map[string]int{"1": 1, "2": 2, "9": 3} {
		e, err := with(setting)
		if err != nil {
			t.Fatal(err)
		}
		used := map[*queue]bool{}
		for range 6 {
			used[e.assignShare(queues).q] = true
		}
		if len(used) != want {
			t.Errorf("queues %s: %d serve it, want %d", setting, len(used), want)
		}
	}
	for _, bad := range []string{"", "0", "-1", "many"} {
		if _, err := with(bad); blk.ToErrno(err) != blk.EINVAL {
			t.Errorf("queues %q: %v", bad, err)
		}
	}
}
