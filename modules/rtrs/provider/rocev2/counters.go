package rocev2

import "github.com/rnbd-go/rnbd/modules/rtrs/verbs"

// Counters implements verbs.CounterSource. The values are those of Stats.
func (d *Device) Counters() []verbs.Counter {
	s := d.Stats()
	out := []verbs.Counter{
		{Name: "sent_packets", Value: s.SentPackets},
		{Name: "received_packets", Value: s.ReceivedPackets},
		{Name: verbs.CounterPlacedByCopy, Bytes: true, Value: s.PlacedCopyBytes},
		{Name: "resent_packets", Value: s.Resent},
		{Name: "timeouts", Value: s.Timeouts},
		{Name: "sequence_naks", Value: s.SequenceNAKs},
		{Name: "rnr_naks", Value: s.RNRNAKs},
		{Name: "refused_handshakes", Reason: "gave way", Value: s.Displaced},
	}
	for i, n := range s.Dropped {
		if dropReason(i) != dropNone {
			out = append(out, verbs.Counter{Name: "dropped_packets", Reason: DropReason(i), Value: n})
		}
	}
	return out
}
