package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// sendBuffer is that of the product's front end.
const sendBuffer = 512 << 10

// frontend answers NBD clients. Each request in flight has an extent of the arena, each
// piece of it the tag extent*extentTags plus the number of the piece.
type frontend struct {
	config
	sub      *shm.Submitter
	arena    []byte
	free     []int
	requests [extents]request
	conns    conns
	cqes     [256]shm.CQE

	now      func() int64
	seat     pump.Seat
	answered bool // a client, since the last look at what is in flight
}

const extentTags = extent / 4096

type request struct {
	conn    *conn
	cookie  uint64
	write   bool
	off     uint64
	len     int
	pushed  int // bytes that are with the client
	pending int // pieces without an answer
}

type conn struct {
	*stream
	f          *frontend
	cur        int // extent of the request that is received
	unanswered int
	most       int // of unanswered
}

func runFrontend(c config) error {
	o, err := open()
	if err != nil {
		return err
	}
	f := &frontend{config: c, sub: o.ring.Submitter(), arena: o.arena}
	for i := range extents {
		f.free = append(f.free, extents-1-i)
	}
	p, err := c.newPump("frontend")
	if err != nil {
		return err
	}
	f.now, f.conns.after = p.Now, f.noteLeft
	p.Do(f.seat.Take)
	l, err := net.Listen("unix", c.socket)
	if err != nil {
		return err
	}
	go f.accept(l, p)
	if err := f.conns.open(); err != nil {
		return err
	}
	return serve(p, f, &f.conns)
}

// accept takes clients.
func (f *frontend) accept(l net.Listener, p *pump.Pump) {
	for {
		client, err := l.Accept()
		if err != nil {
			fail("accept", err)
		}
		go func() {
			defer client.Close()
			if handshake(client, uint64(f.size)) != nil {
				return // it only looked
			}
			file, err := client.(*net.UnixConn).File()
			if err != nil {
				fail("connection", err)
			}
			fd, err := unix.Dup(int(file.Fd()))
			if err = errors.Join(err, file.Close()); err != nil {
				fail("connection", err)
			}
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer)
			c := f.newConn(fd)
			p.Do(func() { f.conns.add(c) })
		}()
	}
}

func (f *frontend) newConn(fd int) *conn {
	c := &conn{stream: newStream(fd, nbdwire.RequestSize), f: f, cur: -1}
	c.begin, c.came = c.onHeader, c.onPayload
	c.gone = func(extent int) { f.free = append(f.free, extent) }
	c.idle = func() bool { return c.unanswered > 0 && c.unanswered >= c.most }
	return c
}

// onHeader takes a command.
func (c *conn) onHeader(h []byte) ([]byte, bool) {
	f := c.f
	if nbdwire.Request(h).Magic() != nbdwire.MagicRequest {
		fail("a client sends no NBD", nil)
	}
	kind, n := nbdwire.Request(h).Type(), int(nbdwire.Request(h).Length())
	if kind == nbdwire.CmdDisc {
		c.closed()
		return nil, false
	}
	if kind > nbdwire.CmdDisc || n == 0 || n > extent {
		fail(fmt.Sprintf("command %d of %d bytes is not served", kind, n), nil)
	}
	if len(f.free) == 0 {
		return nil, false
	}
	c.cur = f.free[len(f.free)-1]
	f.free = f.free[:len(f.free)-1]
	f.seat.Came(f.now())
	f.requests[c.cur] = request{conn: c, cookie: binary.BigEndian.Uint64(h[8:]), write: kind == nbdwire.CmdWrite, off: binary.BigEndian.Uint64(h[16:]), len: n}
	c.unanswered++
	c.most = max(c.most, c.unanswered)
	if kind == nbdwire.CmdWrite {
		return f.arena[c.cur*extent:][:n], true
	}
	return nil, true
}

// onPayload hands the pieces on that are complete.
func (c *conn) onPayload(got int) {
	f, r := c.f, &c.f.requests[c.cur]
	if !r.write {
		got = r.len
	}
	for r.pushed < got {
		n := min(f.piece, r.len-r.pushed)
		if r.pushed+n > got {
			return
		}
		op := blk.Read
		if r.write {
			op = blk.Write
		}
		at := c.cur*extent + r.pushed
		if !f.sub.Push(&shm.SQE{Tag: uint64(c.cur*extentTags + r.pushed/4096), Op: op, Offset: r.off + uint64(r.pushed), ArenaOff: uint64(at), Len: uint32(n)}) {
			fail("the ring is full", f.sub.Err())
		}
		r.pushed += n
		r.pending++
	}
}

// Poll publishes what the connections have pushed, and answers. It is the first source
// of the pump, so that both happen in the turn after the one that has made them; the
// pump makes that at once.
func (f *frontend) Poll() int {
	f.sub.Publish()
	n := f.sub.Pop(f.cqes[:])
	for i := range f.cqes[:n] {
		f.answer(int(f.cqes[i].Tag))
	}
	return n
}

func (f *frontend) answer(tag int) {
	r, at := &f.requests[tag/extentTags], tag%extentTags*4096
	c := r.conn
	r.pending--
	ended := r.pending == 0 && r.pushed == r.len
	switch {
	case !r.write:
		n := min(f.piece, r.len-at)
		m := c.add(nbdwire.DataChunkSize, f.arena[tag/extentTags*extent+at:][:n])
		nbdwire.PutDataChunk(m.head[:], map[bool]uint16{true: nbdwire.ChunkDone}[ended], r.cookie, r.off+uint64(at), uint32(n))
		if ended {
			m.ends = tag / extentTags
		}
	case ended:
		m := c.add(nbdwire.SimpleSize, nil)
		nbdwire.PutSimple(m.head[:], r.cookie, 0)
		m.ends = tag / extentTags
	}
	if ended {
		c.unanswered--
		f.answered = true
	}
}

// noteLeft tells the seat that the only client has all its answers.
func (f *frontend) noteLeft() {
	if f.answered && len(f.conns.list) == 1 && f.conns.list[0].unanswered == 0 && f.conns.list[0].n == 0 {
		f.seat.Left(f.now())
	}
	f.answered = false
}

func (f *frontend) Arm() bool { return f.sub.Arm() }
func (f *frontend) Disarm()   { f.sub.Disarm() }
func (f *frontend) FD() int   { return f.sub.FD() }

// fail ends the process.
func fail(what string, err error) {
	fmt.Fprintln(os.Stderr, "floor:", what, err)
	os.Exit(1)
}
