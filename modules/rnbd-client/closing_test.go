package client

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// The server has not answered the CLOSE of the last mapping when the device is
// mapped again: the OPEN waits, or the CLOSE would end what it opens.
func TestMap_AwaitsTheCloseOfTheLastMapping(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient(withTestFront(t))
	_, err := s.mapIn(c, "other", "") // keeps the session
	must(t, err)
	d, dir := s.mapHanging(c, "vol")
	must(t, c.Unmap(t.Context(), d.name, true)) // CLOSE is given up
	mapsLate(t, s, c, dir, "it has executed CLOSE")
	if got := s.messages(); slices.Index(got, "close") > lastIndex(got, "open vol") {
		t.Errorf("the server has got %q", got)
	}
}

// The CLOSE of the last mapping was lost, and a request of that mapping is under way.
// The OPEN waits for it, or it would overwrite later writes.
func TestMap_AwaitsTheRequestsOfTheLastMapping(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient(withTestFront(t))
	_, err := s.mapIn(c, "other", "") // keeps the session
	must(t, err)
	d, dir := s.mapHanging(c, "vol")
	s.set(func() { s.loseClose = true })
	must(t, c.Unmap(t.Context(), d.name, true))
	brief, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := d.session.awaitClosed(brief, "vol"); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "requests") {
		t.Errorf("beside a request that does not end: %v", err)
	}
	mapsLate(t, s, c, dir, "the request has ended")
}

// mapsLate maps the device again and releases what the server holds. No OPEN may come
// before that.
func mapsLate(t *testing.T, s *target, c *Client, dir frontDir, event string) {
	t.Helper()
	mapped := async(func() error { _, err := s.mapIn(c, "vol", dir); return err })
	for range 20 {
		if n := s.count("open vol"); n != 1 {
			t.Fatalf("the server has got %d OPENs of it before %s", n, event)
		}
		time.Sleep(10 * time.Millisecond)
	}
	s.releaseAll(blk.OK)
	if err := soon(t, "the map", mapped); err != nil {
		t.Fatal(err)
	}
}

func lastIndex(all []string, one string) int {
	last := -1
	for i, s := range all {
		if s == one {
			last = i
		}
	}
	return last
}
