package server

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// rtrsHandler is the Server's implementation of the RTRS callbacks.
type rtrsHandler Server

// adminTimeout bounds the time of an OPEN. It is shorter than a client's
// patience, so that the reason of a failure arrives at the client.
const adminTimeout = 20 * time.Second

// SessionUp allocates a session's requests.
func (h *rtrsHandler) SessionUp(t *rtrs.SrvSession) error {
	s := (*Server)(h)
	sess := &session{
		name: t.Name(), transport: t, arena: t.Memory().(*shm.Arena), chunkSize: uint64(t.ChunkSize()),
		reqs:  make([]request, t.QueueDepth()),
		lanes: make([]sessionLane, len(s.pumps)*len(s.plugins)),

		lookUps: make(chan struct{}, maxSessionLookUps),
	}
	if paths := t.Paths(); len(paths) > 0 {
		sess.fabric = paths[0].Fabric
	}
	err := s.cfg.Audit.Refusal()
	if err == nil {
		err = s.owners.claim(sess.name, sess.provedIdentity())
	}
	if err != nil {
		s.auditSession(audit.EventConnect, sess, err)
		return err
	}
	sess.holds.Store(1)
	for i := range sess.lanes {
		sess.lanes[i] = sessionLane{s: sess}
	}
	for i := range s.sessions {
		sess.index = uint32(i)
		if s.sessions[i].CompareAndSwap(nil, sess) {
			t.SetContext(sess)
			s.log.Info("session up", "session", sess.name)
			s.recordSession(sess, "", "connected")
			s.auditSession(audit.EventConnect, sess, nil)
			return nil
		}
	}
	s.auditSession(audit.EventConnect, sess, syscall.ENOMEM)
	return fmt.Errorf("session %q: %d sessions are open already: %w", t.Name(), MaxSessions, syscall.ENOMEM)
}

// Retired records a request that has not ended before the end of its path. It
// runs on the pump.
func (h *rtrsHandler) Retired(op *rtrs.Op) {
	s := (*Server)(h)
	sess, ok := op.Session().Context().(*session)
	if !ok {
		return
	}
	r := &sess.reqs[op.Chunk()]
	if r.op != op || r.owner.Load() == 0 { // a message that opens or closes a device
		return
	}
	r.retired = true
	r.m.dev.retired.Add(1)
	s.log.Error("device is stuck: a request does not end, and its path has gone", "session", sess.name, "device", r.m.name)
}

// PathLost makes the writes of other clients wait for those that a session without
// a path has in flight. Answers may be lost with the path: failures of flushes are told again.
func (h *rtrsHandler) PathLost(t *rtrs.SrvSession) {
	s := (*Server)(h)
	sess, ok := t.Context().(*session)
	if !ok {
		return
	}
	sess.tellFlushesAgain()
	if !sess.isCut() {
		return
	}
	for _, m := range sess.allMappings() {
		if m.writers != nil && m.inFlight() > 0 && !m.cut.Swap(true) {
			go s.holdBackWrites(m)
		}
	}
}

// holdBackWrites holds back the writes of other clients than m's until m has no request in
// flight.
func (s *Server) holdBackWrites(m *mapping) {
	defer m.cut.Store(false)
	for pause := 200 * time.Microsecond; !m.writers.beginPrecedence(m); pause = min(2*pause, 10*time.Millisecond) {
		if m.inFlight() == 0 || s.stopped.Load() { // another client's requests go first
			return
		}
		time.Sleep(pause)
	}
	s.awaitIdle(m)
	m.writers.endRepetition()
}

// SessionDown closes the session's devices. Only retired requests may be in
// flight. SessionDown does not wait for them; the session's memory is kept
// until they have ended.
func (h *rtrsHandler) SessionDown(t *rtrs.SrvSession) {
	s := (*Server)(h)
	sess, ok := t.Context().(*session)
	if !ok {
		return
	}
	sess.markEnded()
	stuck := s.closeIdle(sess)
	s.log.Info("session down", "session", sess.name, "stuck", len(stuck))
	s.auditSession(audit.EventDisconnect, sess, nil)
	s.recordSession(sess, "connected", "disconnected")
	if len(stuck) == 0 {
		s.letGo(sess)
		return
	}
	go func() {
		var wg sync.WaitGroup
		for _, m := range stuck { // side by side: each waits for its own requests
			wg.Go(func() { s.releaseStuck(m) })
		}
		wg.Wait()
		s.letGo(sess)
	}()
}

// closeIdle closes the mappings without requests in flight and returns the
// others. Those accept no new requests and are stuck until releaseStuck: until
// then no client can open their devices. A plugin that does not close a device
// delays no other device.
func (s *Server) closeIdle(sess *session) (stuck []*mapping) {
	var wg sync.WaitGroup
	for _, m := range sess.allMappings() {
		if m.inFlight() > 0 {
			m.dev.retired.Add(1)
			stuck = append(stuck, m)
			continue
		}
		wg.Go(func() { s.closeMapping(m, false) })
	}
	wg.Wait()
	return stuck
}

// releaseStuck closes a mapping that closeIdle has returned.
func (s *Server) releaseStuck(m *mapping) {
	s.closeMapping(m, false)
	s.awaitIdle(m) // a CLOSE came first and waits, too
	m.dev.retired.Add(-1)
}

// letGo gives back one of sess.holds. The last one frees the session.
func (s *Server) letGo(sess *session) {
	if sess.holds.Add(-1) == 0 {
		s.removeSession(sess)
	}
}

// removeSession frees a session's memory and index: completions do not find it any
// more. The index is used again when no plugin knows it any more.
func (s *Server) removeSession(sess *session) {
	go func() {
		for _, p := range s.plugins {
			p.detachSession(sess)
		}
		s.sessions[sess.index].Store(nil)
	}()
}

// Request dispatches a message. I/O is handled on the pump. Other messages
// may block and get a goroutine.
func (h *rtrsHandler) Request(op *rtrs.Op) {
	s := (*Server)(h)
	sess, ok := op.Session().Context().(*session)
	if !ok {
		op.Respond(int(blk.ENODEV))
		return
	}
	user := op.User()
	switch rnbdwire.TypeOf(user) {
	case rnbdwire.TypeIO:
		if msg := rnbdwire.IO(user); msg.IsValid() {
			s.onIO(op, sess, msg, 0, nil)
			return
		}
		op.Respond(int(blk.EINVAL))
	case rnbdwire.TypeIOOnce:
		if msg := rnbdwire.IOOnce(user); msg.IsValid() {
			s.onIO(op, sess, msg.IO(), msg.Number(), nil)
			return
		}
		op.Respond(int(blk.EINVAL))
	case rnbdwire.TypeIOAgain:
		if msg := rnbdwire.IOAgain(user); msg.IsValid() {
			s.onIO(op, sess, msg.IO(), msg.Number(), msg)
			return
		}
		op.Respond(int(blk.EINVAL))
	case rnbdwire.TypeEvent:
		s.onEvent(op, sess, rnbdwire.Event(user))
	case rnbdwire.TypeSessInfo, rnbdwire.TypeOpen, rnbdwire.TypeOpenAs, rnbdwire.TypeWriter, rnbdwire.TypeList, rnbdwire.TypeExtents, rnbdwire.TypeAskReason, rnbdwire.TypeClose:
		s.admin.Add(1)
		sess.holds.Add(1)
		go s.onAdmin(op, sess)
	default:
		op.Respond(int(blk.EINVAL))
	}
}

// onAdmin handles a message that opens or closes devices, lists them or tells of
// their extents, then answers on the pump of the request.
func (s *Server) onAdmin(op *rtrs.Op, sess *session) {
	defer s.admin.Done()
	ctx, cancel := context.WithTimeout(s.admins, adminTimeout)
	defer cancel()
	err := s.handleAdmin(ctx, op, sess)
	if err != nil {
		s.log.Log(ctx, refusalLevel(op), "request refused", "session", sess.name, "err", err)
	}
	errno := int(adminErrno(op, err))
	s.letGo(sess) // before the answer: after it the session's memory may go
	s.pumps[op.Poller()].poller.Do(func() { op.Respond(errno) })
}

// adminErrno returns the errno that answers op. That of an OPEN comes from the storage.
func adminErrno(op *rtrs.Op, err error) blk.Errno {
	errno := blk.ToErrno(err)
	switch rnbdwire.TypeOf(op.User()) {
	case rnbdwire.TypeOpen, rnbdwire.TypeOpenAs:
		return storageErrno(uint32(errno))
	}
	return errno
}

// refusalLevel is the level at which a refusal is logged. Clients that ask for extents
// ask again and again, and lose nothing by a refusal.
func refusalLevel(op *rtrs.Op) slog.Level {
	if rnbdwire.TypeOf(op.User()) == rnbdwire.TypeExtents {
		return slog.LevelDebug
	}
	return slog.LevelWarn
}

func (s *Server) handleAdmin(ctx context.Context, op *rtrs.Op, sess *session) error {
	user := op.User()
	switch rnbdwire.TypeOf(user) {
	case rnbdwire.TypeSessInfo:
		return s.onSessInfo(op, sess, rnbdwire.SessInfo(user))
	case rnbdwire.TypeOpen:
		if msg := rnbdwire.Open(user); msg.IsValid() {
			return s.withReason(ctx, sess, msg, s.onOpen(ctx, op, sess, msg, ""))
		}
		return fmt.Errorf("open: message of %d bytes: %w", len(user), syscall.EINVAL)
	case rnbdwire.TypeOpenAs:
		if msg := rnbdwire.OpenAs(user); msg.IsValid() {
			return s.withReason(ctx, sess, rnbdwire.Open(msg), s.onOpen(ctx, op, sess, rnbdwire.Open(msg), msg.IOMode()))
		}
		return fmt.Errorf("open with an io mode: message of %d bytes: %w", len(user), syscall.EINVAL)
	case rnbdwire.TypeWriter:
		return s.onWriter(op, sess, rnbdwire.Writer(user))
	case rnbdwire.TypeList:
		return s.onList(ctx, op, sess, rnbdwire.List(user))
	case rnbdwire.TypeExtents:
		return s.onExtents(ctx, op, sess, rnbdwire.Extents(user))
	case rnbdwire.TypeAskReason:
		return onAskReason(sess, rnbdwire.AskReason(user), op.Data()[:op.ReplyLen()])
	}
	return s.onClose(sess, rnbdwire.Close(user))
}

// withReason returns err, the result of an OPEN, with the errno that it is answered with.
// The reason of a refusal is kept for the client that asks for it.
func (s *Server) withReason(ctx context.Context, sess *session, msg rnbdwire.Open, err error) error {
	if err = inTime(ctx, err); err != nil {
		sess.reasons.Note(msg.Name(), reasonOf(err, s.cfg.SearchPath))
	}
	return err
}

// onAskReason answers with the reason of a refused OPEN.
func onAskReason(sess *session, msg rnbdwire.AskReason, reply []byte) error {
	if !msg.IsValid() || len(reply) != rnbdwire.ReasonSize {
		return fmt.Errorf("reason: message of %d bytes, reply of %d: %w", len(msg), len(reply), syscall.EINVAL)
	}
	f, ok := sess.reasons.Find(msg.Name())
	if !ok {
		return fmt.Errorf("no OPEN of %q was refused: %w", msg.Name(), syscall.ENOENT)
	}
	f.Put(reply)
	return nil
}

// features are the extensions that every server offers.
const features = rnbdwire.FeatureEvents | rnbdwire.FeatureOpenAs | rnbdwire.FeatureIdentity | rnbdwire.FeatureOnce |
	rnbdwire.FeatureExtents | rnbdwire.FeatureVerifier | rnbdwire.FeatureReasons

// offeredFeatures returns the extensions that this server offers.
func (s *Server) offeredFeatures() uint16 {
	if s.cfg.List {
		return features | rnbdwire.FeatureList
	}
	return features
}

func (s *Server) onSessInfo(op *rtrs.Op, sess *session, msg rnbdwire.SessInfo) error {
	if !msg.IsValid() || op.ReplyLen() != rnbdwire.SessInfoRspSize {
		return fmt.Errorf("session info: message of %d bytes, reply of %d: %w", len(msg), op.ReplyLen(), syscall.EINVAL)
	}
	ver := min(msg.Version(), rnbdwire.Version)
	sess.version.Store(uint32(ver))
	rnbdwire.SessInfoRspFields{Version: ver, Features: s.offeredFeatures()}.Put(op.Data())
	return nil
}

func (s *Server) onOpen(ctx context.Context, op *rtrs.Op, sess *session, msg rnbdwire.Open, ioMode string) error {
	if n := op.ReplyLen(); n != rnbdwire.OpenRspSize && n != rnbdwire.OpenRspFullSize {
		return fmt.Errorf("open: reply of %d bytes: %w", op.ReplyLen(), syscall.EINVAL)
	}
	if err := s.admitOpen(); err != nil {
		return fmt.Errorf("open %q: %w", msg.Name(), err)
	}
	defer s.doneOpen()
	m, err := s.openMapping(ctx, sess, msg.Name(), ioMode, blk.AccessMode(msg.AccessMode()))
	if err != nil {
		s.auditOpen(sess, msg, err)
		return err
	}
	err = s.judgeMapping(m) // a path may have joined, or the rules or publications have changed
	if err == nil {
		err = s.takeShare(m)
	}
	if err == nil {
		err = s.announceWriter(ctx, m)
	}
	s.auditOpen(sess, msg, err)
	if err != nil {
		s.closeMapping(m, false)
		return fmt.Errorf("open %q: %w", msg.Name(), err)
	}
	if rsp := openRsp(m); op.ReplyLen() == rnbdwire.OpenRspFullSize {
		rsp.PutFull(op.Data())
	} else {
		rsp.Put(op.Data())
	}
	return nil
}

// onWriter handles WRITER: docs/extend/protocol/rnbd.md, "Writes that are repeated".
func (s *Server) onWriter(op *rtrs.Op, sess *session, msg rnbdwire.Writer) error {
	if !msg.IsValid() || msg.Writer() == 0 || op.ReplyLen() != rnbdwire.WriterRspSize {
		return fmt.Errorf("writer: message of %d bytes, reply of %d: %w", len(msg), op.ReplyLen(), syscall.EINVAL)
	}
	if msg.DeviceID() == rnbdwire.NoDevice {
		sess.writer.Store(msg.Writer())
		rnbdwire.WriterRspFields{Mark: rnbdwire.Mark{Server: s.number, Time: uint64(latency.Now())}}.Put(op.Data())
		return nil
	}
	m := sess.mappingByID(msg.DeviceID())
	switch {
	case m == nil:
		return fmt.Errorf("writer: no device %d: %w", msg.DeviceID(), syscall.ENOTCONN)
	case m.writers == nil:
		return fmt.Errorf("writer: %q is open read-only: %w", m.name, syscall.EPERM)
	}
	shared, now := m.writers.snapshotOthers(m)
	rnbdwire.WriterRspFields{Shared: shared, Mark: rnbdwire.Mark{Server: s.number, Time: uint64(now)}}.Put(op.Data())
	return nil
}

func (s *Server) onClose(sess *session, msg rnbdwire.Close) error {
	if !msg.IsValid() {
		return fmt.Errorf("close: message of %d bytes: %w", len(msg), syscall.EINVAL)
	}
	if m := sess.mappingByID(msg.DeviceID()); m != nil {
		m.confirm(m.told.Load())
		s.closeMapping(m, false)
		s.auditClose(m)
	}
	return nil
}

// openRsp returns the description of a device for the client. Sizes are in
// sectors of 512 bytes.
func openRsp(m *mapping) rnbdwire.OpenRspFields {
	l := m.dev.limits.Load()
	f := rnbdwire.OpenRspFields{
		DeviceID:            m.id,
		Sectors:             l.Size / blk.SectorSize,
		MaxHWSectors:        l.MaxIOSize / blk.SectorSize,
		MaxWriteZeroesSects: sectors32(l.MaxWriteZeroes),
		MaxDiscardSectors:   sectors32(l.MaxDiscard),
		DiscardGranularity:  l.DiscardGranularity,
		DiscardAlignment:    l.DiscardAlignment,
		PhysicalBlockSize:   uint16(min(l.PhysicalBlockSize, 1<<15)),
		LogicalBlockSize:    uint16(l.LogicalBlockSize),
		MaxSegments:         l.MaxSegments,
		Volume:              m.dev.volume,
		Properties:          propertiesChecksum(l),
		Verifier:            rnbdwire.Verifier(m.dev.verifier.Load()),
	}
	f.Rotational = l.Rotational
	if l.SecureErase {
		f.SecureDiscard = 1
	}
	if l.WriteCache {
		f.CachePolicy |= rnbdwire.CacheWriteBack
	}
	if l.FUA {
		f.CachePolicy |= rnbdwire.CacheFUA
	}
	return f
}

// sectors32 converts bytes to sectors of 512 bytes, in 32 bits.
func sectors32(n uint64) uint32 { return uint32(min(n/blk.SectorSize, 1<<32-1)) }

// PathUp refuses a path if the rules would have forbidden the session's open
// devices with it. It is never called twice at a time for a session.
func (h *rtrsHandler) PathUp(t *rtrs.SrvSession, p rtrs.SrvPathInfo) error {
	s := (*Server)(h)
	sess, ok := t.Context().(*session)
	if !ok {
		return nil
	}
	m, err := s.admitPath(sess, p.ID)
	s.auditPath(sess, p, err)
	if err != nil {
		s.log.Warn("path is refused: with it the session may not have a device open", "session", sess.name, "client", p.Client, "device", m.name, "err", err)
		return fmt.Errorf("device %q is open: %w", m.name, err)
	}
	return nil
}

// PathConnected records a path whose requests are served now.
func (h *rtrsHandler) PathConnected(t *rtrs.SrvSession, p rtrs.SrvPathInfo) {
	h.cfg.Journal.Add(journal.Event{Kind: journal.Path, Session: t.Name(), Path: pathAddresses(p) + "%" + p.Fabric, To: "connected"})
}

// PathClosed records the end of a path. Its last requests may have ended since PathLost, and
// no client has their answers.
func (h *rtrsHandler) PathClosed(t *rtrs.SrvSession, p rtrs.SrvPathInfo, cause error) {
	if sess, ok := t.Context().(*session); ok {
		sess.tellFlushesAgain()
	}
	e := journal.Event{Kind: journal.Path, Session: t.Name(), Path: pathAddresses(p) + "%" + p.Fabric, From: "connected", To: "closed"}
	if cause != nil {
		e.Why = cause.Error()
	}
	h.cfg.Journal.Add(e)
}

// adminAnswered returns a channel. It is closed when all requests that are
// served off the pumps have been answered.
func (s *Server) adminAnswered() <-chan struct{} {
	done := make(chan struct{})
	go func() { s.admin.Wait(); close(done) }()
	return done
}

var _ rtrs.RefusalWatcher = (*rtrsHandler)(nil)

// Refused records a client that does not prove its identity.
func (h *rtrsHandler) Refused(r rtrs.Refusal) { (*Server)(h).auditRefusal(r) }
