package rtrs

import (
	"context"
	"fmt"
	"sync/atomic"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
)

// Admin requests: few, blocking, on connection 0. They share the permits with
// the I/O queues, and wait for one.

// maxAdmin admin requests may be under way on one path: the server has a fixed
// number of receives on connection 0, and heartbeats need some of them.
const maxAdmin = rtrswire.ServiceDepth - 8

// adminCall is one admin request with memory of its own.
type adminCall struct {
	kind      requestKind
	head      Data
	reply     Data
	carrier   *link       // of a FENCE: the link it goes on, and no other
	result    chan int    // takes one errno
	abandoned atomic.Bool // its caller has given up
	noPermit  bool        // a FENCE that cannot get one; set before result
	settled   func()      // see AdminWriteOnce; nil: not asked for
}

// AdminRead sends user to the server, waits for the answer and copies it into
// reply. Any goroutine but an owner may call it. If ctx ends first, the server
// may still execute the request.
func (s *Session) AdminRead(ctx context.Context, user, reply []byte) error {
	call, err := s.newCall(kindRead, user, len(reply))
	if err == nil {
		err = call.runCall(ctx, s.queues[0])
	}
	if err != nil {
		return fmt.Errorf("rtrs: session %s: admin read: %w", s.name, err)
	}
	if len(reply) > 0 {
		copy(reply, call.reply.Region.mem[call.reply.Off:])
	}
	return nil
}

// AdminListen is AdminRead of something that the server answers when there is
// news, however long that takes: it counts as no request in flight. It keeps a
// permit, and moves to another path when its own is lost. When ctx ends first
// the server still has the request, until the next one takes its place.
func (s *Session) AdminListen(ctx context.Context, user, reply []byte) error {
	call, err := s.newCall(kindListen, user, len(reply))
	if err == nil {
		err = call.runCall(ctx, s.queues[0])
	}
	if err != nil {
		return fmt.Errorf("rtrs: session %s: listen: %w", s.name, err)
	}
	copy(reply, call.reply.Region.mem[call.reply.Off:])
	return nil
}

// AdminWrite is AdminRead without a reply other than success or failure.
func (s *Session) AdminWrite(ctx context.Context, user []byte) error {
	call, err := s.newCall(kindWrite, user, 0)
	if err == nil {
		err = call.runCall(ctx, s.queues[0])
	}
	if err != nil {
		return fmt.Errorf("rtrs: session %s: admin write: %w", s.name, err)
	}
	return nil
}

// AdminWriteOnce is AdminWrite. It calls settled once, from any goroutine: when
// the server cannot execute the request any more. That may be long after ctx
// ended. A server can execute a request that was given up until it has answered
// it, or has closed the path on which the request was sent. If the last path of
// the session is lost, settled may not be called. It must not block.
func (s *Session) AdminWriteOnce(ctx context.Context, user []byte, settled func()) error {
	call, err := s.newCall(kindWrite, user, 0)
	if err != nil {
		settled()
		return fmt.Errorf("rtrs: session %s: admin write: %w", s.name, err)
	}
	call.settled = settled
	if err := call.runCall(ctx, s.queues[0]); err != nil {
		return fmt.Errorf("rtrs: session %s: admin write: %w", s.name, err)
	}
	return nil
}

// newCall takes registered memory for a request.
func (s *Session) newCall(kind requestKind, user []byte, replyLen int) (*adminCall, error) {
	headLen := len(user) + rtrswire.MaxReqHdrLen
	region, err := s.Register(make([]byte, headLen+replyLen))
	if err != nil {
		return nil, err
	}
	copy(region.mem, user)
	c := &adminCall{kind: kind, head: Data{region, 0, len(user)}, result: make(chan int, 1)}
	if replyLen > 0 {
		c.reply = Data{region, headLen, replyLen}
	}
	return c, nil
}

// runCall runs the request and frees its registration.
func (c *adminCall) runCall(ctx context.Context, q *Queue) error {
	q.poller.Do(func() { q.submitAdmin(c) })
	select {
	case errno := <-c.result:
		return c.endCall(errno)
	case <-ctx.Done():
		c.abandoned.Store(true)
		go func() { _ = c.endCall(<-c.result) }()
		return context.Cause(ctx)
	}
}

func (c *adminCall) endCall(errno int) error {
	err := c.head.Region.Close()
	if errno != 0 {
		return syscall.Errno(errno)
	}
	return err
}

// finishCall gives the result to the waiting caller. Owner; must not block.
func (c *adminCall) finishCall(errno int) { c.result <- errno }

// refuseCall is finish for a request that is not sent.
func (c *adminCall) refuseCall(errno int) {
	if c.settled != nil {
		c.settled()
	}
	c.finishCall(errno)
}

// submitAdmin sends a request, behind those that wait. Owner of cid 0.
func (q *Queue) submitAdmin(c *adminCall) {
	if len(q.waiting) > 0 && c.carrier == nil || !q.tryAdmin(c) {
		q.waiting = append(q.waiting, c)
	}
}

// retryAdmin sends waiting requests until one finds no room. FENCEs overtake:
// they may have permits when the others have none.
func (q *Queue) retryAdmin() {
	left := q.waiting[:0]
	blocked := false
	for _, c := range q.waiting {
		if blocked && c.carrier == nil {
			left = append(left, c)
		} else if !q.tryAdmin(c) {
			left = append(left, c)
			blocked = true
		}
	}
	clear(q.waiting[len(left):])
	q.waiting = left
}

// tryAdmin sends or finishes a request; false means that it has to wait.
func (q *Queue) tryAdmin(c *adminCall) bool {
	live := q.session.live.Load()
	if c.carrier != nil {
		live = &liveSet{[]*link{c.carrier}, c.carrier.slots}
	}
	switch {
	case c.abandoned.Load():
		c.refuseCall(int(syscall.ECANCELED))
		return true
	case live == nil, c.carrier != nil && c.carrier.isLost():
		c.refuseCall(int(syscall.ECONNABORTED))
		return true
	case q.running >= maxAdmin:
		return false
	}
	id, spare, ok := q.takeAdminPermit(live.slots, c)
	switch {
	case !ok && c.kind == kindFence && q.sparesLost(live.slots):
		c.noPermit = true
		c.refuseCall(int(syscall.ENOBUFS))
		return true
	case !ok:
		return false
	}
	r := &live.slots.reqs[id]
	*r = request{kind: c.kind, data: c.reply, head: c.head, call: c, spare: spare}
	live.slots.holdPermit(0, id)
	q.running++
	if err := q.submit(live, id, r); err != nil {
		q.releaseSlot(live.slots, id, r)
		if q.submitError(err) == ErrNoPermit {
			return false
		}
		c.refuseCall(ErrnoOf(err))
		return true
	}
	r.settled = c.settled
	return true
}

// sparesLost reports whether every permit that is reserved for FENCEs is held
// by a FENCE that was lost itself. Such a FENCE keeps its permit until its
// carrier is fenced, and that takes a permit. Owner.
func (q *Queue) sparesLost(sl *requestSlots) bool {
	lost, under := 0, 0
	sl.eachHeld(q.cid, func(_ uint32, r *request) {
		switch {
		case r.spare && r.state == reqAborted:
			lost++
		case r.spare:
			under++
		}
	})
	return lost > 0 && under == 0
}

// takeAdminPermit lets a FENCE have one of the permits that are kept for it.
func (q *Queue) takeAdminPermit(sl *requestSlots, c *adminCall) (id uint32, spare, ok bool) {
	if c.kind == kindFence {
		if id, spare = sl.permits.takeSpare(); spare {
			return id, true, true
		}
	}
	id, ok = sl.permits.takeOrMark(0)
	return id, false, ok
}
