package client

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// A front end that shows a device although nobody waits for it any more is made to take
// it away: its place is free again.
func TestFrontend_MapIsCancelledWhileItStarts(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient(withTestFront(t))
	dir := frontDir(t.TempDir())
	for _, name := range []string{"hold", "deaf"} {
		must(t, os.WriteFile(dir.file(name), nil, 0o600))
	}
	r := MapRequest{Path: "vol", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Options: map[string]string{"dir": string(dir)}}
	ctx, cancel := context.WithCancel(t.Context())
	mapped := make(chan error, 1)
	go func() {
		_, err := c.Map(ctx, r)
		mapped <- err
	}()
	eventually(t, "the front end gets the device", func() bool { return strings.HasPrefix(dir.told()[0], "add ") })
	cancel()
	if err := <-mapped; !errors.Is(err, context.Canceled) {
		t.Fatalf("map: %v", err)
	}
	must(t, os.Remove(dir.file("hold")))
	eventually(t, "its place is free", func() bool { return !c.lingers(0) })
	d, err := c.Map(t.Context(), r)
	must(t, err)
	if d.index != 0 {
		t.Errorf("index %d", d.index)
	}
}
