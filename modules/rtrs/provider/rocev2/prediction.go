package rocev2

import (
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH. Placement without a copy. While a long WRITE of the peer is in
// progress, the next datagram most likely holds its next packets, headers and
// payloads in turn. So it is received in pieces: payloads at their places, the
// rest in the staging buffer, where the payloads leave holes. A packet is
// checked in the same way wherever its payload is. At the first packet that is
// not the predicted one, the rest is copied into the holes. A prediction
// completes nothing: Poll does not return while unchecked payload is at its
// place.
//
// No valid data are overwritten, and nothing outside the region. Memory that others read
// meanwhile (verbs.Guarded) is no place. The places are
// those of the message in progress that were not reached yet: their contents
// are undefined until the message is complete, and then they are checked bytes.
// Before, they may hold anything that came to the socket. All connections of
// the queue must be to one peer, so that no peer can read another peer's bytes
// there.
//
//	predict      chooses the places for the next receive
//	layOut       lists the pieces of the datagram
//	elsewhere    the payload of a packet that is as predicted
//	placeRest    copies the others into the holes

const (
	// aheadMTU is the least path MTU, in bytes. Shorter pieces are as fast to
	// copy.
	aheadMTU = 1024
	// aheadPackets is the number of packets that a datagram holds at most.
	aheadPackets = rxBuffer / (bthLen + aheadMTU + icrcLen)
	// aheadRest is the number of receive calls without a prediction after one
	// that was wrong from the first packet: several connections send in turn.
	aheadRest = 16
	// aheadRecent is the number of receive calls after a prediction that take
	// one datagram only: another long WRITE is likely, and its first packet
	// must be handled before the next ones are received.
	aheadRecent = 8
)

// prediction is the prediction of the only datagram that the stage holds.
type prediction struct {
	places []byte // of the payloads, one behind the other; nil: there is no prediction
	mtu    int
	qpn    uint32
	rest   int // calls without a prediction that are left
	recent int // calls for one datagram only that are left
	iov    []unix.Iovec
}

// packetStride returns the distance of two packets in bytes.
func (a *prediction) packetStride() int { return bthLen + a.mtu + icrcLen }

// predictNext prepares a receive of the next packets of the long WRITE in progress,
// if there is one from the socket of o.
func (c *compQueue) predictNext(o *sendBatch) {
	s, q := &c.stage, c.writing
	if s.ahead.places = nil; q == nil || !c.onePeer || q.out != o || q.mtu < aheadMTU {
		return
	}
	if s.ahead.rest > 0 {
		s.ahead.rest--
		return
	}
	if n := q.predictedPlace(); n != nil {
		s.layOut(n, int(q.mtu), q.qpn)
	}
}

// updateOnePeer sets onePeer.
func (c *compQueue) updateOnePeer() {
	var first *qp
	c.onePeer = true
	for _, q := range c.Slots {
		switch {
		case q == nil:
		case first == nil:
			first = q
		case q.peer != first.peer:
			c.onePeer = false
		}
	}
}

// predictedPlace returns the place of the payload of the next middle packets of the
// WRITE in progress, or nil.
func (q *qp) predictedPlace() []byte {
	m := &q.resp.msg
	if q.End.State != softverbs.EndNone || m.class != classWrite || m.got == m.total {
		return nil
	}
	r, _ := q.Domain.Reach(m.key, verbs.AccessRemoteWrite)
	if r == nil || r.Guarded() {
		return nil
	}
	dst := r.Span(m.addr, uint64(m.total))
	n := min((m.total-m.got-1)/q.mtu, uint32(rxBuffer)/(bthLen+q.mtu+icrcLen)) * q.mtu
	if dst == nil || n == 0 {
		return nil
	}
	return dst[m.got : m.got+n]
}

// layOut lists the pieces of a datagram with payloads for places.
func (s *receiveStage) layOut(places []byte, mtu int, qpn uint32) {
	a := &s.ahead
	a.places, a.mtu, a.qpn = places, mtu, qpn
	a.recent = aheadRecent
	a.iov = a.iov[:0]
	at := 0 // in the staging buffer, behind the listed pieces
	for off := 0; off < len(places); off += mtu {
		hole := off/mtu*a.packetStride() + bthLen
		a.iov = append(a.iov, iovecOf(s.buf[at:hole]), iovecOf(places[off:off+mtu]))
		at = hole + mtu
	}
	a.iov = append(a.iov, iovecOf(s.buf[at:rxBuffer]))
}

func iovecOf(b []byte) (v unix.Iovec) {
	setIovec(&v, b)
	return v
}

// payloadElsewhere returns the payload of the next packet b if it is as predicted and
// not in the staging buffer. Otherwise it makes b whole and returns nil.
func (s *receiveStage) payloadElsewhere(b bth) []byte {
	a := &s.ahead
	from := s.index * a.mtu
	if len(b) == a.packetStride() && s.off == s.index*a.packetStride() && from < len(a.places) &&
		b.opcode() == opWriteMiddle && b.pad() == 0 && b.qpn() == a.qpn {
		return a.places[from : from+a.mtu]
	}
	if s.placeRest() > a.mtu && s.index == 0 {
		a.rest = aheadRest
	}
	return nil
}

// placeRest copies the payload of the packets that are left in the stage into their
// holes, and returns the number of bytes.
func (s *receiveStage) placeRest() (n int) {
	a := &s.ahead
	total := int(s.msgs[0].n)
	for k := s.index; k*a.mtu < len(a.places); k++ {
		hole := k*a.packetStride() + bthLen
		if hole >= total {
			break
		}
		n += copy(s.buf[hole:min(hole+a.mtu, total)], a.places[k*a.mtu:])
	}
	s.stats.placed.Add(uint64(n))
	a.places = nil
	return n
}
