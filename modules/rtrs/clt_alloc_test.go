package rtrs

import (
	"runtime"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
)

// The submit and complete path takes no memory. The loopback fabric does not
// either once it is warm, nor do the servers.
func TestWriteAndReadAllocateNothing(t *testing.T) {
	servers := map[string]func(net *loopback.Network){
		"scripted server": func(net *loopback.Network) {
			startScripted(t, net, srvA, func(s *scriptedServer) { s.onImm = answerWithoutMemory })
		},
		"server with plain keys": func(net *loopback.Network) { startServer(t, net, serve, plainKeys) },
		"server with NEW_RKEY":   func(net *loopback.Network) { startServer(t, net, serve) },
	}
	for name, start := range servers {
		t.Run(name, func(t *testing.T) {
			net := loopback.New()
			start(net)
			b := openInline(t, net)
			for range 100 {
				b.round()
			}
			if n := testing.AllocsPerRun(100, b.round); n != 0 {
				t.Errorf("%v allocations per WRITE and READ", n)
			}
		})
	}
}

// inlineClient is a session with a poller that the test itself drives.
type inlineClient struct {
	t        testing.TB
	p        *Poller
	s        *Session
	data     Data
	finished int
}

// openInline opens a session, lending the poller to a goroutine meanwhile.
func openInline(t testing.TB, net *loopback.Network) *inlineClient {
	t.Helper()
	p, err := NewPoller(0)
	if err != nil {
		t.Fatal(err)
	}
	c := &inlineClient{t: t, p: p}
	_, cfg := cltConfig(t, 0)
	cfg.Pollers = []*Poller{p}
	cfg.OnDone = func(_ int, _ uint64, errno int) {
		if errno != 0 {
			t.Errorf("errno %d", errno)
		}
		c.finished++
	}
	c.polling(func() {
		if c.s, err = Open(cltContext(t), "clt", []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, cfg); err != nil {
			return
		}
		c.data.Region, err = c.s.Register(make([]byte, 4096))
		c.data.Len = 4000
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.close)
	return c
}

// polling polls until f has returned.
func (c *inlineClient) polling(f func()) {
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	for {
		select {
		case <-done:
			return
		default:
			c.p.Poll()
			runtime.Gosched()
		}
	}
}

var inlineUser [32]byte

// round does one WRITE and one READ.
func (c *inlineClient) round() {
	q, want := c.s.Queue(0), c.finished+2
	if err := q.Write(1, c.data, inlineUser[:]); err != nil {
		c.t.Fatal(err)
	}
	if err := q.Read(2, c.data, inlineUser[:]); err != nil {
		c.t.Fatal(err)
	}
	for deadline := time.Now().Add(5 * time.Second); c.finished < want; {
		if c.p.Poll() == 0 {
			runtime.Gosched()
		}
		if time.Now().After(deadline) {
			c.t.Fatal("no completion")
		}
	}
}

func (c *inlineClient) close() {
	var err error
	c.polling(func() { err = c.s.Close(cltContext(c.t)) })
	if err != nil {
		c.t.Error(err)
	}
	if err := c.p.Close(); err != nil {
		c.t.Error(err)
	}
}
