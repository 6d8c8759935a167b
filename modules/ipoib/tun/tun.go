package tun

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Hardware types of the interface: ARPHRD_INFINIBAND of a TUN device,
// ARPHRD_ETHER of a TAP device.
const (
	TypeInfiniBand = 32
	TypeEthernet   = 1
)

// HeaderLen is the length of the virtio_net_hdr in front of each packet read or
// written, in bytes. A header of zeros means a packet with complete checksums
// that is not to be segmented.
const HeaderLen = 10

// Flags and GSO types of a Header.
const (
	flagNeedsChecksum = 1

	GSONone  = 0
	GSOTCPv4 = 1
	GSOTCPv6 = 4
)

// Header is the virtio_net_hdr of a packet. Its numbers are in the byte order
// of the host.
type Header []byte

// NeedsChecksum reports whether the checksum of the packet is to be completed:
// its field has the sum of the pseudo header, and the bytes from ChecksumStart
// on must be added.
func (h Header) NeedsChecksum() bool { return h[0]&flagNeedsChecksum != 0 }

// GSOType returns the kind of a packet to be segmented, GSONone for a packet
// that fits the MTU.
func (h Header) GSOType() byte { return h[1] }

// GSOSize returns the payload of each segment of a packet to be segmented, in
// bytes.
func (h Header) GSOSize() int { return int(native.Uint16(h[4:])) }

// ChecksumStart returns the offset of the first byte that the checksum covers.
// ChecksumOffset returns the offset of the checksum field from there.
func (h Header) ChecksumStart() int  { return int(native.Uint16(h[6:])) }
func (h Header) ChecksumOffset() int { return int(native.Uint16(h[8:])) }

// tcpChecksum is the offset of the checksum in a TCP header.
const tcpChecksum = 16

// PutGSO writes the header of a joined TCP packet into h. header is the length
// of its IP and TCP headers, ip that of its IP header, size the payload of each
// part but the last, all in bytes. The checksum field of the packet has the sum
// of the pseudo header.
func PutGSO(h Header, kind byte, header, size, ip int) {
	h[0], h[1] = flagNeedsChecksum, kind
	native.PutUint16(h[2:], uint16(header))
	native.PutUint16(h[4:], uint16(size))
	native.PutUint16(h[6:], uint16(ip))
	native.PutUint16(h[8:], tcpChecksum)
}

// Device is an open TUN or TAP device.
type Device struct {
	file *os.File
	raw  syscall.RawConn
	ctl  int // a socket in the namespace of the device
	name string
}

// Open makes the device name. A name with %d gets a free number. With ethernet it
// is a TAP device of the type Ethernet, else a TUN device of the type InfiniBand.
// There is nothing in between: a TAP device of the type InfiniBand never resolves
// a neighbour, since it has no address length, and a TUN device has no Ethernet
// header.
func Open(name string, ethernet bool) (*Device, error) {
	d, err := open(name, ethernet)
	if err != nil {
		return nil, fmt.Errorf("open TUN or TAP device %s: %w", name, err)
	}
	return d, nil
}

func open(name string, ethernet bool) (*Device, error) {
	if len(name) == 0 || len(name) >= unix.IFNAMSIZ {
		return nil, fmt.Errorf("name of %d characters, want 1 to %d: %w", len(name), unix.IFNAMSIZ-1, unix.EINVAL)
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun: %w", err)
	}
	d := &Device{ctl: -1}
	if err := d.setUp(fd, name, ethernet); err != nil {
		unix.Close(fd)
		if d.ctl >= 0 {
			unix.Close(d.ctl)
		}
		return nil, err
	}
	d.file = os.NewFile(uintptr(fd), "tun")
	if d.raw, err = d.file.SyscallConn(); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

func (d *Device) setUp(fd int, name string, ethernet bool) (err error) {
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	kind := uint16(unix.IFF_TUN)
	if ethernet {
		kind = unix.IFF_TAP
	}
	ifr.SetUint16(kind | unix.IFF_NO_PI | unix.IFF_VNET_HDR | unix.IFF_TUN_EXCL)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		return fmt.Errorf("create: %w", err)
	}
	d.name = ifr.Name()
	if !ethernet {
		if err := unix.IoctlSetInt(fd, unix.TUNSETLINK, TypeInfiniBand); err != nil {
			return fmt.Errorf("set hardware type: %w", err)
		}
	}
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, offloads); err != nil {
		return fmt.Errorf("set offloads: %w", err)
	}
	d.ctl, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	return err
}

// offloads is the work that a device leaves to its reader.
const offloads = unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6

// SetOffloads decides whether the kernel leaves checksums and TCP segmentation
// to the reader. The default is on. Packets that wait to be read are not
// changed.
func (d *Device) SetOffloads(on bool) error {
	v := 0
	if on {
		v = offloads
	}
	var err error
	ctlErr := d.raw.Control(func(fd uintptr) { err = unix.IoctlSetInt(int(fd), unix.TUNSETOFFLOAD, v) })
	if err = errors.Join(ctlErr, err); err != nil {
		return fmt.Errorf("set offloads of %s: %w", d.name, err)
	}
	return nil
}

// Name returns the name of the interface.
func (d *Device) Name() string { return d.name }

// Index returns the interface index.
func (d *Device) Index() (int, error) {
	ifr, err := unix.NewIfreq(d.name)
	if err == nil {
		err = unix.IoctlIfreq(d.ctl, unix.SIOCGIFINDEX, ifr)
	}
	if err != nil {
		return 0, fmt.Errorf("index of %s: %w", d.name, err)
	}
	return int(ifr.Uint32()), nil
}

// SetMTU sets the MTU of the interface, in bytes.
func (d *Device) SetMTU(mtu int) error {
	ifr, err := unix.NewIfreq(d.name)
	if err == nil {
		ifr.SetUint32(uint32(mtu))
		err = unix.IoctlIfreq(d.ctl, unix.SIOCSIFMTU, ifr)
	}
	if err != nil {
		return fmt.Errorf("set MTU of %s to %d: %w", d.name, mtu, err)
	}
	return nil
}

// SetUp sets the interface up or down.
func (d *Device) SetUp(up bool) error {
	ifr, err := unix.NewIfreq(d.name)
	if err == nil {
		err = unix.IoctlIfreq(d.ctl, unix.SIOCGIFFLAGS, ifr)
	}
	if err == nil {
		flags := ifr.Uint16() &^ unix.IFF_UP
		if up {
			flags |= unix.IFF_UP
		}
		ifr.SetUint16(flags)
		err = unix.IoctlIfreq(d.ctl, unix.SIOCSIFFLAGS, ifr)
	}
	if err != nil {
		return fmt.Errorf("set %s up or down: %w", d.name, err)
	}
	return nil
}

// SetCarrier turns the carrier of the interface on or off.
func (d *Device) SetCarrier(on bool) error {
	v := int32(0)
	if on {
		v = 1
	}
	var err error
	ctlErr := d.raw.Control(func(fd uintptr) { err = unix.IoctlSetPointerInt(int(fd), unix.TUNSETCARRIER, int(v)) })
	if err = errors.Join(ctlErr, err); err != nil {
		return fmt.Errorf("set carrier of %s: %w", d.name, err)
	}
	return nil
}

// Read waits for packets and reads as many as there are into bufs, one each,
// with their headers. It sets the lengths of the buffers that it filled and
// returns their number. A packet longer than its buffer is cut. The error after
// Close is os.ErrClosed.
func (d *Device) Read(bufs [][]byte) (n int, err error) {
	rawErr := d.raw.Read(func(fd uintptr) bool {
		for n < len(bufs) {
			b := bufs[n][:cap(bufs[n])]
			var got int
			got, err = unix.Read(int(fd), b)
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				break
			}
			bufs[n] = b[:got]
			n++
		}
		return n > 0 || err != unix.EAGAIN
	})
	switch {
	case n > 0:
		return n, nil
	case rawErr != nil:
		return 0, fmt.Errorf("read from %s: %w", d.name, rawErr)
	}
	return 0, fmt.Errorf("read from %s: %w", d.name, err)
}

// Write gives the kernel a packet. b is its header and the packet.
func (d *Device) Write(b []byte) error {
	if _, err := d.file.Write(b); err != nil {
		return fmt.Errorf("write to %s: %w", d.name, err)
	}
	return nil
}

// Close removes the interface.
func (d *Device) Close() error {
	err := d.file.Close()
	return errors.Join(err, unix.Close(d.ctl))
}
