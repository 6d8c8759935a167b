package verbs

import (
	"fmt"
	"net/netip"
	"syscall"
)

// A GID is an address of InfiniBand's own family. Here it is a netip.Addr, so
// that it goes wherever an IP address goes, in a zone that sets it apart from the
// IP address of the same 16 bytes. No interface has the zone's name, for the colon.
const gidZone = "gid:"

// GID is the address of InfiniBand's family with the 16 bytes of a.
func GID(a netip.Addr) netip.Addr { return netip.AddrFrom16(a.As16()).WithZone(gidZone) }

// IsGID reports whether a is an address of InfiniBand's family.
func IsGID(a netip.Addr) bool { return a.Zone() == gidZone }

// SameFamily reports whether a connection can lead from src to dst.
func SameFamily(src, dst netip.Addr) bool {
	return src.Is4() == dst.Is4() && IsGID(src) == IsGID(dst)
}

// AddrString is a as users write it: a GID has "gid:" before it and all its
// digits; an address with a zone is in brackets, since "%" outside of brackets
// begins the name of a fabric.
func AddrString(a netip.Addr) string {
	switch {
	case IsGID(a):
		return "gid:" + a.WithZone("").StringExpanded()
	case a.Zone() != "":
		return "[" + a.String() + "]"
	}
	return a.String()
}

// AddrPortString is the same with a port.
func AddrPortString(a netip.AddrPort) string {
	if IsGID(a.Addr()) {
		return fmt.Sprintf("gid:[%s]:%d", a.Addr().WithZone("").StringExpanded(), a.Port())
	}
	return a.String()
}

// TreeString is a as the kernel's control files show it: "ip:" or "gid:" before it.
func TreeString(a netip.Addr) string {
	if IsGID(a) {
		return AddrString(a)
	}
	return "ip:" + AddrString(a.Unmap())
}

// IP returns p for a fabric without InfiniBand's addresses. On Ethernet a GID is an
// IP address: IPv6, or IPv4 mapped into it (annex A17 of the InfiniBand architecture).
func (p ConnectParams) IP() (ConnectParams, error) {
	if !IsGID(p.Src) && !IsGID(p.Dst.Addr()) {
		return p, nil
	}
	var err error
	if p.Src, err = ipOf(p.Src); err != nil {
		return p, fmt.Errorf("source %w", err)
	}
	dst, err := ipOf(p.Dst.Addr())
	if err != nil {
		return p, fmt.Errorf("destination %w", err)
	}
	p.Dst = netip.AddrPortFrom(dst, p.Dst.Port())
	if p.Src.IsValid() && p.Src.Is4() != dst.Is4() {
		return p, fmt.Errorf("source %s and destination %s are of different IP versions: %w", p.Src, dst, syscall.EINVAL)
	}
	return p, nil
}

func ipOf(a netip.Addr) (netip.Addr, error) {
	if !IsGID(a) {
		return a, nil
	}
	switch ip := a.WithZone("").Unmap(); {
	case ip.Is6() && ip.IsLinkLocalUnicast():
		return a, fmt.Errorf("%s leads nowhere on Ethernet: it is link-local and does not say on which link; use the GID of another address, or ip: %w", AddrString(a), syscall.EINVAL)
	case ip.IsUnspecified() || ip.IsMulticast():
		return a, fmt.Errorf("%s is no host's address: %w", AddrString(a), syscall.EINVAL)
	default:
		return ip, nil
	}
}
