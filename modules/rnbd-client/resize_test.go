package client

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

func TestResizeIsLocal(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	d, io := s.device(c)
	before := len(s.messages())
	must(t, c.Resize("rnbd0", 1024))
	if got := d.Limits().Size; got != 512<<10 {
		t.Errorf("size %d after the resize to 1024 sectors", got)
	}
	if errno := do(t, io, Request{Op: blk.Read, Off: 512 << 10, Len: 512}); errno != blk.EIO {
		t.Errorf("a read behind the new end: errno %d, want EIO", errno)
	}
	if n := len(s.messages()); n != before {
		t.Errorf("%d messages were sent for it", n-before)
	}
	must(t, c.Resize("vol", 4096)) // more than the server has
	if errno := do(t, io, Request{Op: blk.Read, Off: 1<<20 - 512, Len: 512}); errno != blk.OK {
		t.Errorf("a read in the larger device: errno %d", errno)
	}
}

func TestResizeErrors(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	s.rsp.LogicalBlockSize = 4096
	d, _ := s.device(c)
	for name, x := range map[string]struct {
		device  string
		sectors uint64
		want    error
	}{
		"no such device":           {"rnbd7", 8, syscall.ENOENT},
		"part of a block":          {"rnbd0", 9, syscall.EINVAL},
		"more than fits 64 bits":   {"rnbd0", 1 << 55, syscall.EINVAL},
		"nothing at all is a size": {"rnbd0", 0, nil},
	} {
		if err := c.Resize(x.device, x.sectors); !errors.Is(err, x.want) {
			t.Errorf("%s: got %v, want %v", name, err, x.want)
		}
	}
	s.kill()
	eventually(t, "closed", func() bool { return d.State() == Closed })
	if err := c.Resize("rnbd0", 8); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("of a closed device: got %v, want ENOENT", err)
	}
}

func TestAReconnectOverridesALocalSize(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	d, _ := s.device(c, lossQueue(30*time.Second))
	must(t, c.Resize("rnbd0", 1<<20))
	s.kill()
	eventually(t, "closed", func() bool { return d.State() == Closed })
	s.start()
	eventually(t, "open", func() bool { return d.State() == Open })
	if got := d.Limits().Size; got != 1<<20 {
		t.Errorf("size %d, want what the server says", got)
	}
}

func TestLossFailTakesASmallerDevice(t *testing.T) {
	s := newTarget(t, 1<<20)
	d, io := s.device(s.newClient())
	s.kill()
	eventually(t, "closed", func() bool { return d.State() == Closed })
	s.set(func() { s.rsp.Sectors /= 2 })
	s.start()
	eventually(t, "open", func() bool { return d.State() == Open })
	if errno := do(t, io, Request{Op: blk.Read, Off: 512 << 10, Len: 512}); errno != blk.EIO {
		t.Errorf("read behind the new end: errno %d, want EIO", errno)
	}
}

func TestRemapTakesASmallerDevice(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	d, _ := s.device(c, lossQueue(30*time.Second))
	s.kill()
	eventually(t, "closed", func() bool { return d.State() == Closed })
	s.set(func() { s.rsp.Sectors /= 2 })
	s.start()
	eventually(t, "the device is given up", func() bool { d.mu.Lock(); defer d.mu.Unlock(); return d.needsRemap })
	if _, err := c.Remap(t.Context(), "rnbd0"); err != nil {
		t.Fatalf("remap: %v", err)
	}
	if got := d.Limits().Size; got != 512<<10 {
		t.Errorf("size %d", got)
	}
}
