package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/private"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// routes is an rtrs.Resolver that asks a daemon rnbd-net for the routes to
// addresses in the networks of its bonds. All other addresses are used as they
// are.
type routes struct {
	path string // of the daemon's socket
	http http.Client
	log  *slog.Logger

	mu        sync.Mutex
	ours      map[netip.Addr]bool // had a route once
	followers map[[2]netip.Addr]*routeFollower
}

// newRoutes returns the resolver for "unix:PATH", nil for an empty text.
func newRoutes(text string, log *slog.Logger) (*routes, error) {
	if text == "" {
		return nil, nil
	}
	path, ok := strings.CutPrefix(text, "unix:")
	if !ok || path == "" {
		return nil, usageError{fmt.Errorf("--resolver %q: use unix:PATH, the control socket of rnbd-net", text)}
	}
	r := &routes{path: path, log: log, ours: map[netip.Addr]bool{}, followers: map[[2]netip.Addr]*routeFollower{}}
	r.http.Transport = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return private.Dial(ctx, path)
	}}
	return r, nil
}

// routeFollower follows the routes between two addresses while they are in use.
type routeFollower struct {
	routes   *routes
	src, dst netip.Addr
	users    int // routes.mu
	cancel   context.CancelFunc

	// Guarded by routes.mu.
	now     rtrs.Route    // without Dst: none yet
	err     error         // why there is none
	answers int           // of the daemon, or failures to ask it
	news    chan struct{} // closed and replaced at each answer
	changed chan struct{} // closed and replaced when the route changes
}

// routeLine is a line of the daemon's answer.
type routeLine struct {
	Bond, Slave, Source, Destination, Error string
}

// routePatience bounds the wait for a route: the bond may have no active slave,
// or the daemon may be starting.
const routePatience = 10 * time.Second

// Route implements rtrs.Resolver.
func (r *routes) Route(ctx context.Context, src, dst netip.Addr) (rtrs.Route, error) {
	ctx, cancel := context.WithTimeout(ctx, routePatience)
	defer cancel()
	f := r.use(src, dst)
	for {
		r.mu.Lock()
		now, err, answers, news, ours := f.now, f.err, f.answers, f.news, r.ours[dst]
		now.Changed, now.Release = f.changed, func() { r.release(f) }
		r.mu.Unlock()
		switch {
		case now.Dst.IsValid():
			return now, nil
		case answers > 0 && !ours && errors.Is(err, syscall.ENETUNREACH):
			r.release(f)
			return rtrs.Route{Src: src, Dst: dst}, nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			r.release(f)
			return rtrs.Route{}, fmt.Errorf("no route to %s by a bond (resolver %s): %w", dst, r.path, errors.Join(syscall.EHOSTUNREACH, err))
		}
	}
}

// use returns the routeFollower of two addresses, for one more user.
func (r *routes) use(src, dst netip.Addr) *routeFollower {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := [2]netip.Addr{src, dst}
	f := r.followers[key]
	if f == nil {
		ctx, cancel := context.WithCancel(context.Background())
		f = &routeFollower{routes: r, src: src, dst: dst, cancel: cancel, news: make(chan struct{}), changed: make(chan struct{})}
		r.followers[key] = f
		go f.run(ctx)
	}
	f.users++
	return f
}

func (r *routes) release(f *routeFollower) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if f.users--; f.users == 0 {
		f.cancel()
		delete(r.followers, [2]netip.Addr{f.src, f.dst})
	}
}

// followPause is the time between two attempts to reach the daemon.
const followPause = 100 * time.Millisecond

// run asks for the routes until ctx is done. When the daemon is away the last
// route stays in use: the connections by it do not need the daemon.
func (f *routeFollower) run(ctx context.Context) {
	for ctx.Err() == nil {
		err := f.ask(ctx)
		f.failed(err)
		select {
		case <-ctx.Done():
		case <-time.After(followPause):
		}
	}
}

// ask takes the daemon's answers until they end.
func (f *routeFollower) ask(ctx context.Context) error {
	q := url.Values{"address": {f.dst.String()}, "follow": {"1"}}
	if f.src.IsValid() {
		q.Set("source", f.src.String())
	}
	u := url.URL{Scheme: "http", Host: "rnbd-net", Path: "/routes", RawQuery: q.Encode()}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return err
	}
	answer, err := f.routes.http.Do(req)
	if err != nil { // of an address without a known route, the daemon may know nothing
		return fmt.Errorf("%w: %w", syscall.ENETUNREACH, err)
	}
	defer answer.Body.Close()
	in := json.NewDecoder(answer.Body)
	if answer.StatusCode != http.StatusOK {
		var refusal struct {
			Error string
			Errno syscall.Errno
		}
		if err := in.Decode(&refusal); err != nil || refusal.Errno == 0 {
			return fmt.Errorf("the daemon answers %s: %w", answer.Status, syscall.EPROTO)
		}
		return fmt.Errorf("%s: %w", refusal.Error, refusal.Errno)
	}
	for {
		var l routeLine
		if err := in.Decode(&l); err != nil {
			return err
		}
		if err := f.take(l); err != nil {
			return err
		}
	}
}

// take stores an answer of the daemon. An answer without a route does not end
// the use of the last one.
func (f *routeFollower) take(l routeLine) error {
	if l.Error != "" {
		f.failed(errors.New(l.Error))
		return nil
	}
	src, err1 := netip.ParseAddr(l.Source)
	dst, err2 := netip.ParseAddr(l.Destination)
	if err := errors.Join(err1, err2); err != nil {
		return fmt.Errorf("route of the daemon: %w", err)
	}
	r := f.routes
	r.mu.Lock()
	defer r.mu.Unlock()
	next := rtrs.Route{Src: src, Dst: dst, Via: l.Slave + " of " + l.Bond}
	moved := f.now.Dst.IsValid() && (f.now.Src != src || f.now.Dst != dst)
	f.now, f.err = next, nil
	r.ours[f.dst] = true
	f.answered()
	if moved {
		r.log.Info("address has moved", "address", f.dst, "device", next.Via, "from", src, "to", dst)
		close(f.changed)
		f.changed = make(chan struct{})
	}
	return nil
}

func (f *routeFollower) failed(err error) {
	f.routes.mu.Lock()
	defer f.routes.mu.Unlock()
	f.err = err
	f.answered()
}

// answered wakes the callers of Route. routes.mu is held.
func (f *routeFollower) answered() {
	f.answers++
	close(f.news)
	f.news = make(chan struct{})
}
