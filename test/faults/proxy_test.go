package faults

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// proxy is a network between a client and one address of a server that a test
// can stall and cut. Bytes that it has taken are delivered, later or at once,
// whatever becomes of their sender.
type proxy struct {
	addr   string // where clients connect
	target string
	l      net.Listener
	wg     sync.WaitGroup

	mu      sync.Mutex
	changed *sync.Cond
	held    [2]bool // towards the client, towards the server
	closed  bool
	links   map[*proxyLink]bool
	stuck   int // bytes towards the server that are held
}

// proxyLink is one connection.
type proxyLink struct{ client, server net.Conn }

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{addr: l.Addr().String(), target: target, l: l, links: map[*proxyLink]bool{}}
	p.changed = sync.NewCond(&p.mu)
	p.wg.Go(p.run)
	t.Cleanup(p.close)
	return p
}

func (p *proxy) run() {
	for {
		c, err := p.l.Accept()
		if err != nil {
			return
		}
		s, err := net.Dial("tcp", p.target)
		if err != nil {
			c.Close()
			continue
		}
		k := &proxyLink{c, s}
		p.mu.Lock()
		p.links[k] = true
		closed := p.closed
		p.mu.Unlock()
		if closed {
			c.Close()
			s.Close()
			return
		}
		p.wg.Go(func() { p.carry(s, c, &p.held[1]) })
		p.wg.Go(func() { p.carry(c, s, &p.held[0]) })
	}
}

// carry moves bytes from src to dst, at once or after the holding. Data from
// src is read all the time, so the sender sees no stall.
func (p *proxy) carry(dst, src net.Conn, held *bool) {
	var queue [][]byte
	over := false
	p.wg.Go(func() { // reads
		for {
			b := make([]byte, 64<<10)
			n, err := src.Read(b)
			p.mu.Lock()
			if n > 0 {
				queue = append(queue, b[:n])
				if *held && held == &p.held[1] {
					p.stuck += n
				}
			}
			over = over || err != nil
			p.changed.Broadcast()
			p.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		for !p.closed && (*held || len(queue) == 0 && !over) {
			p.changed.Wait()
		}
		if p.closed || len(queue) == 0 {
			dst.Close()
			return
		}
		out := queue
		queue = nil
		p.mu.Unlock()
		for _, b := range out {
			dst.Write(b) // if nobody takes it any more, it is lost
		}
		p.mu.Lock()
	}
}

func (p *proxy) update(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	p.changed.Broadcast()
}

// hold stops delivery, holdRequests that to the server only, holdAnswers that to the
// client. release ends that.
func (p *proxy) hold()         { p.update(func() { p.held, p.stuck = [2]bool{true, true}, 0 }) }
func (p *proxy) holdRequests() { p.update(func() { p.held, p.stuck = [2]bool{false, true}, 0 }) }
func (p *proxy) holdAnswers()  { p.update(func() { p.held, p.stuck = [2]bool{true, false}, 0 }) }
func (p *proxy) release()      { p.update(func() { p.held = [2]bool{} }) }

// cut ends all connections for the client, as a reset does. Data on its way to
// the server stays.
func (p *proxy) cut() {
	p.update(func() {
		for k := range p.links {
			if tcp, ok := k.client.(*net.TCPConn); ok {
				tcp.SetLinger(0)
			}
			k.client.Close()
			delete(p.links, k)
		}
	})
}

// stuckBytes returns the number of bytes held on their way to the server.
func (p *proxy) stuckBytes() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stuck
}

func (p *proxy) close() {
	p.l.Close()
	p.update(func() {
		p.closed = true
		for k := range p.links {
			k.client.Close()
			k.server.Close()
		}
	})
	p.wg.Wait()
}

func TestProxyDeliversWhatItTookBeforeTheCut(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p := newProxy(t, l.Addr().String())
	c, err := net.Dial("tcp", p.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	p.hold()
	if _, err := c.Write([]byte("late")); err != nil {
		t.Fatal(err)
	}
	eventually(t, enough, "the proxy has the bytes", func() bool { return p.stuckBytes() == 4 })
	p.cut()
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("the client's connection lives after the cut")
	}
	s.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if n, err := s.Read(make([]byte, 8)); n != 0 || err == nil {
		t.Errorf("the server got %d bytes, %v, while they were held", n, err)
	}
	p.release()
	s.SetReadDeadline(time.Now().Add(enough))
	if got, err := io.ReadAll(s); err != nil || string(got) != "late" {
		t.Errorf("the server got %q, %v", got, err)
	}
}
