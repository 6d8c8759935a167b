package ifctl

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ifreq is struct ifreq of Linux on 64-bit machines.
type ifreq struct {
	name [unix.IFNAMSIZ]byte
	data [24]byte
}

// Control is a socket for the interfaces of one namespace.
type Control struct{ fd int }

// Open opens a Control in the thread's network namespace.
func Open() (*Control, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a socket for interfaces: %w", err)
	}
	return &Control{fd}, nil
}

// Close closes the socket.
func (c *Control) Close() error { return unix.Close(c.fd) }

func (c *Control) callIoctl(request uintptr, name string, r *ifreq) error {
	copy(r.name[:unix.IFNAMSIZ-1], name)
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(c.fd), request, uintptr(unsafe.Pointer(r))); e != 0 {
		return e
	}
	return nil
}

// readNumber reads a 32-bit attribute.
func (c *Control) readNumber(request uintptr, name string) (int, error) {
	var r ifreq
	err := c.callIoctl(request, name, &r)
	return int(int32(binary.NativeEndian.Uint32(r.data[:]))), err
}

// Index returns the interface's number.
func (c *Control) Index(name string) (int, error) { return c.readNumber(unix.SIOCGIFINDEX, name) }

// MTU returns the interface's MTU.
func (c *Control) MTU(name string) (int, error) { return c.readNumber(unix.SIOCGIFMTU, name) }

// SetMTU sets the MTU.
func (c *Control) SetMTU(name string, mtu int) error {
	var r ifreq
	binary.NativeEndian.PutUint32(r.data[:], uint32(mtu))
	return c.callIoctl(unix.SIOCSIFMTU, name, &r)
}

// Flags returns IFF_UP and the others of the first 16 bits.
func (c *Control) Flags(name string) (uint16, error) {
	var r ifreq
	err := c.callIoctl(unix.SIOCGIFFLAGS, name, &r)
	return binary.NativeEndian.Uint16(r.data[:]), err
}

// SetUp brings the interface up or down.
func (c *Control) SetUp(name string, up bool) error {
	flags, err := c.Flags(name)
	if err != nil {
		return err
	}
	flags &^= unix.IFF_UP
	if up {
		flags |= unix.IFF_UP
	}
	var r ifreq
	binary.NativeEndian.PutUint16(r.data[:], flags)
	return c.callIoctl(unix.SIOCSIFFLAGS, name, &r)
}

// Address returns the hardware type and the Ethernet address.
func (c *Control) Address(name string) (linkType uint16, addr []byte, err error) {
	var r ifreq
	err = c.callIoctl(unix.SIOCGIFHWADDR, name, &r)
	return binary.NativeEndian.Uint16(r.data[:]), append([]byte(nil), r.data[2:8]...), err
}

// SetAddress sets the Ethernet address.
func (c *Control) SetAddress(name string, addr []byte) error {
	var r ifreq
	binary.NativeEndian.PutUint16(r.data[:], unix.ARPHRD_ETHER)
	copy(r.data[2:8], addr)
	return c.callIoctl(unix.SIOCSIFHWADDR, name, &r)
}

// callEthtool runs the command with the number in the first 4 octets of cmd.
func (c *Control) callEthtool(name string, cmd *[44]byte) error {
	var r ifreq
	*(*unsafe.Pointer)(unsafe.Pointer(&r.data)) = unsafe.Pointer(cmd)
	err := c.callIoctl(unix.SIOCETHTOOL, name, &r)
	runtime.KeepAlive(cmd)
	return err
}

// Carrier reports whether the interface has a link, as of this moment.
func (c *Control) Carrier(name string) bool {
	var cmd [44]byte
	binary.NativeEndian.PutUint32(cmd[:], unix.ETHTOOL_GLINK)
	return c.callEthtool(name, &cmd) == nil && binary.NativeEndian.Uint32(cmd[4:]) != 0
}

// Speed returns Mbit/s, 0 if that is unknown, and whether the link is full duplex.
func (c *Control) Speed(name string) (mbps int, full bool) {
	var cmd [44]byte // struct ethtool_cmd
	binary.NativeEndian.PutUint32(cmd[:], unix.ETHTOOL_GSET)
	if c.callEthtool(name, &cmd) != nil {
		return 0, false
	}
	speed := uint32(binary.NativeEndian.Uint16(cmd[12:])) | uint32(binary.NativeEndian.Uint16(cmd[28:]))<<16
	if speed > 1<<30 { // SPEED_UNKNOWN
		return 0, false
	}
	return int(speed), cmd[14] == 1
}

// TAP makes fd, an open /dev/net/tun, a TAP of that name, without packet
// information. EBUSY says that the name is taken.
func TAP(fd int, name string) error { return tunSetIff(fd, name, unix.IFF_TAP) }

// TUN makes fd a TUN in the same way.
func TUN(fd int, name string) error { return tunSetIff(fd, name, unix.IFF_TUN) }

func tunSetIff(fd int, name string, kind uint16) error {
	var r ifreq
	copy(r.name[:unix.IFNAMSIZ-1], name)
	binary.NativeEndian.PutUint16(r.data[:], kind|unix.IFF_NO_PI|unix.IFF_TUN_EXCL)
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TUNSETIFF, uintptr(unsafe.Pointer(&r))); e != 0 {
		return e
	}
	return nil
}

// tunSetCarrier is TUNSETCARRIER. x/sys/unix lacks it.
const tunSetCarrier = 0x400454e2

// SetCarrier sets the carrier of a TUN or TAP.
func SetCarrier(fd int, on bool) error {
	var v int32
	if on {
		v = 1
	}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), tunSetCarrier, uintptr(unsafe.Pointer(&v))); e != 0 {
		return e
	}
	return nil
}
