// Package nbd makes load on an export of an NBD server, as a device of package
// load.
//
// A queue is a connection of its own. Its owner sends; a goroutine reads the
// replies. Replies are simple ones, and a server may answer while it does not
// read.
package nbd

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/load"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/private"
)

// Export is a device that an NBD server has.
type Export struct {
	nbdwire.Address
	limits blk.Limits
	cipher string // protocol and cipher of TLS
}

// Open connects once, to learn the limits of the export. uri is as nbdwire.ParseURI
// takes it.
func Open(ctx context.Context, uri string) (*Export, error) {
	a, err := nbdwire.ParseURI(uri)
	if err != nil {
		return nil, err
	}
	e := &Export{Address: a}
	conn, err := e.dial(ctx)
	if err != nil {
		return nil, err
	}
	return e, conn.Close()
}

// IsURI reports whether name is one that Open takes, by its beginning.
func IsURI(name string) bool { return nbdwire.IsURI(name) }

// dial connects and negotiates, bounded by ctx.
func (e *Export) dial(ctx context.Context) (net.Conn, error) {
	dial := (&net.Dialer{}).DialContext
	if e.Network == "unix" {
		dial = func(ctx context.Context, _, path string) (net.Conn, error) { return private.Dial(ctx, path) }
	}
	conn, err := dial(ctx, e.Network, e.Address.Address)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	use, announced, err := nbdwire.Negotiate(conn, nbdwire.Options{Export: e.Export, TLS: e.Address.TLS})
	if err == nil {
		e.limits, err = limits(&announced)
	}
	if err == nil && !stop() {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("open export %q of %s: %w", e.Export, e.Address.Address, err)
	}
	if secure, ok := use.(*tls.Conn); ok {
		s := secure.ConnectionState()
		e.cipher = tls.VersionName(s.Version) + " " + tls.CipherSuiteName(s.CipherSuite)
	}
	return use, nil
}

// maxBlock bounds the smallest block of a server, in bytes.
const maxBlock = 64 << 10

// limits translates the announcement of a server.
func limits(e *nbdwire.Export) (blk.Limits, error) {
	if e.MinBlock > maxBlock {
		return blk.Limits{}, fmt.Errorf("blocks of %d bytes: the most is %d", e.MinBlock, maxBlock)
	}
	block := max(blk.SectorSize, e.MinBlock)
	return blk.Limits{Size: e.Size, LogicalBlockSize: block, MaxIOSize: max(block, e.MaxPayload&^(block-1)),
		ReadOnly: e.Flags&nbdwire.ReadOnly != 0}, nil
}

// TLS returns protocol and cipher of the connection of Open, empty without TLS.
func (e *Export) TLS() string { return e.cipher }

// Limits returns the limits that the server sent.
func (e *Export) Limits() blk.Limits { return e.limits }

// Open makes a connection.
func (e *Export) Open(ctx context.Context, _, _, slots, slotSize int) (load.Queue, error) {
	own := *e
	conn, err := own.dial(ctx)
	if err != nil {
		return nil, err
	}
	q := &queue{conn: conn, slotSize: slotSize, send: bufio.NewWriterSize(conn, bufferSize),
		expected: make([]atomic.Int64, slots), busy: make([]bool, slots), answers: make(chan load.Done, slots)}
	if q.mem, err = unix.Mmap(-1, 0, slots*slotSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON); err != nil {
		conn.Close()
		return nil, fmt.Errorf("memory for %d requests of %d bytes: %w", slots, slotSize, err)
	}
	go q.run()
	return q, nil
}

const bufferSize = 256 << 10 // of sends and of replies, in bytes

// queue is one connection in transmission. A request's cookie is its slot.
type queue struct {
	conn     net.Conn
	send     *bufio.Writer
	header   [nbdwire.RequestSize]byte
	mem      []byte
	slotSize int
	busy     []bool // slots in flight; the owner's
	inFlight int
	// expected is 1 + the bytes that follow the reply to a slot; 0: none is
	// due. The owner sets it, run takes it.
	expected []atomic.Int64
	answers  chan load.Done // closed when the connection is over
	err      error          // why; read after that
}

func (q *queue) Buf(slot int) []byte { return q.mem[slot*q.slotSize : (slot+1)*q.slotSize] }

// Submit writes into a buffer. That the connection is over shows in Wait.
func (q *queue) Submit(r load.Request) {
	cmd, payload, follows := uint16(nbdwire.CmdRead), []byte(nil), r.Len
	if r.Op == blk.Write {
		cmd, payload, follows = nbdwire.CmdWrite, q.Buf(r.Slot)[:r.Len], 0
	}
	q.busy[r.Slot] = true
	q.inFlight++
	q.expected[r.Slot].Store(1 + int64(follows))
	q.put(cmd, uint64(r.Slot), r.Off, uint32(r.Len))
	_, _ = q.send.Write(payload)
}

func (q *queue) put(cmd uint16, cookie, off uint64, n uint32) {
	nbdwire.PutRequest(q.header[:], 0, cmd, cookie, off, n)
	_, _ = q.send.Write(q.header[:])
}

func (q *queue) Wait(done []load.Done) int {
	if q.inFlight == 0 {
		return 0
	}
	if q.send.Flush() != nil {
		q.conn.Close() // ends run; run fails the requests in flight
	}
	d, ok := <-q.answers
	n := 0
	for ok {
		done[n] = d
		q.busy[d.Slot] = false
		q.inFlight--
		if n++; n == len(done) {
			return n
		}
		select {
		case d, ok = <-q.answers:
		default:
			return n
		}
	}
	return n + q.fail(done[n:])
}

// fail answers the requests in flight on a connection that is over.
func (q *queue) fail(done []load.Done) (n int) {
	for slot, busy := range q.busy {
		if busy && n < len(done) {
			done[n] = load.Done{Slot: slot, Err: q.err}
			q.busy[slot] = false
			q.inFlight--
			n++
		}
	}
	return n
}

// run reads replies until the connection ends.
func (q *queue) run() {
	r := bufio.NewReaderSize(q.conn, bufferSize)
	for {
		d, err := q.reply(r)
		if err != nil {
			q.err = fmt.Errorf("the NBD connection is over: %w", err)
			close(q.answers)
			return
		}
		q.answers <- d
	}
}

func (q *queue) reply(r io.Reader) (d load.Done, err error) {
	var h [nbdwire.SimpleSize]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return d, err
	}
	s := nbdwire.Simple(h[:])
	code, slot := s.Errno(), s.Cookie()
	if s.Magic() != nbdwire.MagicSimple || slot >= uint64(len(q.expected)) {
		return d, fmt.Errorf("reply % x is garbage", h)
	}
	expected := q.expected[slot].Swap(0)
	if expected == 0 {
		return d, fmt.Errorf("reply to request %d, which does not wait", slot)
	}
	d.Slot = int(slot)
	if code != 0 {
		d.Err = syscall.Errno(code) // NBD's numbers are those of Linux
		return d, nil
	}
	_, err = io.ReadFull(r, q.Buf(d.Slot)[:expected-1])
	return d, err
}

// goodbye is the time for a server to end the connection after it was asked to.
const goodbye = time.Second

// Close asks the server to end the connection and waits until it has: then the
// server counts one user less. It waits for run, since run uses the memory.
func (q *queue) Close() error {
	q.put(nbdwire.CmdDisc, 0, 0, 0)
	_ = q.send.Flush() // a courtesy
	_ = q.conn.SetReadDeadline(time.Now().Add(goodbye))
	for range q.answers {
	}
	if secure, ok := q.conn.(*tls.Conn); ok {
		_ = secure.CloseWrite() // the server may have gone
		q.conn = secure.NetConn()
	}
	return errors.Join(q.conn.Close(), unix.Munmap(q.mem))
}
