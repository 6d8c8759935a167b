package diskio

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

// TestASyncFollowsAStepInParts: the sync of a step that is FUA follows its last part,
// once, and the request is answered after it.
func TestASyncFollowsAStepInParts(t *testing.T) {
	const size = 2048
	again := -int32(unix.EAGAIN)
	for _, c := range []struct {
		name    string
		results []int32 // of the parts; a part beyond these is whole
		parts   int
	}{
		{"short write", []int32{512}, 2},
		{"two short writes", []int32{512, 512}, 3},
		{"short write that is tried again", []int32{512, again}, 3},
		{"write that is tried again", []int32{again}, 2},
		{"short write within a block", []int32{700}, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			results, synced := c.results, false
			b := newBench(nil)
			b.engine.run = func(r *uring.Request) int32 {
				if len(b.ring.answers) > 0 {
					t.Error("the request is answered before its sync")
				}
				if synced = synced || r.Op == uring.Fdatasync; synced {
					return 0
				}
				if len(results) > 0 {
					n := results[0]
					results = results[1:]
					return n
				}
				return int32(r.Len)
			}
			d := &fakeDisk{step: Step{Op: uring.Pwrite, FD: 9, Align: 512, Sync: true}}
			r := write(d, 1, 0, page(t, size, 0))
			r.Flags = blk.FUA
			b.do(r)
			want := make([]uring.Op, c.parts, c.parts+1)
			for i := range want {
				want[i] = uring.Pwrite
			}
			wantOps(t, b, append(want, uring.Fdatasync)...)
			if b.engine.log[c.parts].FD != 9 || b.ring.answers[1] != blk.OK {
				t.Errorf("sync of descriptor %d, answer %v", b.engine.log[c.parts].FD, b.ring.answers[1])
			}
		})
	}
}

// TestASyncFollowsZeroesInParts: so it is with zeroes that are written in parts.
func TestASyncFollowsZeroesInParts(t *testing.T) {
	b := newBench(func(r *uring.Request) int32 { return int32(min(r.Len, 64<<10)) })
	d := &fakeDisk{step: Step{Op: uring.Pwrite, Zeroes: true, Sync: true}}
	b.do(plugin.Request{Disk: d, Op: blk.WriteZeroes, Flags: blk.FUA, Tag: 1, Len: 256 << 10})
	wantOps(t, b, uring.Pwrite, uring.Pwrite, uring.Pwrite, uring.Pwrite, uring.Fdatasync)
}
