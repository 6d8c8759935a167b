package rocev2

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
)

// DATA PATH. Sending. Packets are listed as pieces of header and payload. Packets
// of one size and one queue pair become one segmented send, and one sendmmsg
// takes all. If the socket is full, the rest stays listed, and nothing is added
// before it was sent. A packet meets, in this order:
//
//	room                                 whether it can be listed
//	begin, headerDone, payload, end      its pieces and its ICRC
//	flush                                sendmmsg

const (
	outMessages = 64       // datagrams or segmented sends of a call
	outVecs     = 2048     // pieces of a call
	outHead     = 64 << 10 // headers, pads and ICRCs of a call
	// A segmented send has at most this many packets and bytes.
	maxSegments  = 64
	maxSegmented = 65000
	maxRunVecs   = 1024 // the kernel's limit of pieces of a datagram
)

// sendBatch holds the packets that a completion queue sends from a port.
type sendBatch struct {
	port  *udpPort
	fd    int
	gso   bool
	stats *queueCounters

	msgs []mmsghdr
	ctl  []controlBuf
	runs []packetRun
	vecs []unix.Iovec
	head []byte

	at, n    int // messages at..n are to be sent
	vecsUsed int
	headUsed int
	blocked  bool // the socket is full

	// The packet being listed.
	crc  uint32
	size int
}

// packetRun is a message: packets of equal size, only the last may be shorter.
type packetRun struct {
	q           *qp
	first, vecs int // of outbox.vecs
	size        int // of a packet
	packets     int
	total       int
	short       bool // the last one is shorter: no other may follow
}

func newOutbox(p *udpPort, fd int, stats *queueCounters) *sendBatch {
	return &sendBatch{
		port: p, fd: fd, gso: p.gso, stats: stats,
		msgs: make([]mmsghdr, outMessages), ctl: make([]controlBuf, outMessages), runs: make([]packetRun, outMessages),
		vecs: make([]unix.Iovec, outVecs), head: make([]byte, outHead),
	}
}

// makeRoom reports whether a packet can be listed. It flushes if that helps.
func (o *sendBatch) makeRoom() bool {
	if o.packetFits() {
		return true
	}
	o.flushPackets()
	return o.packetFits()
}

func (o *sendBatch) packetFits() bool {
	return !o.blocked && o.n < outMessages && o.vecsUsed+maxSGE+2 <= outVecs && o.headUsed+maxHeader+3+icrcLen <= outHead
}

// beginPacket begins a packet of q with size bytes from the base transport header to
// the ICRC, and returns room for header bytes of headers.
func (o *sendBatch) beginPacket(q *qp, header, size int) []byte {
	r := o.runFor(q, size)
	o.size = size
	o.crc = q.toPeer.startCRC(size, uint16(r.packets))
	r.packets++
	r.total += size
	r.short = size < r.size
	o.stats.sent.Add(1)
	return o.putHead(header)
}

// runFor returns the run for a packet of size bytes.
func (o *sendBatch) runFor(q *qp, size int) *packetRun {
	if o.gso && o.n > o.at {
		r := &o.runs[o.n-1]
		if r.q == q && r.first+r.vecs == o.vecsUsed && !r.short && size <= r.size && r.packets < maxSegments && r.total+size <= maxSegmented && r.vecs+maxSGE+2 <= maxRunVecs {
			return r
		}
	}
	o.runs[o.n] = packetRun{q: q, first: o.vecsUsed, size: size}
	o.n++
	return &o.runs[o.n-1]
}

// putHead appends n bytes of header room to the packet and returns them.
func (o *sendBatch) putHead(n int) []byte {
	b := o.head[o.headUsed : o.headUsed+n]
	r := &o.runs[o.n-1]
	if r.vecs > 0 && o.vecs[o.vecsUsed-1].Base == lastOf(o.head, o.headUsed, &o.vecs[o.vecsUsed-1]) {
		growIovec(&o.vecs[o.vecsUsed-1], n)
	} else {
		o.putVec(b)
	}
	o.headUsed += n
	return b
}

// lastOf returns the start of a piece that ends at head[used].
func lastOf(head []byte, used int, v *unix.Iovec) *byte {
	if int(v.Len) > used {
		return nil
	}
	return &head[used-int(v.Len)]
}

func (o *sendBatch) putVec(b []byte) {
	setIovec(&o.vecs[o.vecsUsed], b)
	o.vecsUsed++
	o.runs[o.n-1].vecs++
}

// headerDone continues the ICRC over the headers.
func (o *sendBatch) headerDone(head []byte) { o.crc = sumHeader(o.crc, head) }

// appendPayload appends b to the packet. b must not be empty.
func (o *sendBatch) appendPayload(b []byte) {
	o.putVec(b)
	o.crc = updateCRC(o.crc, b)
}

// endPacket appends the pad and the ICRC.
func (o *sendBatch) endPacket(pad int) {
	b := o.putHead(pad + icrcLen)
	clear(b[:pad])
	putICRC(b[pad:], updateCRC(o.crc, b[:pad]))
}

// flushPackets passes the listed packets to the socket.
func (o *sendBatch) flushPackets() {
	if o.at == o.n {
		return
	}
	if !o.blocked {
		for i := o.at; i < o.n; i++ {
			o.describeRun(i)
		}
	}
	o.blocked = false
	for o.at < o.n {
		n, errno := sendMany(o.fd, o.msgs[o.at:o.n])
		switch errno {
		case 0:
			o.at += n
		case unix.EINTR:
		case unix.EAGAIN, unix.ENOBUFS, unix.ENOMEM:
			o.blocked = true
			return
		default:
			o.skipMessage(errno)
		}
	}
	o.discardAll()
}

func (o *sendBatch) describeRun(i int) {
	r := &o.runs[i]
	var control *controlBuf
	if r.packets > 1 {
		control = &o.ctl[i]
		control.setSegment(r.size)
	}
	o.msgs[i].setMessage(&r.q.to, o.vecs[r.first:r.first+r.vecs], control)
}

// skipMessage skips the next message. It is lost for the peer. If the kernel
// cannot send it because it is segmented, there will be no segmented sends any
// more. Other errors, of the route, the interface or a filter, may pass.
func (o *sendBatch) skipMessage(errno unix.Errno) {
	r := &o.runs[o.at]
	o.at++
	if r.packets == 1 {
		return
	}
	if segmentsRefused(errno, o.port.addr, r.q.conn.peer, r.size) {
		o.gso = false
	}
}

// segmentsRefused reports whether errno means that there can be no segmented
// sends from local. size is that of the packets to peer that were refused.
func segmentsRefused(errno unix.Errno, local, peer netip.Addr, size int) bool {
	switch errno {
	case unix.EIO, unix.EOPNOTSUPP: // the device, or a layer below, cannot
		return true
	case unix.EINVAL: // the same, or the packets are too large for the route
		return !tooLarge(local, peer, size)
	}
	return false
}

// tooLarge reports whether packets of size bytes are too large for the route.
func tooLarge(local, peer netip.Addr, size int) bool {
	headers := 20 + 8 // IPv4 and UDP
	if local.Is6() {
		headers = 40 + 8
	}
	mtu := routeMTU(local, peer)
	return mtu > 0 && size+headers > mtu
}

// letGo makes the listed packets independent of the memory of r: they are
// sent or discarded. For the peers, discarded packets are lost ones.
func (o *sendBatch) letGo(r *softverbs.Region) {
	if !o.usesRegion(r) {
		return
	}
	if o.flushPackets(); o.at < o.n {
		o.discardAll()
	}
}

// usesRegion reports whether a listed message has payload in the memory of r.
func (o *sendBatch) usesRegion(r *softverbs.Region) bool {
	for _, m := range o.runs[o.at:o.n] {
		for i := range m.vecs {
			if r.Span(pieceAddr(&o.vecs[m.first+i]), 1) != nil {
				return true
			}
		}
	}
	return false
}

// removeQP removes the packets of q.
func (o *sendBatch) removeQP(q *qp) {
	n := o.at
	for _, r := range o.runs[o.at:o.n] {
		if r.q != q {
			o.runs[n] = r
			n++
		}
	}
	o.n = n
	switch {
	case o.at == o.n:
		o.discardAll()
	case o.blocked:
		for i := o.at; i < o.n; i++ {
			o.describeRun(i)
		}
	}
}

// discardAll removes all packets.
func (o *sendBatch) discardAll() {
	o.at, o.n, o.vecsUsed, o.headUsed, o.blocked = 0, 0, 0, 0, false
}
