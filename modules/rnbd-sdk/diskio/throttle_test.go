package diskio

import (
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

// disks are n disks, each on a descriptor of its number.
func disks(n int) (out []*fakeDisk) {
	for i := range n {
		out = append(out, &fakeDisk{step: Step{Op: uring.Pwrite, FD: int32(i)}})
	}
	return out
}

func TestADiskThatHangsLeavesWorkersToOthers(t *testing.T) {
	for _, tt := range []struct {
		name          string
		hung, workers int
	}{
		{"one disk", 1, 16},
		{"one disk of an engine with few workers", 1, 2},
		{"four disks", 4, 16},
		{"four disks of an engine with many workers", 4, 64},
		{"eight disks", 8, 64},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(all)
			b.engine.workers, b.engine.hung = tt.workers, map[int32]bool{}
			all := disks(tt.hung + 2)
			buf := page(t, 4096, 0)
			tag := uint64(0)
			for i := range tt.hung {
				b.engine.hung[int32(i)] = true
				for range 100 / tt.hung {
					b.do(write(all[i], tag, 0, buf))
					tag++
				}
			}
			for n := range 20 {
				d := all[tt.hung+n%2]
				b.do(write(d, 120, 0, buf), write(d, 121, 0, buf), write(d, 122, 0, buf))
				for _, tag := range []uint64{120, 121, 122} {
					if errno, ok := b.ring.answers[tag]; !ok || errno != blk.OK {
						t.Fatalf("write number %d beside %d disks that hang: answered %t, errno %d", n, tt.hung, ok, errno)
					}
					delete(b.ring.answers, tag)
				}
			}
			if len(b.ring.answers) != 0 {
				t.Errorf("requests of disks that hang were answered: %v", b.ring.answers)
			}
			clear(b.engine.hung)
			for range 100 {
				b.turn()
			}
			if len(b.ring.answers) != int(tag) || b.queue.inFlight != 0 {
				t.Errorf("%d of %d requests of the disks were answered in the end", len(b.ring.answers), tag)
			}
			if q := b.queue; q.busy != 0 || len(q.shares) != 0 || len(q.spare) != q.ring.Depth() {
				t.Errorf("left behind: %d busy, %d shares, %d spare", q.busy, len(q.shares), len(q.spare))
			}
		})
	}
}

// An engine without a bound gets everything at once.
func TestNoDiskWaitsWhereNothingIsBounded(t *testing.T) {
	b := newBench(all)
	b.engine.hung = map[int32]bool{0: true}
	d, buf := disks(1)[0], page(t, 4096, 0)
	for tag := range uint64(100) {
		b.ring.todo = append(b.ring.todo, write(d, tag, 0, buf))
	}
	b.turn()
	if n := len(b.engine.log); n != 100 {
		t.Errorf("the engine has %d of 100 requests", n)
	}
}

// A request that the engine has no room for waits; it does not fail.
func TestARequestThatIsRefusedWaits(t *testing.T) {
	b := newBench(all)
	b.engine.hung = map[int32]bool{0: true}
	all, buf := disks(2), page(t, 4096, 0)
	b.do(write(all[0], 0, 0, buf))
	b.engine.full = true
	b.do(write(all[1], 1, 0, buf), write(all[1], 2, 4096, buf))
	if len(b.ring.answers) != 0 {
		t.Fatalf("answered: %v", b.ring.answers)
	}
	b.engine.full = false
	for range 10 {
		b.turn()
	}
	if len(b.ring.answers) != 2 || b.ring.answers[1] != blk.OK || b.ring.answers[2] != blk.OK {
		t.Errorf("answers %v, want two without an error", b.ring.answers)
	}
	if log := b.engine.log; len(log) != 3 || log[1].Tag != 1 || log[2].Tag != 2 {
		t.Errorf("the engine got %d requests, not in order", len(log))
	}
}

func TestNothingIsAllocatedPerRequestThatWaits(t *testing.T) {
	b := newBench(all)
	b.engine.workers = 2
	buf := page(t, 4096, 0)
	var rs []plugin.Request
	for i, d := range disks(8) {
		for k := range 4 {
			rs = append(rs, write(d, uint64(i*4+k), 0, buf))
		}
	}
	loop := func() {
		b.ring.todo = rs
		for range 64 {
			b.turn()
		}
		b.engine.log = b.engine.log[:0]
	}
	loop()
	if got := testing.AllocsPerRun(50, loop); got != 0 {
		t.Errorf("%v allocations for %d requests, want 0", got, len(rs))
	}
	if b.queue.inFlight != 0 {
		t.Errorf("%d requests are still in flight", b.queue.inFlight)
	}
}
