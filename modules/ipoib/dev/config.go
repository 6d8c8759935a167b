package dev

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/registry"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Config describes an interface. Zero fields mean the defaults named here.
type Config struct {
	Name   string // of the TUN device; 1 to 15 bytes
	Fabric verbs.DatagramDevice
	Local  netip.Addr   // address of the port
	Peers  []netip.Addr // addresses of the other ports of the link
	// Registry takes the place of Peers, QKey and LinkMTU, and says the GID of the
	// port. Default: none.
	Registry *registry.Client
	PKey     uint16 // partition; default 0xffff. The full-member bit is set.
	QKey     uint32 // of the link; default DefaultQKey
	Scope    byte   // of multicast GIDs; default wire.ScopeLinkLocal
	// LinkMTU is the MTU of the broadcast group, in bytes; that of the
	// interface is 4 less. It need not be an MTU of InfiniBand. Default: 2048,
	// or the largest MTU of InfiniBand that the fabric carries if that is
	// smaller.
	LinkMTU int
	Mode    Mode // default Datagram
	// Ethernet makes the interface an Ethernet device to the kernel (TAP) in the
	// place of one of the type InfiniBand (TUN). The link is the same.
	Ethernet bool
	Trace    *Trace // default: none
	// Logger gets a line for each change of state. Default slog.Default().
	Logger *slog.Logger
}

// DefaultQKey is the default queue key of a link. Its top bit is clear, so no
// privilege is needed to send with it.
const DefaultQKey = 0x00000b1b

// minLinkMTU is the smallest MTU of InfiniBand.
const minLinkMTU = 256

func (c Config) withDefaults() (Config, error) {
	if c.PKey == 0 {
		c.PKey = verbs.DefaultPKey
	}
	if c.QKey == 0 {
		c.QKey = DefaultQKey
	}
	if c.Scope == 0 {
		c.Scope = wire.ScopeLinkLocal
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	switch {
	case c.Fabric == nil:
		return c, errors.New("no fabric")
	case c.PKey&0x7fff == 0:
		return c, fmt.Errorf("P_Key 0x%04x names no partition: %w", c.PKey, unix.EINVAL)
	case c.Scope > 15:
		return c, fmt.Errorf("scope %d has more than 4 bits: %w", c.Scope, unix.EINVAL)
	}
	c.PKey |= 0x8000
	for _, p := range c.Peers {
		if !p.IsValid() || p.Is4() != c.Local.Is4() {
			return c, fmt.Errorf("peer %s is not in the address family of %s: %w", p, c.Local, unix.EINVAL)
		}
	}
	return c, nil
}

// linkMTU returns the MTU of the link on a fabric with datagrams of room
// bytes. It is want, or the default if want is 0.
func linkMTU(want, room int) (int, error) {
	if want != 0 {
		if want < minLinkMTU || want > room {
			return 0, fmt.Errorf("link MTU %d: want %d to %d, the longest datagram of the fabric: %w", want, minLinkMTU, room, unix.EINVAL)
		}
		return want, nil
	}
	best := 0
	for _, m := range wire.LinkMTUs {
		if m <= room && m <= 2048 {
			best = m
		}
	}
	if best == 0 {
		return 0, fmt.Errorf("datagrams of the fabric carry %d bytes, and a link needs %d: raise the MTU of the underlying interface", room, minLinkMTU)
	}
	return best, nil
}

// ChildName returns the name of the child interface of parent in the partition
// pkey, as Linux makes it: at most 10 bytes of the parent's name, a point, 4
// hexadecimal digits.
func ChildName(parent string, pkey uint16) string {
	return fmt.Sprintf("%.10s.%04x", parent, pkey)
}
