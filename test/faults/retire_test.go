package faults

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

// A disk that stops answering while the path goes keeps nobody else from coming
// back: the path closes after 5 s, connects again, and the other device is in
// use. The stuck one follows when its last write has ended, with its data.
func TestAStuckDiskDoesNotKeepAPathFromComingBack(t *testing.T) {
	bad, good := slowdisk.New(t, 4<<20), slowdisk.New(t, 4<<20)
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{Plugins: []string{"blockio"}})
	c := l.Client(lab.ClientOptions{})
	stuck := l.Map(c, bad.Loop(), s, withLoss("queue:60s"))
	other := l.Map(c, good.Loop(), s, withLoss("queue:60s"))
	n, m := mustDial(t, c, stuck.Name), mustDial(t, c, other.Name)
	want := bytes.Repeat([]byte{7}, 4096)

	bad.HoldWrites()
	t.Cleanup(bad.Release)
	written := make(chan error, 1)
	go func() {
		_, err := n.WriteAt(want, 8192)
		written <- err
	}()
	bad.WaitHeld(1)
	begun := time.Now()
	disconnect(t, c, stuck.Session)
	if _, err := m.WriteAt(want, 4096); err != nil { // waits until the session is back
		t.Fatalf("write to the other device: %v", err)
	}
	t.Logf("the other device is in use again after %v", time.Since(begun).Round(time.Millisecond))
	if len(written) > 0 {
		t.Error("the write to the stuck disk was answered")
	}
	if state := serverDevice(t, s, bad.Loop()).State; !strings.HasPrefix(state, "stuck") {
		t.Errorf("the server says %q", state)
	}
	before := len(bad.History())
	time.Sleep(300 * time.Millisecond)
	if now := len(bad.History()); now != before {
		t.Errorf("%d writes reached the disk beside the one that is held", now-before)
	}

	bad.Release()
	if err := <-written; err != nil {
		t.Errorf("the write that waited: %v", err)
	}
	got := make([]byte, 4096)
	if _, err := n.ReadAt(got, 8192); err != nil || !bytes.Equal(got, want) {
		t.Errorf("read of what waited: %v, %#x", err, got[0])
	}
}

// disconnect closes the first path of a session and has it connect again.
func disconnect(t *testing.T, c *lab.Client, session string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	path := &controlpb.PathRequest{Session: session, Id: 1}
	if _, err := c.API.DisconnectPath(ctx, path); err != nil {
		t.Fatal(err)
	}
	if _, err := c.API.ReconnectPath(ctx, path); err != nil {
		t.Logf("reconnect at first: %v", err) // it goes on trying
	}
}
