package faults

import (
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

func TestAFailingMediumFailsItsRequestsAndNoOthers(t *testing.T) {
	onTargets(t, func(t *testing.T, d *slowdisk.Disk, c target, engine string) {
		good := slowdisk.New(t, 1<<20)
		h := launch(t, d, c.plugin, engine)
		h.mustOpen(device, c.path(d), blk.ReadWrite)
		h.mustOpen(device+1, c.path(good), blk.ReadWrite)
		d.SetError(syscall.EIO)
		for tag := range uint64(8) {
			e := request(blk.Write, tag, c.skew)
			e.Device += uint32(tag % 2)
			h.start(e)
		}
		for tag := range uint64(8) {
			want := []blk.Errno{blk.EIO, blk.OK}[tag%2]
			if got := h.wait(tag); got != want {
				t.Errorf("write %d: %v, want %v", tag, got, want)
			}
		}
		d.SetError(0)
		h.start(request(blk.Write, 0, c.skew))
		if got := h.wait(0); got != blk.OK {
			t.Errorf("write after the medium recovered: %v", got)
		}
	})
}
