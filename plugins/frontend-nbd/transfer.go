package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// Connections change the process. The process that gives them up:
//
//	pauseAccept  no connection is accepted, negotiations end
//	pause        no command begins; commands in flight are answered, and nothing waits
//	             for a client that does not send or read
//	exportState  the rest of each connection becomes a plugin.Connection
//
// The next one checks them in AdoptConnections and has them served in
// ServeConnections. In between each socket is in both processes, and neither touches
// it: so the first can take it back.

var (
	errHanded = errors.New("another process goes on with it")
	errMoved  = errors.New("another process goes on, without this connection")
)

const (
	// negotiationsEnd is the time for negotiations to end before a hand-over.
	negotiationsEnd = 100 * time.Millisecond
	quietPause      = 200 * time.Microsecond
)

// ReleaseConnections implements plugin.Transferrer. Connections of the kernel's
// client stay: the kernel gets new ones.
func (f *frontend) ReleaseConnections(ctx context.Context) (all []plugin.Connection, closed int, err error) {
	f.transfer.Lock()
	defer f.transfer.Unlock()
	listeners := f.pauseAccept()
	f.awaitNegotiated(ctx, listeners)
	f.eachQueue(func(q *queue) { q.pauseConns(true) })
	if err := f.awaitQuiet(ctx); err != nil {
		f.eachQueue(func(q *queue) { q.pauseConns(false) })
		f.resumeAccept(listeners)
		return nil, 0, err
	}
	for _, l := range listeners {
		closed += l.handshakes.closeAll()
		l.Close()
	}
	f.eachQueue(func(q *queue) {
		given, lost := q.exportConns()
		all, closed = append(all, given...), closed+lost
	})
	f.log().Info("connections are given up for another process", "connections", len(all), "closed", closed)
	return all, closed, nil
}

// pauseAccept has the listeners accept no connection, and returns them.
func (f *frontend) pauseAccept() []*acceptSocket {
	f.mu.Lock()
	listeners := f.listeners
	f.listeners = nil
	f.mu.Unlock()
	for _, l := range listeners {
		l.hushed.Store(true)
		l.interrupt()
		<-l.accepting
	}
	return listeners
}

// resumeAccept undoes pauseAccept.
func (f *frontend) resumeAccept(listeners []*acceptSocket) {
	for _, l := range listeners {
		l.hushed.Store(false)
		l.goOn()
		l.accepting = make(chan struct{})
		go f.acceptLoop(l)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.listeners = append(f.listeners, listeners...)
}

func (f *frontend) awaitNegotiated(ctx context.Context, listeners []*acceptSocket) {
	ctx, cancel := context.WithTimeout(ctx, negotiationsEnd)
	defer cancel()
	busy := func(l *acceptSocket) bool { return l.handshakes.pendingCount() > 0 }
	for ctx.Err() == nil && slices.ContainsFunc(listeners, busy) {
		time.Sleep(quietPause)
	}
}

// eachQueue runs fn on the thread of each queue, one after the other.
func (f *frontend) eachQueue(fn func(*queue)) {
	f.mu.Lock()
	queues := slices.Clone(f.queues)
	f.mu.Unlock()
	for _, q := range queues {
		done := make(chan struct{})
		if f.runOnQueue(q, func() { fn(q); close(done) }) {
			<-done
		}
	}
}

// awaitQuiet waits until no device has a request of a connection that is to be given
// up.
func (f *frontend) awaitQuiet(ctx context.Context) error {
	for {
		var busy *conn
		f.eachQueue(func(q *queue) {
			for _, c := range q.conns {
				if c.disk == nil && q.isBusy(c) {
					busy = c
				}
			}
		})
		if busy == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("requests of export %q do not end: %w", busy.exp.name, blk.EBUSY)
		case <-time.After(quietPause):
		}
	}
}

// isBusy reports whether the device has a request of c, or will get one. The commands
// of a client that has gone are taken to the end, since others wait for them.
func (q *queue) isBusy(c *conn) bool {
	if c.ending != 0 && c.state == connPaused {
		c.state, q.again = connOpen, true
	}
	return c.ending != 0 || c.inDevice() > 0
}

// pauseConns pauses the connections of a queue, but for those of the kernel, or has them go
// on. Queue's thread, as leave.
func (q *queue) pauseConns(on bool) {
	q.holds, q.left = on, false
	for _, c := range q.conns {
		switch {
		case c.disk != nil:
		case on && c.state == connOpen && !c.ended:
			c.state = connPaused
		case !on && c.state == connPaused:
			c.state = connOpen
			c.refuseNew()
			q.again = true
		}
	}
}

// exportConns gives the connections up. Those that cannot be given up are closed.
func (q *queue) exportConns() (all []plugin.Connection, closed int) {
	for _, c := range q.conns {
		if c.disk != nil || c.state == connDead {
			continue
		}
		given, err := c.giveUp()
		if err != nil {
			c.closeSocket(err)
			closed++
			continue
		}
		all = append(all, given)
	}
	q.left = true
	q.reapConns()
	return all, closed
}

// giveUp makes c, which is quiet, a plugin.Connection. After an error it is as before.
func (c *conn) giveUp() (plugin.Connection, error) {
	if c.tunnel != nil {
		return plugin.Connection{}, errMoved
	}
	s, bytes, err := c.exportState()
	if err != nil {
		return plugin.Connection{}, err
	}
	own, err := unix.FcntlInt(uintptr(c.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return plugin.Connection{}, err
	}
	given, err := wrapConn(c.exp.name, own, s, bytes)
	if err != nil {
		given.Close()
		return plugin.Connection{}, err
	}
	_ = unix.EpollCtl(c.q.epoll, unix.EPOLL_CTL_DEL, c.fd, nil) // the socket stays open in given
	c.closeSocket(errHanded)
	return given, nil
}

// AdoptConnections implements plugin.Transferrer.
func (f *frontend) AdoptConnections(_ context.Context, all []plugin.Connection) error {
	var adopted []*conn
	for i := range all {
		c, err := f.prepareAdopted(&all[i])
		if err != nil {
			for _, c := range adopted {
				c.undoAdopt()
			}
			plugin.CloseConnections(all)
			return fmt.Errorf("connection of export %q: %w", all[i].Device, err)
		}
		adopted = append(adopted, c)
	}
	for i := range all {
		all[i].FDs[0] = -1 // the connection's
		plugin.CloseConnections(all[i : i+1])
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.adopted = append(f.adopted, adopted...)
	return nil
}

// prepareAdopted prepares a connection. Its socket is not the connection's yet.
func (f *frontend) prepareAdopted(from *plugin.Connection) (*conn, error) {
	s, h, err := unwrapConn(from)
	if err != nil {
		return nil, err
	}
	exp, err := f.openExport(from.Device)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, blk.ENODEV)
	}
	sh := f.assignShare(exp)
	if sh == nil {
		exp.removeOpener()
		return nil, fmt.Errorf("no queue to serve it: %w", blk.ENODEV)
	}
	c := newConn(from.FDs[0], s.Peer, handshakeResult{exp: exp, structured: s.Structured, allocation: s.Allocation && exp.listsExtents(), readOnly: s.ReadOnly, listener: s.Socket}, sh)
	c.toldReadOnly = s.ReadOnly && !s.Narrowed
	if s.Listener != "" {
		c.user = &nbdUser{events: &f.users, peer: s.Peer, listener: s.Listener, connected: true}
	}
	if c.handed = h; h.isOver() {
		c.handed = nil
	}
	if s.Draining {
		c.state = connDraining
	}
	return c, nil
}

// undoAdopt undoes adopt.
func (c *conn) undoAdopt() {
	c.forgetEnd()
	c.exp.unassignShare(c.sh)
	c.exp.removeOpener()
}

// ServeConnections implements plugin.Transferrer.
func (f *frontend) ServeConnections(context.Context) error {
	f.mu.Lock()
	adopted := f.adopted
	f.adopted = nil
	f.mu.Unlock()
	f.eachQueue(func(q *queue) { q.pauseConns(false) }) // this process may have given up its own before
	for _, c := range adopted {                         // before a connection is served: the requests of those that have ended go first
		if c.isGone() {
			c.noteEnd()
		}
	}
	for _, c := range adopted {
		c.user.eventOpened(c.exp.name, c.readOnly)
		if !f.runOnQueue(c.q, func() { c.q.addConn(c) }) {
			c.undoAdopt()
			unix.Close(c.fd)
			return errShutdown
		}
	}
	f.recheckAccess() // by the rules of this process
	f.log().Info("connections of another process are served", "connections", len(adopted))
	return nil
}
