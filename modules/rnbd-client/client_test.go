package client

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

func TestR123_SessionInfoThenOpen(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	s.device(c)
	if got := s.messages(); !slices.Equal(got, []string{"sess-info", "open vol"}) {
		t.Errorf("R-123: messages %q", got)
	}
}

func TestR120_R121_ShapeOfAdminMessages(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	d, _ := s.device(c)
	must(t, c.Unmap(t.Context(), d.Name(), false))
	want := []string{
		"type 0 read true message 36 data 36 reply 36",
		"type 2 read true message 264 data 56 reply 56",
		"type 5 read false message 8 data 0 reply 0",
	}
	s.set(func() {
		if !slices.Equal(s.shapes, want) {
			t.Errorf("got %q\nwant %q", s.shapes, want)
		}
	})
}

func TestIOMessages(t *testing.T) {
	s := newTarget(t, 1<<20)
	d, io := s.device(s.newClient())
	for _, c := range []struct {
		name    string
		r       Request
		rw      uint32
		sector  uint64
		dataLen int
		read    bool
	}{
		{"R-136 read", Request{Op: blk.Read, Off: 8192, Len: 4096}, 0x100, 16, 4096, true},
		{"R-136 write", Request{Op: blk.Write, Off: 512, Len: 512}, 0x001, 1, 512, false},
		{"R-136 synchronous write", Request{Op: blk.Write, Flags: blk.Sync, Len: 512}, 0x101, 0, 512, false},
		{"write with a priority", Request{Op: blk.Write, Len: 512, Prio: 0x4004}, 0x001, 0, 512, false},
		{"flush has no priority", Request{Op: blk.Flush, Prio: 0x4004}, 0x302, ^uint64(0), 0, true},
		{"R-136 write with FUA", Request{Op: blk.Write, Flags: blk.FUA, Len: 512}, 0x301, 0, 512, false},
		{"R-138 flush", Request{Op: blk.Flush}, 0x302, ^uint64(0), 0, true},
		{"R-137 discard", Request{Op: blk.Discard, Len: 65536}, 0x003, 0, 0, false},
		{"R-137 write zeroes", Request{Op: blk.WriteZeroes, Off: 4096, Len: 8192}, 0x005, 8, 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if errno := do(t, io, c.r); errno != blk.OK {
				t.Fatalf("errno %d", errno)
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			n := len(s.ios) - 1
			want := rnbdwire.IOFields{DeviceID: d.id.Load(), Sector: c.sector, RW: c.rw, BISize: c.r.Len}
			if c.r.Op != blk.Flush {
				want.Prio = c.r.Prio
			}
			if s.ios[n] != want || s.dataLens[n] != c.dataLen || s.reads[n] != c.read {
				t.Errorf("got %+v, data %d, RTRS read %t\nwant %+v, data %d, RTRS read %t", s.ios[n], s.dataLens[n], s.reads[n], want, c.dataLen, c.read)
			}
		})
	}
}

func TestR141_Data(t *testing.T) {
	s := newTarget(t, 1<<20)
	d, io := s.device(s.newClient())
	if io.SlotSize() != 61440 || d.Limits().MaxIOSize != 61440 {
		t.Fatalf("R-141: slots of %d, largest I/O %d; want the server's 61440", io.SlotSize(), d.Limits().MaxIOSize)
	}
	rnd := rand.NewChaCha8([32]byte{1})
	for i := range 200 {
		n := uint32(512 * (1 + i%120))
		off := uint64(i*4096) % (1<<20 - 61440)
		rnd.Read(io.Buf(0)[:n])
		want := bytes.Clone(io.Buf(0)[:n])
		if errno := do(t, io, Request{Op: blk.Write, Slot: 0, Off: off, Len: n}); errno != blk.OK {
			t.Fatalf("write: errno %d", errno)
		}
		if errno := do(t, io, Request{Op: blk.Read, Slot: 1, Off: off, Len: n}); errno != blk.OK || !bytes.Equal(io.Buf(1)[:n], want) {
			t.Fatalf("read of %d at %d: errno %d, or other bytes", n, off, errno)
		}
	}
}

func TestManyRequestsWaitForPermits(t *testing.T) {
	s := newTarget(t, 1<<20) // 16 permits
	_, io := s.device(s.newClient())
	s.set(func() { s.hold = true })
	for slot := range io.Slots() {
		if !io.Submit(Request{Op: blk.Read, Slot: slot, Off: uint64(slot) * 512, Len: 512}) {
			t.Fatal("submit refused")
		}
	}
	io.Flush()
	eventually(t, "most permits are in use", s.busy)
	time.Sleep(20 * time.Millisecond)
	s.set(func() {
		if n := len(s.held); n > 16 {
			t.Errorf("R-057: %d requests in flight, the depth is 16", n)
		}
	})
	s.releaseAll(blk.OK)
	seen := map[int]bool{}
	var done [64]Done
	for len(seen) < io.Slots() {
		for _, x := range done[:io.Wait(done[:])] {
			if x.Errno != blk.OK || seen[x.Slot] {
				t.Fatalf("answer %+v, seen before: %t", x, seen[x.Slot])
			}
			seen[x.Slot] = true
		}
	}
}

func TestErrors(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	_, io := s.device(c)
	s.set(func() { s.ioErr = blk.ENOSPC })
	if errno := do(t, io, Request{Op: blk.Write, Len: 512}); errno != blk.ENOSPC {
		t.Errorf("the server's errno: got %d", errno)
	}
	s.set(func() { s.ioErr = blk.OK })
	before := len(s.messages())
	for name, r := range map[string]Request{
		"R-140 beyond the end": {Op: blk.Read, Off: 1 << 20, Len: 512},
		"unaligned":            {Op: blk.Read, Off: 100, Len: 512},
		"too long":             {Op: blk.Read, Len: 65536},
	} {
		if errno := do(t, io, r); errno == blk.OK {
			t.Errorf("%s: answered OK", name)
		}
	}
	if n := len(s.messages()); n != before {
		t.Errorf("%d bad requests reached the server", n-before)
	}
}

func TestEntriesOfAFrontEndStayInTheirArena(t *testing.T) {
	s := newTarget(t, 1<<20)
	d, _ := s.device(s.newClient())
	size := uint64(d.arena.Size())
	for _, x := range []struct {
		name string
		e    shm.SQE
		want blk.Errno
	}{
		{"whole arena's end", shm.SQE{Op: blk.Read, Arena: d.index, ArenaOff: size - 512, Len: 512}, blk.OK},
		{"a byte behind it", shm.SQE{Op: blk.Read, Arena: d.index, ArenaOff: size - 511, Len: 512}, blk.EINVAL},
		{"begins at its end", shm.SQE{Op: blk.Read, Arena: d.index, ArenaOff: size, Len: 512}, blk.EINVAL},
		{"offset that wraps", shm.SQE{Op: blk.Write, Arena: d.index, ArenaOff: ^uint64(0) - 511, Len: 512}, blk.EINVAL},
		{"arena of another device", shm.SQE{Op: blk.Write, Arena: d.index + 1, Len: 512}, blk.EINVAL},
		{"no data, no place", shm.SQE{Op: blk.Flush, Arena: d.index + 1, ArenaOff: size}, blk.OK},
	} {
		if got := d.checkEntry(&x.e); got != x.want {
			t.Errorf("%s: errno %d, want %d", x.name, got, x.want)
		}
	}
}

func TestMapErrors(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	s.device(c)
	before := len(s.messages())
	req := func(change func(*MapRequest)) error {
		r := MapRequest{Path: "vol2", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Frontend: "none"}
		change(&r)
		_, err := c.Map(t.Context(), r)
		return err
	}
	for _, x := range []struct {
		name   string
		change func(*MapRequest)
		want   error
	}{
		{"R-143 same path again", func(r *MapRequest) { r.Path = "vol" }, syscall.EEXIST},
		{"same name again", func(r *MapRequest) { r.Name = "rnbd0" }, syscall.EEXIST},
		{"no session of that name and no path", func(r *MapRequest) { r.Session, r.Paths = "other", nil }, syscall.ENXIO},
		{"no session and no path", func(r *MapRequest) { r.Paths = nil }, syscall.EINVAL},
		{"path that is none", func(r *MapRequest) { r.Session, r.Paths = "x", []string{"nohost"} }, syscall.EINVAL},
		{"fabric that is not there", func(r *MapRequest) { r.Session, r.Paths = "x", []string{"10.0.0.1%none"} }, syscall.EINVAL},
		{"front end that is not there", func(r *MapRequest) { r.Frontend = "ublk" }, syscall.EINVAL},
		{"empty path", func(r *MapRequest) { r.Path = "" }, syscall.EINVAL},
		{"path too long", func(r *MapRequest) { r.Path = strings.Repeat("n", 255) }, syscall.EINVAL},
		{"a word of the commands as name", func(r *MapRequest) { r.Name = "all" }, syscall.EINVAL},
		{"a word of the commands as session", func(r *MapRequest) { r.Session = "all" }, syscall.EINVAL},
		{"name with a slash", func(r *MapRequest) { r.Name = "a/b" }, syscall.EINVAL},
	} {
		t.Run(x.name, func(t *testing.T) {
			if err := req(x.change); !errors.Is(err, x.want) {
				t.Errorf("got %v, want %v", err, x.want)
			}
		})
	}
	if n := len(s.messages()); n != before {
		t.Errorf("R-143: %d messages were sent for it", n-before)
	}
	t.Run("R-144 failed open of a fresh session ends the session", func(t *testing.T) {
		s.set(func() { s.openErr = blk.ENOENT })
		defer s.set(func() { s.openErr = 0 })
		if err := req(func(r *MapRequest) { r.Session = "fresh" }); !errors.Is(err, syscall.ENOENT) {
			t.Errorf("got %v, want ENOENT", err)
		}
		eventually(t, "the fresh session is gone", func() bool { return s.sessions.Load() == 1 })
	})
	t.Run("R-133 logical block size 0", func(t *testing.T) {
		s.set(func() { s.rsp.LogicalBlockSize = 0 })
		defer s.set(func() { s.rsp.LogicalBlockSize = 512 })
		if err := req(func(*MapRequest) {}); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("got %v, want EINVAL", err)
		}
		if m := s.messages(); m[len(m)-1] != "close" {
			t.Errorf("no CLOSE was sent: %q", m)
		}
	})
}

func TestR134_CachePolicy(t *testing.T) {
	for policy, want := range map[uint8][2]bool{
		0:                       {false, false},
		rnbdwire.CacheFUA:       {false, false},
		rnbdwire.CacheWriteBack: {true, false},
		rnbdwire.CacheWriteBack | rnbdwire.CacheFUA: {true, true},
	} {
		s := newTarget(t, 1<<20)
		s.rsp.CachePolicy = policy
		d, _ := s.device(s.newClient())
		if l := d.Limits(); l.WriteCache != want[0] || l.FUA != want[1] {
			t.Errorf("R-134: policy %d: write cache %t, FUA %t; want %v", policy, l.WriteCache, l.FUA, want)
		}
	}
}

func TestReadOnly(t *testing.T) {
	s := newTarget(t, 1<<20)
	_, io := s.device(s.newClient(), func(r *MapRequest) { r.Mode = blk.ReadOnly })
	if errno := do(t, io, Request{Op: blk.Write, Len: 512}); errno != blk.EROFS {
		t.Errorf("write: errno %d, want EROFS", errno)
	}
	if errno := do(t, io, Request{Op: blk.Read, Len: 512}); errno != blk.OK {
		t.Errorf("read: errno %d", errno)
	}
}

func TestWhatTheServerSaysOfTheMedium(t *testing.T) {
	s := newTarget(t, 1<<20)
	s.rsp.Rotational, s.rsp.SecureDiscard = true, 1
	d, io := s.device(s.newClient())
	if l := d.Limits(); !l.Rotational || !l.SecureErase {
		t.Errorf("limits %+v", l)
	}
	if errno := do(t, io, Request{Op: blk.SecureErase, Len: 4096}); errno != blk.OK {
		t.Errorf("secure erase: errno %d", errno)
	}
}

func TestR145_UnmapSendsClose(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	d, _ := s.device(c)
	must(t, c.Unmap(t.Context(), d.Name(), false))
	if m := s.messages(); m[len(m)-1] != "close" {
		t.Errorf("R-145: the last message is %q", m[len(m)-1])
	}
	eventually(t, "the session is closed with its last device", func() bool { return s.sessions.Load() == 0 })
	if d.State() != Unmapped {
		t.Errorf("state %s", d.State())
	}
	if err := c.Unmap(t.Context(), "rnbd0", false); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("again: %v, want ENOENT", err)
	}
}

func TestDevicesShareASession(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	d1, _ := s.device(c)
	if name := d1.session.name; !regexp.MustCompile(`^host-example-[0-9a-f]{4}@10-0-0-1:1234$`).MatchString(name) {
		t.Errorf("name of the session: %q", name)
	}
	d2, err := c.Map(t.Context(), MapRequest{Path: "vol2", Session: d1.session.name, Mode: blk.ReadWrite, Frontend: "none"})
	must(t, err)
	if s.sessions.Load() != 1 || d2.Name() != "rnbd1" {
		t.Errorf("%d sessions, name %s", s.sessions.Load(), d2.Name())
	}
	must(t, c.Unmap(t.Context(), "vol2", false))
	if s.sessions.Load() != 1 {
		t.Error("the session ended with a device left in it")
	}
}
