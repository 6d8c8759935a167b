package client

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// A user's settings of a session of a killed daemon are set for the next one;
// all others are as the next daemon's configuration says.
func TestTuningSurvivesTheDaemon(t *testing.T) {
	const attempts = 17 // of the next daemon's configuration
	for _, v := range []struct {
		name       string
		change     func(*testing.T, *Client)
		policy     rtrs.Policy
		reconnects int
	}{
		{"nothing", func(*testing.T, *Client) {}, rtrs.MinLatency, attempts},
		{"by command", func(t *testing.T, c *Client) {
			_, err := c.Control("").SetPolicy(t.Context(), &controlpb.SetPolicyRequest{Session: "s", Policy: "rr"})
			must(t, err)
			_, err = c.Control("").SetMaxReconnectAttempts(t.Context(), &controlpb.SetMaxReconnectAttemptsRequest{Session: "s", Attempts: -1})
			must(t, err)
		}, rtrs.RoundRobin, -1},
		{"by control files", func(t *testing.T, c *Client) {
			tree := treeOf(t, c)
			must(t, tree.write("class/rtrs-client/s/mpath_policy", "round-robin"))
			must(t, tree.write("class/rtrs-client/s/max_reconnect_attempts", "0"))
		}, rtrs.RoundRobin, 0},
		{"something impossible", func(t *testing.T, c *Client) {
			if _, err := c.Control("").SetPolicy(t.Context(), &controlpb.SetPolicyRequest{Session: "s", Policy: "best"}); err == nil {
				t.Error("there is a policy best")
			}
			if _, err := c.Control("").SetMaxReconnectAttempts(t.Context(), &controlpb.SetMaxReconnectAttemptsRequest{Session: "s", Attempts: -2}); err == nil {
				t.Error("-2 attempts are taken")
			}
		}, rtrs.MinLatency, attempts},
	} {
		t.Run(v.name, func(t *testing.T) {
			s := newTarget(t, 1<<20)
			dir := t.TempDir()
			state := filepath.Join(dir, "devices")
			c := s.newClient(withTestFront(t), func(cfg *Config) { cfg.StateFile = state })
			_, err := c.Map(t.Context(), MapRequest{Path: "vol", Session: "s", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Options: map[string]string{"dir": dir}})
			must(t, err)
			v.change(t, c)
			b, err := os.ReadFile(state)
			must(t, err)
			killed := filepath.Join(dir, "killed")
			must(t, os.WriteFile(killed, b, 0o600))
			must(t, c.Unmap(t.Context(), "rnbd0", true))

			next := s.newClient(withTestFront(t), func(cfg *Config) {
				cfg.StateFile, cfg.Policy, cfg.Timing.MaxReconnectAttempts = killed, rtrs.MinLatency, attempts
			})
			eventually(t, "the disk is served again", func() bool {
				d, err := next.Device("rnbd0")
				return err == nil && d.State() == Open
			})
			d, err := next.Device("rnbd0")
			must(t, err)
			if got := d.session.transport.Policy(); got != v.policy {
				t.Errorf("policy %v, want %v", got, v.policy)
			}
			if got := d.session.transport.Timing().MaxReconnectAttempts; got != v.reconnects {
				t.Errorf("%d reconnect attempts, want %d", got, v.reconnects)
			}
		})
	}
}

// A change of a session does not wait for a map of a silent server, and is
// written down at once.
func TestSessionChangesDuringAMap(t *testing.T) {
	s := newTarget(t, 1<<20)
	dir := t.TempDir()
	state := filepath.Join(dir, "devices")
	c := s.newClient(withTestFront(t), func(cfg *Config) { cfg.StateFile = state })
	_, err := c.Map(t.Context(), MapRequest{Path: "vol", Session: "s", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Options: map[string]string{"dir": dir}})
	must(t, err)
	s.set(func() { s.holdOpen = true })
	mapped := async(func() error { _, err := s.mapIn(c, "other", ""); return err })
	eventually(t, "OPEN is there", s.hasOpen)
	addPath(t, c, "10.0.1.1")
	if n := len(savedPathsOf(t, state)); n != 2 {
		t.Errorf("%d paths are written down, want 2", n)
	}
	s.answerOpen()
	if err := soon(t, "the map", mapped); err != nil {
		t.Error(err)
	}
}

// Settings of a session hold for its disks that still wait, too: they may be
// the first that the next daemon maps.
func TestTuningOfDisksThatWait(t *testing.T) {
	s := newTarget(t, 1<<20)
	dir := t.TempDir()
	state := filepath.Join(dir, "devices")
	saved := savedSample()
	saved.Session, saved.Paths = "s", []string{"10.0.0.1"}
	saved.Frontend = "not started" // so it waits
	must(t, writeState(state, &savedState{Version: stateVersion, Devices: []savedDevice{saved}}))
	c := s.newClient(withTestFront(t), func(cfg *Config) { cfg.StateFile = state })
	_, err := c.Map(t.Context(), MapRequest{Path: "vol", Session: "s", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Options: map[string]string{"dir": dir}})
	must(t, err)
	_, err = c.Control("").SetPolicy(t.Context(), &controlpb.SetPolicyRequest{Session: "s", Policy: "rr"})
	must(t, err)
	addPath(t, c, "10.0.1.1")
	eventually(t, "both entries have it", func() bool {
		all, err := readState(state)
		must(t, err)
		done := len(all) == 2
		for _, d := range all {
			done = done && len(d.Paths) == 2 && d.Policy != ""
		}
		return done
	})
}
