package rocev2

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// UD queue pairs share one slot of the device, so one socket of each port. An
// agent reads it in a goroutine of its own. It hands each datagram to the queue
// pair with its number, or to all attached ones.

// maxDatagram is the longest payload of a datagram, in bytes.
const maxDatagram = 4096

// udPeers is the number of pseudo headers that an agent or a queue pair
// caches.
const udPeers = 4096

// udAgent receives the datagrams of a port.
type udAgent struct {
	port  *udpPort
	slot  uint32
	conn  *net.UDPConn // a duplicate of the slot's socket
	raw   syscall.RawConn
	done  chan struct{}
	stage receiveStage
	out   *sendBatch // names the socket to stage
	stats *queueCounters
	// The goroutine's own.
	from  map[sourceKey]*crcPrefix
	ready []*udQP // have got datagrams and were not woken yet

	mu     sync.Mutex
	qps    map[uint32]*udQP
	number uint32 // the last one given
}

// sourceKey is where a packet came from.
type sourceKey struct {
	addr [16]byte
	port uint16
}

var _ verbs.DatagramDevice = (*Device)(nil)

// OpenDatagrams implements verbs.DatagramDevice.
func (d *Device) OpenDatagrams(cfg verbs.DatagramConfig) (verbs.DatagramQP, error) {
	q, err := d.openDatagrams(cfg)
	if err != nil {
		return nil, fmt.Errorf("open datagrams at %s: %w", cfg.Local, err)
	}
	return q, nil
}

func (d *Device) openDatagrams(cfg verbs.DatagramConfig) (*udQP, error) {
	cfg.PKey = cmp.Or(cfg.PKey, verbs.DefaultPKey)
	cfg.RecvQueue = cmp.Or(cfg.RecvQueue, 256)
	switch {
	case cfg.PKey&pkeyBase == 0:
		return nil, fmt.Errorf("P_Key 0x%04x names no partition", cfg.PKey)
	case cfg.RecvQueue < 0 || cfg.RecvQueue > maxQPWR:
		return nil, fmt.Errorf("receive queue of %d datagrams, at most %d", cfg.RecvQueue, maxQPWR)
	}
	p, err := d.portAt(cfg.Local)
	if err != nil {
		return nil, err
	}
	mtu, err := interfaceMTU(p.addr)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	a, err := d.agentAt(p)
	if err != nil {
		return nil, err
	}
	q := newUDQP(d, a, cfg, datagramRoom(p.addr, mtu))
	if err := a.addQP(q); err != nil {
		return nil, err
	}
	d.users++
	return q, nil
}

// datagramRoom is the longest payload of a datagram that leaves the interface
// whole. Pad makes every packet a multiple of four bytes.
func datagramRoom(addr netip.Addr, mtu int) int {
	headers := ip4Len
	if addr.Is6() {
		headers = ip6Len
	}
	return min((mtu-headers-udpLen-bthLen-dethLen-icrcLen)&^3, maxDatagram)
}

// agentAt returns the agent of a port, started if it is not yet. d.mu is held.
func (d *Device) agentAt(p *udpPort) (*udAgent, error) {
	if d.closed {
		return nil, verbs.ErrClosed
	}
	if err := d.takeUDSlot(); err != nil {
		return nil, err
	}
	if a := d.agents[p]; a != nil {
		return a, nil
	}
	conn, err := dupForPoller(p.socks[d.ud.index])
	if err != nil {
		return nil, err
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	a := &udAgent{
		port: p, slot: d.ud.index, conn: conn, raw: raw, done: make(chan struct{}), stats: &queueCounters{},
		out: &sendBatch{port: p}, from: map[sourceKey]*crcPrefix{}, qps: map[uint32]*udQP{}, number: rand.Uint32(),
	}
	a.stage = newStage(a.stats)
	d.agents[p] = a
	d.stats.Open(a.stats)
	go a.run()
	return a, nil
}

// takeUDSlot makes the slot of UD queue pairs. d.mu is held.
func (d *Device) takeUDSlot() error {
	if d.ud != nil {
		return nil
	}
	if len(d.slots) > maxSlots {
		return fmt.Errorf("all %d completion queues are in use", maxSlots)
	}
	if err := d.growPorts(); err != nil {
		return err
	}
	d.ud = &cqSlot{index: uint32(len(d.slots))}
	d.slots = append(d.slots, d.ud)
	for _, p := range d.ports {
		if err := p.selectSockets(); err != nil {
			return err
		}
	}
	return nil
}

// dupForPoller gives the runtime's poller a descriptor of the same socket.
func dupForPoller(fd int) (*net.UDPConn, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(dup), "rocev2-datagrams")
	defer f.Close()
	c, err := net.FilePacketConn(f)
	if err != nil {
		return nil, err
	}
	return c.(*net.UDPConn), nil
}

// addQP gives q a number and makes it reachable.
func (a *udAgent) addQP(q *udQP) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for range queuesPerCQ {
		a.number = (a.number + 1) & (1<<(24-slotBits) - 1)
		qpn := a.number<<slotBits | a.slot
		if a.number != 0 && a.qps[qpn] == nil && len(a.qps) < queuesPerCQ {
			q.qpn = qpn
			a.qps[qpn] = q
			return nil
		}
	}
	return fmt.Errorf("all %d UD queue pairs of the port are in use", queuesPerCQ)
}

// removeDatagrams takes q away, and its agent with the last one.
func (d *Device) removeDatagrams(q *udQP) {
	a := q.agent
	d.mu.Lock()
	a.mu.Lock()
	delete(a.qps, q.qpn)
	last := len(a.qps) == 0
	a.mu.Unlock()
	if last {
		delete(d.agents, a.port)
		d.stats.Close(a.stats)
	}
	d.mu.Unlock()
	if last {
		a.conn.Close()
		<-a.done
	}
	d.removeUser()
}

// run receives until the agent is closed. Queue pairs are woken after each
// datagram of the socket, which may be many merged ones.
func (a *udAgent) run() {
	defer close(a.done)
	read := func(fd uintptr) bool {
		a.out.fd = int(fd)
		return a.stage.fillFrom(a.out) > 0
	}
	for a.raw.Read(read) == nil {
		for !a.stage.empty() {
			p := a.stage.nextPacket()
			a.stats.received.Add(1)
			if why := a.onPacket(&p); why != dropNone {
				a.stats.dropped[why].Add(1)
			}
			if a.stage.off == 0 {
				a.wakeReceivers()
			}
		}
	}
}

// wakeReceivers wakes the queue pairs that have got datagrams.
func (a *udAgent) wakeReceivers() {
	for _, q := range a.ready {
		q.more.Signal()
	}
	clear(a.ready)
	a.ready = a.ready[:0]
}

// onPacket checks a packet and delivers it.
func (a *udAgent) onPacket(p *receivedPacket) dropReason {
	b := bth(p.b)
	switch {
	case len(b) < bthLen+dethLen+icrcLen || len(b) > bthLen+dethLen+maxDatagram+icrcLen:
		return dropLength
	case b.version() != 0 || b.opcode() != opDatagram:
		return dropHeader
	case len(b) < bthLen+dethLen+b.pad()+icrcLen:
		return dropLength
	}
	if p.id > 0 && b.qpn() != verbs.MulticastQPN && b.qpn()&(1<<slotBits-1) != a.slot {
		a.port.stopMerging()
	}
	if !a.pseudoFrom(p).checkPacket(b, nil, p.id) {
		return dropICRC
	}
	return a.deliverDatagram(p, b)
}

// deliverDatagram gives the datagram b to those that it is for. It returns the reason
// if no queue pair took it.
func (a *udAgent) deliverDatagram(p *receivedPacket, b bth) dropReason {
	a.mu.Lock()
	defer a.mu.Unlock()
	if b.qpn() != verbs.MulticastQPN {
		if q := a.qps[b.qpn()]; q != nil {
			return a.giveDatagram(q, p, b, false)
		}
		return dropQPN
	}
	why := dropQPN
	for _, q := range a.qps {
		if q.isAttached() {
			if d := a.giveDatagram(q, p, b, true); d == dropNone || why == dropQPN {
				why = d
			}
		}
	}
	return why
}

// giveDatagram gives the datagram b to q and notes q for wake.
func (a *udAgent) giveDatagram(q *udQP, p *receivedPacket, b bth, multicast bool) dropReason {
	why := q.onDatagram(p, b, multicast)
	if why == dropNone && !slices.Contains(a.ready, q) {
		a.ready = append(a.ready, q)
	}
	return why
}

// pseudoFrom returns the pseudo header of packets from the sender of p.
func (a *udAgent) pseudoFrom(p *receivedPacket) *crcPrefix {
	key := sourceKey{p.addr, p.sport}
	ps := a.from[key]
	if ps == nil {
		if len(a.from) >= udPeers {
			clear(a.from)
		}
		v := newPseudo(netip.AddrFrom16(p.addr).Unmap(), a.port.addr, p.sport)
		ps = &v
		a.from[key] = ps
	}
	return ps
}
