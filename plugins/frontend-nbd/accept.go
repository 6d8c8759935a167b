package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	handshakeTime = 15 * time.Second // for the whole negotiation, with TLS
	acceptPause   = 50 * time.Millisecond
)

// acceptSocket is a socket of the daemon.
type acceptSocket struct {
	net.Listener
	name       string            // the daemon's
	handshakes *handshakeLimiter // bounds the connections that negotiate
	hushed     atomic.Bool
	accepting  chan struct{} // closed when accept has returned
}

// interrupt ends the Accept under way, goOn lets further ones wait again.
func (l *acceptSocket) interrupt() { l.setDeadline(time.Now()) }
func (l *acceptSocket) goOn()      { l.setDeadline(time.Time{}) }

func (l *acceptSocket) setDeadline(t time.Time) {
	if d, ok := l.Listener.(interface{ SetDeadline(time.Time) error }); ok {
		_ = d.SetDeadline(t)
	}
}

// AddListener serves the exports on a listening socket. The daemon keeps the
// socket open: when this process dies, the next one accepts from it.
func (f *frontend) AddListener(_ context.Context, name string, file *os.File) error {
	nl, err := net.FileListener(file) // a duplicate
	if err != nil {
		return fmt.Errorf("descriptor does not listen: %w", err)
	}
	file.Close()
	l := &acceptSocket{Listener: nl, name: name, handshakes: newHandshakeLimiter(), accepting: make(chan struct{})}
	f.mu.Lock()
	f.listeners = append(f.listeners, l)
	f.mu.Unlock()
	f.eachQueue(func(q *queue) { q.pauseConns(false) }) // this process may have given up its connections before
	f.log().Info("listening", "listener", name, "address", l.Addr().String())
	go f.acceptLoop(l)
	return nil
}

// acceptLoop runs until the listener is closed or hushed.
func (f *frontend) acceptLoop(l *acceptSocket) {
	defer close(l.accepting)
	for {
		nc, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) || l.hushed.Load() {
				return
			}
			f.log().Warn("accept failed", "address", l.Addr(), "err", err)
			time.Sleep(acceptPause) // out of descriptors: others may close some
			continue
		}
		l.handshakes.acquire(nc)
		go f.negotiateConn(l, nc)
	}
}

var errGaveWay = errors.New("the negotiation was slow, and gave way to another one")

// negotiateConn negotiates and gives the connection to a queue. One with TLS is carried
// there until it ends.
func (f *frontend) negotiateConn(l *acceptSocket, nc net.Conn) {
	defer nc.Close()
	secure := f.securityOf(l.name)
	if secure != nil {
		secure.user = &nbdUser{events: &f.users, from: addressOf(nc), peer: peerOf(nc), listener: l.name}
	}
	t, err := f.secureConn(nc, l.name, secure)
	if !l.handshakes.release(nc) && err != nil {
		err = errGaveWay
	}
	if err != nil && !errors.Is(err, errAborted) {
		f.log().Info("connection refused", "peer", peerOf(nc), "err", err)
		if secure != nil {
			secure.user.eventRefused(err)
		}
	}
	if t != nil {
		t.run()
	}
}

// secureConn returns the tunnel to run, nil without TLS.
func (f *frontend) secureConn(nc net.Conn, listener string, s *listenerSecurity) (*tlsTunnel, error) {
	if err := nc.SetDeadline(time.Now().Add(handshakeTime)); err != nil {
		return nil, err
	}
	n, err := runHandshake(nc, f, s)
	n.listener = listener
	switch {
	case err != nil:
		return nil, err
	case n.tls != nil:
		return f.newTunnel(n, peerOf(nc))
	}
	return nil, f.addConn(nc, n)
}

// addConn gives a negotiated connection to a queue. If that fails, the export is
// released.
func (f *frontend) addConn(nc net.Conn, n handshakeResult) error {
	fd, err := duplicateSocket(nc)
	if err != nil {
		n.exp.removeOpener()
		return err
	}
	if nc.LocalAddr().Network() == "unix" {
		enlargeSendBuffer(fd)
	}
	return f.assignConn(fd, peerOf(nc), n, nil)
}

// assignConn gives a socket to the queue with the fewest connections of its export. If
// that fails, the socket is closed and the export is released.
func (f *frontend) assignConn(fd int, peer string, n handshakeResult, t *tlsTunnel) error {
	sh := f.assignShare(n.exp)
	if sh == nil {
		n.exp.removeOpener()
		unix.Close(fd)
		return errors.New("no queue to serve it")
	}
	f.eachQueue(func(q *queue) { q.noteEnds(n.exp) }) // their requests go ahead of those of the new connection
	c := newConn(fd, peer, n, sh)
	c.tunnel, c.user, c.proof = t, n.user, proofOf(n.tls)
	n.user.eventOpened(n.exp.name, n.readOnly)
	if !f.runOnQueue(sh.q, func() { sh.q.addConn(c) }) {
		n.user.closes(n.exp.name, n.readOnly, errShutdown, false)
		n.exp.unassignShare(sh)
		n.exp.removeOpener()
		unix.Close(fd)
		return errShutdown
	}
	f.recheckLate(c, n.by)
	log := f.log()
	if n.tls != nil {
		log = log.With("cipher", cipherOf(n.tls), "identity", identityOf(n.tls))
	}
	log.Info("connection opened", "export", n.exp.name, "peer", c.peer, "structured", n.structured)
	return nil
}

// sendBuffer is the send buffer of unix sockets, in bytes, so that one call
// takes most of a large reply. The kernel doubles it and charges its overhead to
// it. TCP sockets size their buffers themselves.
const sendBuffer = 512 << 10

// enlargeSendBuffer enlarges the send buffer; without privileges up to net.core.wmem_max.
// A failure costs only speed.
func enlargeSendBuffer(fd int) {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer) != nil {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, sendBuffer)
	}
}

func (f *frontend) assignShare(e *export) *slotShare {
	f.mu.Lock()
	defer f.mu.Unlock()
	return e.assignShare(f.queues)
}

// duplicateSocket returns a descriptor of the socket that the Go runtime does not
// poll. It is non-blocking, as the original.
func duplicateSocket(nc net.Conn) (fd int, err error) {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return -1, fmt.Errorf("%T has no descriptor", nc)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return -1, err
	}
	cerr := raw.Control(func(old uintptr) {
		fd, err = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0)
	})
	if err = errors.Join(cerr, err); err != nil {
		return -1, fmt.Errorf("duplicate socket: %w", err)
	}
	return fd, nil
}

func peerOf(nc net.Conn) string {
	if a := nc.RemoteAddr(); a != nil && a.String() != "" {
		return a.String()
	}
	return nc.LocalAddr().String()
}
