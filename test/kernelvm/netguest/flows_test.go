package netguest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"
)

const period = 20 * time.Millisecond

// echo is a flow of numbered datagrams from host one to host two and back.
type echo struct {
	t    *testing.T
	mu   sync.Mutex
	at   []time.Time // of the answers
	seen map[uint32]bool
	dup  int
}

// listen opens a socket on the host.
func (h *host) listen(network, addr string) (c net.PacketConn) {
	h.t.Helper()
	h.in(func() (err error) {
		c, err = net.ListenPacket(network, addr)
		return err
	})
	h.t.Cleanup(func() { c.Close() })
	return c
}

// newEcho starts the flow. It ends with the test.
func newEcho(one, two *host, from, to string) *echo {
	one.t.Helper()
	e := &echo{t: one.t, seen: map[uint32]bool{}}
	server, client := two.listen("udp4", to), one.listen("udp4", from)
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := server.ReadFrom(b)
			if err != nil {
				return
			}
			server.WriteTo(b[:n], from)
		}
	}()
	go func() {
		b := make([]byte, 2048)
		for {
			n, _, err := client.ReadFrom(b)
			if err != nil {
				return
			}
			if n == 4 {
				e.arrived(binary.BigEndian.Uint32(b))
			}
		}
	}()
	ctx, cancel := context.WithCancel(context.Background())
	one.t.Cleanup(cancel)
	go every(ctx, func(i uint32) { client.WriteTo(binary.BigEndian.AppendUint32(nil, i), server.LocalAddr()) })
	return e
}

// every calls f with 0, 1, ... until ctx ends.
func every(ctx context.Context, f func(i uint32)) {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for i := uint32(0); ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			f(i)
		}
	}
}

func (e *echo) arrived(i uint32) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.seen[i] {
		e.dup++
	}
	e.seen[i] = true
	e.at = append(e.at, time.Now())
}

// flows waits for ten answers from now on.
func (e *echo) flows() {
	e.t.Helper()
	e.mu.Lock()
	before := len(e.at)
	e.mu.Unlock()
	eventually(e.t, "datagrams flow", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(e.at) >= before+10
	})
}

// gap returns the longest time without an answer that ended after t.
func (e *echo) gap(t time.Time) (longest time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := len(e.at) - 1; i > 0 && e.at[i].After(t); i-- {
		longest = max(longest, e.at[i].Sub(e.at[i-1]))
	}
	return longest.Round(time.Millisecond)
}

// once fails the test if an answer came twice.
func (e *echo) once() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.dup > 0 {
		e.t.Errorf("%d datagrams came twice", e.dup)
	}
}

// stream is a TCP connection from host one to host two, 100 kB/s of known
// bytes.
type stream struct {
	t      *testing.T
	cancel context.CancelFunc
	sent   chan result
	got    chan result
}

type result struct {
	bytes int64
	sum   []byte
	err   error
}

func newStream(one, two *host, to string) *stream {
	one.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s := &stream{t: one.t, cancel: cancel, sent: make(chan result, 1), got: make(chan result, 1)}
	var l net.Listener
	var c net.Conn
	two.in(func() (err error) {
		l, err = net.Listen("tcp4", to)
		return err
	})
	go func() {
		in, err := l.Accept()
		if err != nil {
			s.got <- result{err: err}
			return
		}
		defer in.Close()
		h := sha256.New()
		n, err := io.Copy(h, in)
		s.got <- result{n, h.Sum(nil), err}
	}()
	one.in(func() (err error) {
		c, err = (&net.Dialer{Timeout: patience}).Dial("tcp4", to)
		return err
	})
	one.t.Cleanup(func() { cancel(); l.Close(); c.Close() })
	go func() {
		r, h, total := rand.NewChaCha8([32]byte{1}), sha256.New(), int64(0)
		var err error
		b := make([]byte, 2000)
		every(ctx, func(uint32) {
			if err == nil {
				r.Read(b)
				h.Write(b)
				total += int64(len(b))
				_, err = c.Write(b)
			}
		})
		if err == nil {
			err = c.(*net.TCPConn).CloseWrite()
		}
		s.sent <- result{total, h.Sum(nil), err}
	}()
	return s
}

// end closes the connection and compares what was sent with what has come.
func (s *stream) end() error {
	s.cancel()
	var r [2]result
	for i, c := range []chan result{s.sent, s.got} {
		select {
		case r[i] = <-c:
		case <-time.After(patience):
			return fmt.Errorf("the stream does not end")
		}
		if r[i].err != nil {
			return r[i].err
		}
	}
	if r[0].bytes != r[1].bytes || !bytes.Equal(r[0].sum, r[1].sum) {
		return fmt.Errorf("%d bytes were sent, %d came, or others", r[0].bytes, r[1].bytes)
	}
	s.t.Logf("%d bytes of TCP came whole", r[0].bytes)
	return nil
}
