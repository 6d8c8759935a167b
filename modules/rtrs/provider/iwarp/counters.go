package iwarp

import "github.com/rnbd-go/rnbd/modules/rtrs/verbs"

// Counters implements verbs.CounterSource. The values are those of Stats.
func (d *Device) Counters() []verbs.Counter {
	s := d.Stats()
	return []verbs.Counter{
		{Name: "sent", Bytes: true, Value: s.SentBytes},
		{Name: "received", Bytes: true, Value: s.ReceivedBytes},
		{Name: verbs.CounterPlacedByCopy, Bytes: true, Value: s.PlacedCopyBytes},
		{Name: "placed_by_socket", Bytes: true, Value: s.DirectBytes},
		{Name: "closed", Reason: "crc", Value: s.CRCErrors},
		{Name: "closed", Reason: "silent", Value: s.Silent},
		{Name: "refused_handshakes", Reason: "gave way", Value: s.Handshakes.GaveWay},
		{Name: "refused_handshakes", Reason: "late", Value: s.Handshakes.Late},
		{Name: "refused_handshakes", Reason: "bad", Value: s.Handshakes.Refused},
	}
}
