package nbdclient

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// Flags of commands.
const (
	FUA    = nbdwire.CmdFlagFUA    // on stable media before the reply
	NoHole = nbdwire.CmdFlagNoHole // WriteZeroes: leave the range allocated
)

// Options say how to connect. The zero value asks for the default export with
// structured replies.
type Options struct {
	Export string
	Simple bool // do not ask for structured replies
}

// Info describes an export as the server announced it. Sizes in bytes.
type Info struct {
	Size           uint64
	Flags          uint16
	MinBlock       uint32
	PreferredBlock uint32
	MaxPayload     uint32
	Structured     bool
}

// ErrClosed is the error of calls after Close, or after the server has closed
// the connection.
var ErrClosed = errors.New("nbd connection is closed")

// Client is one connection to one export.
type Client struct {
	conn net.Conn
	info Info

	sendMu sync.Mutex // one request at a time into the socket

	mu      sync.Mutex
	pending map[uint64]*call
	cookie  uint64
	cause   error         // why we closed the socket, if we did
	err     error         // the connection is over
	over    chan struct{} // closed when run has returned
}

// call is a request that waits for its reply.
type call struct {
	data []byte // of a read: where payload goes
	off  uint64
	err  error
	done chan struct{}
}

// Dial connects, negotiates and starts the transmission. ctx bounds all of it.
func Dial(ctx context.Context, network, address string, o Options) (*Client, error) {
	conn, err := connect(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c, err := start(conn, o)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("open export %q of %s: %w", o.Export, address, err)
	}
	return c, nil
}

// connect dials, and lets the end of ctx end the negotiation.
func connect(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		conn.SetDeadline(deadline)
	}
	return conn, nil
}

func start(conn net.Conn, o Options) (*Client, error) {
	e, err := nbdwire.NegotiatePlain(conn, nbdwire.Options{Export: o.Export, Structured: !o.Simple})
	if err != nil {
		return nil, err
	}
	info := Info{Size: e.Size, Flags: e.Flags, MinBlock: e.MinBlock, PreferredBlock: e.PreferredBlock, MaxPayload: e.MaxPayload, Structured: e.Structured}
	conn.SetDeadline(time.Time{})
	c := &Client{conn: conn, info: info, pending: map[uint64]*call{}, over: make(chan struct{})}
	go c.run()
	return c, nil
}

// List returns the names of the server's exports.
func List(ctx context.Context, network, address string) ([]string, error) {
	conn, err := connect(ctx, network, address)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	names, err := nbdwire.List(conn, nil)
	if err != nil {
		return nil, fmt.Errorf("list exports of %s: %w", address, err)
	}
	return names, nil
}

// Info returns the server's announcement of the export.
func (c *Client) Info() Info { return c.info }

// Size of the export in bytes.
func (c *Client) Size() int64 { return int64(c.info.Size) }

// ReadAt reads len(p) bytes. It fails as a whole.
func (c *Client) ReadAt(p []byte, off int64) (int, error) {
	return all(p, c.do(nbdwire.CmdRead, 0, off, len(p), p))
}

// WriteAt writes len(p) bytes. It fails as a whole.
func (c *Client) WriteAt(p []byte, off int64) (int, error) {
	return c.Write(p, off, 0)
}

// Write is WriteAt with flags: FUA.
func (c *Client) Write(p []byte, off int64, flags uint16) (int, error) {
	return all(p, c.do(nbdwire.CmdWrite, flags, off, len(p), p))
}

// Flush makes every completed write durable.
func (c *Client) Flush() error { return c.do(nbdwire.CmdFlush, 0, 0, 0, nil) }

// Trim tells that a range is not needed any more.
func (c *Client) Trim(off, n int64) error { return c.do(nbdwire.CmdTrim, 0, off, int(n), nil) }

// WriteZeroes zeroes a range. Flags: FUA, NoHole.
func (c *Client) WriteZeroes(off, n int64, flags uint16) error {
	return c.do(nbdwire.CmdWriteZeroes, flags, off, int(n), nil)
}

// Close says goodbye and closes the connection. Calls that wait get ErrClosed.
func (c *Client) Close() error {
	c.sendMu.Lock()
	c.conn.SetWriteDeadline(time.Now().Add(time.Second))
	c.conn.Write(header(nbdwire.CmdDisc, 0, 0, 0, 0))
	c.sendMu.Unlock()
	err := c.hangUp(ErrClosed)
	<-c.over
	if errors.Is(err, net.ErrClosed) { // the server was faster: run has hung up
		return nil
	}
	return err
}

// hangUp closes the socket; run then fails the calls that wait, for only run
// may touch their buffers.
func (c *Client) hangUp(cause error) error {
	c.mu.Lock()
	if c.cause == nil {
		c.cause = cause
	}
	c.mu.Unlock()
	return c.conn.Close()
}

func all(p []byte, err error) (int, error) {
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

func header(cmd, flags uint16, cookie, off uint64, n uint32) []byte {
	b := make([]byte, nbdwire.RequestSize)
	nbdwire.PutRequest(b, flags, cmd, cookie, off, n)
	return b
}

// do sends one request and waits for its reply.
func (c *Client) do(cmd, flags uint16, off int64, n int, data []byte) error {
	if off < 0 || n < 0 || int64(n) > 1<<32-1 {
		return fmt.Errorf("range of %d bytes at %d", n, off)
	}
	p := &call{off: uint64(off), done: make(chan struct{})}
	if cmd == nbdwire.CmdRead {
		p.data = data
	}
	cookie, err := c.register(p)
	if err != nil {
		return err
	}
	bufs := net.Buffers{header(cmd, flags, cookie, uint64(off), uint32(n))}
	if cmd == nbdwire.CmdWrite {
		bufs = append(bufs, data)
	}
	c.sendMu.Lock()
	_, err = bufs.WriteTo(c.conn)
	c.sendMu.Unlock()
	if err != nil {
		c.hangUp(fmt.Errorf("%w: send: %w", ErrClosed, err))
	}
	<-p.done
	return p.err
}

func (c *Client) register(p *call) (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, c.err
	}
	c.cookie++
	c.pending[c.cookie] = p
	return c.cookie, nil
}

// end fails every call that waits, and those to come.
func (c *Client) end(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cause != nil {
		cause = c.cause
	}
	c.err = cause
	for cookie, p := range c.pending {
		delete(c.pending, cookie)
		p.err = cause
		close(p.done)
	}
}

// run reads replies until the connection ends.
func (c *Client) run() {
	defer close(c.over)
	r := bufio.NewReaderSize(c.conn, 256<<10)
	for {
		if err := c.reply(r); err != nil {
			c.end(fmt.Errorf("%w: %w", ErrClosed, err))
			c.conn.Close()
			return
		}
	}
}

func (c *Client) reply(r io.Reader) error {
	var b [20]byte
	if _, err := io.ReadFull(r, b[:16]); err != nil {
		return err
	}
	switch binary.BigEndian.Uint32(b[:]) {
	case nbdwire.MagicSimple:
		return c.simple(r, binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint32(b[4:]))
	case nbdwire.MagicChunk:
		if _, err := io.ReadFull(r, b[16:]); err != nil {
			return err
		}
		return c.chunk(r, b[:])
	}
	return fmt.Errorf("reply % x is garbage", b[:16])
}

// find returns the call of a reply, and forgets it if this is its last.
func (c *Client) find(cookie uint64, last bool) (*call, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pending[cookie]
	if p == nil {
		return nil, fmt.Errorf("reply to request %d, which does not wait", cookie)
	}
	if last {
		delete(c.pending, cookie)
	}
	return p, nil
}

func (c *Client) simple(r io.Reader, cookie uint64, code uint32) error {
	p, err := c.find(cookie, false)
	if err != nil {
		return err
	}
	if code == 0 {
		if _, err := io.ReadFull(r, p.data); err != nil {
			return err
		}
	}
	return c.finish(cookie, errnoOf(code))
}

// finish wakes the caller.
func (c *Client) finish(cookie uint64, err error) error {
	p, gone := c.find(cookie, true)
	if gone != nil {
		return gone
	}
	if p.err == nil {
		p.err = err
	}
	close(p.done)
	return nil
}

// chunk reads one chunk of a structured reply.
func (c *Client) chunk(r io.Reader, h []byte) error {
	flags, kind := binary.BigEndian.Uint16(h[4:]), binary.BigEndian.Uint16(h[6:])
	cookie, n := binary.BigEndian.Uint64(h[8:]), binary.BigEndian.Uint32(h[16:])
	p, err := c.find(cookie, false)
	if err != nil {
		return err
	}
	var failed error
	switch {
	case kind == nbdwire.ChunkNone:
	case kind == nbdwire.ChunkOffsetData:
		err = p.receive(r, n)
	case kind == nbdwire.ChunkOffsetHole:
		err = p.hole(r, n)
	case kind&nbdwire.ChunkErrors != 0:
		failed, err = chunkError(r, n)
	default:
		err = fmt.Errorf("chunk of unknown type %d", kind)
	}
	if err != nil {
		return err
	}
	if failed != nil && p.err == nil {
		p.err = failed
	}
	if flags&nbdwire.ChunkDone != 0 {
		return c.finish(cookie, nil)
	}
	return nil
}

// part is the piece of the caller's buffer that a chunk speaks of.
func (p *call) part(off uint64, n uint64) ([]byte, error) {
	if off < p.off || off-p.off > uint64(len(p.data)) || n > uint64(len(p.data))-(off-p.off) {
		return nil, fmt.Errorf("chunk of %d bytes at %d for a read of %d at %d", n, off, len(p.data), p.off)
	}
	return p.data[off-p.off:][:n], nil
}

func (p *call) receive(r io.Reader, n uint32) error {
	var b [8]byte
	if n < 8 {
		return fmt.Errorf("data chunk of %d bytes", n)
	}
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return err
	}
	part, err := p.part(binary.BigEndian.Uint64(b[:]), uint64(n-8))
	if err != nil {
		return err
	}
	_, err = io.ReadFull(r, part)
	return err
}

func (p *call) hole(r io.Reader, n uint32) error {
	var b [12]byte
	if n != 12 {
		return fmt.Errorf("hole chunk of %d bytes", n)
	}
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return err
	}
	part, err := p.part(binary.BigEndian.Uint64(b[:]), uint64(binary.BigEndian.Uint32(b[8:])))
	clear(part)
	return err
}

func chunkError(r io.Reader, n uint32) (failed, err error) {
	if n < 6 || n > 1<<16 {
		return nil, fmt.Errorf("error chunk of %d bytes", n)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, err
	}
	code := binary.BigEndian.Uint32(b)
	if code == 0 {
		return nil, errors.New("error chunk without an error")
	}
	return errnoOf(code), nil
}

// errnoOf is the error of a reply; NBD's numbers are those of Linux.
func errnoOf(code uint32) error {
	if code == 0 {
		return nil
	}
	return syscall.Errno(code)
}
