package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/bond/resolve"
)

// Routes to addresses in the networks of bonds, for transports that connect by
// the ports below: by the active slave. The answer to GET /routes is one
// route; with follow=1 it goes on, with a line for each change.

// routeInfo is a route. Without an Error it has all other fields.
type routeInfo struct {
	Bond        string `json:"bond,omitempty"`
	Slave       string `json:"slave,omitempty"`
	Source      string `json:"source,omitempty"`      // address of the slave's port
	Destination string `json:"destination,omitempty"` // address of the neighbour's port
	Error       string `json:"error,omitempty"`       // why there is no route now
}

// errNoAnswer says that a neighbour was asked and has not answered.
var errNoAnswer = errors.New("the neighbour has not answered yet")

// findRoute returns the route from src, which may be zero, to dst. ENETUNREACH says
// that no bond leads there.
func (b *bondSet) findRoute(src, dst netip.Addr) (routeInfo, error) {
	r, err := b.net.Resolver.Resolve(dst)
	if err != nil {
		return routeInfo{}, err
	}
	if src.IsValid() && src != r.Source {
		return routeInfo{}, fmt.Errorf("resolve %s: %s has not the source address %s: %w", dst, r.Bond, src, unix.ENETUNREACH)
	}
	l, err := b.set.Link(r.Slave)
	if err != nil {
		return routeInfo{}, err
	}
	to, ok := l.Endpoint(dst)
	if !ok {
		return routeInfo{}, fmt.Errorf("resolve %s by %s: %w", dst, r.Slave, errNoAnswer)
	}
	return routeInfo{Bond: r.Bond, Slave: r.Slave, Source: portOf(l.Interface).String(), Destination: to.String()}, nil
}

// neighborCheck is the time between two looks at the neighbour: it may be a
// bond too, and move.
const neighborCheck = 100 * time.Millisecond

// firstAnswer is how long a request without follow waits for the neighbour.
const firstAnswer = 2 * time.Second

func (s *apiServer) serveRoutes(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	dst, err := netip.ParseAddr(q.Get("address"))
	var src netip.Addr
	if text := q.Get("source"); err == nil && text != "" {
		src, err = netip.ParseAddr(text)
	}
	if err != nil {
		writeError(w, fmt.Errorf("request: %w: %w", err, unix.EINVAL))
		return
	}
	moved := make(chan struct{}, 1)
	defer s.bonds.net.Resolver.Subscribe(dst, func(resolve.AddrChange) {
		select {
		case moved <- struct{}{}:
		default:
		}
	})()
	tick := time.NewTicker(neighborCheck)
	defer tick.Stop()
	follow, end := q.Get("follow") != "", time.Now().Add(firstAnswer)
	var last routeInfo
	for first := true; ; first = false {
		now, err := s.bonds.findRoute(src, dst)
		switch {
		case err != nil && errors.Is(err, unix.ENETUNREACH) && first,
			err != nil && !follow && (!errors.Is(err, errNoAnswer) || time.Now().After(end)):
			writeError(w, err)
			return
		case err != nil:
			now = routeInfo{Error: err.Error()}
		}
		if now != last && (follow || err == nil) {
			last = now
			if json.NewEncoder(w).Encode(now) != nil {
				return
			}
			w.(http.Flusher).Flush()
			if !follow {
				return
			}
		}
		select {
		case <-r.Context().Done():
			return
		case <-moved:
		case <-tick.C:
		}
	}
}

func newResolve() *cobra.Command {
	var follow bool
	c := &cobra.Command{Use: "resolve ADDRESS", Short: "show the ports that lead to an address in the network of a bond", Args: argCount(1, 1),
		RunE: func(cmd *cobra.Command, a []string) error {
			if _, err := netip.ParseAddr(a[0]); err != nil {
				return usageError{err}
			}
			q := url.Values{"address": {a[0]}}
			if follow {
				q.Set("follow", "1")
			}
			body, err := callDaemon(cmd, http.MethodGet, "/routes", q, nil)
			if err != nil {
				return err
			}
			defer body.Close()
			return printRoutes(cmd, a[0], json.NewDecoder(body))
		}}
	c.Flags().BoolVar(&follow, "follow", false, "go on, with a line for each change, until SIGINT")
	return c
}

func printRoutes(cmd *cobra.Command, addr string, in *json.Decoder) error {
	for {
		var r routeInfo
		err := in.Decode(&r)
		switch {
		case errors.Is(err, io.EOF), cmd.Context().Err() != nil:
			return nil
		case err != nil:
			return err
		}
		out := cmd.OutOrStdout()
		if o, _ := cmd.Flags().GetString("output"); o == "json" {
			err = json.NewEncoder(out).Encode(r)
		} else if r.Error != "" {
			_, err = fmt.Fprintf(out, "%s has no route: %s\n", addr, r.Error)
		} else {
			_, err = fmt.Fprintf(out, "%s by %s of %s: from %s to %s\n", addr, r.Slave, r.Bond, r.Source, r.Destination)
		}
		if err != nil {
			return err
		}
	}
}
