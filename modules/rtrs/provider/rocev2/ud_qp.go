package rocev2

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

const (
	udBatch = 64 // datagrams of a sendmmsg
	// udPatience is the time for which Send waits for room in the socket, in
	// milliseconds.
	udPatience = 100
)

// udQP implements verbs.DatagramQP.
type udQP struct {
	dev   *Device
	agent *udAgent
	qpn   uint32
	pkey  uint16
	room  int // MaxPayload
	qkey  atomic.Uint32

	mu     sync.Mutex
	more   sync.Cond // on mu: a datagram came, or closed
	ring   []udEntry
	head   int // the oldest
	n      int
	groups map[[16]byte]bool
	drops  verbs.DatagramDrops
	closed bool

	send udSender
}

// udEntry is a datagram that waits for Receive.
type udEntry struct {
	buf       []byte // grows with its largest contents
	peer      netip.Addr
	qpn       uint32
	multicast bool
}

// udSender builds packets. Payload is listed, not copied.
type udSender struct {
	mu    sync.Mutex
	psn   uint32
	peers map[netip.Addr]*udPeer
	msgs  []mmsghdr
	iov   []unix.Iovec // three for each message
	heads []byte       // udHead for each message
	tails []byte       // udTail for each message
}

const (
	udHead = bthLen + dethLen
	udTail = 3 + icrcLen
)

// udPeer is a destination.
type udPeer struct {
	to sockaddr
	ps pseudo
}

func newUDQP(d *Device, a *udAgent, cfg verbs.DatagramConfig, room int) *udQP {
	q := &udQP{dev: d, agent: a, pkey: cfg.PKey, room: room, ring: make([]udEntry, cfg.RecvQueue), groups: map[[16]byte]bool{}}
	q.more.L = &q.mu
	q.qkey.Store(cfg.QKey)
	q.send = udSender{
		peers: map[netip.Addr]*udPeer{}, msgs: make([]mmsghdr, udBatch), iov: make([]unix.Iovec, 3*udBatch),
		heads: make([]byte, udHead*udBatch), tails: make([]byte, udTail*udBatch), psn: random32() & psnMask,
	}
	return q
}

func (q *udQP) QPN() uint32           { return q.qpn }
func (q *udQP) LocalAddr() netip.Addr { return q.agent.port.addr }
func (q *udQP) MaxPayload() int       { return q.room }
func (q *udQP) SetQKey(key uint32)    { q.qkey.Store(key) }

// Attach implements verbs.DatagramQP. Copies of a multicast datagram do not name
// its group, so an attached queue pair gets those of all groups.
func (q *udQP) Attach(mgid [16]byte) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return fmt.Errorf("attach group: %w", verbs.ErrClosed)
	}
	q.groups[mgid] = true
	return nil
}

// Detach implements verbs.DatagramQP.
func (q *udQP) Detach(mgid [16]byte) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.groups[mgid] {
		return fmt.Errorf("detach group %s: not attached", netip.AddrFrom16(mgid))
	}
	delete(q.groups, mgid)
	return nil
}

func (q *udQP) attached() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.groups) > 0
}

// onDatagram keeps the datagram b for Receive.
func (q *udQP) onDatagram(p *inbound, b bth, multicast bool) drop {
	deth := b[bthLen:]
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case !verbs.SamePartition(b.pkey(), q.pkey):
		q.drops.PKey++
		return dropPKey
	case be.Uint32(deth) != q.qkey.Load():
		q.drops.QKey++
		return dropKey
	case q.closed || q.n == len(q.ring):
		q.drops.Full++
		return dropState
	}
	e := &q.ring[(q.head+q.n)%len(q.ring)]
	e.buf = append(e.buf[:0], b[udHead:len(b)-icrcLen-b.pad()]...)
	e.peer, e.qpn, e.multicast = netip.AddrFrom16(p.addr).Unmap(), be.Uint32(deth[4:])&qpnMask, multicast
	q.n++
	q.more.Signal()
	return dropNone
}

// Receive implements verbs.DatagramQP.
func (q *udQP) Receive(msgs []verbs.Datagram) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for n := 0; ; {
		for q.n > 0 && n < len(msgs) {
			e := &q.ring[q.head]
			q.head = (q.head + 1) % len(q.ring)
			q.n--
			m := &msgs[n]
			if len(e.buf) > cap(m.Payload) {
				q.drops.Length++
				continue
			}
			m.Payload = m.Payload[:copy(m.Payload[:cap(m.Payload)], e.buf)]
			m.Peer, m.QPN, m.Multicast = e.peer, e.qpn, e.multicast
			n++
		}
		if n > 0 || len(msgs) == 0 {
			return n, nil
		}
		if q.closed {
			return 0, fmt.Errorf("receive datagrams: %w", verbs.ErrClosed)
		}
		q.more.Wait()
	}
}

// Dropped implements verbs.DatagramQP.
func (q *udQP) Dropped() verbs.DatagramDrops {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.drops
}

// Close implements verbs.DatagramQP.
func (q *udQP) Close() error {
	q.mu.Lock()
	again := q.closed
	q.closed = true
	q.more.Broadcast()
	q.mu.Unlock()
	if again {
		return fmt.Errorf("close datagrams: %w", verbs.ErrClosed)
	}
	q.send.mu.Lock() // a Send that runs has the socket
	q.send.msgs = nil
	q.send.mu.Unlock()
	q.dev.removeDatagrams(q)
	return nil
}

// Send implements verbs.DatagramQP.
func (q *udQP) Send(msgs []verbs.Datagram) (int, error) {
	s := &q.send
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.msgs == nil {
		return 0, fmt.Errorf("send datagram: %w", verbs.ErrClosed)
	}
	for done := 0; done < len(msgs); {
		n, err := 0, error(nil)
		for done+n < len(msgs) && n < udBatch && err == nil {
			if err = q.build(n, &msgs[done+n]); err == nil {
				n++
			}
		}
		sent := q.transmit(s.msgs[:n])
		if done += n; err != nil {
			return done, err
		}
		q.agent.stats.sent.Add(uint64(sent))
	}
	return len(msgs), nil
}

// build makes message i of the next sendmmsg.
func (q *udQP) build(i int, m *verbs.Datagram) error {
	if len(m.Payload) > q.room {
		return fmt.Errorf("send datagram of %d bytes, at most %d: %w", len(m.Payload), q.room, unix.EMSGSIZE)
	}
	peer, err := q.peer(m.Peer)
	if err != nil {
		return err
	}
	s, pad := &q.send, padLen(len(m.Payload))
	head, tail := s.heads[i*udHead:][:udHead], s.tails[i*udTail:][:pad+icrcLen]
	putBTH(head, opDatagram, pad, m.QPN, s.psn, false)
	be.PutUint16(head[2:], q.pkey)
	be.PutUint32(head[bthLen:], m.QKey)
	be.PutUint32(head[bthLen+4:], q.qpn)
	s.psn = psnAdd(s.psn, 1)
	clear(tail[:pad])
	crc := sumHeader(peer.ps.start(udHead+len(m.Payload)+pad+icrcLen, 0), head)
	putICRC(tail[pad:], sum(sum(crc, m.Payload), tail[:pad]))

	iov := s.iov[3*i : 3*i : 3*i+3]
	for _, b := range [][]byte{head, m.Payload, tail} {
		if len(b) > 0 {
			iov = append(iov, unix.Iovec{})
			setIovec(&iov[len(iov)-1], b)
		}
	}
	s.msgs[i].describe(&peer.to, iov, nil)
	return nil
}

// peer returns the record of a destination.
func (q *udQP) peer(a netip.Addr) (*udPeer, error) {
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
	p := &udPeer{ps: newPseudo(local, a, roceUDPPort)}
	p.to.set(newPeerAddr(a))
	q.send.peers[a] = p
	return p, nil
}

// transmit passes msgs to the socket and returns how many it took. Refused
// messages are lost, as datagrams may be.
func (q *udQP) transmit(msgs []mmsghdr) (sent int) {
	for len(msgs) > 0 {
		n, errno := 0, unix.Errno(0)
		raw, err := q.agent.conn.SyscallConn()
		if err == nil {
			err = raw.Control(func(fd uintptr) {
				if n, errno = sendMany(int(fd), msgs); errno == unix.EAGAIN {
					unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, udPatience)
					n, errno = sendMany(int(fd), msgs)
				}
			})
		}
		switch {
		case err != nil:
			return sent
		case errno == 0:
			sent += n
			msgs = msgs[n:]
		case errno == unix.EINTR:
		default:
			msgs = msgs[1:]
		}
	}
	return sent
}
