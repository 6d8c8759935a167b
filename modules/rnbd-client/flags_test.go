package client

import (
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// Each flag of a front end's request is in the message to the server, and no other flag.
func TestFlagsOfRequestsOnTheWire(t *testing.T) {
	const sync, fua, noUnmap = rnbdwire.FlagSync, rnbdwire.FlagFUA, rnbdwire.FlagNoUnmap
	for _, features := range []uint16{0, rnbdwire.FeatureOnce} {
		s := newTarget(t, 1<<20)
		s.features = features
		_, io := s.device(s.newClient())
		for _, c := range []struct {
			name  string
			op    blk.Op
			flags blk.Flags
			want  uint32
		}{
			{"R-136 a read", blk.Read, 0, sync},
			{"R-136 a write", blk.Write, 0, 0},
			{"R-136 a write that somebody waits for", blk.Write, blk.Sync, sync},
			{"R-136 a write with FUA", blk.Write, blk.FUA, sync | fua},
			{"R-136 a flush", blk.Flush, 0, sync | fua},
			{"R-136 a discard", blk.Discard, blk.Sync, sync},
			{"R-190 write-zeroes that may make a hole", blk.WriteZeroes, 0, 0},
			{"R-190 write-zeroes that must stay allocated", blk.WriteZeroes, blk.NoUnmap, noUnmap},
			{"R-190 write-zeroes with all flags", blk.WriteZeroes, blk.NoUnmap | blk.FUA | blk.Sync, sync | fua | noUnmap},
			{"R-190 only write-zeroes can stay allocated", blk.Discard, blk.NoUnmap, 0},
		} {
			t.Run(c.name, func(t *testing.T) {
				s.set(func() { s.ios = nil })
				if errno := do(t, io, Request{Op: c.op, Flags: c.flags, Len: 4096, Prio: 0x4004}); errno != blk.OK {
					t.Fatalf("errno %v", errno)
				}
				s.mu.Lock()
				defer s.mu.Unlock()
				if len(s.ios) != 1 || s.ios[0].RW != uint32(c.op)|c.want {
					t.Fatalf("messages %+v, want flags %#x", s.ios, c.want)
				}
				if prio := s.ios[0].Prio; prio != 0x4004 && c.op != blk.Flush {
					t.Errorf("priority %#x", prio)
				}
			})
		}
	}
}

// A flag that this daemon does not know would be lost on its way to the server.
func TestFlagsOfRequests_UnknownAreRefused(t *testing.T) {
	s := newTarget(t, 1<<20)
	d, _ := s.device(s.newClient())
	for bit := range 8 {
		e := &shm.SQE{Op: blk.WriteZeroes, Len: 4096, Flags: 1 << bit}
		if got, known := d.checkEntry(e), e.Flags&blk.KnownFlags != 0; (got == blk.OK) != known || !known && got != blk.EINVAL {
			t.Errorf("flag %#x: errno %v, known %t", e.Flags, got, known)
		}
	}
}
