package rocev2

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// The active side chooses the path MTU when it connects, by the interface, by
// the kernel's route and by experience: if short packets of a connection arrive
// and none of full size ever did, a link between the hosts carries less. The
// next connections between them use less. The passive side enforces that by
// refusing.

const (
	// learnedFor is the time for which a smaller path MTU is used before the
	// full one is tried again.
	learnedFor = 10 * time.Minute
	// ethernetCode is the path MTU of Ethernet's 1500 bytes: 1024.
	ethernetCode = 3
	// stuckAfter is the number of losses of a packet in a row after which its
	// size is suspected.
	stuckAfter = 3
)

// learnedMTU is a path MTU that was learned.
type learnedMTU struct {
	code  uint8
	until time.Time
}

// mtuTo returns the code of the largest known path MTU between a port and a peer.
// It does not ask the kernel. m.mu is held.
func (m *connManager) mtuTo(p *udpPort, peer netip.Addr) uint8 {
	if l, ok := m.learned[peer]; ok && time.Now().Before(l.until) {
		return min(p.mtu, l.code)
	}
	return p.mtu
}

// onPacketsLost notes that packets with the path MTU mtu, in bytes, do not arrive at a
// peer. m.mu is held.
func (m *connManager) onPacketsLost(peer netip.Addr, mtu uint32) {
	code := uint8(minMTUCode)
	for mtuBytes(code+1) < mtu {
		code++
	}
	code = min(code, ethernetCode)
	now := time.Now()
	for a, l := range m.learned {
		if now.After(l.until) {
			delete(m.learned, a)
		}
	}
	m.learned[peer] = learnedMTU{code, now.Add(learnedFor)}
	m.dev.cfg.Logger.Warn("rocev2 packets of full size do not arrive: a link between the hosts carries less than the interfaces; the next connections use less",
		"peer", peer, "path_mtu", mtu, "to", mtuBytes(code), "within", learnedFor)
}

// suspectMTU returns the path MTU if the size of packets may be the reason why the
// connection has failed, else 0. If the peer has reported the loss, suspectMTU
// notes the reason itself.
func (q *qp) suspectMTU() uint32 {
	r := &q.req
	if r.fullArrived || r.stuck < stuckAfter || r.una.at >= r.begun || q.mtu == mtuBytes(minMTUCode) ||
		!fullAt(q.SQ.At(r.una.at), r.una.off, q.mtu) {
		return 0
	}
	if !r.gapTold {
		return q.mtu
	}
	m := &q.dev.cm
	m.mu.Lock()
	defer m.mu.Unlock()
	m.onPacketsLost(q.conn.peer, q.mtu)
	return 0
}

// routeMTU returns the largest IP packet in bytes that the kernel sends from src
// to dst, or 0 if it is not known.
func routeMTU(src, dst netip.Addr) int {
	family, level, option := unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_MTU
	to := newPeerAddr(dst)
	var from, peer unix.Sockaddr = &unix.SockaddrInet6{Addr: src.As16(), ZoneId: newPeerAddr(src).scope}, &unix.SockaddrInet6{Addr: dst.As16(), Port: roceUDPPort, ZoneId: to.scope}
	if dst.Is4() {
		family, level, option = unix.AF_INET, unix.IPPROTO_IP, unix.IP_MTU
		from, peer = &unix.SockaddrInet4{Addr: src.As4()}, &unix.SockaddrInet4{Addr: dst.As4(), Port: roceUDPPort}
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	if unix.Bind(fd, from) != nil || unix.Connect(fd, peer) != nil {
		return 0
	}
	n, err := unix.GetsockoptInt(fd, level, option)
	if err != nil {
		return 0
	}
	return n
}
