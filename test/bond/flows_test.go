package bond

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/netns"
)

// flow is traffic through the bond, with the time of each arrival.
type flow struct {
	name   string
	mu     sync.Mutex
	at     []time.Time
	seen   map[uint32]bool
	double int
}

func newFlow(name string) *flow { return &flow{name: name, seen: map[uint32]bool{}} }

// arrived notes the arrival of a numbered packet.
func (f *flow) arrived(number uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.at = append(f.at, time.Now())
	if f.seen[number] {
		f.double++
	}
	f.seen[number] = true
}

// since is how many arrivals there were after t.
func (f *flow) since(t time.Time) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := len(f.at) - 1; i >= 0 && f.at[i].After(t); i-- {
		n++
	}
	return n
}

// gap is the longest time without an arrival that ends after t.
func (f *flow) gap(t time.Time) (longest time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := len(f.at) - 1; i > 0 && f.at[i].After(t); i-- {
		longest = max(longest, f.at[i].Sub(f.at[i-1]))
	}
	return longest
}

const period = 5 * time.Millisecond // of every flow but TCP

// each calls fn with 0, 1, 2, ... until ctx ends.
func each(ctx context.Context, fn func(i uint32)) {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for i := uint32(0); ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			fn(i)
		}
	}
}

// in opens something in a namespace of the network.
func in[T any](n *network, ns string, open func() (T, error)) (v T) {
	n.t.Helper()
	err := netns.Do(n.ns(ns), func() (err error) {
		v, err = open()
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return v
}

// udp sends numbered datagrams that the peer sends back.
func (n *network) udp(ctx context.Context) *flow {
	f := newFlow("UDP")
	echo := in(n, "peer", func() (net.PacketConn, error) { return net.ListenPacket("udp4", "10.5.0.2:7000") })
	n.t.Cleanup(func() { echo.Close() })
	go func() {
		buf := make([]byte, 100)
		for {
			k, from, err := echo.ReadFrom(buf)
			if err != nil {
				return
			}
			echo.WriteTo(buf[:k], from)
		}
	}()
	c := in(n, "up", func() (net.PacketConn, error) { return net.ListenPacket("udp4", "10.5.0.1:0") })
	n.t.Cleanup(func() { c.Close() })
	to := &net.UDPAddr{IP: net.IPv4(10, 5, 0, 2), Port: 7000}
	go each(ctx, func(i uint32) { c.WriteTo(binary.BigEndian.AppendUint32(nil, i), to) })
	go readNumbers(c, f, 0)
	return f
}

// readNumbers records the packets by the number at offset at.
func readNumbers(c net.PacketConn, f *flow, at int) {
	buf := make([]byte, 100)
	for {
		k, _, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		if k >= at+4 {
			f.arrived(binary.BigEndian.Uint32(buf[at:]))
		}
	}
}

// icmp sends echo requests; the peer's kernel answers them.
func (n *network) icmp(ctx context.Context) *flow {
	f := newFlow("ICMP")
	c := in(n, "up", func() (net.PacketConn, error) { return net.ListenPacket("ip4:icmp", "10.5.0.1") })
	n.t.Cleanup(func() { c.Close() })
	to := &net.IPAddr{IP: net.IPv4(10, 5, 0, 2)}
	go each(ctx, func(i uint32) {
		m := []byte{8, 0, 0, 0, 0, 77, byte(i >> 8), byte(i)}
		m = binary.BigEndian.AppendUint32(m, i)
		var sum uint32
		for k := 0; k < len(m); k += 2 {
			sum += uint32(m[k])<<8 | uint32(m[k+1])
		}
		sum = sum>>16 + sum&0xffff
		binary.BigEndian.PutUint16(m[2:], ^uint16(sum+sum>>16))
		c.WriteTo(m, to)
	})
	go readNumbers(c, f, 8)
	return f
}

// multicast sends numbered datagrams from the peer to a group that a user of
// the bond has joined.
func (n *network) multicast(ctx context.Context) *flow {
	f := newFlow("multicast")
	group := &net.UDPAddr{IP: net.IPv4(239, 1, 2, 3), Port: 7001}
	recv := in(n, "up", func() (net.PacketConn, error) {
		bond, err := net.InterfaceByName("bond0")
		if err != nil {
			return nil, err
		}
		return net.ListenMulticastUDP("udp4", bond, group)
	})
	n.t.Cleanup(func() { recv.Close() })
	if n.peerDev == "e0" {
		n.waitFor("the switch knows the member", func() bool {
			n.query()
			return slices.Equal(n.members("239.1.2.3"), []string{"p0"})
		})
	}
	n.ip("peer", "route replace 239.0.0.0/8 dev "+n.peerDev)
	send := in(n, "peer", func() (net.PacketConn, error) { return net.ListenPacket("udp4", "10.5.0.2:0") })
	n.t.Cleanup(func() { send.Close() })
	go each(ctx, func(i uint32) { send.WriteTo(binary.BigEndian.AppendUint32(nil, i), group) })
	go readNumbers(recv, f, 0)
	return f
}

// stream is a TCP connection with known content.
type stream struct {
	*flow
	done chan error // the result of the comparison, after stop
	stop context.CancelFunc
}

// tcp sends pseudo-random bytes to the peer, 2 MB/s, and compares them at the end.
func (n *network) tcp(ctx context.Context) *stream {
	ctx, cancel := context.WithCancel(ctx)
	s := &stream{flow: newFlow("TCP"), done: make(chan error, 1), stop: cancel}
	l := in(n, "peer", func() (net.Listener, error) { return net.Listen("tcp4", "10.5.0.2:7002") })
	n.t.Cleanup(func() { l.Close() })
	type sum struct {
		bytes int64
		hash  []byte
		err   error
	}
	received := make(chan sum, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			received <- sum{err: err}
			return
		}
		defer c.Close()
		h, buf, total := sha256.New(), make([]byte, 64<<10), int64(0)
		for {
			k, err := c.Read(buf)
			h.Write(buf[:k])
			if total += int64(k); k > 0 {
				s.arrived(uint32(total)) // the end of a piece is as good as a number
			}
			if err != nil {
				if err == io.EOF {
					err = nil
				}
				received <- sum{total, h.Sum(nil), err}
				return
			}
		}
	}()
	c := in(n, "up", func() (net.Conn, error) { return net.DialTimeout("tcp4", "10.5.0.2:7002", patience) })
	go func() {
		defer c.Close()
		r, h, total := rand.NewChaCha8([32]byte{1}), sha256.New(), int64(0)
		var err error
		buf := make([]byte, 10<<10)
		each(ctx, func(uint32) {
			if err != nil {
				return
			}
			r.Read(buf)
			h.Write(buf)
			var k int
			k, err = c.Write(buf)
			total += int64(k)
		})
		if err == nil {
			err = c.(*net.TCPConn).CloseWrite()
		}
		got := <-received
		switch {
		case err != nil || got.err != nil:
			s.done <- fmt.Errorf("send %v, receive %v", err, got.err)
		case got.bytes != total || !bytes.Equal(got.hash, h.Sum(nil)):
			s.done <- fmt.Errorf("%d bytes arrived of %d, or others", got.bytes, total)
		default:
			s.done <- nil
		}
	}()
	return s
}
