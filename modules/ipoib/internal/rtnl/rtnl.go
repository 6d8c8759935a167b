// Package rtnl reads the addresses and routes of an interface by rtnetlink. A
// Conn belongs to the network namespace of the thread that opened it.
package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

var native = binary.NativeEndian

// Conn is a connection to rtnetlink for one interface. All methods may be
// called by any goroutine.
type Conn struct {
	index int

	mu  sync.Mutex // one request at a time
	fd  int
	seq uint32

	events *os.File // multicast messages of the kernel
}

// Open opens a Conn for the interface with the number index.
func Open(index int) (*Conn, error) {
	fd, err := socket(0)
	if err != nil {
		return nil, fmt.Errorf("open rtnetlink: %w", err)
	}
	timeout := unix.Timeval{Sec: 5}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("open rtnetlink: %w", err)
	}
	ev, err := socket(unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR | unix.RTMGRP_IPV4_ROUTE | unix.RTMGRP_IPV6_ROUTE)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("open rtnetlink: %w", err)
	}
	if err := unix.SetNonblock(ev, true); err != nil {
		unix.Close(fd)
		unix.Close(ev)
		return nil, fmt.Errorf("open rtnetlink: %w", err)
	}
	return &Conn{index: index, fd: fd, events: os.NewFile(uintptr(ev), "rtnetlink")}, nil
}

func socket(groups uint32) (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return -1, err
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// Close closes the connection. Wait returns.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return errors.Join(c.events.Close(), unix.Close(c.fd))
}

// Wait waits until links, addresses or routes may have changed. Its error is
// os.ErrClosed after Close.
func (c *Conn) Wait() error {
	b := make([]byte, 64<<10)
	_, err := c.events.Read(b)
	if errors.Is(err, unix.ENOBUFS) { // messages were lost: something has changed
		return nil
	}
	return err
}

// roundTrip sends a message and returns the answers to it.
func (c *Conn) roundTrip(kind, flags uint16, body []byte) ([]syscall.NetlinkMessage, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq++
	m := make([]byte, unix.NLMSG_HDRLEN, unix.NLMSG_HDRLEN+len(body))
	native.PutUint32(m, uint32(unix.NLMSG_HDRLEN+len(body)))
	native.PutUint16(m[4:], kind)
	native.PutUint16(m[6:], flags|unix.NLM_F_REQUEST)
	native.PutUint32(m[8:], c.seq)
	if err := unix.Sendto(c.fd, append(m, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, err
	}
	var all []syscall.NetlinkMessage
	for b := make([]byte, 64<<10); ; {
		n, _, err := unix.Recvfrom(c.fd, b, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		msgs, err := syscall.ParseNetlinkMessage(append([]byte(nil), b[:n]...))
		if err != nil {
			return nil, err
		}
		for _, m := range msgs {
			if m.Header.Seq != c.seq {
				continue // the answer to a request that timed out
			}
			switch m.Header.Type {
			case unix.NLMSG_DONE:
				return all, nil
			case unix.NLMSG_ERROR:
				if len(m.Data) < 4 {
					return nil, errors.New("short error message")
				}
				if e := int32(native.Uint32(m.Data)); e != 0 {
					return nil, unix.Errno(-e)
				}
				return all, nil
			}
			all = append(all, m)
			if m.Header.Flags&unix.NLM_F_MULTI == 0 && flags&unix.NLM_F_ACK == 0 {
				return all, nil
			}
		}
	}
}

func appendAttribute(b []byte, kind uint16, data []byte) []byte {
	b = native.AppendUint16(b, uint16(4+len(data)))
	b = native.AppendUint16(b, kind)
	b = append(b, data...)
	return append(b, make([]byte, -len(data)&3)...)
}

// parseAttributes returns the attributes behind the first n bytes of a message.
func parseAttributes(data []byte, n int) map[uint16][]byte {
	out := map[uint16][]byte{}
	for len(data) >= n+4 {
		b := data[n:]
		size := int(native.Uint16(b))
		if size < 4 || size > len(b) {
			break
		}
		out[native.Uint16(b[2:])] = b[4:size]
		n += (size + 3) &^ 3
	}
	return out
}

// Addrs returns the IP addresses of the interface with the number index, with
// their prefixes.
func (c *Conn) Addrs(index int) ([]netip.Prefix, error) {
	var out []netip.Prefix
	err := c.eachAddr(func(i int, p netip.Prefix) {
		if i == index {
			out = append(out, p)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("addresses of interface %d: %w", index, err)
	}
	return out, nil
}

// Index returns the number of the interface.
func (c *Conn) Index() int { return c.index }

// IsUp reports whether the interface is up.
func (c *Conn) IsUp() (bool, error) {
	flags, _, err := c.linkInfo(c.index)
	if err != nil {
		return false, fmt.Errorf("state of interface %d: %w", c.index, err)
	}
	return flags&unix.IFF_UP != 0, nil
}

// MAC returns the Ethernet address of the interface.
func (c *Conn) MAC() (mac [6]byte, err error) {
	_, at, err := c.linkInfo(c.index)
	if err == nil && copy(mac[:], at[unix.IFLA_ADDRESS]) != len(mac) {
		err = errors.New("none in the answer of the kernel")
	}
	if err != nil {
		return mac, fmt.Errorf("read the Ethernet address of interface %d: %w", c.index, err)
	}
	return mac, nil
}

// SetMAC sets the Ethernet address of the interface.
func (c *Conn) SetMAC(mac [6]byte) error {
	body := make([]byte, unix.SizeofIfInfomsg)
	native.PutUint32(body[4:], uint32(c.index))
	if _, err := c.roundTrip(unix.RTM_NEWLINK, unix.NLM_F_ACK, appendAttribute(body, unix.IFLA_ADDRESS, mac[:])); err != nil {
		return fmt.Errorf("set Ethernet address of interface %d: %w", c.index, err)
	}
	return nil
}

// AddAddr gives the interface an address, without duplicate address detection. An
// address that it has already is no error.
func (c *Conn) AddAddr(p netip.Prefix) error {
	family := byte(unix.AF_INET6)
	if p.Addr().Is4() {
		family = unix.AF_INET
	}
	body := make([]byte, unix.SizeofIfAddrmsg)
	body[0], body[1], body[2] = family, byte(p.Bits()), unix.IFA_F_NODAD
	if p.Addr().IsLinkLocalUnicast() {
		body[3] = unix.RT_SCOPE_LINK
	}
	native.PutUint32(body[4:], uint32(c.index))
	raw := p.Addr().AsSlice()
	body = appendAttribute(appendAttribute(body, unix.IFA_LOCAL, raw), unix.IFA_ADDRESS, raw)
	_, err := c.roundTrip(unix.RTM_NEWADDR, unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_EXCL, body)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add address %s to interface %d: %w", p, c.index, err)
	}
	return nil
}

// NextHop returns the gateway of the route to dst by the interface with the
// number index, or dst if it is reached without one.
func (c *Conn) NextHop(index int, dst netip.Addr) (netip.Addr, error) {
	body := make([]byte, unix.SizeofRtMsg)
	body[0] = unix.AF_INET6
	if dst.Is4() {
		body[0] = unix.AF_INET
	}
	body[1] = byte(dst.BitLen())
	body = appendAttribute(body, unix.RTA_DST, dst.AsSlice())
	body = appendAttribute(body, unix.RTA_OIF, native.AppendUint32(nil, uint32(index)))
	msgs, err := c.roundTrip(unix.RTM_GETROUTE, 0, body)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("route to %s by interface %d: %w", dst, index, err)
	}
	for _, m := range msgs {
		at := parseAttributes(m.Data, unix.SizeofRtMsg)
		if a, ok := netip.AddrFromSlice(at[unix.RTA_GATEWAY]); ok {
			return a, nil
		}
		if via := at[unix.RTA_VIA]; len(via) > 2 { // family, address
			if a, ok := netip.AddrFromSlice(via[2:]); ok {
				return a, nil
			}
		}
	}
	return dst, nil
}
