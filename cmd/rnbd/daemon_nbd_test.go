package main

import (
	"os"
	"slices"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// Sockets of the service manager stand for the default one, and are not added to
// other front ends.
func TestTakeSockets(t *testing.T) {
	held, safe := []*os.File{os.Stdin}, []*os.File{os.Stdout}
	for _, c := range []struct {
		held, trusted []*os.File
		configured    bool
		listen        int
	}{
		{nil, nil, false, 1}, {held, nil, false, 0}, {nil, safe, false, 0}, {held, safe, false, 0}, {held, safe, true, 1},
	} {
		cfg := client.Config{Frontends: []client.FrontendConfig{{Name: "ublk"}, {Name: "nbd", Listen: []string{"unix:x"}}}}
		takeSockets(&cfg, c.held, c.trusted, c.configured)
		nbd := cfg.Frontends[1]
		if !slices.Equal(nbd.Sockets, c.held) || !slices.Equal(nbd.TrustedSockets, c.trusted) || len(nbd.Listen) != c.listen || cfg.Frontends[0].Sockets != nil {
			t.Errorf("%+v: %+v", c, nbd)
		}
	}
}

// A client that is sent away, or that may not write any more, is an event.
func TestNBDChange(t *testing.T) {
	e := plugin.UserEvent{Event: plugin.UserForced, Device: "rnbd0", Peer: "10.0.0.7:1", Identity: "dns:app", Reason: "revoked", Mode: "ro"}
	got, ok := nbdChange(e)
	if !ok || got.Device != "rnbd0" || got.To != "NBD client closed" || got.Why != "10.0.0.7:1 dns:app: revoked" {
		t.Errorf("%+v", got)
	}
	e.Event = plugin.UserJudged
	if got, ok := nbdChange(e); !ok || got.To != "NBD client ro" {
		t.Errorf("%+v", got)
	}
	e.Event = plugin.UserCloses
	if got, ok := nbdChange(e); ok {
		t.Errorf("%+v", got)
	}
}
