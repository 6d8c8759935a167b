package rocev2

import (
	"fmt"
	"net/netip"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH. Sending datagrams. Payload is listed, not copied. Packets of one
// size to one queue pair that follow each other become one segmented send, and
// one sendmmsg takes all that are listed. A batch goes through:
//
//	list       the packets, with their ICRCs
//	transmit   sendmmsg; what the kernel refuses to segment is listed again, packet by packet

const (
	udHead = bthLen + dethLen
	udTail = 3 + icrcLen

	udBatch = 256 // packets that are listed at a time, at most
	// udPatience is the time for which Send waits for room in the socket, in
	// milliseconds.
	udPatience = 100
)

// udSender sends the datagrams of a queue pair.
type udSender struct {
	mu     sync.Mutex
	closed bool
	gso    bool
	psn    uint32
	peers  map[netip.Addr]*udPeer
	raw    syscall.RawConn // the socket
	call   func(fd uintptr)

	runs  []udRun
	msgs  []mmsghdr
	ctl   []controlBuf
	vecs  []unix.Iovec // two for each packet, and one for each run
	heads []byte       // headers, pads and ICRCs

	at, n    int // runs at..n are to be sent
	vecsUsed int
	headUsed int
	taken    int // result of call
	errno    unix.Errno
}

// udRun is a datagram of the socket: packets of equal size, only the last may be
// shorter.
type udRun struct {
	peer        *udPeer
	qpn         uint32
	start       int // first datagram of the batch
	first, vecs int // of udSender.vecs
	size        int // of a packet
	packets     int
	total       int
	short       bool // the last one is shorter: no other may follow
}

// udPeer is a destination.
type udPeer struct {
	addr netip.Addr
	to   sockaddr
	ps   crcPrefix
}

func (s *udSender) init(a *udAgent) {
	s.raw, s.gso, s.psn, s.peers = a.raw, a.port.gso, random32()&psnMask, map[netip.Addr]*udPeer{}
	s.runs, s.msgs, s.ctl = make([]udRun, udBatch), make([]mmsghdr, udBatch), make([]controlBuf, udBatch)
	s.vecs, s.heads = make([]unix.Iovec, 3*udBatch), make([]byte, (udHead+udTail)*udBatch)
	s.call = s.sendOnce
}

// Send implements verbs.DatagramQP.
func (q *udQP) Send(msgs []verbs.Datagram) (int, error) {
	s := &q.send
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, fmt.Errorf("send datagram: %w", verbs.ErrClosed)
	}
	for done := 0; done < len(msgs); {
		n, err := q.listBatch(msgs[done:])
		took := q.transmitBatch(n)
		done += took
		if err != nil && took == n {
			return done, err
		}
	}
	return len(msgs), nil
}

// listBatch lists the packets of msgs, udBatch at most, and returns their number. An
// error concerns msgs[n].
func (q *udQP) listBatch(msgs []verbs.Datagram) (n int, err error) {
	s := &q.send
	s.at, s.n, s.vecsUsed, s.headUsed = 0, 0, 0, 0
	for n < len(msgs) && n < udBatch {
		if err := q.addDatagram(n, &msgs[n]); err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// addDatagram lists datagram i of the batch.
func (q *udQP) addDatagram(i int, m *verbs.Datagram) error {
	if len(m.Payload) > q.room {
		return fmt.Errorf("send datagram of %d bytes, at most %d: %w", len(m.Payload), q.room, unix.EMSGSIZE)
	}
	s, pad := &q.send, padLen(len(m.Payload))
	size := udHead + len(m.Payload) + pad + icrcLen
	r := s.runFor(m, size)
	if r == nil {
		peer, err := q.peerRecord(m.Peer)
		if err != nil {
			return err
		}
		r = &s.runs[s.n]
		s.n++
		*r = udRun{peer: peer, qpn: m.QPN, start: i, first: s.vecsUsed, size: size}
	}
	crc := r.peer.ps.startCRC(size, uint16(r.packets))
	r.packets++
	r.total += size
	r.short = size < r.size

	head := s.putHead(r, udHead)
	putBTH(head, opDatagram, pad, m.QPN, s.psn, false)
	be.PutUint16(head[2:], q.pkey)
	be.PutUint32(head[bthLen:], m.QKey)
	be.PutUint32(head[bthLen+4:], q.qpn)
	s.psn = psnAdd(s.psn, 1)
	crc = sumHeader(crc, head)
	if len(m.Payload) > 0 {
		s.putVec(r, m.Payload)
		crc = updateCRC(crc, m.Payload)
	}
	tail := s.putHead(r, pad+icrcLen)
	clear(tail[:pad])
	putICRC(tail[pad:], updateCRC(crc, tail[:pad]))
	return nil
}

// runFor returns the last run if the packet of m, of size bytes, may follow in
// it.
func (s *udSender) runFor(m *verbs.Datagram, size int) *udRun {
	if !s.gso || s.n == 0 {
		return nil
	}
	r := &s.runs[s.n-1]
	if r.qpn != m.QPN || r.peer.addr != m.Peer || r.short || size > r.size || r.packets == maxSegments || r.total+size > maxSegmented {
		return nil
	}
	return r
}

// putHead appends n bytes of header room to the run r and returns them.
func (s *udSender) putHead(r *udRun, n int) []byte {
	b := s.heads[s.headUsed : s.headUsed+n]
	if r.vecs > 0 && s.vecs[s.vecsUsed-1].Base == lastOf(s.heads, s.headUsed, &s.vecs[s.vecsUsed-1]) {
		growIovec(&s.vecs[s.vecsUsed-1], n)
	} else {
		s.putVec(r, b)
	}
	s.headUsed += n
	return b
}

func (s *udSender) putVec(r *udRun, b []byte) {
	setIovec(&s.vecs[s.vecsUsed], b)
	s.vecsUsed++
	r.vecs++
}

// peerRecord returns the record of a destination.
func (q *udQP) peerRecord(a netip.Addr) (*udPeer, error) {
	if p := q.send.peers[a]; p != nil {
		return p, nil
	}
	local := q.agent.port.addr
	if !a.IsValid() || a.Is4() != local.Is4() || a.IsUnspecified() || a.IsMulticast() {
		return nil, fmt.Errorf("send datagram from %s to %s: not the address of a peer in the same family: %w", local, a, unix.EINVAL)
	}
	if len(q.send.peers) >= udPeers {
		clear(q.send.peers)
	}
	p := &udPeer{addr: a, ps: newPseudo(local, a, roceUDPPort)}
	p.to.setPeer(newPeerAddr(a))
	q.send.peers[a] = p
	return p, nil
}

// transmitBatch passes the listed n datagrams to the socket. It returns how many are
// done with: fewer than n if the kernel has refused to segment a run. Other
// refused packets are lost, as datagrams may be.
func (q *udQP) transmitBatch(n int) int {
	s := &q.send
	for i := range s.runs[:s.n] {
		r := &s.runs[i]
		var control *controlBuf
		if r.packets > 1 {
			control = &s.ctl[i]
			control.setSegment(r.size)
		}
		s.msgs[i].setMessage(&r.peer.to, s.vecs[r.first:r.first+r.vecs], control)
	}
	for s.at < s.n {
		if s.raw.Control(s.call) != nil {
			return n // closed
		}
		r := &s.runs[s.at]
		switch {
		case s.errno == 0:
			for _, r := range s.runs[s.at : s.at+s.taken] {
				q.agent.stats.sent.Add(uint64(r.packets))
			}
			s.at += s.taken
		case s.errno == unix.EINTR:
		case r.packets > 1 && segmentsRefused(s.errno, q.agent.port.addr, r.peer.addr, r.size):
			s.gso = false
			return r.start
		default:
			s.at++
		}
	}
	return n
}

// sendOnce makes one sendmmsg. If the socket is full it waits once.
func (s *udSender) sendOnce(fd uintptr) {
	if s.taken, s.errno = sendMany(int(fd), s.msgs[s.at:s.n]); s.errno == unix.EAGAIN {
		unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, udPatience)
		s.taken, s.errno = sendMany(int(fd), s.msgs[s.at:s.n])
	}
}
