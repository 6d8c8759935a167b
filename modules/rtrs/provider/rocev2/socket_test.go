package rocev2

import (
	"testing"

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
			o.cq.packet(&inbound{b: b, id: tt.id, addr: o.q.peer, out: o.q.out}, &wc)
			if p.gro.Load() != tt.want {
				t.Errorf("merging is on: %t", !tt.want)
			}
		})
	}
}

// A segmented send that the kernel refuses is lost, and the last of its kind.
func TestC042_RefusedSegmentedSendIsTheLast(t *testing.T) {
	o := newOffline(t) // its socket refuses everything
	defer o.finish()
	out := o.q.out
	out.gso = true
	o.cq.transmit()
	if out.gso || out.at != 0 || out.n != 0 {
		t.Errorf("segmented sends are on: %t, %d messages wait", out.gso, out.n-out.at)
	}
	if n := o.q.req.outstanding(); n == 0 {
		t.Error("nothing was sent")
	}
}

func TestC042_EqualPacketsOfAQueuePairAreOneSend(t *testing.T) {
	o := newOffline(t)
	defer o.finish()
	out := o.q.out
	out.gso = true
	o.q.request()
	sizes := []int{}
	for _, r := range out.runs[:out.n] {
		if full := r.size * r.packets; r.total != full && (!r.short || r.total >= full) {
			t.Errorf("%d packets of %d bytes, %d in all", r.packets, r.size, r.total)
		}
		sizes = append(sizes, r.packets)
	}
	// 600 bytes at a path MTU of 256: the first packet has a longer header than
	// the second, which therefore is the last of its run.
	if len(sizes) < 3 || sizes[0] < 2 {
		t.Errorf("packets of the messages: %v", sizes)
	}
}
