package rocev2

import (
	"golang.org/x/sys/unix"
)

// DATA PATH. Receiving: fill makes one recvmmsg into the staging buffers, next
// returns packet by packet. The kernel may have merged packets of one size into
// one datagram. Payload of long WRITEs does not go through the staging buffers
// (prediction.go).

const (
	rxBatch  = 16
	rxBuffer = 64 << 10
)

// receivedPacket is one received packet.
type receivedPacket struct {
	b     []byte // from the base transport header to the ICRC
	place []byte // the payload if it is not in b
	id    uint16 // the most likely IPv4 identification: position in a merged datagram
	addr  [16]byte
	sport uint16
	out   *sendBatch // of the port it came to
}

// receiveStage holds the packets of one receive call.
type receiveStage struct {
	msgs  []mmsghdr
	iov   []unix.Iovec
	names []sockaddr
	ctl   []controlBuf
	buf   []byte

	out   *sendBatch // of the socket it came from
	n     int        // datagrams received
	at    int        // datagram of the next packet
	off   int        // of the next packet, in that datagram
	index int        // of the packet at off
	ahead prediction
	stats *queueCounters
}

func newStage(stats *queueCounters) receiveStage {
	s := receiveStage{
		ahead: prediction{iov: make([]unix.Iovec, 0, 2*aheadPackets+1)}, stats: stats,
		msgs: make([]mmsghdr, rxBatch), iov: make([]unix.Iovec, rxBatch), names: make([]sockaddr, rxBatch),
		ctl: make([]controlBuf, rxBatch), buf: make([]byte, rxBatch*rxBuffer),
	}
	for i := range s.msgs {
		setIovec(&s.iov[i], s.buf[i*rxBuffer:][:rxBuffer])
		s.names[i].n = unix.SizeofSockaddrInet6
	}
	return s
}

func (s *receiveStage) empty() bool { return s.at == s.n }

// fillFrom receives from the socket of o, as predicted if there is a prediction, and
// returns the number of datagrams.
func (s *receiveStage) fillFrom(o *sendBatch) int {
	msgs := s.msgs
	if s.ahead.recent > 0 {
		msgs = msgs[:1]
	}
	for i := range msgs {
		s.names[i].n = unix.SizeofSockaddrInet6
		msgs[i].setMessage(&s.names[i], s.iov[i:i+1], &s.ctl[i])
	}
	if s.ahead.places != nil {
		msgs[0].setMessage(&s.names[0], s.ahead.iov, &s.ctl[0])
	}
	s.at, s.n, s.off, s.index, s.out = 0, 0, 0, 0, o
	if n, errno := receiveMany(o.fd, msgs); errno == 0 {
		s.n = n
		s.ahead.recent = max(s.ahead.recent-1, 0)
	}
	return s.n
}

// nextPacket takes the next packet from the stage. The stage must not be empty. The
// packet of an empty datagram is empty.
func (s *receiveStage) nextPacket() (p receivedPacket) {
	m := &s.msgs[s.at]
	total := int(m.n)
	size := s.ctl[s.at].segmentSize(int(m.hdr.Controllen))
	if size <= 0 {
		size = total
	}
	end := min(s.off+size, total)
	p.b = s.buf[s.at*rxBuffer+s.off : s.at*rxBuffer+end]
	p.id, p.out = uint16(s.index), s.out
	if s.ahead.places != nil {
		p.place = s.payloadElsewhere(p.b)
	}
	p.addr, p.sport = s.names[s.at].peerOf()
	s.off, s.index = end, s.index+1
	if end == total {
		s.at++
		s.off, s.index = 0, 0
		s.ahead.places = nil
	}
	return p
}
