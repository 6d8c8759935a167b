package dev

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/internal/nstest"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

var (
	portA = netip.MustParseAddr("10.9.0.1")
	portB = netip.MustParseAddr("10.9.0.2")

	loopbackPort = netip.MustParseAddr("127.0.0.3")
)

// host is a namespace with a port of the fabric.
type host struct {
	*nstest.Namespace
	t      *testing.T
	port   netip.Addr
	fabric verbs.DatagramDevice
}

// hosts makes two hosts on a cable with the MTU given.
func hosts(t *testing.T, mtu int) (a, b *host) {
	t.Helper()
	na, nb := nstest.Pair(t, mtu)
	return newHost(t, na, portA), newHost(t, nb, portB)
}

func newHost(t *testing.T, n *nstest.Namespace, port netip.Addr) *host {
	t.Helper()
	h := &host{Namespace: n, t: t, port: port}
	var d verbs.Device
	var err error
	n.Do(func() {
		d, err = rocev2.Open(rocev2.Config{Addrs: []netip.Addr{port}, Logger: slog.New(slog.DiscardHandler)})
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	h.fabric = d.(verbs.DatagramDevice)
	return h
}

// open makes an interface that is up, with the addresses given.
func (h *host) open(cfg Config, addrs ...string) *Interface {
	h.t.Helper()
	i, err := h.tryOpen(cfg)
	if err != nil {
		h.t.Fatal(err)
	}
	for _, a := range addrs {
		args := []string{"ip", "addr", "add", a, "dev", i.Name()}
		if netip.MustParsePrefix(a).Addr().Is6() {
			args = append(args, "nodad")
		}
		h.Run(args...)
	}
	h.Run("ip", "link", "set", i.Name(), "up")
	h.t.Cleanup(func() { i.Close() })
	eventually(h.t, "the interface knows its addresses", func() bool {
		i.mu.Lock()
		defer i.mu.Unlock()
		return i.isUp && i.groups.Ready() && len(i.ips) >= len(addrs)+1 // and link-local
	})
	return i
}

func (h *host) tryOpen(cfg Config) (i *Interface, err error) {
	if cfg.Name == "" {
		cfg.Name = "ib0"
	}
	cfg.Fabric, cfg.Local = h.fabric, h.port
	if cfg.Peers == nil {
		cfg.Peers = []netip.Addr{portA, portB}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if os.Getenv("IPOIB_LOG") != "" {
		cfg.Logger = slog.Default()
	}
	h.Do(func() { i, err = Open(cfg) })
	return i, err
}

// pair makes two hosts with an interface each: 192.168.50.1 and .2, fd50::1 and
// fd50::2.
func pair(t *testing.T) (a, b *host, ia, ib *Interface) {
	t.Helper()
	a, b = hosts(t, 4200)
	ia = a.open(Config{}, "192.168.50.1/24", "fd50::1/64")
	ib = b.open(Config{}, "192.168.50.2/24", "fd50::2/64")
	return a, b, ia, ib
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not after 20 s", what)
		}
	}
}

// udp opens a socket of the host.
func (h *host) udp(network, addr string, control func(fd int) error) *net.UDPConn {
	h.t.Helper()
	var c net.PacketConn
	var err error
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		if control != nil {
			raw.Control(func(fd uintptr) { err = control(int(fd)) })
		}
		return err
	}}
	h.Do(func() { c, err = lc.ListenPacket(context.Background(), network, addr) })
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { c.Close() })
	return c.(*net.UDPConn)
}

// exchange sends datagrams from c to dst until one of them arrives at to, and
// returns where it came from. A datagram may be lost.
func exchange(t *testing.T, c *net.UDPConn, dst string, to *net.UDPConn, payload []byte) netip.AddrPort {
	t.Helper()
	addr := net.UDPAddrFromAddrPort(netip.MustParseAddrPort(dst))
	b := make([]byte, len(payload)+1)
	for range 40 {
		if _, err := c.WriteTo(payload, addr); err != nil {
			t.Fatalf("send to %s: %v", dst, err)
		}
		to.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		for {
			n, from, err := to.ReadFromUDPAddrPort(b)
			if err != nil {
				break
			}
			if bytes.Equal(b[:n], payload) {
				return from
			}
		}
	}
	t.Fatalf("no datagram for %s arrived", dst)
	panic("not reached")
}

// ping sends ICMP echo requests until one is answered.
func (h *host) ping(dst string) {
	h.t.Helper()
	a := netip.MustParseAddr(dst)
	domain, proto, request := unix.AF_INET, unix.IPPROTO_ICMP, byte(8)
	if a.Is6() {
		domain, proto, request = unix.AF_INET6, unix.IPPROTO_ICMPV6, 128
	}
	var answer []byte
	h.Do(func() {
		fd, err := unix.Socket(domain, unix.SOCK_RAW, proto)
		if err != nil {
			h.t.Error(err)
			return
		}
		defer unix.Close(fd)
		var sa unix.Sockaddr = &unix.SockaddrInet6{Addr: a.As16()}
		if a.Is4() {
			sa = &unix.SockaddrInet4{Addr: a.As4()}
		}
		tv := unix.Timeval{Usec: 500_000}
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
		m := []byte{request, 0, 0, 0, 0x12, 0x34, 0, 1, 'p', 'i', 'n', 'g'}
		sum := internetChecksum(m)
		m[2], m[3] = byte(sum>>8), byte(sum)
		for range 40 {
			if err := unix.Sendto(fd, m, 0, sa); err != nil {
				continue
			}
			b := make([]byte, 200)
			for {
				n, _, err := unix.Recvfrom(fd, b, 0)
				if err != nil {
					break
				}
				if b := b[:n]; bytes.HasSuffix(b, m[4:]) && b[len(b)-len(m)] != request {
					answer = b
					return
				}
			}
		}
	})
	if answer == nil {
		h.t.Fatalf("no answer from %s", dst)
	}
}

func internetChecksum(b []byte) uint16 {
	var n uint32
	for i := 0; i+1 < len(b); i += 2 {
		n += uint32(b[i])<<8 | uint32(b[i+1])
	}
	for n > 0xffff {
		n = n>>16 + n&0xffff
	}
	return ^uint16(n)
}

// buffer is a capture.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Clone(b.b.Bytes())
}
