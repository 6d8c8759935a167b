package mapline

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DefaultPort is the port of RNBD servers (docs/extend/protocol/rnbd.md).
const DefaultPort = 1234

// Path is a path to a server. Its text form is [SRC@]DST[:PORT][%FABRIC], where an
// address is an IP address, or "gid:" and a GID. IPv6 addresses and GIDs that are
// followed by a port are in brackets, as are IPv6 addresses with a zone
// ("[fe80::1%eth0]"). ParsePath also accepts the kernel's "ip:" before an address
// and "," in place of "@".
type Path struct {
	Src    netip.Addr // zero: the system chooses
	Dst    netip.AddrPort
	Fabric string // empty: the client chooses
}

// String returns the text form; ParsePath reads it.
func (p Path) String() string {
	s := verbs.AddrPortString(p.Dst)
	if p.Src.IsValid() {
		s = verbs.AddrString(p.Src) + "@" + s
	}
	if p.Fabric != "" {
		s += "%" + p.Fabric
	}
	return s
}

// ParsePath reads the text form of a path. The port defaults to DefaultPort. Errors
// wrap EINVAL.
func ParsePath(s string) (Path, error) {
	fail := func(why string) (Path, error) {
		return Path{}, fmt.Errorf("path %q: %s; write [SRC@]DST[:PORT][%%FABRIC]: %w", s, why, syscall.EINVAL)
	}
	var p Path
	rest, fabric, hasFabric := cutFabric(s)
	if p.Fabric = fabric; hasFabric && fabric == "" {
		return fail("no fabric after %")
	}
	dst := rest
	if i := indexOutside(rest, "@,"); i >= 0 {
		var ok bool
		if p.Src, ok = parseAddr(rest[:i]); !ok {
			return fail("the source is no IP address and no gid:GID")
		}
		dst = rest[i+1:]
	}
	var ok bool
	if p.Dst, ok = ParseDst(dst); !ok {
		return fail(wrongDst(dst))
	}
	if p.Src.IsValid() && !verbs.SameFamily(p.Src, p.Dst.Addr()) {
		return fail("source and destination are of different families")
	}
	return p, nil
}

// cutFabric cuts a path at the "%" before the name of its fabric. A "%" within
// brackets belongs to an IPv6 zone.
func cutFabric(path string) (addresses, fabric string, found bool) {
	if i := indexOutside(path, "%"); i >= 0 {
		return path[:i], path[i+1:], true
	}
	return path, "", false
}

// indexOutside returns the index of the first of chars that is outside of
// brackets, or -1.
func indexOutside(s, chars string) int {
	inside := false
	for i, c := range s {
		switch {
		case c == '[' || c == ']':
			inside = c == '['
		case !inside && strings.ContainsRune(chars, c):
			return i
		}
	}
	return -1
}

// wrongDst returns the reason for which ParseDst refuses a destination.
func wrongDst(s string) string {
	if strings.Count(s, "[") != strings.Count(s, "]") {
		return "a bracket of the destination has no partner"
	}
	if host, port, ok := cutLast(s, ":"); ok {
		if _, ok := parseAddr(host); ok {
			return fmt.Sprintf("the port %q is no number from 1 to 65535", port)
		}
	}
	return "the destination is no IP address or gid:GID with an optional port"
}

func parseAddr(s string) (netip.Addr, bool) {
	text, isGID := strings.CutPrefix(s, "gid:")
	if !isGID {
		text = strings.TrimPrefix(s, "ip:")
	}
	if inner, open := strings.CutPrefix(text, "["); open != strings.HasSuffix(text, "]") {
		return netip.Addr{}, false
	} else if open {
		text = strings.TrimSuffix(inner, "]")
	}
	a, err := netip.ParseAddr(text)
	switch {
	case err != nil || isGID && !isPlainIPv6(a) || !isInterface(a.Zone()):
		return netip.Addr{}, false
	case isGID:
		return verbs.GID(a), true
	}
	return a.Unmap(), true
}

func isPlainIPv6(a netip.Addr) bool { return a.Is6() && a.Zone() == "" }

// isInterface reports whether zone may be the name of an interface, or is empty.
func isInterface(zone string) bool { return !strings.ContainsAny(zone, ":/") }

// ParseDst reads the destination of a path: DST[:PORT].
func ParseDst(s string) (netip.AddrPort, bool) {
	if a, ok := parseAddr(s); ok {
		return netip.AddrPortFrom(a, DefaultPort), true
	}
	host, port, ok := cutLast(s, ":")
	if !ok {
		return netip.AddrPort{}, false
	}
	a, ok := parseAddr(host)
	n, err := strconv.ParseUint(port, 10, 16)
	if !ok || err != nil || n == 0 {
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(a, uint16(n)), true
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// ParseKernelPath reads a path of a control file: [SRC@]DST[%FABRIC], or "," in
// place of "@". An address is "ip:" and an IPv4 or IPv6 address, in brackets if
// it has a zone, or "gid:" and a GID.
// The text has no port; port becomes that of the path. Errors wrap EINVAL, or
// EPROTONOSUPPORT for a destination that is neither ip: nor gid:.
func ParseKernelPath(s string, port uint16) (p Path, err error) {
	addrs, fabric, hasFabric := cutFabric(s)
	if p.Fabric = fabric; hasFabric && fabric == "" {
		return p, fmt.Errorf("no fabric after %%: %w", syscall.EINVAL)
	}
	if strings.ContainsAny(fabric, "%@,") {
		return p, fmt.Errorf("%q is no name of a fabric: %w", fabric, syscall.EINVAL)
	}
	dst := addrs
	if i := indexOutside(addrs, "@,"); i >= 0 {
		dst = addrs[i+1:]
		if p.Src, err = parseKernelAddr(addrs[:i]); err != nil {
			return p, fmt.Errorf("source %q is not ip:ADDRESS or gid:GID: %w", addrs[:i], syscall.EINVAL)
		}
	}
	a, err := parseKernelAddr(dst)
	if err != nil {
		return p, fmt.Errorf("destination %q: %w", dst, err)
	}
	if p.Src.IsValid() && !verbs.SameFamily(p.Src, a) {
		return p, fmt.Errorf("source and destination are of different families: %w", syscall.EINVAL)
	}
	p.Dst = netip.AddrPortFrom(a, port)
	return p, nil
}

func parseKernelAddr(s string) (a netip.Addr, err error) {
	text, isIP := strings.CutPrefix(s, "ip:")
	if !isIP {
		var isGID bool
		if text, isGID = strings.CutPrefix(s, "gid:"); !isGID {
			return a, fmt.Errorf("it has to begin with ip: or gid:: %w", syscall.EPROTONOSUPPORT)
		}
	}
	if isIP && strings.Contains(text, "%") {
		var ok bool
		if a, ok = parseAddr(text); !ok {
			return a, fmt.Errorf("not an address: %w", syscall.EINVAL)
		}
		return a, nil
	}
	a, err = netip.ParseAddr(text)
	if err != nil || !isIP && !isPlainIPv6(a) {
		return a, fmt.Errorf("not an address: %w", syscall.EINVAL)
	}
	if !isIP {
		return verbs.GID(a), nil
	}
	return a.Unmap(), nil
}
