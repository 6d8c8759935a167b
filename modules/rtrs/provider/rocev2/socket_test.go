package rocev2

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The kernel merges packets of different queue pairs, and all of them go where
// the first one goes.
func TestC042_MergingStopsWhenItMixesQueuePairs(t *testing.T) {
	for _, tt := range []struct {
		name string
		id   uint16 // position among the merged
		slot uint32 // of the packet's queue pair, after ours
		want bool   // merging goes on
	}{
		{"first packet: sent to the wrong number", 0, 1, true},
		{"later packet for a queue pair of ours that is gone", 1, 0, true},
		{"later packet for another queue", 1, 1, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := newOffline(t)
			defer o.finish()
			p := o.q.out.port
			p.gro.Store(true)
			b := make([]byte, shapes[opSendOnly].size+icrcLen)
			putBTH(b, opSendOnly, 0, 0xabcd<<slotBits|o.cq.slot.index+tt.slot, 0, false)
			var wc verbs.WC
			o.cq.deliverCounted(&receivedPacket{b: b, id: tt.id, addr: o.q.peer, out: o.q.out}, &wc)
			if p.gro.Load() != tt.want {
				t.Errorf("merging is on: %t", !tt.want)
			}
		})
	}
}

// A send that the kernel refuses is lost. Segmented ones go on, unless the error
// says that the kernel cannot do it.
func TestC042_RefusedSegmentedSends(t *testing.T) {
	for _, tt := range []struct {
		errno unix.Errno
		size  int // of a packet
		want  bool
	}{
		{unix.EIO, 1000, false},
		{unix.EOPNOTSUPP, 1000, false},
		{unix.EINVAL, 1000, false},
		{unix.EINVAL, 1 << 20, true}, // larger than the route of lo takes
		{unix.EMSGSIZE, 1000, true},
		{unix.EPERM, 1000, true},
		{unix.ECONNREFUSED, 1000, true},
		{unix.ENETUNREACH, 1000, true},
		{unix.EHOSTUNREACH, 1000, true},
		{unix.ENETDOWN, 1000, true},
		{unix.EBADF, 1000, true},
	} {
		t.Run(fmt.Sprintf("%s for packets of %d bytes", unix.ErrnoName(tt.errno), tt.size), func(t *testing.T) {
			c, _ := pairOf(t, Config{})
			out := c.qp.out
			out.gso = true
			out.runs[0] = packetRun{q: c.qp, size: tt.size, packets: 2}
			out.n = 1
			out.skipMessage(tt.errno)
			if out.gso != tt.want || out.at != 1 {
				t.Errorf("segmented sends are on: %t, %d messages wait", out.gso, out.n-out.at)
			}
			out.discardAll()
		})
	}
}

func TestC042_RefusedSendsAreLost(t *testing.T) {
	o := newOffline(t) // its socket refuses everything
	defer o.finish()
	out := o.q.out
	o.cq.transmitActive()
	if out.at != 0 || out.n != 0 {
		t.Errorf("%d messages wait", out.n-out.at)
	}
	if n := o.q.req.outstandingPackets(); n == 0 {
		t.Error("nothing was sent")
	}
}

func TestC042_EqualPacketsOfAQueuePairAreOneSend(t *testing.T) {
	o := newOffline(t)
	defer o.finish()
	out := o.q.out
	out.gso = true
	o.q.sendRequests()
	sizes := []int{}
	for _, r := range out.runs[:out.n] {
		if full := r.size * r.packets; r.total != full && (!r.short || r.total >= full) {
			t.Errorf("%d packets of %d bytes, %d in all", r.packets, r.size, r.total)
		}
		sizes = append(sizes, r.packets)
	}
	// 600 bytes at a path MTU of 256: the first packet has a longer header than
	// the second, so the second is the last of its run.
	if len(sizes) < 3 || sizes[0] < 2 {
		t.Errorf("packets of the messages: %v", sizes)
	}
}
