package ifctl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Watch is told of changes of interfaces and addresses.
type Watch struct {
	file *os.File
	done chan struct{}
}

// Groups of rtnetlink.
const (
	Links     = unix.RTMGRP_LINK
	Addresses = unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR
)

// NewWatch calls changed after each change in the thread's network namespace, on
// one goroutine, until Close. A change that was missed is followed by a call.
func NewWatch(groups uint32, changed func()) (*Watch, error) {
	fd, err := openNetlink(groups)
	if err != nil {
		return nil, err
	}
	w := &Watch{file: os.NewFile(uintptr(fd), "rtnetlink"), done: make(chan struct{})}
	go w.run(changed)
	return w, nil
}

func openNetlink(groups uint32) (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return -1, fmt.Errorf("open rtnetlink: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("bind rtnetlink: %w", err)
	}
	return fd, nil
}

func (w *Watch) run(changed func()) {
	defer close(w.done)
	buf := make([]byte, 64<<10)
	for {
		_, err := w.file.Read(buf)
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return
		}
		changed()
	}
}

// Close ends the calls; none runs when it returns.
func (w *Watch) Close() {
	w.file.Close()
	<-w.done
}

// Prefixes asks for the addresses of interfaces. It stays with the namespace
// of the thread that opened it.
type Prefixes struct{ fd int }

// NewPrefixes opens a socket for questions.
func NewPrefixes() (*Prefixes, error) {
	fd, err := openNetlink(0)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, false); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return &Prefixes{fd}, nil
}

// Close closes the socket.
func (p *Prefixes) Close() error { return unix.Close(p.fd) }

// Of returns the addresses of the interface with that number that may be used.
// It is called by one goroutine at a time.
func (p *Prefixes) Of(index int) (all []netip.Prefix, err error) {
	request := make([]byte, unix.NLMSG_HDRLEN+unix.SizeofIfAddrmsg)
	binary.NativeEndian.PutUint32(request, uint32(len(request)))
	binary.NativeEndian.PutUint16(request[4:], unix.RTM_GETADDR)
	binary.NativeEndian.PutUint16(request[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	if err := unix.Sendto(p.fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, fmt.Errorf("ask for addresses: %w", err)
	}
	buf := make([]byte, 64<<10)
	for {
		n, _, err := unix.Recvfrom(p.fd, buf, 0)
		if err != nil {
			return nil, fmt.Errorf("ask for addresses: %w", err)
		}
		messages, err := syscall.ParseNetlinkMessage(buf[:n])
		if err != nil {
			return nil, fmt.Errorf("ask for addresses: %w", err)
		}
		for _, m := range messages {
			switch m.Header.Type {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				return all, nil
			case unix.RTM_NEWADDR:
				if prefix, ok := parseAddress(m, index); ok {
					all = append(all, prefix)
				}
			}
		}
	}
}

// parseAddress reads an RTM_NEWADDR of the interface. Addresses that are still
// tentative do not count.
func parseAddress(m syscall.NetlinkMessage, index int) (netip.Prefix, bool) {
	if len(m.Data) < unix.SizeofIfAddrmsg || binary.NativeEndian.Uint32(m.Data[4:]) != uint32(index) || m.Data[2]&unix.IFA_F_TENTATIVE != 0 {
		return netip.Prefix{}, false
	}
	attrs, err := syscall.ParseNetlinkRouteAttr(&m)
	if err != nil {
		return netip.Prefix{}, false
	}
	var addr, local netip.Addr
	for _, a := range attrs {
		switch a.Attr.Type {
		case unix.IFA_ADDRESS:
			addr, _ = netip.AddrFromSlice(a.Value)
		case unix.IFA_LOCAL: // of IPv4, and of a peer's other end
			local, _ = netip.AddrFromSlice(a.Value)
		}
	}
	if local.IsValid() {
		addr = local
	}
	return netip.PrefixFrom(addr, int(m.Data[1])), addr.IsValid()
}
