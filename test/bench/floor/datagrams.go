package main

import (
	"bytes"
	"encoding/binary"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

const (
	packetMTU    = 4096           // bytes of payload in a packet
	packetHeader = sumAt + 4      // of every packet: that of its message, and its checksum
	mostPackets  = 15             // that the kernel takes and delivers at once
	firstPackets = 2              // of a message that are sent at once, as ours are: they go through a stage
	udpBuffer    = arenaSize >> 1 // of a socket; nothing is sent again, so nothing may be lost
	packetStage  = mostPackets * (packetHeader + packetMTU)
)

// datagrams is a connected UDP socket with messages in both directions, a source of a
// pump. A message is packets in sequence, each with its header, and one call sends and one
// receives up to mostPackets of them, which the kernel takes apart no earlier than it must
// (UDP_SEGMENT, UDP_GRO). The packets of a message that has begun are received with their
// payload at its place, the first ones through a stage.
type datagrams struct {
	fd    int
	sums  bool
	begin func(h []byte) (payload []byte, ok bool) // as those of a stream; ok must be true
	came  func(n int)

	stage   []byte
	current [packetHeader]byte // the header of the message in progress
	payload []byte             // of it
	got     int
	open    bool

	outbound
	sent   int // bytes of payload of the first
	heads  []byte
	events int
	v      vec
}

func newDatagrams(fd int, sums bool, begin func([]byte) ([]byte, bool), came func(int)) (*datagrams, error) {
	d := &datagrams{fd: fd, sums: sums, begin: begin, came: came, stage: make([]byte, packetStage), outbound: newOutbound(),
		heads: make([]byte, mostPackets*packetHeader), v: newVec(2 * mostPackets)}
	for _, o := range []struct{ level, name, value int }{
		{unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, udpBuffer}, {unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, udpBuffer},
		{unix.SOL_UDP, unix.UDP_SEGMENT, packetHeader + packetMTU}, {unix.SOL_UDP, unix.UDP_GRO, 1},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return nil, os.NewSyscallError("setsockopt", err)
		}
	}
	return d, nil
}

func (d *datagrams) FD() int        { return d.fd }
func (d *datagrams) Events() uint32 { return unix.EPOLLIN | unix.EPOLLOUT }

// Arm returns false if there is something to receive or to send.
func (d *datagrams) Arm() bool { return !ready(d.fd, d.n > 0) }

// Poll receives and sends.
func (d *datagrams) Poll() int {
	d.events = 0
	d.flush()
	for d.receive() {
	}
	d.flush()
	return d.events
}

// receive makes one call. It returns false if there was nothing.
func (d *datagrams) receive() bool {
	vecs, heads := 1, d.stage
	if d.open {
		vecs, heads = d.lay(d.payload[d.got:]), d.heads
	} else {
		d.v.set(0, d.stage)
	}
	n, errno := d.v.receive(d.fd, vecs)
	switch {
	case errno == unix.EAGAIN || errno == unix.EINTR:
		return false
	case errno != 0 || n == 0:
		fail("receive", errno)
	}
	d.events++
	for staged := !d.open; n > 0; {
		head := heads[:packetHeader]
		heads, n = heads[packetHeader:], n-packetHeader
		if staged {
			heads, n = d.staged(head, heads, n)
		} else {
			n -= d.packet(head)
		}
	}
	return true
}

// lay points the vector at the places of the packets with the rest of a payload.
func (d *datagrams) lay(rest []byte) (vecs int) {
	for ; len(rest) > 0 && vecs < 2*mostPackets; vecs += 2 {
		n := min(packetMTU, len(rest))
		d.v.set(vecs, d.heads[vecs/2*packetHeader:][:packetHeader])
		d.v.set(vecs+1, rest[:n])
		rest = rest[n:]
	}
	return vecs
}

// staged takes a packet whose payload, the first of the n bytes of rest, is not at its
// place. It returns what is behind it.
func (d *datagrams) staged(head, rest []byte, n int) ([]byte, int) {
	if !d.open {
		payload, ok := d.begin(head)
		if !ok {
			fail("a message has to wait", nil)
		}
		copy(d.current[:], head)
		d.payload, d.got, d.open = payload, 0, true
	}
	copied := copy(d.payload[d.got:], rest[:min(n, packetMTU)])
	d.packet(head)
	return rest[copied:], n - copied
}

// packet accounts for a packet whose payload is at its place, and returns the length of
// the payload.
func (d *datagrams) packet(head []byte) int {
	payload := d.payload[d.got:min(len(d.payload), d.got+packetMTU)]
	if !bytes.Equal(head[:sumAt], d.current[:sumAt]) {
		fail("a packet is lost", nil)
	}
	if d.sums && sumOf(head, payload) != binary.LittleEndian.Uint32(head[sumAt:]) {
		fail("a checksum is wrong", nil)
	}
	d.got += len(payload)
	d.open = d.got < len(d.payload)
	d.came(d.got)
	return len(payload)
}

// post sends a request between the daemons, or an answer. Each packet has a header of
// packetHeader bytes instead of one of n for all of them.
func (d *datagrams) post(_ int, payload []byte, e *shm.SQE) {
	putHeader(d.add(packetHeader, payload).head[:], e)
}

// flush sends packets until there is none or the socket is full.
func (d *datagrams) flush() {
	for d.n > 0 {
		m := &d.out[d.first]
		bytes, vecs := d.list(m)
		switch _, errno := d.v.send(d.fd, vecs); errno {
		case 0:
		case unix.EAGAIN, unix.EINTR, unix.ENOBUFS:
			return
		default:
			fail("send", errno)
		}
		d.events++
		if d.sent += bytes; d.sent == len(m.payload) {
			m.payload, d.sent = nil, 0
			d.shift()
		}
	}
}

// list points the vector at the next packets of m, and returns the length of their
// payloads and of the vector.
func (d *datagrams) list(m *message) (bytes, vecs int) {
	most := mostPackets
	if d.sent == 0 {
		most = firstPackets
	}
	for rest := m.payload[d.sent:]; vecs == 0 || len(rest) > 0 && vecs < 2*most; {
		payload := rest[:min(packetMTU, len(rest))]
		head := d.heads[vecs/2*packetHeader:][:packetHeader]
		copy(head, m.head[:sumAt])
		if d.sums {
			binary.LittleEndian.PutUint32(head[sumAt:], sumOf(head, payload))
		}
		d.v.set(vecs, head)
		vecs++
		if len(payload) > 0 {
			d.v.set(vecs, payload)
			vecs++
		}
		rest, bytes = rest[len(payload):], bytes+len(payload)
	}
	return bytes, vecs
}

// datagramSockets returns two UDP sockets on loopback that are connected with each other.
func datagramSockets() (a, b *os.File, err error) {
	loopback := &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}
	free, err := net.ListenUDP("udp", loopback)
	if err != nil {
		return nil, nil, err
	}
	addr := free.LocalAddr().(*net.UDPAddr)
	first, err := net.DialUDP("udp", loopback, addr)
	if err != nil {
		free.Close()
		return nil, nil, err
	}
	free.Close()
	second, err := net.DialUDP("udp", addr, first.LocalAddr().(*net.UDPAddr))
	if err != nil {
		return nil, nil, err
	}
	if a, err = first.File(); err == nil {
		b, err = second.File()
	}
	return a, b, err
}
