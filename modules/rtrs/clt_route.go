package rtrs

import (
	"context"
	"fmt"
	"net/netip"
	"syscall"
)

// Resolver returns how addresses are reached at the moment. It is for
// addresses that move between devices: that of a bond is reached by its active
// slave. It plays the part of RDMA-CM's address resolution and of its event
// ADDR_CHANGE.
type Resolver interface {
	// Route returns the route from src, which may be zero, to dst. Addresses
	// that the resolver does not manage are returned as they are. It may wait
	// for a route until ctx is done.
	Route(ctx context.Context, src, dst netip.Addr) (Route, error)
}

// Route is how an address is reached.
type Route struct {
	Src, Dst netip.Addr // to connect with; a zero Src is chosen by the system
	Via      string     // for people, e.g. "ib0 of bond0"; may be empty
	// Changed is closed when another route takes its place. The path connects
	// again at once then. Nil: never.
	Changed <-chan struct{}
	// Release ends the use of the route. It may be nil.
	Release func()
}

// ErrAddrChange is the cause of the reconnect of a path whose address is
// reached by another route.
var ErrAddrChange error = &sentinelError{"rtrs: the address is reached by another route now", syscall.ECONNRESET}

// resolveRoute returns the route of an attempt to connect.
func (p *path) resolveRoute(ctx context.Context) (Route, error) {
	r := p.session.cfg.Resolver
	if r == nil {
		return Route{Src: p.addr.Src, Dst: p.addr.Dst.Addr()}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.session.Timing().ConnectTimeout)
	defer cancel()
	route, err := r.Route(ctx, p.addr.Src, p.addr.Dst.Addr())
	if err != nil {
		return Route{}, fmt.Errorf("resolve: %w", connectError(ctx, err))
	}
	if route.Via != "" {
		p.log.Info("rtrs: path has a route", "device", route.Via, "from", route.Src, "to", route.Dst)
	}
	return route, nil
}

func (r *Route) releaseRoute() {
	if r.Release != nil {
		r.Release()
	}
}

// guardContext returns a context that ends when the route changes.
func (r *Route) guardContext(ctx context.Context) (context.Context, func()) {
	if r.Changed == nil {
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-r.Changed:
			cancel(ErrAddrChange)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}
