package iwarp

import (
	"context"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A connection that comes while nobody accepts waits for the next listener of the
// socket.
func TestListenOnAnInheritedSocket(t *testing.T) {
	first := openDevice(t, DefaultConfig())
	l, err := first.Listen(netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	f, err := first.Socket(l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	addr := l.Addr()
	l.Close()
	c, s := newEnd(t, DefaultConfig()), newEnd(t, DefaultConfig())
	connected := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_, err := c.dev.Connect(ctx, c.qp, verbs.ConnectParams{Dst: addr})
		connected <- err
	}()
	if got, err := s.dev.Inherit(f); err != nil || got != addr {
		t.Fatalf("inherit: %s, %v", got, err)
	}
	if _, err := s.dev.Inherit(f); err == nil {
		t.Error("the same socket twice")
	}
	select {
	case err := <-connected:
		t.Fatalf("nobody accepts, and the connection ends: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	if l, err = s.dev.Listen(addr); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Accept(s.qp, nil); err != nil {
		t.Fatal(err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
}

func TestSocketsThatCannotBeInherited(t *testing.T) {
	d := openDevice(t, DefaultConfig())
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if _, err := d.Inherit(null); err == nil {
		t.Error("a file is a socket")
	}
	if _, err := d.Socket(netip.MustParseAddrPort("127.0.0.1:1")); err == nil {
		t.Error("a socket where the device does not listen")
	}
}
