package server

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// resolveName returns node and plugin for name. It may wait for the file system, as
// lookUp does.
func (s *Server) resolveName(ctx context.Context, sess *session, name, ioMode string) (*node, *ioPlugin, error) {
	p, err := s.choosePlugin(ctx, name, ioMode)
	var info plugin.Info
	if err == nil && p != nil {
		info, err = p.described(ctx)
	}
	if err != nil {
		return nil, nil, err
	}
	if info.Names == plugin.NamesOpaque {
		if !utf8.ValidString(name) {
			return nil, nil, fmt.Errorf("open %q: the plugin %s has no names that are not UTF-8: %w", name, p.cfg.Name, syscall.ENOENT)
		}
		n := &node{path: name, id: opaqueID(p, name)}
		n.volume = volumeID("name", p.cfg.Name, name)
		return n, p, nil
	}
	n, err := s.lookUp(ctx, sess, name)
	if err != nil {
		return nil, nil, err
	}
	if p == nil {
		p, err = s.pluginForNode(ctx, n)
	}
	if p == nil && err == nil {
		err = fmt.Errorf("no io plugin serves %s: %w", n.path, syscall.ENOTBLK)
	}
	if err != nil {
		n.close()
		return nil, nil, fmt.Errorf("open %q: %w", name, err)
	}
	return n, p, nil
}

// openMapping implements OPEN: docs/extend/protocol/rnbd.md, "OPEN". ioMode is the
// mode that the client asks for, or empty. OPENs of different nodes run at
// the same time.
func (s *Server) openMapping(ctx context.Context, sess *session, name, ioMode string, mode blk.AccessMode) (*mapping, error) {
	fail := func(err error) (*mapping, error) { return nil, fmt.Errorf("open %q: %w", name, err) }
	if err := s.checkEarly(ctx, sess, name, mode); err != nil {
		return fail(err)
	}
	if m, err := sess.openedBefore(ctx, name, ioMode); m != nil || err != nil {
		return m, err
	}
	if err := s.roomFor(len(sess.openMappings())); err != nil {
		return fail(err)
	}
	n, p, err := s.resolveName(ctx, sess, name, ioMode)
	if err != nil {
		return nil, s.hideVolume(sess, name, mode, err)
	}
	if err := s.judgeNode(sess, n, name, mode); err != nil {
		n.close()
		return fail(err)
	}
	if err := s.awaitFence(ctx, n.id, mode); err != nil {
		n.close()
		return fail(err)
	}
	turn, err := s.nodes.Lock(ctx, n.id)
	if err != nil {
		n.close()
		return fail(fmt.Errorf("another OPEN or CLOSE of the device does not end: %w", syscall.EBUSY))
	}
	defer turn.Unlock()
	if m, err := sess.openMapping(name, ioMode); m != nil || err != nil { // by an OPEN that had the lock before
		n.close()
		return m, err
	}
	if err := errors.Join(n.checkPresent(), s.admitWriter(n.id, mode)); err != nil {
		n.close()
		return fail(err)
	}
	id, private := n.id, n.meta.Private
	dev, err := s.acquireDevice(ctx, n, p, ioMode != "", name, mode)
	if err != nil {
		s.releaseWriter(id, mode)
		return nil, err
	}
	m := sess.newMapping(dev, name, mode)
	m.identity, m.private = sess.provedIdentity(), private
	if err := s.addMapping(ctx, sess, m, id); err != nil {
		s.releaseDevice(dev)
		s.releaseWriter(id, mode)
		return fail(err)
	}
	s.log.Info("device opened", "session", sess.name, "device", name, "path", dev.path, "id", m.id, "mode", mode.String(), "plugin", p.cfg.Name)
	m.recordAudit("", "open", mode.String())
	return m, nil
}

// checkEarly checks what can be known before the device is looked up. A mapping of the
// session whose device has failed for good is closed, so that it is opened again.
func (s *Server) checkEarly(ctx context.Context, sess *session, name string, mode blk.AccessMode) error {
	if mode > blk.Migration {
		return fmt.Errorf("access mode %d is unknown: %w", mode, syscall.EINVAL)
	}
	if err := s.cfg.Audit.Refusal(); err != nil {
		return err
	}
	if p, _ := s.jail.pool(name); p == nil { // of a volume judgeNode asks
		if err := s.checkAllowed(sess, name, mode); err != nil {
			return err
		}
	}
	return s.closeLost(ctx, sess, name)
}

// addMapping makes m one of the session's: from then on requests find it. id is its
// device's node, for the record of writers.
func (s *Server) addMapping(ctx context.Context, sess *session, m *mapping, id nodeID) error {
	if m.mode != blk.ReadOnly {
		m.writers = s.historyOf(id)
		m.writers.addWriter(m)
		m.joinFlushes()
	}
	err := m.dev.plugin.attachSession(ctx, sess)
	if err == nil {
		if err = sess.addMapping(m, s.roomFor); err != nil {
			m.dev.plugin.leaveSession(sess)
		}
	}
	if err != nil && m.writers != nil {
		m.writers.removeWriter(m, false)
	}
	return err
}

// closeLost closes the session's mapping of name if its device has failed for
// good, so that OPEN opens it again. During a restart of the plugin it waits
// for the next process. The error is EIO if the plugin is given up.
func (s *Server) closeLost(ctx context.Context, sess *session, name string) error {
	m := sess.byName(name)
	if m == nil || !m.dev.isLost() {
		return nil
	}
	if _, err := m.dev.plugin.sup.Await(ctx); err != nil {
		return fmt.Errorf("%s: %w", m.dev.stateText(), err)
	}
	if m.inFlight() > 0 {
		return fmt.Errorf("%s, and its last requests have not ended: %w", m.dev.stateText(), syscall.EBUSY)
	}
	s.closeMapping(m, false)
	return nil
}

// openedBefore does what opened does. It waits until the requests of that mapping have
// ended: if the client has lost its CLOSE with a path it has forgotten them, and they
// would overwrite the writes that follow the OPEN.
func (s *session) openedBefore(ctx context.Context, name, ioMode string) (*mapping, error) {
	for pause := 200 * time.Microsecond; ; pause = min(2*pause, 10*time.Millisecond) {
		m, err := s.openMapping(name, ioMode)
		if m == nil || err != nil || m.inFlight() == 0 {
			return m, err
		}
		if !sleepFor(ctx, pause) {
			return nil, fmt.Errorf("open %q: it is open, and %d of its requests do not end: %w", name, m.inFlight(), syscall.EBUSY)
		}
	}
}

// openMapping returns the session's mapping of name, nil if there is none. ioMode is
// as in openMapping.
func (s *session) openMapping(name, ioMode string) (*mapping, error) {
	fail := func(err error) (*mapping, error) { return nil, fmt.Errorf("open %q: %w", name, err) }
	if err := s.checkAlive(); err != nil {
		return fail(err)
	}
	m := s.byName(name)
	switch {
	case m == nil:
		return nil, nil
	case ioMode != "" && m.dev.plugin.cfg.Name != ioMode:
		return fail(fmt.Errorf("it is open with io mode %s: %w", m.dev.plugin.cfg.Name, syscall.EBUSY))
	}
	if err := m.dev.checkIdle(); err != nil {
		return fail(err)
	}
	return m, nil
}

// admitWriter counts one more mapping of a node, unless another mapping or
// requests of a lost path forbid it. The caller holds the nodeLock.
func (s *Server) admitWriter(id nodeID, mode blk.AccessMode) error {
	if err := s.nodeBusy(id); err != nil {
		return err
	}
	if err := s.checkWriterFence(id, mode); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.writers.admit(id, mode)
}

// checkWriterFence returns EBUSY for a second writer while the first one has lost its paths and
// has requests in flight: these could land on later writes.
func (s *Server) checkWriterFence(id nodeID, mode blk.AccessMode) error {
	if mode != blk.Migration {
		return nil // refused beside another writer
	}
	s.mu.Lock()
	u := s.histories[id]
	s.mu.Unlock()
	if u == nil {
		return nil
	}
	if m := u.unfencedWriter(); m != nil {
		return fmt.Errorf("session %q has lost its paths, and %d of its requests have not ended: %w", m.session.name, m.inFlight(), syscall.EBUSY)
	}
	return nil
}

// awaitFence waits until fenced has no error, or until the device is stuck.
func (s *Server) awaitFence(ctx context.Context, id nodeID, mode blk.AccessMode) error {
	for pause := 200 * time.Microsecond; ; pause = min(2*pause, 10*time.Millisecond) {
		err := s.checkWriterFence(id, mode)
		if err == nil || s.nodeBusy(id) != nil || !sleepFor(ctx, pause) {
			return err
		}
	}
}

func (s *Server) releaseWriter(id nodeID, mode blk.AccessMode) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writers.release(id, mode)
}

// closeMapping implements CLOSE: new requests fail, requests in flight end, an EXTENTS
// is given up, then the device is released. With keepID the id is not given out again.
func (s *Server) closeMapping(m *mapping, keepID bool) {
	if m.closed.Swap(true) {
		return
	}
	m.endExtents()
	s.awaitIdle(m)
	id := m.dev.key.id
	turn, _ := s.nodes.Lock(context.Background(), id)
	defer turn.Unlock()
	if !keepID {
		m.session.mu.Lock()
		m.session.releaseID(m)
		m.session.mu.Unlock()
	}
	if m.writers != nil {
		m.writers.removeWriter(m, true)
	}
	s.giveShare(m)
	s.releaseDevice(m.dev)
	m.dev.plugin.leaveSession(m.session)
	s.releaseWriter(id, m.mode)
	m.released.Store(true)
	s.log.Info("device closed", "session", m.session.name, "device", m.name, "id", m.id)
	m.recordAudit("open", "closed", "")
}

// awaitIdle returns when m has no request in flight, or when no plugin is left
// to end them.
func (s *Server) awaitIdle(m *mapping) {
	for pause := 200 * time.Microsecond; m.inFlight() > 0 && !s.stopped.Load(); pause = min(2*pause, 10*time.Millisecond) {
		time.Sleep(pause)
	}
}

// forceClose takes a device away from a session.
func (s *Server) forceClose(m *mapping, why string) {
	s.auditForcedClose(m, why)
	s.closeMapping(m, true)
	s.notify(m, rnbdwire.EventRemoved)
}
