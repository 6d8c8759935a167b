package rtnl

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// linkInfo returns the flags of an interface and its attributes.
func (c *Conn) linkInfo(index int) (flags uint32, attrs map[uint16][]byte, err error) {
	body := make([]byte, unix.SizeofIfInfomsg)
	native.PutUint32(body[4:], uint32(index))
	msgs, err := c.roundTrip(unix.RTM_GETLINK, 0, body)
	if err == nil && (len(msgs) == 0 || len(msgs[0].Data) < unix.SizeofIfInfomsg) {
		err = errors.New("short answer of the kernel")
	}
	if err != nil {
		return 0, nil, err
	}
	return native.Uint32(msgs[0].Data[8:]), parseAttributes(msgs[0].Data, unix.SizeofIfInfomsg), nil
}

// eachAddr calls fn with each address of the namespace and the number of its interface.
func (c *Conn) eachAddr(fn func(index int, p netip.Prefix)) error {
	msgs, err := c.roundTrip(unix.RTM_GETADDR, unix.NLM_F_DUMP, make([]byte, unix.SizeofIfAddrmsg))
	if err != nil {
		return err
	}
	for _, m := range msgs {
		if m.Header.Type != unix.RTM_NEWADDR || len(m.Data) < unix.SizeofIfAddrmsg {
			continue
		}
		at := parseAttributes(m.Data, unix.SizeofIfAddrmsg)
		raw := at[unix.IFA_LOCAL]
		if raw == nil {
			raw = at[unix.IFA_ADDRESS]
		}
		if a, ok := netip.AddrFromSlice(raw); ok {
			fn(int(native.Uint32(m.Data[4:])), netip.PrefixFrom(a, int(m.Data[1])))
		}
	}
	return nil
}

// Running reports whether the interface that has the address a is up and has a
// carrier. found is false if no interface of the namespace has it.
func (c *Conn) Running(a netip.Addr) (running, found bool, err error) {
	index := 0
	if err = c.eachAddr(func(i int, p netip.Prefix) {
		if p.Addr() == a {
			index = i
		}
	}); err == nil && index != 0 {
		var flags uint32
		flags, _, err = c.linkInfo(index)
		running = flags&unix.IFF_LOWER_UP != 0
	}
	if errors.Is(err, unix.ENODEV) { // it went away meanwhile
		return false, false, nil
	}
	if err != nil {
		return false, false, fmt.Errorf("state of the interface with the address %s: %w", a, err)
	}
	return running, index != 0, nil
}

// bondActiveSlave is IFLA_BOND_ACTIVE_SLAVE of linux/if_link.h.
const bondActiveSlave = 2

// Bond returns the number of the bond of Linux's driver whose slave the
// interface is, 0 if there is none. active reports whether it is the active
// slave.
func (c *Conn) Bond() (bond int, active bool, err error) {
	_, at, err := c.linkInfo(c.index)
	if err != nil {
		return 0, false, fmt.Errorf("state of interface %d: %w", c.index, err)
	}
	raw := at[unix.IFLA_MASTER]
	if len(raw) < 4 {
		return 0, false, nil
	}
	master := int(native.Uint32(raw))
	if _, at, err = c.linkInfo(master); err != nil {
		return 0, false, fmt.Errorf("state of interface %d: %w", master, err)
	}
	info := parseAttributes(at[unix.IFLA_LINKINFO], 0)
	if kind := info[unix.IFLA_INFO_KIND]; string(kind) != "bond\x00" {
		return 0, false, nil // a VRF or the like: the addresses are those of the interface
	}
	chosen := parseAttributes(info[unix.IFLA_INFO_DATA], 0)[bondActiveSlave]
	return master, len(chosen) >= 4 && int(native.Uint32(chosen)) == c.index, nil
}
