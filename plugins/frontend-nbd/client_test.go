package main

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// client is an NBD client that can also misbehave. do may be called from many
// goroutines.
type client struct {
	t    testing.TB
	conn net.Conn
	size uint64
	tx   uint16 // transmission flags

	context bool // base:allocation is in force

	sendMu  sync.Mutex
	mu      sync.Mutex
	cookie  uint64
	pending map[uint64]*call
	err     error
}

type call struct {
	buf  []byte
	off  uint64
	n    int
	list []extent // of a block status
	code uint32
	err  error
	done chan struct{}
}

var errEnded = errors.New("connection ended")

// dial connects and negotiates; replies are read by nobody yet.
func dial(t testing.TB, network, addr, export string, structured bool) *client {
	t.Helper()
	conn, err := net.DialTimeout(network, addr, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	c := &client{t: t, conn: conn, pending: map[uint64]*call{}}
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	defer conn.SetDeadline(time.Time{})
	c.negotiate(export, structured)
	return c
}

func (c *client) negotiate(export string, structured bool) {
	c.t.Helper()
	var b [18]byte
	c.must(io.ReadFull(c.conn, b[:]))
	c.must(c.conn.Write([]byte{0, 0, 0, 3}))
	c.choose(export, structured)
}

// choose is what follows the greeting.
func (c *client) choose(export string, structured bool) {
	c.t.Helper()
	var b [20]byte
	if structured {
		c.must(c.conn.Write(option(nbdwire.OptStructuredReply, nil)))
		c.must(io.ReadFull(c.conn, b[:20]))
		c.setContext(export)
	}
	c.must(c.conn.Write(option(nbdwire.OptExportName, []byte(export))))
	c.must(io.ReadFull(c.conn, b[:10]))
	c.size, c.tx = binary.BigEndian.Uint64(b[:]), binary.BigEndian.Uint16(b[8:])
}

// setContext asks for base:allocation.
func (c *client) setContext(export string) {
	c.t.Helper()
	c.must(c.conn.Write(option(nbdwire.OptSetMetaContext, metaData(export, nbdwire.AllocationContext))))
	for kind := uint32(0); kind != nbdwire.RepAck; {
		var h [20]byte
		c.must(io.ReadFull(c.conn, h[:]))
		if kind = binary.BigEndian.Uint32(h[12:]); kind != nbdwire.RepAck && kind != nbdwire.RepMetaCtx {
			c.t.Fatalf("SET_META_CONTEXT is answered by %#x", kind)
		}
		c.context = c.context || kind == nbdwire.RepMetaCtx
		c.must(io.ReadFull(c.conn, make([]byte, binary.BigEndian.Uint32(h[16:]))))
	}
}

func (c *client) must(_ int, err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// connect is dial with replies being read.
func (r *rig) connect(structured bool) *client {
	r.t.Helper()
	c := dial(r.t, "unix", r.addr, "disk0", structured)
	go c.run()
	return c
}

func option(opt uint32, data []byte) []byte {
	b := binary.BigEndian.AppendUint64(nil, nbdwire.MagicOption)
	b = binary.BigEndian.AppendUint32(b, opt)
	b = binary.BigEndian.AppendUint32(b, uint32(len(data)))
	return append(b, data...)
}

func command(cmd, flags uint16, cookie, off uint64, n uint32) []byte {
	b := binary.BigEndian.AppendUint32(nil, nbdwire.MagicRequest)
	b = binary.BigEndian.AppendUint16(b, flags)
	b = binary.BigEndian.AppendUint16(b, cmd)
	b = binary.BigEndian.AppendUint64(b, cookie)
	b = binary.BigEndian.AppendUint64(b, off)
	return binary.BigEndian.AppendUint32(b, n)
}

// start sends a request; buf is its payload, or where it goes.
func (c *client) start(cmd, flags uint16, off uint64, n int, buf []byte) *call {
	p := &call{off: off, n: n, done: make(chan struct{})}
	if cmd == nbdwire.CmdRead {
		p.buf = buf
	}
	c.mu.Lock()
	if c.err != nil {
		p.err = c.err
		close(p.done)
		c.mu.Unlock()
		return p
	}
	c.cookie++
	cookie := c.cookie
	c.pending[cookie] = p
	c.mu.Unlock()
	b := command(cmd, flags, cookie, off, uint32(n))
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if cmd == nbdwire.CmdWrite {
		b = append(b, buf...)
	}
	c.conn.Write(b) // a failure ends run as well
	return p
}

func (p *call) wait() (uint32, error) {
	select {
	case <-p.done:
		return p.code, p.err
	case <-time.After(20 * time.Second):
		return 0, errors.New("no reply")
	}
}

// do runs a request to its end; the connection must survive.
func (c *client) do(cmd, flags uint16, off uint64, n int, buf []byte) uint32 {
	code, err := c.start(cmd, flags, off, n, buf).wait()
	if err != nil {
		c.t.Errorf("command %d of %d bytes at %d: %v", cmd, n, off, err)
	}
	return code
}

func (c *client) write(off uint64, p []byte) uint32 { return c.do(nbdwire.CmdWrite, 0, off, len(p), p) }
func (c *client) read(off uint64, p []byte) uint32  { return c.do(nbdwire.CmdRead, 0, off, len(p), p) }

func (c *client) run() {
	r := bufio.NewReaderSize(c.conn, 64<<10)
	var err error
	for err == nil {
		err = c.reply(r)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = fmt.Errorf("%w: %w", errEnded, err)
	for _, p := range c.pending {
		p.err = c.err
		close(p.done)
	}
	c.pending = nil
}

func (c *client) reply(r io.Reader) error {
	var b [20]byte
	if _, err := io.ReadFull(r, b[:16]); err != nil {
		return err
	}
	p := c.call(binary.BigEndian.Uint64(b[8:]))
	if p == nil {
		return fmt.Errorf("reply % x to nobody", b[:16])
	}
	switch binary.BigEndian.Uint32(b[:]) {
	case nbdwire.MagicSimple:
		if p.code = binary.BigEndian.Uint32(b[4:]); p.code == 0 {
			if _, err := io.ReadFull(r, p.buf); err != nil {
				return err
			}
		}
		c.end(binary.BigEndian.Uint64(b[8:]))
		return nil
	case nbdwire.MagicChunk:
		io.ReadFull(r, b[16:])
		return c.chunk(r, p, b[:])
	}
	return fmt.Errorf("garbage % x", b[:16])
}

func (c *client) chunk(r io.Reader, p *call, h []byte) error {
	data := make([]byte, binary.BigEndian.Uint32(h[16:]))
	if _, err := io.ReadFull(r, data); err != nil {
		return err
	}
	switch binary.BigEndian.Uint16(h[6:]) {
	case nbdwire.ChunkNone:
	case nbdwire.ChunkOffsetData:
		copy(p.buf[binary.BigEndian.Uint64(data)-p.off:][:len(data)-8], data[8:])
	case nbdwire.ChunkBlockStatus:
		return c.status(p, h, data)
	case nbdwire.ChunkError:
		p.code = binary.BigEndian.Uint32(data)
	default:
		return fmt.Errorf("chunk % x", h)
	}
	if binary.BigEndian.Uint16(h[4:])&nbdwire.ChunkDone != 0 {
		c.end(binary.BigEndian.Uint64(h[8:]))
	}
	return nil
}

// extent is a descriptor of a block status.
type extent struct {
	n, flags uint32
}

// status takes a chunk of block status, the whole reply.
func (c *client) status(p *call, h, data []byte) error {
	if len(data) < 12 || len(data)%8 != 4 || binary.BigEndian.Uint32(data) != allocationID || binary.BigEndian.Uint16(h[4:]) != nbdwire.ChunkDone {
		return fmt.Errorf("block status % x % x", h, data)
	}
	left := uint64(p.n)
	for data = data[4:]; len(data) > 0; data = data[8:] {
		e := extent{binary.BigEndian.Uint32(data), binary.BigEndian.Uint32(data[4:])}
		if e.n == 0 || uint64(e.n) > left || e.flags != 0 && e.flags != 3 {
			return fmt.Errorf("extent %+v of a block status, %d bytes are left", e, left)
		}
		if last := len(p.list) - 1; last >= 0 && p.list[last].flags == e.flags {
			return fmt.Errorf("neighbours of one kind: %+v, %+v", p.list, e)
		}
		left -= uint64(e.n)
		p.list = append(p.list, e)
	}
	c.end(binary.BigEndian.Uint64(h[8:]))
	return nil
}

func (c *client) call(cookie uint64) *call {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pending[cookie]
}

func (c *client) end(cookie uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.pending[cookie].done)
	delete(c.pending, cookie)
}

func escaped(path string) string { return strings.ReplaceAll(url.QueryEscape(path), "%2F", "/") }
