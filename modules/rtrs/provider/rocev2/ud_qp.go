package rocev2

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
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
	next   int  // datagram of the oldest that Receive returns next
	merged bool // the newest has a datagram that came merged with the next one
	groups map[[16]byte]bool
	drops  verbs.DatagramDrops
	closed bool

	send udSender
}

// udEntry holds datagrams that wait for Receive. There is more than one if they
// came merged.
type udEntry struct {
	buf       []byte // the payloads; grows with its largest contents
	ends      []int  // of each payload in buf
	peer      netip.Addr
	qpn       uint32
	multicast bool
}

func newUDQP(d *Device, a *udAgent, cfg verbs.DatagramConfig, room int) *udQP {
	q := &udQP{dev: d, agent: a, pkey: cfg.PKey, room: room, ring: make([]udEntry, cfg.RecvQueue), groups: map[[16]byte]bool{}}
	q.more.L = &q.mu
	q.qkey.Store(cfg.QKey)
	q.send.init(a)
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

func (q *udQP) isAttached() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.groups) > 0
}

// onDatagram keeps the datagram b for Receive. The agent signals q.more
// afterwards.
func (q *udQP) onDatagram(p *receivedPacket, b bth, multicast bool) dropReason {
	deth := b[bthLen:]
	q.mu.Lock()
	defer q.mu.Unlock()
	if p.id == 0 {
		q.merged = false
	}
	switch {
	case !verbs.SamePartition(b.pkey(), q.pkey):
		q.drops.PKey++
		return dropPKey
	case be.Uint32(deth) != q.qkey.Load():
		q.drops.QKey++
		return dropKey
	}
	payload := b[udHead : len(b)-icrcLen-b.pad()]
	e := q.entryFor(p, be.Uint32(deth[4:])&qpnMask, multicast, len(payload))
	if e == nil {
		q.drops.Full++
		return dropState
	}
	e.buf = append(e.buf, payload...)
	e.ends = append(e.ends, len(e.buf))
	return dropNone
}

// entryFor returns the entry for a payload of n bytes: that of the datagrams
// that it came merged with, or a new one. It returns nil if none is free. q.mu
// is held.
func (q *udQP) entryFor(p *receivedPacket, qpn uint32, multicast bool, n int) *udEntry {
	peer := netip.AddrFrom16(p.addr).Unmap()
	if q.merged && q.n > 0 && !q.closed {
		e := &q.ring[(q.head+q.n-1)%len(q.ring)]
		if e.peer == peer && e.qpn == qpn && e.multicast == multicast && len(e.ends) < maxSegments && len(e.buf)+n <= maxSegmented {
			return e
		}
	}
	if q.closed || q.n == len(q.ring) {
		return nil
	}
	e := &q.ring[(q.head+q.n)%len(q.ring)]
	e.buf, e.ends, e.peer, e.qpn, e.multicast = e.buf[:0], e.ends[:0], peer, qpn, multicast
	q.n++
	q.merged = true
	return e
}

// Receive implements verbs.DatagramQP.
func (q *udQP) Receive(msgs []verbs.Datagram) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for n := 0; ; {
		for q.n > 0 && n < len(msgs) {
			e, payload := q.popDatagram()
			m := &msgs[n]
			if len(payload) > cap(m.Payload) {
				q.drops.Length++
				continue
			}
			m.Payload = m.Payload[:copy(m.Payload[:cap(m.Payload)], payload)]
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

// popDatagram removes the oldest datagram. The results are valid while q.mu is held.
// q.n is not 0.
func (q *udQP) popDatagram() (e *udEntry, payload []byte) {
	e = &q.ring[q.head]
	start := 0
	if q.next > 0 {
		start = e.ends[q.next-1]
	}
	payload = e.buf[start:e.ends[q.next]]
	if q.next++; q.next == len(e.ends) {
		q.head, q.n, q.next = (q.head+1)%len(q.ring), q.n-1, 0
	}
	return e, payload
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
	q.send.closed = true
	q.send.mu.Unlock()
	q.dev.removeDatagrams(q)
	return nil
}
