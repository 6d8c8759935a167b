package rocev2

import (
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// While a long WRITE of the peer is under way, the next datagram most likely
// holds its next packets, headers and payloads in turn. So it is received in
// pieces: payloads at their places, the rest into the staging buffer, where
// they leave holes. A packet is judged as ever, whole or with its payload
// elsewhere. With the first that is not as foreseen, all the rest is copied
// into the holes. What was foreseen completes nothing, so Poll does not return
// while something is left at its place.
//
// Nothing that is valid can be overwritten so, and nothing outside the region:
// the places are those of the message in progress that were not reached yet,
// which are undefined until it is complete, and by then hold what was judged.
// In between they show whatever came to the socket. So that no peer sees there
// what another one sent, all connections of the queue must be to the same.

const (
	// aheadMTU is the least path MTU, in bytes: shorter pieces are as fast to copy.
	aheadMTU = 1024
	// aheadPackets is the most that a datagram holds.
	aheadPackets = rxBuffer / (bthLen + aheadMTU + icrcLen)
	// aheadRest is how many receive calls are made without foresight when there
	// was nothing of what was foreseen: several connections send in turn.
	aheadRest = 16
	// aheadRecent is how many receive calls take one datagram only after one that
	// was foreseen: the first packet of another long WRITE is likely, which has to
	// be seen before the others are received.
	aheadRecent = 8
)

// ahead is what the stage foresees of the only datagram that it holds.
type ahead struct {
	places []byte // of the payloads, one behind the other; nil: nothing is foreseen
	mtu    int
	qpn    uint32
	rest   int // calls without foresight
	recent int // calls for one datagram
	iov    []unix.Iovec
}

// stride is the distance of two packets.
func (a *ahead) stride() int { return bthLen + a.mtu + icrcLen }

// foresee sets up a receive of the next packets of the WRITE at hand, if there
// is one from the socket of o.
func (c *cq) foresee(o *outbox) {
	s, q := &c.stage, c.writing
	if s.ahead.places = nil; q == nil || !c.onePeer || q.out != o || q.mtu < aheadMTU {
		return
	}
	if s.ahead.rest > 0 {
		s.ahead.rest--
		return
	}
	if n := q.foreseeable(); n != nil {
		s.lay(n, int(q.mtu), q.qpn)
	}
}

// survey looks whether all connections have the same peer.
func (c *cq) survey() {
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

// foreseeable returns where the next middle packets of the WRITE in progress
// belong, nil when there are none.
func (q *qp) foreseeable() []byte {
	m := &q.resp.msg
	if q.End.State != softverbs.EndNone || m.class != classWrite || m.got == m.total {
		return nil
	}
	dst := q.Domain.Remote(m.key, m.addr, uint64(m.total), verbs.AccessRemoteWrite)
	n := min((m.total-m.got-1)/q.mtu, uint32(rxBuffer)/(bthLen+q.mtu+icrcLen)) * q.mtu
	if dst == nil || n == 0 {
		return nil
	}
	return dst[m.got : m.got+n]
}

// lay lists the pieces of a datagram whose payloads belong to places.
func (s *stage) lay(places []byte, mtu int, qpn uint32) {
	a := &s.ahead
	a.places, a.mtu, a.qpn = places, mtu, qpn
	a.recent = aheadRecent
	a.iov = a.iov[:0]
	at := 0 // in the staging buffer, behind what is listed
	for off := 0; off < len(places); off += mtu {
		hole := off/mtu*a.stride() + bthLen
		a.iov = append(a.iov, piece(s.buf[at:hole]), piece(places[off:off+mtu]))
		at = hole + mtu
	}
	a.iov = append(a.iov, piece(s.buf[at:rxBuffer]))
}

func piece(b []byte) (v unix.Iovec) {
	setIovec(&v, b)
	return v
}

// elsewhere returns the payload of the packet b, which is the next, when it is
// not in the staging buffer. It makes b whole when b is not what was foreseen.
func (s *stage) elsewhere(b bth) []byte {
	a := &s.ahead
	from := s.index * a.mtu
	if len(b) == a.stride() && s.off == s.index*a.stride() && from < len(a.places) &&
		b.opcode() == opWriteMiddle && b.pad() == 0 && b.qpn() == a.qpn {
		return a.places[from : from+a.mtu]
	}
	if s.settle() > a.mtu && s.index == 0 {
		a.rest = aheadRest
	}
	return nil
}

// settle makes what is left in the stage whole, and returns how many bytes had
// been received elsewhere.
func (s *stage) settle() (n int) {
	a := &s.ahead
	total := int(s.msgs[0].n)
	for k := s.index; k*a.mtu < len(a.places); k++ {
		hole := k*a.stride() + bthLen
		if hole >= total {
			break
		}
		n += copy(s.buf[hole:min(hole+a.mtu, total)], a.places[k*a.mtu:])
	}
	s.stats.placed.Add(uint64(n))
	a.places = nil
	return n
}
