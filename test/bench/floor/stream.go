package main

import (
	"encoding/binary"
	"hash/crc32"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

const (
	stageSize  = 256 << 10
	bulkMin    = 16 << 10 // payload from which only the next header is received behind it
	listBytes  = 512 << 10
	listVecs   = 512
	queueLen   = 8192 // messages that wait to be sent
	mostHeader = 108
)

// message is a header and, of some, the payload behind it.
type message struct {
	head    [mostHeader]byte
	n       int
	payload []byte
	ends    int // extent that is free when the message is sent; below 0: none
}

// stream is a socket with messages in both directions, a source of a pump. One call
// receives the rest of a payload at its place and the headers behind it; one call sends
// all messages that wait.
type stream struct {
	fd     int
	header int // bytes of a header that is received
	// begin takes a header and returns the place of its payload. It returns false if
	// that message must wait.
	begin func(h []byte) (payload []byte, ok bool)
	// came is called when so many bytes of the payload are there.
	came func(n int)
	// closed is called at the end of the stream.
	closed func()
	// gone is called when a message with an extent has been sent.
	gone func(extent int)
	// idle reports whether nothing is expected, so that one look in eight suffices.
	idle func() bool
	// quiet says that the last receive has emptied the socket, skip that Poll does not
	// receive. The owner of many streams skips the quiet ones until epoll reports them.
	quiet, skip bool
	sums        bool // each message has a checksum

	sum, want uint32 // of the message in progress

	stage   []byte
	r, w    int
	payload []byte // of the message in progress
	got     int
	open    bool // a message is in progress
	looks   int

	outbound
	sent   int // bytes of the first
	events int
	v      vec
}

// outbound are the messages that wait to be sent, in a circle.
type outbound struct {
	out      []message
	first, n int // of out
}

func newStream(fd, header int) *stream {
	return &stream{fd: fd, header: header, stage: make([]byte, stageSize), outbound: newOutbound(), v: newVec(listVecs + 2),
		closed: func() { fail("the stream has ended", nil) }, idle: func() bool { return false }}
}

func (s *stream) FD() int        { return s.fd }
func (s *stream) Events() uint32 { return unix.EPOLLIN | unix.EPOLLOUT }

// Arm returns false if there is something to receive or to send. Edges do not suffice: a
// pump that parks drops those that came since the last call.
func (s *stream) Arm() bool { return !ready(s.fd, s.n > 0) }

// ready reports whether a socket has something to receive, or room if something is to be
// sent.
func ready(fd int, toSend bool) bool {
	look := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	if toSend {
		look[0].Events |= unix.POLLOUT
	}
	n, _ := unix.Poll(look[:], 0)
	return n > 0
}

// Poll receives and sends.
func (s *stream) Poll() int {
	s.events = 0
	s.flush()
	s.parse() // a message that had to wait
	if s.looks++; !s.skip && (s.open && len(s.payload) > s.got || !s.idle() || s.looks%8 == 0) {
		for s.receive() {
			s.parse()
		}
		s.parse()
	}
	s.flush()
	return s.events
}

// receive makes one call. It returns true if there may be more.
func (s *stream) receive() bool {
	s.w = copy(s.stage, s.stage[s.r:s.w])
	s.r = 0
	direct, vecs, room := 0, 0, len(s.stage)-s.w
	if s.open {
		rest := s.payload[s.got:]
		s.v.set(0, rest)
		direct, vecs = len(rest), 1
		if len(s.payload) >= bulkMin {
			room = min(room, s.header)
		}
	}
	if room > 0 {
		s.v.set(vecs, s.stage[s.w:][:room])
		vecs++
	}
	if vecs == 0 {
		return false
	}
	n, errno := s.v.receive(s.fd, vecs)
	switch {
	case errno == unix.EAGAIN || errno == unix.EINTR:
		s.quiet = true
		return false
	case errno != 0 || n == 0:
		s.closed()
		return false
	}
	s.events++
	if d := min(n, direct); d > 0 {
		s.place(d)
	}
	s.w += max(0, n-direct)
	s.quiet = n < direct+room
	return !s.quiet
}

// place accounts for n bytes of payload at their place.
func (s *stream) place(n int) {
	if s.sums {
		s.sum = crc32.Update(s.sum, castagnoli, s.payload[s.got:][:n])
	}
	s.got += n
	s.open = s.got < len(s.payload)
	s.check()
	s.came(s.got)
}

// check fails if a message is complete and is not what was sent.
func (s *stream) check() {
	if s.sums && !s.open && s.sum != s.want {
		fail("a checksum is wrong", nil)
	}
}

// parse takes messages that are staged.
func (s *stream) parse() {
	for {
		if s.open {
			n := copy(s.payload[s.got:], s.stage[s.r:s.w])
			if s.r += n; n > 0 {
				s.place(n)
			}
			if s.open {
				return
			}
		}
		if s.w-s.r < s.header {
			return
		}
		payload, ok := s.begin(s.stage[s.r:][:s.header])
		if !ok {
			return
		}
		s.r += s.header
		if s.sums {
			h := s.stage[s.r-s.header:][:s.header]
			s.sum, s.want = headerSum(h), binary.LittleEndian.Uint32(h[sumAt:])
		}
		s.payload, s.got, s.open = payload, 0, len(payload) > 0
		if !s.open {
			s.check()
			s.came(0)
		}
	}
}

func newOutbound() outbound { return outbound{out: make([]message, queueLen)} }

// add returns the next message to be sent, with n bytes of header.
func (o *outbound) add(n int, payload []byte) *message {
	if o.n == len(o.out) {
		fail("too many messages", nil)
	}
	m := &o.out[(o.first+o.n)%len(o.out)]
	o.n++
	m.n, m.payload, m.ends = n, payload, -1
	return m
}

// shift forgets the first message, which was sent.
func (o *outbound) shift() {
	o.first = (o.first + 1) % len(o.out)
	o.n--
}

// sumAt is the place of the checksum in a header, behind the other fields.
const sumAt = 32

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// headerSum is the checksum of a header without its own field.
func headerSum(h []byte) uint32 {
	return crc32.Update(crc32.Checksum(h[:sumAt], castagnoli), castagnoli, h[sumAt+4:])
}

// sumOf is the checksum of a message or packet.
func sumOf(head, payload []byte) uint32 {
	return crc32.Update(headerSum(head), castagnoli, payload)
}

// post sends a request between the daemons, or an answer, with n bytes of header.
func (s *stream) post(n int, payload []byte, e *shm.SQE) {
	m := s.add(n, payload)
	putHeader(m.head[:], e)
	if s.sums {
		binary.LittleEndian.PutUint32(m.head[sumAt:], sumOf(m.head[:n], payload))
	}
}

// flush sends messages until there is none or the socket is full.
func (s *stream) flush() {
	for s.n > 0 {
		n, errno := s.v.send(s.fd, s.list())
		if errno != 0 {
			if errno != unix.EAGAIN && errno != unix.EINTR {
				s.closed()
				s.n = 0
			}
			return
		}
		s.events++
		s.drop(n)
	}
}

// list points the vector at the messages and returns its length.
func (s *stream) list() (vecs int) {
	skip, bytes := s.sent, 0
	for i := 0; i < s.n && vecs+2 <= listVecs && bytes < listBytes; i++ {
		m := &s.out[(s.first+i)%len(s.out)]
		if skip < m.n {
			s.v.set(vecs, m.head[skip:m.n])
			vecs, skip = vecs+1, 0
		} else {
			skip -= m.n
		}
		if len(m.payload) > skip {
			s.v.set(vecs, m.payload[skip:])
			vecs++
			bytes += len(m.payload) - skip
		}
		skip = 0
	}
	return vecs
}

// drop forgets n bytes that were sent.
func (s *stream) drop(n int) {
	n += s.sent
	for s.n > 0 {
		m := &s.out[s.first]
		if n < m.n+len(m.payload) {
			break
		}
		n -= m.n + len(m.payload)
		m.payload = nil
		if m.ends >= 0 {
			s.gone(m.ends)
		}
		s.shift()
	}
	s.sent = n
}
