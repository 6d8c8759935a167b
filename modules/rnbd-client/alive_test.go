package client

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// A client that hangs is noticed, wherever it does.
func TestAlive(t *testing.T) {
	c := newTarget(t, 1<<20).newClient()
	must(t, c.Alive(t.Context()))
	hangs := func(what string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if err := c.Alive(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", what, err)
		}
	}
	release := make(chan struct{})
	c.pumps[len(c.pumps)-1].pump.Do(func() { <-release })
	hangs("a pump hangs")
	close(release)
	must(t, c.Alive(t.Context()))
	c.mu.Lock()
	hangs("sessions are locked")
	c.mu.Unlock()
	must(t, c.Alive(t.Context()))
}

// When the host goes down no disk is left to a next client, used or not.
func TestClose_LeavesNothingWhenTheHostGoesDown(t *testing.T) {
	s := newTarget(t, 1<<20)
	state := filepath.Join(t.TempDir(), "client.devices")
	c := s.clientToClose(withTestFront(t), func(cfg *Config) { cfg.StateFile = state })
	used := newFrontDir(t)
	must(t, used.set("used", ""))
	_, err := s.mapIn(c, "used", used)
	must(t, err)
	c.LeaveNothing()
	must(t, c.Close(t.Context()))
	if !slices.Contains(used.told(), "remove forced true") {
		t.Errorf("the disk in use is left: %q", used.told())
	}
	if saved, err := readState(state); len(saved) != 0 || err != nil {
		t.Errorf("written down: %+v, %v", saved, err)
	}
}
