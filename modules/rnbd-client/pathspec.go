package client

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-client/internal/mapline"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// CheckPath returns the error of a path in the form [SRC@]DST[:PORT][%FABRIC].
func CheckPath(s string) error {
	_, err := mapline.ParsePath(s)
	return err
}

// pathAddress returns p with the device of its fabric.
func (c *Client) pathAddress(ctx context.Context, p mapline.Path) (rtrs.PathAddr, error) {
	name := p.Fabric
	if name == "" {
		name = c.defaultFabric(ctx, p)
	}
	dev := c.fabricDevice(name)
	if dev == nil {
		hint := ""
		if a := p.Dst.Addr(); a.Is6() && a.IsLinkLocalUnicast() && a.Zone() == "" {
			hint = fmt.Sprintf(" (if it is an interface, write [%s%%%s])", a, name)
		}
		return rtrs.PathAddr{}, fmt.Errorf("fabric %q is not in this build%s: %w", name, hint, syscall.EINVAL)
	}
	return rtrs.PathAddr{Device: dev, Src: p.Src, Dst: p.Dst}, nil
}

// preferredTimeout bounds the check whether the preferred fabric leads to an
// address.
const preferredTimeout = 3 * time.Second

// defaultFabric returns the fabric for a path without one.
func (c *Client) defaultFabric(ctx context.Context, p mapline.Path) string {
	fabric, ok := c.fabricDevice(c.cfg.PreferredFabric).(verbs.Chooser)
	if !ok || p.Dst.Addr().IsLoopback() || c.cfg.Protect {
		return c.cfg.DefaultFabric
	}
	ctx, cancel := context.WithTimeout(ctx, preferredTimeout)
	defer cancel()
	if _, err := fabric.DeviceFor(ctx, p.Src, p.Dst.Addr()); err != nil {
		c.log.Debug("the preferred fabric does not lead there", "path", p.String(), "fabric", c.cfg.PreferredFabric, "err", err)
		return c.cfg.DefaultFabric
	}
	return c.cfg.PreferredFabric
}

// withPathHint adds a hint to the error of a path that did not connect: the server may
// be on another fabric, or the address lacks its interface.
func withPathHint(addrs []rtrs.PathAddr, err error) error {
	for _, a := range addrs {
		if ip := a.Dst.Addr(); errors.Is(err, syscall.EINVAL) && ip.Is6() && ip.IsLinkLocalUnicast() && ip.Zone() == "" {
			return fmt.Errorf("%w (%s is link-local: write its interface too, as [%s%%eth0])", err, ip, ip)
		}
	}
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

func (c *Client) pathAddresses(ctx context.Context, specs []string) (out []rtrs.PathAddr, err error) {
	for _, s := range specs {
		p, err := mapline.ParsePath(s)
		if err != nil {
			return nil, err
		}
		a, err := c.pathAddress(ctx, p)
		if err != nil {
			return nil, fmt.Errorf("path %q: %w", s, err)
		}
		out = append(out, a)
	}
	return out, nil
}
