package rtrs

import (
	"errors"
	"sync"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
)

// newsroom is a consumer that parks every request.
type newsroom struct {
	srv *ServerConfig

	mu        sync.Mutex
	parked    []*Op
	cancelled int
}

func (n *newsroom) request(op *Op) {
	n.mu.Lock()
	n.parked = append(n.parked, op)
	n.mu.Unlock()
	op.Park(func(op *Op) {
		n.mu.Lock()
		n.cancelled++
		n.parked = nil
		n.mu.Unlock()
		op.Respond(int(syscall.ECANCELED))
	})
}

func (n *newsroom) waiting() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.parked)
}

// tell answers the request that waits.
func (n *newsroom) tell(text string) {
	n.mu.Lock()
	op := n.parked[0]
	n.parked = nil
	n.mu.Unlock()
	copy(op.Data(), text)
	n.srv.Pollers[op.Poller()].Do(func() { op.Respond(0) })
}

func TestListen(t *testing.T) {
	net := loopback.New()
	news := &newsroom{}
	srv := startServer(t, net, news.request, func(c *ServerConfig) { news.srv = c })
	c := cltOpen(t, loopbackPaths(net), nil)
	type answer struct {
		err  error
		text string
	}
	listen := func() <-chan answer {
		got := make(chan answer, 1)
		go func() {
			reply := make([]byte, 4)
			err := c.AdminListen(t.Context(), []byte("news?"), reply)
			got <- answer{err, string(reply)}
		}()
		eventually(t, "the request waits", func() bool { return news.waiting() > 0 })
		return got
	}

	got := listen()
	eventually(t, "nothing in flight while it waits", func() bool { return c.Stats().Inflight == 0 && srvInflight(srv) == 0 })
	news.tell("one!")
	if a := <-got; a.err != nil || a.text != "one!" {
		t.Fatalf("got %q, %v", a.text, a.err)
	}
	if n, m := c.Stats().Inflight, srvInflight(srv); n != 0 || m != 0 {
		t.Errorf("in flight after the answer: %d at the client, %d at the server", n, m)
	}

	got = listen()
	net.Cut(cltA, addrOf(srvA)) // its path must not wait for the consumer's news to close
	eventually(t, "the server gives it up", func() bool { news.mu.Lock(); defer news.mu.Unlock(); return news.cancelled == 1 })
	eventually(t, "it waits again on another path", func() bool { return news.waiting() == 1 })
	news.tell("two!")
	if a := <-got; a.err != nil || a.text != "two!" {
		t.Fatalf("after the loss of a path: %q, %v", a.text, a.err)
	}
	eventually(t, "nothing in flight", func() bool { return c.Stats().Inflight == 0 && srvInflight(srv) == 0 })

	got = listen()
	if err := c.Session.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a := <-got; !errors.Is(a.err, syscall.ECONNABORTED) {
		t.Errorf("at the end of the session: %v, want ECONNABORTED", a.err)
	}
}
