package e2e

import (
	"encoding/binary"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

const (
	toServer = 0
	toClient = 1
)

// tap is a TCP proxy in front of a server. It keeps all bytes.
type tap struct {
	addr string

	mu    sync.Mutex
	links []*link
}

// link is one TCP connection through the tap.
type link struct {
	mu    sync.Mutex
	parts []part
}

// part is the bytes of one read, in the order of arrival.
type part struct {
	dir  int
	data []byte
}

func newTap(t *testing.T, server string) *tap {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	p := &tap{addr: l.Addr().String()}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			k := &link{}
			p.mu.Lock()
			p.links = append(p.links, k)
			p.mu.Unlock()
			go k.carry(c, server)
		}
	}()
	return p
}

func (k *link) carry(client net.Conn, address string) {
	defer client.Close()
	server, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer server.Close()
	go func() {
		k.copy(client, server, toClient)
		client.Close()
	}()
	k.copy(server, client, toServer)
}

// copy keeps data before it goes on, so that an answer never comes before its
// question.
func (k *link) copy(to io.Writer, from io.Reader, dir int) {
	for {
		b := make([]byte, 32<<10) // fits an IP packet
		n, err := from.Read(b)
		if n > 0 {
			k.mu.Lock()
			k.parts = append(k.parts, part{dir, b[:n]})
			k.mu.Unlock()
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// all returns the links so far, by the order of their connects.
func (p *tap) all() []*link {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]*link(nil), p.links...)
}

// stream is all that went in one direction.
func (k *link) stream(dir int) (b []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.parts {
		if p.dir == dir {
			b = append(b, p.data...)
		}
	}
	return b
}

// pcap writes the bytes as a capture of IPv4 over Ethernet.
func (p *tap) pcap(t *testing.T) string {
	t.Helper()
	out := binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4)
	out = append(out, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 1, 0, 0, 0)
	for i, k := range p.all() {
		out = k.packets(out, uint16(40000+i))
	}
	path := filepath.Join(t.TempDir(), "tap.pcap")
	if err := os.WriteFile(path, out, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (k *link) packets(out []byte, port uint16) []byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	const fin, syn, push, ack = 0x01, 0x02, 0x08, 0x10
	ports := [2]uint16{port, 1234}
	seq := [2]uint32{1000, 5000}
	put := func(dir int, flags byte, data []byte) {
		f := make([]byte, 54, 54+len(data))
		f[12] = 8
		ip, tcp := f[14:34], f[34:54]
		ip[0], ip[8], ip[9] = 0x45, 64, 6
		binary.BigEndian.PutUint16(ip[2:], uint16(40+len(data)))
		copy(ip[12:], []byte{192, 0, 2, byte(1 + dir), 192, 0, 2, byte(2 - dir)})
		binary.BigEndian.PutUint16(tcp, ports[dir])
		binary.BigEndian.PutUint16(tcp[2:], ports[1-dir])
		binary.BigEndian.PutUint32(tcp[4:], seq[dir])
		binary.BigEndian.PutUint32(tcp[8:], seq[1-dir])
		tcp[12], tcp[13] = 5<<4, flags
		binary.BigEndian.PutUint16(tcp[14:], 65535)
		f = append(f, data...)
		seq[dir] += uint32(len(data))
		if flags&(syn|fin) != 0 {
			seq[dir]++
		}
		out = binary.LittleEndian.AppendUint64(out, 0) // time
		out = binary.LittleEndian.AppendUint32(out, uint32(len(f)))
		out = binary.LittleEndian.AppendUint32(out, uint32(len(f)))
		out = append(out, f...)
	}
	put(toServer, syn, nil)
	put(toClient, syn|ack, nil)
	put(toServer, ack, nil)
	var pending [2][]byte
	var started [2]bool
	for _, p := range k.parts {
		pending[p.dir] = append(pending[p.dir], p.data...)
		for {
			n := nextPacket(pending[p.dir], started[p.dir])
			if n == 0 {
				break
			}
			started[p.dir] = true
			put(p.dir, push|ack, pending[p.dir][:n])
			pending[p.dir] = pending[p.dir][n:]
		}
	}
	return out
}

// nextPacket is the length of the whole frames that b begins with and one
// packet holds; 0: not even one is there. The start-up frame goes alone. A tap
// cuts wherever a read happened to end, and tshark loses its way where that is
// within the length of a frame.
func nextPacket(b []byte, started bool) (n int) {
	const most = 32 << 10
	if !started {
		if len(b) >= 20 && len(b) >= 20+int(binary.BigEndian.Uint16(b[18:])) {
			n = 20 + int(binary.BigEndian.Uint16(b[18:]))
		}
		return n
	}
	for {
		whole := fpduLen(b[n:])
		if whole == 0 || n > 0 && n+whole > most {
			return n
		}
		n += whole
	}
}
