// Package nbd makes load on an export of an NBD server, as a device of package
// load.
//
// A queue is a connection of its own. Its owner sends; a goroutine reads the
// replies. Replies are simple ones, and a server may answer while it does not
// read. Negotiation is in handshake.go.
package nbd

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/load"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/private"
)

// Export is a device that an NBD server has.
type Export struct {
	network, address, name string
	tls                    *tls.Config // nil: none
	limits                 blk.Limits
	cipher                 string // protocol and cipher of TLS
}

// Open connects once, to learn the limits of the export. uri is
// nbd://HOST:PORT/NAME or nbd+unix:///NAME?socket=PATH. With nbds in the place
// of nbd the connection has TLS; see loadTLS for its files.
func Open(ctx context.Context, uri string) (*Export, error) {
	e, err := parse(uri)
	if err != nil {
		return nil, err
	}
	conn, err := e.dial(ctx)
	if err != nil {
		return nil, err
	}
	return e, conn.Close()
}

func parse(uri string) (*Export, error) {
	u, err := url.Parse(uri)
	if err != nil {
		return nil, err
	}
	e := &Export{network: "tcp", address: u.Host, name: strings.TrimPrefix(u.Path, "/")}
	scheme, transport, _ := strings.Cut(u.Scheme, "+")
	if transport == "unix" {
		e.network, e.address = "unix", u.Query().Get("socket")
	}
	if scheme != "nbd" && scheme != "nbds" || transport != "" && transport != "unix" || e.address == "" {
		return nil, fmt.Errorf("%q is no address of an NBD export: %w", uri, syscall.EINVAL)
	}
	if scheme == "nbds" {
		e.tls, err = loadTLS(u.Query().Get("tls-certificates"), cmp.Or(u.Query().Get("tls-hostname"), u.Hostname(), "localhost"))
	}
	return e, err
}

// IsURI reports whether name is one that Open takes, by its beginning.
func IsURI(name string) bool {
	scheme, _, ok := strings.Cut(name, "://")
	return ok && slices.Contains([]string{"nbd", "nbd+unix", "nbds", "nbds+unix"}, scheme)
}

// loadTLS reads the files ca-cert.pem, client-cert.pem and client-key.pem of a
// folder, as libnbd names them. Without the last two the client has no
// certificate. Without a folder the authorities are those of the system. host is
// what the server must prove to be.
func loadTLS(dir, host string) (*tls.Config, error) {
	cfg := &tls.Config{ServerName: host, DynamicRecordSizingDisabled: true}
	if dir == "" {
		return cfg, nil
	}
	ca, err := os.ReadFile(filepath.Join(dir, "ca-cert.pem"))
	if err != nil {
		return nil, fmt.Errorf("tls-certificates: %w", err)
	}
	cfg.RootCAs = x509.NewCertPool()
	if !cfg.RootCAs.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("tls-certificates: %s has no certificate: %w", filepath.Join(dir, "ca-cert.pem"), syscall.EINVAL)
	}
	cert, err := tls.LoadX509KeyPair(filepath.Join(dir, "client-cert.pem"), filepath.Join(dir, "client-key.pem"))
	switch {
	case err == nil:
		cfg.Certificates = []tls.Certificate{cert}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("tls-certificates: %w", err)
	}
	return cfg, nil
}

// dial connects and negotiates, bounded by ctx.
func (e *Export) dial(ctx context.Context) (net.Conn, error) {
	dial := (&net.Dialer{}).DialContext
	if e.network == "unix" {
		dial = func(ctx context.Context, _, path string) (net.Conn, error) { return private.Dial(ctx, path) }
	}
	conn, err := dial(ctx, e.network, e.address)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	use := conn
	if e.tls == nil {
		e.limits, err = negotiate(conn, e.name)
	} else {
		use, err = e.dialTLS(conn)
	}
	if err == nil && !stop() {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("open export %q of %s: %w", e.name, e.address, err)
	}
	return use, nil
}

// dialTLS is negotiate with TLS.
func (e *Export) dialTLS(conn net.Conn) (net.Conn, error) {
	secure, l, err := negotiateTLS(conn, e.tls, e.name)
	if err != nil {
		return nil, err
	}
	s := secure.ConnectionState()
	e.limits, e.cipher = l, tls.VersionName(s.Version)+" "+tls.CipherSuiteName(s.CipherSuite)
	return secure, nil
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

const (
	magicRequest = 0x25609513
	magicReply   = 0x67446698
	cmdRead      = 0
	cmdWrite     = 1
	cmdDisc      = 2
	headerSize   = 28
	replySize    = 16
	bufferSize   = 256 << 10
)

// queue is one connection in transmission. A request's cookie is its slot.
type queue struct {
	conn     net.Conn
	send     *bufio.Writer
	header   [headerSize]byte
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
	cmd, payload, follows := uint16(cmdRead), []byte(nil), r.Len
	if r.Op == blk.Write {
		cmd, payload, follows = cmdWrite, q.Buf(r.Slot)[:r.Len], 0
	}
	q.busy[r.Slot] = true
	q.inFlight++
	q.expected[r.Slot].Store(1 + int64(follows))
	q.put(cmd, uint64(r.Slot), r.Off, uint32(r.Len))
	_, _ = q.send.Write(payload)
}

func (q *queue) put(cmd uint16, cookie, off uint64, n uint32) {
	b := binary.BigEndian.AppendUint32(q.header[:0], magicRequest)
	b = binary.BigEndian.AppendUint16(b, 0)
	b = binary.BigEndian.AppendUint16(b, cmd)
	b = binary.BigEndian.AppendUint64(b, cookie)
	b = binary.BigEndian.AppendUint64(b, off)
	_, _ = q.send.Write(binary.BigEndian.AppendUint32(b, n))
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
	var h [replySize]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return d, err
	}
	code, slot := binary.BigEndian.Uint32(h[4:]), binary.BigEndian.Uint64(h[8:])
	if binary.BigEndian.Uint32(h[:]) != magicReply || slot >= uint64(len(q.expected)) {
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
	q.put(cmdDisc, 0, 0, 0)
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
