package server

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
)

// write sends a write of 512 bytes at sector 0.
func (i *initiator) write(id uint32, value byte) <-chan int {
	return i.once(id, 0, value, uint64(value), nil)
}

// A client that loses its paths with a write in flight admits no second writer
// before the write has ended: the second one's writes could be overwritten.
func TestMigration_NoSecondWriterBesideWritesWithoutAPath(t *testing.T) {
	mem := newMemory()
	disk := mem.add("vol", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.RetireAfter = time.Minute })
	one := r.connect("one")
	id, _ := one.openWriter("vol", 1)
	disk.hung.Store(true)
	one.write(id, 'A')
	eventually(t, "the plugin has the write", func() bool { return len(mem.requests()) == 1 })
	m := r.server.sessions[0].Load().openMappings()[0]
	go one.close()
	eventually(t, "the path has gone", m.session.isCut)
	two := r.connect("two")
	if _, err := two.open("vol", blk.ReadWrite); !errors.Is(err, syscall.EPERM) {
		t.Errorf("OPEN in mode rw: %v, want EPERM at once", err)
	}
	opened := make(chan error, 1)
	go func() { _, err := two.open("vol", blk.Migration); opened <- err }()
	select {
	case err := <-opened:
		t.Fatalf("OPEN is answered (%v) before the write has ended", err)
	case <-time.After(50 * time.Millisecond):
	}
	mem.wake()
	if err := <-opened; err != nil {
		t.Error(err)
	}
}

// The second writer is there already: its writes wait.
func TestMigration_WritesWaitForThoseWithoutAPath(t *testing.T) {
	mem := newMemory()
	disk := mem.add("vol", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.RetireAfter = time.Minute })
	one, two := r.connect("one"), r.connect("two")
	id, _ := one.openWriter("vol", 1)
	id2, _ := two.openWriter("vol", 2)
	disk.hung.Store(true)
	one.write(id, 'A')
	eventually(t, "the plugin has the write", func() bool { return len(mem.requests()) == 1 })
	go one.close()
	sdktest.Within(t, 20*time.Second, "writes of others are held back", func() bool { return r.usage().repeats.Load() == 1 })
	b := two.write(id2, 'B')
	read := make(chan blk.Errno, 1)
	go func() { read <- two.rw(id2, blk.Read, 8, make([]byte, 512)) }()
	eventually(t, "the plugin has the read", func() bool { return len(mem.requests()) == 2 })
	time.Sleep(20 * time.Millisecond)
	if n := len(mem.requests()); n != 2 {
		t.Errorf("the plugin has %d requests", n)
	}
	mem.wake()
	if errno := two.await(b); errno != blk.OK {
		t.Errorf("B: errno %d", errno)
	}
	if errno := <-read; errno != blk.OK {
		t.Errorf("read: errno %d", errno)
	}
	if got := mem.value("vol"); got != 'B' {
		t.Errorf("%c on the disk, want B", got)
	}
	eventually(t, "nothing is held back", func() bool { return r.usage().repeats.Load() == 0 })
}

// Two clients lose their paths: each one's writes are held back for the other's, and
// nothing is left behind.
func TestUsage_TwoPrecede(t *testing.T) {
	u := &writerHistory{}
	one, two := &mapping{writer: 1}, &mapping{writer: 2}
	if !u.beginPrecedence(one) || u.beginPrecedence(two) {
		t.Error("the second one does not wait")
	}
	u.endRepetition()
	if !u.beginPrecedence(two) || u.beginPrecedence(one) {
		t.Error("the first one does not wait")
	}
	u.endRepetition()
	if u.repeats.Load() != 0 {
		t.Error("something is left")
	}
}
