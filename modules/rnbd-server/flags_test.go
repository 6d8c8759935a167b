package server

import (
	"fmt"
	"slices"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// seenBy returns what the plugin gets while f runs, as operations with flags.
func seenBy(mem *memory, f func()) (out []string) {
	before := len(mem.requests())
	f()
	for _, r := range mem.requests()[before:] {
		s := fmt.Sprintf("%v %d+%d", r.Op, r.Off, r.Len)
		for bit, name := range []string{"fua", "sync", "no-unmap"} {
			if r.Flags&(1<<bit) != 0 {
				s += " " + name
			}
		}
		out = append(out, s)
	}
	return out
}

// Each flag of a message reaches the plugin.
func TestFlagsOfMessagesAtThePlugin(t *testing.T) {
	const sync, fua, preflush, noUnmap = rnbdwire.FlagSync, rnbdwire.FlagFUA, rnbdwire.FlagPreflush, rnbdwire.FlagNoUnmap
	mem := newMemory()
	mem.add("cache", 1<<20)
	mem.add("no cache", 1<<20, func(l *blk.Limits) { l.WriteCache, l.FUA = false, false })
	r := newRig(t, mem)
	i := r.connect("s1")
	_, err := i.sessInfo(2)
	must(t, err)
	ids := map[string]uint32{}
	for name := range mem.disks {
		rsp, err := i.open(name, blk.ReadWrite)
		must(t, err)
		ids[name] = rsp.DeviceID
	}
	for _, c := range []struct {
		name, dev string
		op        blk.Op
		flags     uint32
		n, data   int
		want      []string
	}{
		{"R-136 a write", "cache", blk.Write, 0, 512, 512, []string{"write 4096+512"}},
		{"R-136 SYNC", "cache", blk.Write, sync, 512, 512, []string{"write 4096+512 sync"}},
		{"R-136 FUA", "cache", blk.Write, fua, 512, 512, []string{"write 4096+512 fua"}},
		{"R-136 FUA without a cache", "no cache", blk.Write, fua, 512, 512, []string{"write 4096+512"}},
		{"R-190 write-zeroes that may make a hole", "cache", blk.WriteZeroes, 0, 4096, 0, []string{"write-zeroes 4096+4096"}},
		{"R-190 NOUNMAP", "cache", blk.WriteZeroes, noUnmap, 4096, 0, []string{"write-zeroes 4096+4096 no-unmap"}},
		{"R-190 NOUNMAP of a write means nothing", "cache", blk.Write, noUnmap, 512, 512, []string{"write 4096+512"}},
		{"R-191 a write of no bytes with PREFLUSH is a flush", "cache", blk.Write, fua | preflush, 0, 0, []string{"flush 0+0"}},
		{"R-191 a write of no bytes with FUA is a flush", "cache", blk.Write, fua, 0, 0, []string{"flush 0+0"}},
		{"R-191 a flush with PREFLUSH is one flush", "cache", blk.Flush, fua | preflush, 0, 0, []string{"flush 0+0"}},
		{"R-191 a write with PREFLUSH comes after a flush", "cache", blk.Write, fua | preflush, 512, 512, []string{"flush 0+0", "write 4096+512 fua"}},
		{"R-191 write-zeroes with PREFLUSH", "cache", blk.WriteZeroes, preflush | noUnmap, 4096, 0, []string{"flush 0+0", "write-zeroes 4096+4096 no-unmap"}},
		{"R-191 nothing to flush without a cache", "no cache", blk.Write, fua | preflush, 512, 512, []string{"write 4096+512"}},
		{"R-192 unknown flags", "cache", blk.Write, sync | 1<<12 | 1<<31, 512, 512, []string{"write 4096+512 sync"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			unknown := r.server.unknownFlags.Load()
			got := seenBy(mem, func() {
				if errno := i.await(i.start(false, c.data, ioMessage(ids[c.dev], c.op, c.flags, 8, c.n))); errno != blk.OK {
					t.Errorf("errno %v", errno)
				}
			})
			if !slices.Equal(got, c.want) {
				t.Errorf("the plugin sees %q, want %q", got, c.want)
			}
			if ignored := r.server.unknownFlags.Load() - unknown; (ignored != 0) != (c.flags>>12 != 0) {
				t.Errorf("%d requests with unknown flags are counted", ignored)
			}
		})
	}
	t.Run("R-192 unknown flags are counted where operators look", func(t *testing.T) {
		for _, c := range r.server.limitCounters() {
			if c.Name == "ignored" && c.Reason == "unknown-flags" && c.Value == 1 {
				return
			}
		}
		t.Errorf("%v", r.server.limitCounters())
	})
}

// The write of a request with PREFLUSH begins when the flush has succeeded, also in the
// next process of a plugin that died between them, and never after a failed flush.
func TestR191_PreflushComesFirst(t *testing.T) {
	const flags = rnbdwire.FlagFUA | rnbdwire.FlagPreflush
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	disk := mem.add("a", 1<<20)
	r := newRig(t, mem)
	i := r.connect("s1")
	rsp, err := i.open("a", blk.ReadWrite)
	must(t, err)
	write := func() <-chan int { return i.start(false, 512, ioMessage(rsp.DeviceID, blk.Write, flags, 8, 512)) }

	disk.flushErrno.Store(uint32(blk.ENOSPC))
	if got := seenBy(mem, func() {
		if errno := i.await(write()); errno != blk.ENOSPC {
			t.Errorf("after a flush that fails: errno %v, want ENOSPC", errno)
		}
	}); len(got) != 1 {
		t.Errorf("after a flush that fails the plugin sees %q", got)
	}
	disk.flushErrno.Store(0)

	mem.setHold(true)
	tag, before := write(), len(mem.requests())
	eventually(t, "the flush is with the plugin", func() bool { return len(mem.requests()) > before })
	r.process().Kill()
	mem.setHold(false)
	if errno := i.await(tag); errno != blk.OK {
		t.Fatalf("errno %v", errno)
	}
	seen := mem.requests()
	if last := seen[len(seen)-1]; last.Op != blk.Write || seen[len(seen)-2].Op != blk.Flush {
		t.Errorf("the plugin sees %v", seen)
	}
}
