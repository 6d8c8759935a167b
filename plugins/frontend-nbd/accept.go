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

// listener is a socket of the daemon.
type listener struct {
	net.Listener
	name      string // the daemon's
	crowd     *crowd // of connections that negotiate
	hushed    atomic.Bool
	accepting chan struct{} // closed when accept has returned
}

// interrupt ends the Accept under way, goOn lets further ones wait again.
func (l *listener) interrupt() { l.setDeadline(time.Now()) }
func (l *listener) goOn()      { l.setDeadline(time.Time{}) }

func (l *listener) setDeadline(t time.Time) {
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
	l := &listener{Listener: nl, name: name, crowd: newCrowd(), accepting: make(chan struct{})}
	f.mu.Lock()
	f.listeners = append(f.listeners, l)
	f.mu.Unlock()
	f.eachQueue(func(q *queue) { q.hold(false) }) // this process may have given up its connections before
	f.log().Info("listening", "listener", name, "address", l.Addr().String())
	go f.accept(l)
	return nil
}

// accept runs until the listener is closed or hushed.
func (f *frontend) accept(l *listener) {
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
		l.crowd.enter(nc)
		go f.welcome(l, nc)
	}
}

var errGaveWay = errors.New("the negotiation was slow, and gave way to another one")

// welcome negotiates and gives the connection to a queue. One with TLS is carried
// there until it ends.
func (f *frontend) welcome(l *listener, nc net.Conn) {
	defer nc.Close()
	secure := f.securityOf(l.name)
	if secure != nil {
		secure.user = &user{events: &f.users, from: addressOf(nc), peer: peerOf(nc), listener: l.name}
	}
	t, err := f.introduce(nc, l.name, secure)
	if !l.crowd.leave(nc) && err != nil {
		err = errGaveWay
	}
	if err != nil && !errors.Is(err, errAborted) {
		f.log().Info("connection refused", "peer", peerOf(nc), "err", err)
		if secure != nil {
			secure.user.refused(err)
		}
	}
	if t != nil {
		t.run()
	}
}

// introduce returns the tunnel to run, nil without TLS.
func (f *frontend) introduce(nc net.Conn, listener string, s *security) (*tunnel, error) {
	if err := nc.SetDeadline(time.Now().Add(handshakeTime)); err != nil {
		return nil, err
	}
	n, err := negotiate(nc, f, s)
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
func (f *frontend) addConn(nc net.Conn, n negotiated) error {
	fd, err := duplicate(nc)
	if err != nil {
		n.exp.release()
		return err
	}
	if nc.LocalAddr().Network() == "unix" {
		widen(fd)
	}
	return f.join(fd, peerOf(nc), n, nil)
}

// join gives a socket to the queue with the fewest connections of its export. If
// that fails, the socket is closed and the export is released.
func (f *frontend) join(fd int, peer string, n negotiated, t *tunnel) error {
	sh := f.assign(n.exp)
	if sh == nil {
		n.exp.release()
		unix.Close(fd)
		return errors.New("no queue to serve it")
	}
	f.eachQueue(func(q *queue) { q.noteEnds(n.exp) }) // their requests go ahead of those of the new connection
	c := newConn(fd, peer, n, sh)
	c.tunnel, c.user, c.proof = t, n.user, proofOf(n.tls)
	n.user.opens(n.exp.name, n.readOnly)
	if !f.post(sh.q, func() { sh.q.add(c) }) {
		n.user.closes(n.exp.name, n.readOnly, errShutdown, false)
		n.exp.unassign(sh)
		n.exp.release()
		unix.Close(fd)
		return errShutdown
	}
	f.judgeLate(c, n.by)
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

// widen enlarges the send buffer; without privileges up to net.core.wmem_max.
// A failure costs only speed.
func widen(fd int) {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer) != nil {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, sendBuffer)
	}
}

func (f *frontend) assign(e *export) *share {
	f.mu.Lock()
	defer f.mu.Unlock()
	return e.assign(f.queues)
}

// duplicate returns a descriptor of the socket that the Go runtime does not
// poll. It is non-blocking, as the original.
func duplicate(nc net.Conn) (fd int, err error) {
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
