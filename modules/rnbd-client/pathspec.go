package client

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DefaultPort is RNBD's (docs/protocol/rnbd.md).
const DefaultPort = 1234

// pathSpec is a path as users write it: [src@]dst[:port][%fabric]. An address
// is an IP address, or "gid:" and a GID. With a port, IPv6 addresses and GIDs stand
// in brackets. The kernel's "ip:" before an address is accepted, and "," for "@".
type pathSpec struct {
	src    netip.Addr // zero: the system chooses
	dst    netip.AddrPort
	fabric string // empty: the default
}

// String is the spelling that parsePath reads.
func (p pathSpec) String() string {
	s := verbs.AddrPortString(p.dst)
	if p.src.IsValid() {
		s = verbs.AddrString(p.src) + "@" + s
	}
	if p.fabric != "" {
		s += "%" + p.fabric
	}
	return s
}

func parsePath(s string) (pathSpec, error) {
	fail := func(why string) (pathSpec, error) {
		return pathSpec{}, fmt.Errorf("path %q: %s; write [SRC@]DST[:PORT][%%FABRIC]: %w", s, why, syscall.EINVAL)
	}
	var p pathSpec
	rest, fabric, hasFabric := strings.Cut(s, "%")
	if p.fabric = fabric; hasFabric && fabric == "" {
		return fail("no fabric after %")
	}
	dst := rest
	if i := strings.IndexAny(rest, "@,"); i >= 0 {
		var ok bool
		if p.src, ok = parseAddr(rest[:i]); !ok {
			return fail("the source is no IP address and no gid:GID")
		}
		dst = rest[i+1:]
	}
	var ok bool
	if p.dst, ok = parseDst(dst); !ok {
		return fail(wrongDst(dst))
	}
	if p.src.IsValid() && !verbs.SameFamily(p.src, p.dst.Addr()) {
		return fail("source and destination are of different families")
	}
	return p, nil
}

// wrongDst returns what is wrong with a destination that parseDst refuses.
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
	case err != nil || isGID && a.Is4():
		return netip.Addr{}, false
	case isGID:
		return verbs.GID(a), true
	}
	return a.Unmap(), true
}

func parseDst(s string) (netip.AddrPort, bool) {
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

// address finds the fabric's device for p.
func (c *Client) address(ctx context.Context, p pathSpec) (rtrs.PathAddr, error) {
	name := p.fabric
	if name == "" {
		name = c.unnamed(ctx, p)
	}
	dev, ok := c.cfg.Fabrics[name]
	if !ok {
		return rtrs.PathAddr{}, fmt.Errorf("fabric %q is not in this build: %w", name, syscall.EINVAL)
	}
	return rtrs.PathAddr{Device: dev, Src: p.src, Dst: p.dst}, nil
}

// preferredTimeout bounds the question whether the preferred fabric leads to an
// address.
const preferredTimeout = 3 * time.Second

// unnamed is the fabric of a path that names none.
func (c *Client) unnamed(ctx context.Context, p pathSpec) string {
	fabric, ok := c.cfg.Fabrics[c.cfg.PreferredFabric].(verbs.Chooser)
	if !ok || p.dst.Addr().IsLoopback() {
		return c.cfg.DefaultFabric
	}
	ctx, cancel := context.WithTimeout(ctx, preferredTimeout)
	defer cancel()
	if _, err := fabric.DeviceFor(ctx, p.src, p.dst.Addr()); err != nil {
		c.log.Debug("the preferred fabric does not lead there", "path", p.String(), "fabric", c.cfg.PreferredFabric, "err", err)
		return c.cfg.DefaultFabric
	}
	return c.cfg.PreferredFabric
}

// refused adds to the error of a path that nobody accepted which other fabric
// the server may be on.
func refused(addrs []rtrs.PathAddr, err error) error {
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return err
	}
	for _, a := range addrs {
		switch a.Device.Info().Fabric {
		case "iwarp":
			return fmt.Errorf("%w (over iwarp; the server of a Linux kernel is reached with %s%%rocev2)", err, verbs.AddrPortString(a.Dst))
		case "ibverbs":
			return fmt.Errorf("%w (over ibverbs, because an RDMA device leads there; a server that listens on TCP is reached with %s%%iwarp)", err, verbs.AddrPortString(a.Dst))
		}
	}
	return err
}

func (c *Client) addresses(ctx context.Context, specs []string) (out []rtrs.PathAddr, err error) {
	for _, s := range specs {
		p, err := parsePath(s)
		if err != nil {
			return nil, err
		}
		a, err := c.address(ctx, p)
		if err != nil {
			return nil, fmt.Errorf("path %q: %w", s, err)
		}
		out = append(out, a)
	}
	return out, nil
}
