package rocev2

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A port is UDP 4791 at one local address: a group of SO_REUSEPORT sockets. A
// filter in the kernel picks one by the destination queue pair number. Socket
// 0 takes the packets for queue pair 1, the connection manager, and belongs to
// the port's control goroutine. Socket s belongs to slot s, one completion
// queue; the numbers of its queue pairs are s modulo 256.
//
// The kernel knows the sockets of a group by their position. So the socket of a
// slot stays open when its completion queue is closed, and is used by the next
// one.

const (
	slotBits = 8
	maxSlots = 1<<slotBits - 2 // without 0; 255 stays free so that no number is all ones

	socketBuffer = 8 << 20
)

// udpPort implements UDP 4791 at one address.
type udpPort struct {
	dev     *Device
	addr    netip.Addr
	mtu     uint8 // code of the largest path MTU
	control *net.UDPConn
	done    chan struct{} // closed when the control goroutine has ended
	socks   []int         // by slot, -1 for 0; guarded by Device.mu
	buffer  int           // bytes of a receive buffer, as the kernel counts them
	gso     bool
	gro     atomic.Bool
}

// peerAddr is the destination of packets.
type peerAddr struct {
	addr  netip.Addr
	port  uint16
	scope uint32
}

func newPeerAddr(a netip.Addr) peerAddr {
	p := peerAddr{addr: a, port: roceUDPPort}
	if z := a.Zone(); z != "" {
		if ifi, err := net.InterfaceByName(z); err == nil {
			p.scope = uint32(ifi.Index)
		} else if n, err := strconv.ParseUint(z, 10, 32); err == nil {
			p.scope = uint32(n)
		}
	}
	return p
}

// openPort binds the sockets of slots 0 to slots.
func (d *Device) openPort(addr netip.Addr, slots int) (*udpPort, error) {
	if !addr.IsValid() || addr.IsUnspecified() || addr.IsMulticast() {
		return nil, fmt.Errorf("open UDP port %d at %s: not the address of this host", roceUDPPort, addr)
	}
	code, err := d.mtuOf(addr)
	if err != nil {
		return nil, fmt.Errorf("open UDP port %d at %s: %w", roceUDPPort, addr, err)
	}
	p := &udpPort{dev: d, addr: addr, mtu: code, done: make(chan struct{})}
	if err := p.openSockets(slots); err != nil {
		p.close()
		return nil, err
	}
	p.buffer, _ = unix.GetsockoptInt(p.socks[1], unix.SOL_SOCKET, unix.SO_RCVBUF)
	d.cfg.Logger.Info("rocev2 address bound", "address", addr, "path_mtu", mtuBytes(p.mtu), "gso", p.gso, "gro", p.gro.Load(), "receive_buffer", p.buffer)
	return p, nil
}

func (p *udpPort) openSockets(slots int) error {
	first, err := p.bindSocket(true)
	if err != nil {
		return err
	}
	if err := p.takeControl(first); err != nil {
		return fmt.Errorf("open UDP port %d at %s: %w", roceUDPPort, p.addr, err)
	}
	p.socks = []int{-1}
	p.probeOffloads()
	for range max(slots, 1) {
		if err := p.addSocket(); err != nil {
			return err
		}
	}
	return p.selectSockets()
}

// selectSockets makes the kernel pick the socket of each packet. Device.mu is
// held.
func (p *udpPort) selectSockets() error {
	multicast := uint32(0) // queue pair 1 drops it
	if p.dev.ud != nil {
		multicast = p.dev.ud.index
	}
	filter := selectFilter(multicast)
	err := unix.SetsockoptSockFprog(p.socks[1], unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
	if err != nil {
		return fmt.Errorf("open UDP port %d at %s: select by queue pair number: %w", roceUDPPort, p.addr, err)
	}
	return nil
}

// selectFilter returns the number of the socket: 0 for queue pair 1, multicast
// for the queue pair number of multicast, else the low byte of the destination
// queue pair number. For a number without a socket the kernel picks any, and
// its owner drops the packet.
func selectFilter(multicast uint32) []unix.SockFilter {
	return []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 4},
		{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: qpnMask},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 3, K: cmQPN},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 3, K: verbs.MulticastQPN},
		{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 1<<slotBits - 1},
		{Code: unix.BPF_RET | unix.BPF_A},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
		{Code: unix.BPF_RET | unix.BPF_K, K: multicast},
	}
}

// addSocket opens the socket of the next slot.
func (p *udpPort) addSocket() error {
	fd, err := p.bindSocket(false)
	if err != nil {
		return err
	}
	if p.gro.Load() {
		unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_GRO, 1)
	}
	p.socks = append(p.socks, fd)
	return nil
}

// bindSocket opens a socket. The first of a port must have it alone, so that a
// second process is refused; later ones join its group.
func (p *udpPort) bindSocket(first bool) (int, error) {
	family := unix.AF_INET6
	var sa unix.Sockaddr = &unix.SockaddrInet6{Port: roceUDPPort, Addr: p.addr.As16(), ZoneId: newPeerAddr(p.addr).scope}
	if p.addr.Is4() {
		family, sa = unix.AF_INET, &unix.SockaddrInet4{Port: roceUDPPort, Addr: p.addr.As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("open UDP port %d at %s: %w", roceUDPPort, p.addr, err)
	}
	err = setOptions(fd, family)
	if err == nil && !first {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	}
	if err == nil {
		err = unix.Bind(fd, sa)
	}
	if err == nil && first {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	}
	if err == nil {
		return fd, nil
	}
	unix.Close(fd)
	if errors.Is(err, unix.EADDRINUSE) {
		return -1, fmt.Errorf("open UDP port %d at %s: another process holds it, probably another rnbd or the kernel's rxe: %w", roceUDPPort, p.addr, err)
	}
	return -1, fmt.Errorf("open UDP port %d at %s: %w", roceUDPPort, p.addr, err)
}

// setOptions makes the kernel send a known IPv4 identification and no fragments,
// and accept datagrams without a UDP checksum.
func setOptions(fd, family int) error {
	var err error
	if family == unix.AF_INET {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
	} else {
		err = errors.Join(
			unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1),
			unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO),
			unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_NO_CHECK6_RX, 1))
	}
	for _, o := range [][2]int{{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF}, {unix.SO_SNDBUFFORCE, unix.SO_SNDBUF}} {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, o[0], socketBuffer) != nil {
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, o[1], socketBuffer) // as much as is allowed
		}
	}
	return err
}

// takeControl gives socket 0 to the runtime's poller.
func (p *udpPort) takeControl(fd int) error {
	f := os.NewFile(uintptr(fd), "rocev2-control")
	defer f.Close()
	c, err := net.FilePacketConn(f)
	if err != nil {
		return err
	}
	p.control = c.(*net.UDPConn)
	return nil
}

// probeOffloads tests the kernel for offloads.
func (p *udpPort) probeOffloads() {
	if p.dev.cfg.NoOffload {
		return
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	_, err = unix.GetsockoptInt(fd, unix.SOL_UDP, unix.UDP_SEGMENT)
	p.gso = err == nil
	p.gro.Store(unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_GRO, 1) == nil)
}

// stopMerging turns GRO off: the kernel has merged packets of different queue
// pairs, and delivers all of them to the socket of the first. No lock is held.
func (p *udpPort) stopMerging() {
	if !p.gro.Swap(false) {
		return
	}
	p.dev.mu.Lock()
	defer p.dev.mu.Unlock()
	for _, fd := range p.socks {
		if fd >= 0 {
			unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_GRO, 0)
		}
	}
	p.dev.cfg.Logger.Info("rocev2 turned receive offload off: the kernel merges packets of different queue pairs", "address", p.addr)
}

func (p *udpPort) close() {
	if p.control != nil {
		p.control.Close()
	}
	for _, fd := range p.socks {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	p.socks = nil
}

// mtuBytes returns the path MTU with a code: 256 to 4096 bytes of payload.
func mtuBytes(code uint8) uint32 { return 128 << code }

const (
	minMTUCode, maxMTUCode = 1, 5
	// packetOverhead is the number of bytes that the kernel subtracts from the
	// MTU of an interface: IPv6, UDP and all headers of a packet.
	packetOverhead = 96
)

func mtuCode(interfaceMTU int) uint8 {
	code := uint8(maxMTUCode)
	for code > minMTUCode && int(mtuBytes(code))+packetOverhead > interfaceMTU {
		code--
	}
	return code
}

// mtuOf returns the code of the largest path MTU of the interface that has addr.
func (d *Device) mtuOf(addr netip.Addr) (uint8, error) {
	limit := uint8(maxMTUCode)
	for limit > minMTUCode && mtuBytes(limit) > uint32(d.cfg.PathMTU) {
		limit--
	}
	mtu, err := interfaceMTU(addr)
	if err != nil {
		return 0, err
	}
	return min(limit, mtuCode(mtu)), nil
}

// interfaceMTU returns the MTU of the interface that has addr, in bytes.
func interfaceMTU(addr netip.Addr) (int, error) {
	ifis, err := net.Interfaces()
	if err != nil {
		return 0, err
	}
	for _, ifi := range ifis {
		addrs, err := ifi.Addrs()
		if err != nil {
			continue
		}
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && (n.IP.Equal(addr.AsSlice()) || ifi.Flags&net.FlagLoopback != 0 && n.Contains(addr.AsSlice())) {
				return ifi.MTU, nil
			}
		}
	}
	return 0, errors.New("no interface has the address")
}

// sourceFor returns the system's source address for dst.
func sourceFor(dst netip.Addr) (netip.Addr, error) {
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(dst, roceUDPPort)))
	if err != nil {
		return netip.Addr{}, err
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
}

// closeLast closes the socket that was opened last.
func (p *udpPort) closeLast() {
	last := len(p.socks) - 1
	unix.Close(p.socks[last])
	p.socks = p.socks[:last]
}
