package iwarp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// listener implements verbs.Listener.
type listener struct {
	dev        *Device
	tcp        *net.TCPListener
	handshakes *handshakeLimiter
	reqs       chan *connRequest
	room       chan struct{} // one token for each handshake, also of requests that wait for Accept
	done       chan struct{} // closed by Close
	wg         sync.WaitGroup
	once       sync.Once

	refused atomic.Pointer[func(verbs.Refused)] // nil: nothing is told
}

// Listen accepts connections at addr, on a socket of Inherit if there is one.
func (d *Device) Listen(addr netip.AddrPort) (verbs.Listener, error) {
	nl, err := d.socketAt(addr)
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", addr, err)
	}
	l := &listener{
		dev: d, tcp: nl, handshakes: newHandshakeLimiter(d.cfg.MaxHandshakes, d.cfg.MaxHandshakesPerAddress),
		reqs: make(chan *connRequest), room: make(chan struct{}, d.cfg.MaxHandshakes), done: make(chan struct{}),
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		nl.Close()
		return nil, fmt.Errorf("listen at %s: %w", addr, verbs.ErrClosed)
	}
	d.listeners[l] = struct{}{}
	l.wg.Go(l.run)
	return l, nil
}

// socketAt returns a socket that listens at addr.
func (d *Device) socketAt(addr netip.AddrPort) (*net.TCPListener, error) {
	d.mu.Lock()
	l := d.inherited[addr]
	delete(d.inherited, addr)
	d.mu.Unlock()
	if l != nil {
		return l, nil
	}
	// Connections inherit the options of the socket that listens.
	lc := net.ListenConfig{KeepAliveConfig: d.cfg.keepAlive(), Control: d.cfg.limitSilence}
	lc.SetMultipathTCP(false)
	nl, err := lc.Listen(context.Background(), "tcp", addr.String())
	if err != nil {
		return nil, err
	}
	return nl.(*net.TCPListener), nil
}

// Inherit gives the device a socket that listens already, made by another process
// or a listener that was closed. Listen at the address that it returns takes the
// socket. Connections that wait there are accepted then. Inherit does not take f
// over.
func (d *Device) Inherit(f *os.File) (netip.AddrPort, error) {
	nl, err := net.FileListener(f)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("descriptor %q does not listen: %w", f.Name(), err)
	}
	l, ok := nl.(*net.TCPListener)
	if !ok {
		nl.Close()
		return netip.AddrPort{}, fmt.Errorf("descriptor %q listens on %s, not on TCP", f.Name(), nl.Addr().Network())
	}
	addr := addrPort(l.Addr())
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || d.inherited[addr] != nil {
		l.Close()
		return addr, fmt.Errorf("descriptor %q: the device is closed, or has a socket at %s already", f.Name(), addr)
	}
	d.inherited[addr] = l
	return addr, nil
}

// Socket returns a duplicate of the socket that listens at addr. Connections wait
// there while no process accepts them, for as long as a duplicate is open.
func (d *Device) Socket(addr netip.AddrPort) (*os.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for l := range d.listeners {
		if l.Addr() == addr {
			return l.tcp.File()
		}
	}
	return nil, fmt.Errorf("the device does not listen at %s", addr)
}

// Addr implements verbs.Listener.
func (l *listener) Addr() netip.AddrPort { return addrPort(l.tcp.Addr()) }

// WatchRefused implements verbs.Refuser.
func (l *listener) WatchRefused(f func(verbs.Refused)) { l.refused.Store(&f) }

// reportRefusal tells of a connection that is refused because of its protection.
func (l *listener) reportRefusal(h *pendingHandshake, err error) {
	var no *unprotectedError
	f := l.refused.Load()
	if f == nil || !errors.As(err, &no) || errors.Is(err, net.ErrClosed) { // the last: this side ends
		return
	}
	r := verbs.Refused{Client: addrPort(h.conn.RemoteAddr()), Server: addrPort(h.conn.LocalAddr()), Err: no.error}
	if claim, ok := errors.AsType[verbs.Unproved](err); ok {
		r.Claimed = claim.Claimed
	}
	(*f)(r)
}

// Accept implements verbs.Listener.
func (l *listener) Accept() (verbs.ConnRequest, error) {
	select {
	case r := <-l.reqs:
		return r, nil
	case <-l.done:
		return nil, fmt.Errorf("accept at %s: %w", l.Addr(), verbs.ErrClosed)
	}
}

// Close implements verbs.Listener. It waits for the handshakes to stop.
func (l *listener) Close() error {
	l.once.Do(func() {
		close(l.done)
		l.tcp.Close()
		l.handshakes.close()
		l.dev.mu.Lock()
		delete(l.dev.listeners, l)
		l.dev.mu.Unlock()
	})
	l.wg.Wait()
	return nil
}

// run accepts connections until the listener is closed. After a failure that
// may pass, such as too few descriptors, it tries again.
func (l *listener) run() {
	for {
		conn, err := l.tcp.AcceptTCP()
		switch {
		case err == nil:
			if !l.startHandshake(conn) {
				return
			}
			continue
		case errors.Is(err, net.ErrClosed):
			return
		}
		l.dev.cfg.Logger.Warn("iwarp listener cannot accept a connection and tries again", "address", l.Addr(), "err", err)
		select {
		case <-time.After(100 * time.Millisecond):
		case <-l.done:
			return
		}
	}
}

// startHandshake starts the handshake on conn. Another one may have to give way. If all
// others are requests that wait for Accept, begin waits too, and further
// connections wait in the backlog of the kernel. It reports whether the listener
// is still open.
func (l *listener) startHandshake(conn *net.TCPConn) bool {
	h := newHandshake(conn, l.dev.cfg.RequestTimeout)
	l.handshakes.addHandshake(h)
	if !l.enterRoom(h) {
		conn.Close()
		return false
	}
	l.wg.Go(func() {
		l.runHandshake(h)
		<-l.room
	})
	return true
}

// enterRoom waits for a place among all handshakes and reports whether the
// listener is still open. Meanwhile handshakes may give way that could not
// before.
func (l *listener) enterRoom(h *pendingHandshake) bool {
	for {
		select {
		case l.room <- struct{}{}:
			return true
		case <-l.done:
			return false
		case <-time.After(10 * time.Millisecond):
			l.handshakes.closeVictim(h)
		}
	}
}

// runHandshake reads the request and offers it to Accept.
func (l *listener) runHandshake(h *pendingHandshake) {
	r, err := l.dev.examineRequest(h)
	l.reportRefusal(h, err)
	if stayed := l.handshakes.removeHandshake(h); err != nil && !stayed {
		err = errGaveWay
	}
	if err == nil {
		select {
		case l.reqs <- r:
			return
		case <-l.done:
			err = verbs.ErrClosed
		}
	}
	h.conn.Close()
	l.dev.countHandshake(err)
	level := slog.LevelInfo
	if err == errGaveWay {
		level = slog.LevelDebug // there are many, and they are counted
	}
	l.dev.cfg.Logger.Log(context.Background(), level, "iwarp connection refused", "remote", addrPort(h.conn.RemoteAddr()), "cause", err)
}

// examineRequest reads and checks a request within the deadline of h. If it refuses,
// it has sent the refusal.
func (d *Device) examineRequest(h *pendingHandshake) (*connRequest, error) {
	tcp := h.conn
	conn, from, err := d.protectAccept(h)
	if err != nil {
		return nil, err
	}
	cfg := d.cfgFor(conn)
	frame, err := readMPA(from, mpaKeyRequest)
	if err != nil {
		return nil, fmt.Errorf("receive MPA request: %w", err)
	}
	r := &connRequest{dev: d, startupConn: conn, cfg: cfg, frame: frame}
	r.terms, r.private, r.depths, err = cfg.checkRequest(&frame)
	var no *mpaRefusal
	if errors.As(err, &no) {
		conn.Write(no.reply.encode(mpaKeyReply))
	}
	if err != nil {
		return nil, err
	}
	if bytesWaiting(tcp) {
		return nil, fmt.Errorf("%w: bytes behind the request", errMPA)
	}
	conn.SetDeadline(time.Time{})
	return r, nil
}

// connRequest implements verbs.ConnRequest.
type connRequest struct {
	*startupConn
	dev     *Device
	cfg     *Config
	frame   mpaFrame
	terms   connTerms
	depths  readDepths
	private []byte
}

func (r *connRequest) Private() []byte            { return r.private }
func (r *connRequest) LocalAddr() netip.AddrPort  { return addrPort(r.TCPConn.LocalAddr()) }
func (r *connRequest) RemoteAddr() netip.AddrPort { return addrPort(r.TCPConn.RemoteAddr()) }

// Accept implements verbs.ConnRequest.
func (r *connRequest) Accept(v verbs.QP, private []byte) error {
	defer r.startupConn.Close()
	q, ok := v.(*qp)
	if !ok || q.dev != r.dev {
		return fmt.Errorf("accept %s: %w", r.RemoteAddr(), softverbs.ErrForeign)
	}
	if err := q.Begin(private, maxUserData); err != nil {
		return fmt.Errorf("accept %s: %w", r.RemoteAddr(), err)
	}
	err := r.answerOnce(false, private)
	if err == nil {
		err = q.handToOwner(r.startupConn, r.terms)
	}
	if err != nil {
		q.Move(softverbs.Connecting, softverbs.Down)
		return fmt.Errorf("accept %s: %w", r.RemoteAddr(), err)
	}
	return nil
}

// Reject implements verbs.ConnRequest.
func (r *connRequest) Reject(private []byte) error {
	defer r.startupConn.Close()
	if len(private) > maxUserData {
		private = private[:maxUserData]
	}
	if err := r.answerOnce(true, private); err != nil {
		return fmt.Errorf("reject %s: %w", r.RemoteAddr(), err)
	}
	return nil
}

func (r *connRequest) answerOnce(reject bool, private []byte) error {
	if bytesWaiting(r.TCPConn) {
		return fmt.Errorf("%w: bytes behind the request", errMPA)
	}
	f := r.cfg.mpaReply(&r.frame, r.terms, r.depths, reject, private)
	r.startupConn.SetDeadline(time.Now().Add(answerLimit))
	_, err := r.startupConn.Write(f.encode(mpaKeyReply))
	return err
}

// bytesWaiting reports whether bytes wait in the socket.
func bytesWaiting(conn *net.TCPConn) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return false
	}
	waiting := false
	raw.Control(func(fd uintptr) {
		var b [1]byte
		n, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		waiting = err == nil && n > 0
	})
	return waiting
}
