package main

import (
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// fakeNet answers as rnbd-net does: routes to 10.5.0.2 until its end.
type fakeNet struct {
	server http.Server
	lines  chan routeLine
}

func newFakeNet(t *testing.T, socket string) *fakeNet {
	t.Helper()
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	f := &fakeNet{lines: make(chan routeLine, 10)}
	f.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("address") != "10.5.0.2" {
			w.WriteHeader(http.StatusBadRequest)
			json.NewEncoder(w).Encode(map[string]any{"error": "no bond", "errno": syscall.ENETUNREACH})
			return
		}
		for {
			select {
			case line := <-f.lines:
				json.NewEncoder(w).Encode(line)
				w.(http.Flusher).Flush()
			case <-r.Context().Done():
				return
			}
		}
	})
	go f.server.Serve(l)
	t.Cleanup(func() { f.server.Close() })
	return f
}

func TestRoutesFollowTheDaemon(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	r, err := newRoutes("unix:"+socket, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ours, other := netip.MustParseAddr("10.5.0.2"), netip.MustParseAddr("192.168.1.1")
	if got, err := r.Route(t.Context(), netip.Addr{}, ours); err != nil || got.Dst != ours {
		t.Errorf("without a daemon, an address that never had a route: %v, %v; want it as it is", got.Dst, err)
	}
	daemon := newFakeNet(t, socket)
	if got, err := r.Route(t.Context(), netip.Addr{}, other); err != nil || got.Dst != other || got.Changed != nil {
		t.Errorf("an address of no bond: %v, %v; want it as it is", got, err)
	}
	first := routeLine{Bond: "bond0", Slave: "ib0", Source: "10.9.0.1", Destination: "10.9.0.3"}
	daemon.lines <- routeLine{Error: "not yet"}
	daemon.lines <- first
	got, err := r.Route(t.Context(), netip.Addr{}, ours)
	if err != nil || got.Src.String() != "10.9.0.1" || got.Dst.String() != "10.9.0.3" {
		t.Fatalf("%v, %v", got, err)
	}
	daemon.lines <- routeLine{Error: "no active slave"}
	daemon.lines <- first
	select {
	case <-got.Changed:
		t.Error("the same route again is told as a change")
	case <-time.After(100 * time.Millisecond):
	}
	daemon.lines <- routeLine{Bond: "bond0", Slave: "ib1", Source: "10.9.0.2", Destination: "10.9.0.3"}
	select {
	case <-got.Changed:
	case <-time.After(20 * time.Second):
		t.Fatal("the change is not told")
	}
	next, err := r.Route(t.Context(), netip.Addr{}, ours)
	if err != nil || next.Src.String() != "10.9.0.2" {
		t.Errorf("after the change: %v, %v", next.Src, err)
	}
	got.Release()
	next.Release()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.followers) != 0 {
		t.Errorf("%d addresses are followed without a user", len(r.followers))
	}
}

func TestRoutesRefuseAnotherKindOfSocket(t *testing.T) {
	for _, text := range []string{"/run/net.sock", "unix:", "tcp:1"} {
		if _, err := newRoutes(text, nil); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
}
