package main

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// Headers between the daemons, in bytes: what ours sends besides payload for a request
// and for an answer (iwarp with MPA CRC: a WRITE with its immediate, and an answer with
// the chunk's next key). Fields: tag, offset on the disk, offset in the arena, length,
// operation.
const (
	wireRequest = 108
	wireAnswer  = 52
)

func putHeader(b []byte, e *shm.SQE) {
	binary.LittleEndian.PutUint64(b, e.Tag)
	binary.LittleEndian.PutUint64(b[8:], e.Offset)
	binary.LittleEndian.PutUint64(b[16:], e.ArenaOff)
	binary.LittleEndian.PutUint32(b[24:], e.Len)
	b[28] = byte(e.Op)
}

func getHeader(b []byte) shm.SQE {
	return shm.SQE{Tag: binary.LittleEndian.Uint64(b), Offset: binary.LittleEndian.Uint64(b[8:]),
		ArenaOff: binary.LittleEndian.Uint64(b[16:]), Len: binary.LittleEndian.Uint32(b[24:]), Op: blk.Op(b[28])}
}

// payload is the place of a request's payload in an arena.
func payload(arena []byte, e *shm.SQE) []byte { return arena[e.ArenaOff:][:e.Len] }

// client is the ring of the client's daemon, a source of its pump. A request keeps its
// offset in the arena on the way: the server's arena has the same layout.
type client struct {
	comp  *shm.Completer
	arena []byte
	wire  wire
	cur   shm.SQE // whose answer is received
	sqes  [256]shm.SQE
}

func runClient(conf config) error {
	o, p, err := daemon(conf, "client")
	if err != nil {
		return err
	}
	c := &client{comp: o.ring.Completer(), arena: o.arena}
	begin := func(h []byte) ([]byte, bool) {
		if c.cur = getHeader(h); c.cur.Op != blk.Read {
			return nil, true
		}
		return payload(c.arena, &c.cur), true
	}
	came := func(n int) {
		if (c.cur.Op != blk.Read || n == int(c.cur.Len)) && !c.comp.Push(&shm.CQE{Tag: c.cur.Tag}) {
			fail("an answer without a request", c.comp.Err())
		}
	}
	if c.wire, err = conf.newWire(firstFD+4, wireAnswer, begin, came); err != nil {
		return err
	}
	return serve(p, c, c.wire)
}

// daemon makes what both daemons have.
func daemon(c config, name string) (o opened, p *pump.Pump, err error) {
	if o, err = open(); err != nil {
		return o, nil, err
	}
	p, err = c.newPump(name)
	return o, p, err
}

// wire is the connection between the daemons, a source of a pump.
type wire interface {
	pump.Source
	// post sends a request or an answer with n bytes of header. The payload must stay as
	// it is until it is sent.
	post(n int, payload []byte, e *shm.SQE)
}

// newWire makes the wire of a connection: TCP, or UDP with -datagrams. The functions are
// those of a stream.
func (c config) newWire(fd, header int, begin func([]byte) ([]byte, bool), came func(int)) (wire, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, err
	}
	if c.datagrams {
		return newDatagrams(fd, c.sums, begin, came)
	}
	s := newStream(fd, header)
	s.sums, s.begin, s.came = c.sums, begin, came
	return s, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, tcpBuffer)
}

// tcpBuffer is about the send buffer that the product gives a connection on loopback;
// the kernel doubles it.
const tcpBuffer = 290 << 10

// Poll publishes the answers of the turn before and sends requests. The wire is polled
// after it in the same turn.
func (c *client) Poll() int {
	c.comp.Publish()
	n := c.comp.Pop(c.sqes[:])
	for i := range c.sqes[:n] {
		e := &c.sqes[i]
		var data []byte
		if e.Op == blk.Write {
			data = payload(c.arena, e)
		}
		c.wire.post(wireRequest, data, e)
	}
	return n
}

func (c *client) Arm() bool { return c.comp.Arm() }
func (c *client) Disarm()   { c.comp.Disarm() }
func (c *client) FD() int   { return c.comp.FD() }

// server is the ring of the server's daemon.
type server struct {
	sub    *shm.Submitter
	arena  []byte
	wire   wire
	cur    shm.SQE // that is received
	flying [extents * extentTags]shm.SQE
	cqes   [256]shm.CQE
}

func runServer(conf config) error {
	o, p, err := daemon(conf, "server")
	if err != nil {
		return err
	}
	s := &server{sub: o.ring.Submitter(), arena: o.arena}
	var store []byte
	if conf.inServer {
		if store, err = newStore(conf.size); err != nil {
			return err
		}
	}
	begin := func(h []byte) ([]byte, bool) {
		if s.cur = getHeader(h); s.cur.Op == blk.Write {
			return payload(s.arena, &s.cur), true
		}
		return nil, true
	}
	came := func(n int) {
		if s.cur.Op == blk.Write && n < int(s.cur.Len) {
			return
		}
		if store != nil {
			move(store, s.arena, &s.cur)
			s.answer(&s.cur)
			return
		}
		s.flying[s.cur.Tag] = s.cur
		if !s.sub.Push(&s.cur) {
			fail("the ring is full", s.sub.Err())
		}
	}
	if s.wire, err = conf.newWire(firstFD+4, wireRequest, begin, came); err != nil {
		return err
	}
	return serve(p, s, s.wire)
}

// Poll publishes the requests of the turn before and sends answers.
func (s *server) Poll() int {
	s.sub.Publish()
	n := s.sub.Pop(s.cqes[:])
	for _, a := range s.cqes[:n] {
		s.answer(&s.flying[a.Tag])
	}
	return n
}

func (s *server) answer(e *shm.SQE) {
	var data []byte
	if e.Op == blk.Read {
		data = payload(s.arena, e)
	}
	s.wire.post(wireAnswer, data, e)
}

func (s *server) Arm() bool { return s.sub.Arm() }
func (s *server) Disarm()   { s.sub.Disarm() }
func (s *server) FD() int   { return s.sub.FD() }

// shownAfter is how many bytes of requests a storage plugin serves before it shows the
// answers.
const shownAfter = 32 << 10

// plugin is the disk, in memory.
type plugin struct {
	comp  *shm.Completer
	arena []byte
	disk  []byte
	sqes  [256]shm.SQE
}

func runPlugin(c config) error {
	o, err := open()
	if err != nil {
		return err
	}
	if c.file != "" {
		return runDisk(c, o)
	}
	disk, err := newStore(c.size)
	if err != nil {
		return err
	}
	p, err := c.newPump("plugin")
	if err != nil {
		return err
	}
	return serve(p, &plugin{comp: o.ring.Completer(), arena: o.arena, disk: disk})
}

// newStore is the memory of a disk.
func newStore(size int64) ([]byte, error) {
	disk, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	_ = unix.Madvise(disk, unix.MADV_HUGEPAGE) // costs speed only where there are none
	for i := 0; i < len(disk); i += 4096 {
		disk[i] = 1 // no load meets a page that is not there
	}
	return disk, nil
}

// move does a request on a disk in memory.
func move(disk, arena []byte, e *shm.SQE) {
	memory, disk := payload(arena, e), disk[e.Offset:][:e.Len]
	if e.Op == blk.Write {
		copy(disk, memory)
	} else {
		copy(memory, disk)
	}
}

// Poll copies.
func (p *plugin) Poll() int {
	n := p.comp.Pop(p.sqes[:])
	bytes := 0
	for i := range p.sqes[:n] {
		e := &p.sqes[i]
		move(p.disk, p.arena, e)
		p.comp.Push(&shm.CQE{Tag: e.Tag})
		if bytes += int(e.Len); bytes >= shownAfter {
			p.comp.Publish()
			bytes = 0
		}
	}
	p.comp.Publish()
	return n
}

func (p *plugin) Arm() bool { return p.comp.Arm() }
func (p *plugin) Disarm()   { p.comp.Disarm() }
func (p *plugin) FD() int   { return p.comp.FD() }
