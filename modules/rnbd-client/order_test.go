package client

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// A client does not leave while a request of a front end is in flight on a server: the
// next process would send later requests beside it. The client serves again.
func TestHandOver_NotWithRequestsInFlight(t *testing.T) {
	s := newTarget(t, 1<<20)
	_, use := withState(t)
	c := s.newClient(withTestFront(t), use)
	d, dir := s.mapHanging(c, "vol")
	h, err := c.HandOver(t.Context())
	if !errors.Is(err, syscall.EBUSY) || !strings.Contains(err.Error(), "requests of device "+d.name+" do not end") {
		t.Errorf("left with a request in flight: %v", err)
	}
	s.releaseAll(blk.OK)
	must(t, c.TakeOver(t.Context(), h))
	c.ServeUsers(t.Context())
	eventually(t, "the disk is shown again", func() bool { return dir.adds() == 2 })
}
