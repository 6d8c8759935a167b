package iwarp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/internal/tlsrecord"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// TLSMode selects the connections that a listener takes.
type TLSMode uint8

const (
	TLSOff     TLSMode = iota // plain ones
	TLSAllow                  // both: the first byte of the peer decides
	TLSRequire                // those with TLS
)

// startupConn is a connection during the start-up, with or without TLS.
type startupConn struct {
	*net.TCPConn
	tls *tlsauth.Conn // nil: plain
}

func (s *startupConn) Read(b []byte) (int, error) {
	if s.tls != nil {
		return s.tls.Read(b)
	}
	return s.TCPConn.Read(b)
}

func (s *startupConn) Write(b []byte) (int, error) {
	if s.tls != nil {
		return s.tls.Write(b)
	}
	return s.TCPConn.Write(b)
}

// Security implements verbs.Secured for requests.
func (s *startupConn) Security() verbs.Security {
	if s.tls == nil {
		return verbs.Security{}
	}
	return s.tls.Security()
}

// cfgFor returns the configuration for a connection: under TLS another checksum
// finds nothing that TLS does not find.
func (d *Device) cfgFor(s *startupConn) *Config {
	if s.tls == nil || d.cfg.TLSCRC {
		return &d.cfg
	}
	c := d.cfg
	c.CRC = false
	return &c
}

var errNoTLS = errors.New("this end has no TLS: it needs the files of a certificate or of a shared key")

// protectDial makes the client's handshake, if one is asked for.
func (d *Device) protectDial(tcp *net.TCPConn, p *verbs.ConnectParams) (*startupConn, error) {
	s := &startupConn{TCPConn: tcp}
	switch {
	case !p.Protect:
		return s, nil
	case d.cfg.TLS == nil:
		return nil, errNoTLS
	}
	var err error
	s.tls, err = d.cfg.TLS.Client(tcp, p.PeerName)
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("%w: the server may have no TLS, or its log says why it refuses", err)
	}
	return s, err
}

// peekedConn is a connection with its first bytes read already. It implements
// tlsauth.Turns.
type peekedConn struct {
	*net.TCPConn
	r io.Reader
	h *pendingHandshake
	e *handshakeScheduler
}

func (f *peekedConn) Read(b []byte) (int, error) { return f.r.Read(b) }

func (f *peekedConn) Take() error {
	return f.e.acquire(addrPort(f.TCPConn.RemoteAddr()).Addr(), f.h.deadline, f.h.out)
}

func (f *peekedConn) Give() { f.e.release() }

// typeHandshake is the first byte of a TLS connection. An MPA request begins with
// a letter.
const typeHandshake = 22

// protectAccept makes the server's handshake, as the mode of the listener has
// it. It returns the reader of the request.
func (d *Device) protectAccept(h *pendingHandshake) (*startupConn, io.Reader, error) {
	tcp := h.conn
	s := &startupConn{TCPConn: tcp}
	if d.cfg.AcceptTLS == TLSOff {
		return s, s, nil
	}
	var b [1]byte
	if _, err := io.ReadFull(tcp, b[:]); err != nil {
		return nil, nil, err
	}
	whole := &peekedConn{tcp, io.MultiReader(bytes.NewReader(b[:]), tcp), h, &d.tlsHandshakes}
	switch {
	case b[0] != typeHandshake && d.cfg.AcceptTLS == TLSRequire:
		return nil, nil, &unprotectedError{errors.New("the peer does not begin with TLS, which this listener requires")}
	case b[0] != typeHandshake:
		return s, whole, nil
	}
	var err error
	if s.tls, err = d.cfg.TLS.Server(whole); err != nil {
		err = &unprotectedError{err}
	}
	return s, s, err
}

// unprotectedError is the error of a connection that TLS does not protect.
type unprotectedError struct{ error }

func (e *unprotectedError) Unwrap() error { return e.error }

// DATA PATH. The part of TLS in a connection. Receiving: fillRecords reads
// from the socket and opens one record at a time in place, from where rx.go places
// payload. Sending: seal makes records of the list of tx.go.

const (
	// protectFirst is the size of either buffer at first, in bytes. A buffer
	// that is too small becomes larger once.
	protectFirst = 32 << 10
	openSize     = 256 << 10
	sealSize     = 16 * (tlsrecord.MaxContent + tlsrecord.Overhead)
	// protectHead is room in front of the first record for the part of a header
	// or a tail that was in the record before.
	protectHead = 64
)

// tlsState is TLS of a connection.
type tlsState struct {
	in       *tlsrecord.Opener
	out      *tlsrecord.Sealer
	security verbs.Security

	got     []byte // received: got[r:w] are not opened. The staging buffer is in it.
	r, w    int
	pending bool // a whole record is there

	sealed   []byte // sealed[at:n] waits for the socket
	at, n    int
	position uint64 // stream position of the sealed bytes
	update   bool   // the peer asks for a new key
	vec      iovecList
	alert    tlsrecord.AlertCode
}

// installTLS takes over a connection after its handshake. rest are the bytes
// received behind it.
func (q *qp) installTLS(c *tlsauth.Conn) (err error) {
	p := &tlsState{security: c.Security(), vec: newVec(1)}
	var rest []byte
	if p.in, p.out, rest, err = c.Detach(); err != nil {
		return err
	}
	if len(rest) > 0 && !q.terms.initiator {
		return fmt.Errorf("%w: bytes behind the request", errMPA)
	}
	p.got = make([]byte, max(protectFirst, protectHead+len(rest)+tlsrecord.MaxRecord))
	p.sealed = make([]byte, protectFirst)
	// rest is parsed like the rest of a record.
	p.r = protectHead + copy(p.got[protectHead:], rest)
	p.w = p.r
	q.rx.stage, q.rx.r, q.rx.w = p.got, protectHead, p.r
	q.tls = p
	return nil
}

// Security implements verbs.Secured.
func (q *qp) Security() verbs.Security {
	if q.Is(softverbs.Idle) || q.Is(softverbs.Connecting) || q.tls == nil {
		return verbs.Security{}
	}
	return q.tls.security
}

// canFill reports whether fill may find something.
func (q *qp) canFill() bool { return q.readable || q.tls != nil && q.tls.pending }

// fillRecords opens the next record, or reads from the socket if none is whole.
// It returns the number of bytes.
func (q *qp) fillRecords() int {
	p := q.tls
	size, err := p.in.Next(p.got[p.r:p.w])
	switch {
	case err != nil:
		q.onUnprotected(err)
		return 0
	case size == 0:
		return q.readRecords()
	}
	q.openRecord(size)
	if q.End.State == softverbs.EndNone {
		next, err := p.in.Next(p.got[p.r:p.w])
		p.pending = next > 0 || err != nil
	}
	return size
}

// readRecords reads from the socket once.
func (q *qp) readRecords() int {
	x, p := &q.rx, q.tls
	left := x.w - x.r // at most a part of a header or a tail
	copy(p.got[protectHead-left:], x.stage[x.r:x.w])
	x.r, x.w = protectHead-left, protectHead
	p.w = protectHead + copy(p.got[protectHead:], p.got[p.r:p.w])
	p.r, p.pending = protectHead, false
	x.v.setEntry(0, p.got[p.w:])
	room := len(p.got) - p.w
	got, errno := x.v.recv(q.fd, 1)
	if got == 0 && errno == 0 {
		q.peerGone(errTruncated)
		return 0
	}
	if !q.checkReceived(got, room, errno) {
		return 0
	}
	if p.w += got; p.w == len(p.got) && len(p.got) < openSize {
		more := make([]byte, openSize)
		copy(more, p.got)
		p.got, x.stage = more, more
	}
	size, err := p.in.Next(p.got[p.r:p.w])
	p.pending = size > 0 || err != nil
	return got
}

// errTruncated is the cause if the peer has closed the connection without
// close_notify. An attacker may have done so.
var errTruncated = fmt.Errorf("TLS: closed without close_notify: %w", io.ErrUnexpectedEOF)

// openRecord opens the record of size bytes at r. The content is staged: payload goes to
// its place from there, when the record is known to be authentic.
func (q *qp) openRecord(size int) {
	x, p := &q.rx, q.tls
	rec := p.got[p.r : p.r+size]
	at := p.r + tlsrecord.HeaderLen
	p.r += size
	typ, content, err := p.in.Open(rec)
	switch {
	case err != nil:
		q.onUnprotected(err)
	case typ != tlsrecord.ApplicationData:
		q.controlRecord(typ, content)
	default:
		left := x.w - x.r
		copy(p.got[at-left:], x.stage[x.r:x.w])
		x.r, x.w = at-left, at+len(content)
	}
}

// controlRecord handles a record that is not data.
func (q *qp) controlRecord(typ byte, content []byte) {
	switch event, err := q.tls.in.Control(typ, content); {
	case err != nil:
		q.onUnprotected(err)
	case event == tlsrecord.Closed:
		q.peerGone(io.EOF)
	case event == tlsrecord.UpdateRequested:
		q.tls.update = true
	}
}

// onUnprotected ends the connection because the peer breaks TLS.
func (q *qp) onUnprotected(err error) {
	var e *tlsrecord.Error
	if errors.As(err, &e) && !e.Received {
		q.tls.alert = e.Code
	}
	q.hangUp(verbs.StatusFatal, err)
}

// sealRecords makes records of the list until the buffer is full. All sealed before has
// been sent.
func (q *qp) sealRecords() {
	t, p := &q.tx, q.tls
	p.at, p.n = 0, 0
	if t.at == t.n {
		return
	}
	if p.update || p.out.Worn() {
		if err := p.out.SealUpdate(p.sealed); err != nil {
			q.hangUp(verbs.StatusFatal, err)
			return
		}
		p.n, p.update = tlsrecord.UpdateLen, false
	}
	for t.at < t.n && len(p.sealed)-p.n >= tlsrecord.MaxContent+tlsrecord.Overhead {
		n := t.recordLen()
		p.out.Begin(p.sealed[p.n:], tlsrecord.ApplicationData, n)
		t.gatherRecord(p.out, n)
		p.n += p.out.End()
		p.position += uint64(n)
	}
}

// recordLen returns how many bytes of the list the next record has.
func (t *transmitHalf) recordLen() (n int) {
	for i := t.at; i < t.n; i++ {
		next := int(t.v.iov[i].Len)
		if n += next; n >= tlsrecord.MaxContent {
			return tlsrecord.MaxContent
		}
	}
	return n
}

// gatherRecord takes n bytes off the list for a record.
func (t *transmitHalf) gatherRecord(out *tlsrecord.Sealer, n int) {
	for n > 0 {
		b := t.v.entryBytes(t.at)
		if len(b) <= n {
			t.at++
		} else {
			b = b[:n]
			t.v.dropFront(t.at, n)
		}
		out.Add(b)
		n -= len(b)
	}
}

// transmitRecords is transmit under TLS.
func (q *qp) transmitRecords() {
	t, p := &q.tx, q.tls
	for range batchRuns {
		if t.dead || q.fd < 0 {
			return
		}
		if p.at == p.n {
			if t.at == t.n {
				t.clearList()
				q.buildList()
			}
			if t.at < t.n && len(p.sealed) < sealSize && t.queued-p.position > protectFirst {
				p.sealed = make([]byte, sealSize+tlsrecord.UpdateLen)
			}
			if q.sealRecords(); q.fd < 0 {
				return
			}
		}
		if p.at == p.n {
			q.onAllSent()
			return
		}
		p.vec.setEntry(0, p.sealed[p.at:p.n])
		n, errno := p.vec.send(q.fd, 0, 1)
		if !q.sentSome(n, errno) {
			return
		}
		if errno == 0 {
			if p.at += n; p.at == p.n {
				t.accepted = p.position
			}
		}
	}
}

// sendAlert sends an alert as the last record, if the socket takes it at once and
// the record before is complete.
func (q *qp) sendAlert() {
	p := q.tls
	if p == nil || p.at < p.n || q.tx.dead {
		return
	}
	p.out.SealAlert(p.sealed, p.alert)
	p.vec.setEntry(0, p.sealed[:tlsrecord.AlertLen])
	p.vec.send(q.fd, 0, 1)
}
