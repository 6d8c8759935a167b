package client

import (
	"slices"
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
	mapped := async(func() error { _, err := s.mapIn(c, "vol", dir); return err })
	for range 20 {
		if n := s.count("open vol"); n != 1 {
			t.Fatalf("the server has got %d OPENs of it before it has executed CLOSE", n)
		}
		time.Sleep(10 * time.Millisecond)
	}
	s.releaseAll(blk.OK)
	if err := soon(t, "the map", mapped); err != nil {
		t.Fatal(err)
	}
	if got := s.messages(); slices.Index(got, "close") > lastIndex(got, "open vol") {
		t.Errorf("the server has got %q", got)
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
