package tun

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// TypeInfiniBand is the hardware type of the interface, ARPHRD_INFINIBAND.
const TypeInfiniBand = 32

// HeaderLen is the length of the virtio_net_hdr in front of each packet that is
// read or written, in bytes. A header of zeros belongs to a whole packet.
const HeaderLen = 10

// Flags and GSO types of a Header.
const (
	flagNeedsChecksum = 1

	GSONone  = 0
	GSOTCPv4 = 1
	GSOTCPv6 = 4
)

// Header is the virtio_net_hdr of a packet. Numbers are in the order of the host.
type Header []byte

// NeedsChecksum reports whether the checksum of the packet has to be finished:
// the field has the sum of the pseudo header, and the bytes from ChecksumStart on
// are to be added.
func (h Header) NeedsChecksum() bool { return h[0]&flagNeedsChecksum != 0 }

// GSOType is GSONone for a packet that fits the MTU.
func (h Header) GSOType() byte { return h[1] }

// GSOSize is the payload that each segment of a larger packet is to have.
func (h Header) GSOSize() int { return int(native.Uint16(h[4:])) }

// ChecksumStart and ChecksumOffset say where the checksum begins, from the start
// of the packet, and where its field is, from there.
func (h Header) ChecksumStart() int  { return int(native.Uint16(h[6:])) }
func (h Header) ChecksumOffset() int { return int(native.Uint16(h[8:])) }

// Device is an open TUN device.
type Device struct {
	file *os.File
	raw  syscall.RawConn
	ctl  int // a socket in the namespace of the device
	name string
}

// Open makes the device name. A name with %d gets a free number.
func Open(name string) (*Device, error) {
	d, err := open(name)
	if err != nil {
		return nil, fmt.Errorf("open TUN device %s: %w", name, err)
	}
	return d, nil
}

func open(name string) (*Device, error) {
	if len(name) == 0 || len(name) >= unix.IFNAMSIZ {
		return nil, fmt.Errorf("name of %d characters, want 1 to %d: %w", len(name), unix.IFNAMSIZ-1, unix.EINVAL)
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun: %w", err)
	}
	d := &Device{ctl: -1}
	if err := d.setUp(fd, name); err != nil {
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

func (d *Device) setUp(fd int, name string) (err error) {
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR | unix.IFF_TUN_EXCL)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		return fmt.Errorf("create: %w", err)
	}
	d.name = ifr.Name()
	if err := unix.IoctlSetInt(fd, unix.TUNSETLINK, TypeInfiniBand); err != nil {
		return fmt.Errorf("set hardware type: %w", err)
	}
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, unix.TUN_F_CSUM|unix.TUN_F_TSO4|unix.TUN_F_TSO6); err != nil {
		return fmt.Errorf("set offloads: %w", err)
	}
	d.ctl, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	return err
}

// Name returns the name of the interface.
func (d *Device) Name() string { return d.name }

// Index returns the number of the interface.
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

// Read waits for packets and reads as many as there are into bufs, one each, with
// their headers. It sets the length of each that it filled, and returns their
// number. A packet longer than its buffer is cut. After Close the error is
// os.ErrClosed.
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

// Write passes a packet behind its header to the kernel.
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
