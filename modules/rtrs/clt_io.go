package rtrs

import (
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
)

// DATA PATH of the client. The functions stand in the order in which a request
// meets them. All run on the owner of the queue's poller:
//
//	Write, Read   -> admit
//	admit         check; take a permit; user message into the permit's header
//	submit        choose a path, again if posting fails
//	post          header after the user message, one RDMA WRITE WITH IMM
//	              ... the wire ...
//	onReply       find the request of an answer; take the chunk's next rkey
//	finish        permit back; upcall
//
// A request stays on its queue from beginning to end. Between queues there is
// no order. A request of a lost path comes back to post from clt_failover.go.

// Queue is one I/O queue of a session: connection cid = index+1 of every
// path. All its methods, and the calls of OnDone for it, belong to the owner of
// its poller.
type Queue struct {
	session  *Session
	poller   *Poller
	cid      int
	lastPath int // id of the path used last, for RoundRobin

	retry    *requestSlots // has lost requests that wait for room in a send queue
	noCredit bool          // onCredit shall call resume
	onPermit func()        // wake

	// Of cid 0:
	waiting []*adminCall // for a permit, first come first served
	running int          // admin requests that hold a permit
}

func newQueue(s *Session, cid int) *Queue {
	q := &Queue{session: s, cid: cid, poller: s.cfg.Pollers[max(cid-1, 0)%len(s.cfg.Pollers)]}
	q.onPermit = q.wakeWaiters
	return q
}

// ErrBadData: the Data of a request lies outside its region.
var ErrBadData error = &sentinelError{"rtrs: the data lies outside its region", syscall.EINVAL}

// Write sends d and the user message to the server. The completion comes as
// OnDone(queue, tag, errno). The memory of d must not change until then; user
// is copied. Nothing was sent if an error is returned: ErrNoPermit (OnPermit
// tells when to try again), ErrDisconnected, ErrTooLarge or ErrBadData.
func (q *Queue) Write(tag uint64, d Data, user []byte) error {
	return q.admit(kindWrite, tag, d, user)
}

// Read sends the user message and has the server write to d; otherwise it is
// like Write.
func (q *Queue) Read(tag uint64, d Data, user []byte) error {
	return q.admit(kindRead, tag, d, user)
}

// admit checks a request, takes a permit for it and submits it.
func (q *Queue) admit(kind requestKind, tag uint64, d Data, user []byte) error {
	live := q.session.live.Load()
	if live == nil {
		return ErrDisconnected
	}
	if len(user) > MaxUserLen {
		return ErrTooLarge
	}
	if !d.inRegion() {
		return ErrBadData
	}
	sl := live.slots
	id, ok := sl.permits.takeOrMark(q.cid)
	if !ok {
		return ErrNoPermit
	}
	r := &sl.reqs[id]
	r.kind, r.tag, r.data = kind, tag, d
	r.head = Data{sl.headers, int(id) * slotHeaderLen, len(user)}
	copy(sl.headers.mem[r.head.Off:], user)
	sl.holdPermit(q.cid, id)
	if err := q.submit(live, id, r); err != nil {
		q.releaseSlot(sl, id, r)
		return q.submitError(err)
	}
	return nil
}

// submitError translates an error of submit for the caller.
func (q *Queue) submitError(err error) error {
	if err == errNoCredit {
		q.noCredit = true
		return ErrNoPermit
	}
	return err
}

// submit sends a request on the path that the policy chooses; a path that does
// not take it is skipped.
func (q *Queue) submit(live *liveSet, id uint32, r *request) error {
	err := ErrDisconnected
	var tried linkSet
	for i := range live.links {
		if len(live.links) > 1 {
			i = q.session.Policy().pickLink(live.links, &tried, q.lastPath)
		}
		l := live.links[i]
		if err = q.post(l, id, r); err == nil {
			q.lastPath = l.path.id
			return nil
		}
		tried.addLink(i)
	}
	return err
}

// post sends a request on one link: for a WRITE data, user message and header
// go to the start of the chunk; for a READ user message and header go behind
// the room for the reply's data.
func (q *Queue) post(l *link, id uint32, r *request) error {
	c := l.conns[q.cid]
	if c.down {
		return ErrDisconnected
	}
	head := r.head.Region.mem[r.head.Off:]
	hdrLen := putHeader(head[r.head.Len:], r, l.dev.index)
	off := r.data.Len + r.head.Len
	if off+hdrLen > l.chunkSize || r.head.Len+hdrLen > l.maxHdrSize {
		return ErrTooLarge
	}
	whole := Data{r.head.Region, r.head.Off, r.head.Len + hdrLen}
	buf := l.bufs[id]
	sges := c.sges[:0]
	switch {
	case r.kind == kindRead || r.kind == kindListen:
		buf.addr += uint64(r.data.Len)
	case r.data.Len > 0:
		sges = append(sges, r.data.localElement(l.dev.index))
	}
	sges = append(sges, whole.localElement(l.dev.index))
	if err := c.postRequest(sges, buf.addr, buf.rkey, rtrswire.IOReqImm(l.shift, int(id), off)); err != nil {
		return err
	}
	r.link, r.state = l, reqInflight
	c.countSent(r)
	return nil
}

// putHeader writes the header of a request behind its user message.
func putHeader(b []byte, r *request, dev int) int {
	switch {
	case r.kind == kindWrite:
		return rtrswire.PutWriteHdr(b, r.head.Len)
	case r.kind == kindFence:
		return rtrswire.PutFenceHdr(b, r.head.Len)
	case r.data.Len == 0:
		return rtrswire.PutReadHdr(b, r.head.Len)
	}
	key := &(*r.data.Region.keys.Load())[dev]
	return rtrswire.PutReadDescHdr(b, r.head.Len, false, rtrswire.Desc{
		Addr: key.addr + uint64(r.data.Off),
		Key:  key.rkey,
		Len:  uint32(r.data.Len),
	})
}

// onReply handles the immediate of an answer on c. rkey is the payload that
// came with it under NEW_RKEY, else nil. Answers to nothing in flight are
// ignored.
func (q *Queue) onReply(c *cltConn, imm rtrswire.Imm, rkey rtrswire.RkeyRsp) {
	errno, buf := imm.IORsp()
	id, l := uint32(buf), c.link
	if !l.slots.holdsPermit(q.cid, id) {
		return
	}
	r := &l.slots.reqs[id]
	if r.link != l || r.state != reqInflight {
		return
	}
	if rkey != nil {
		l.bufs[id].rkey = rkey.Rkey()
	}
	c.countAnswered(r)
	q.finish(l.slots, id, r, errno)
	if len(q.waiting) > 0 {
		q.retryAdmin()
	}
}

// countSent notes a request that was posted.
func (c *cltConn) countSent(r *request) {
	r.sentAt, r.sentOn = c.poller.Now(), c.poller.cpu
	switch r.kind {
	case kindListen:
		return
	case kindFence:
		c.stats.started.Add(1)
		return
	}
	c.stats.countRequest(r.kind == kindRead, r.data.Len+r.head.Len)
	if r.data.Len == 0 {
		c.stats.noData.Add(1)
	}
}

// countAnswered notes the answer to a request.
func (c *cltConn) countAnswered(r *request) {
	if !r.kind.countsAsIO() {
		return
	}
	c.stats.finished.Add(1)
	if cpu := c.poller.cpu; cpu != r.sentOn {
		c.stats.countMigration(r.sentOn, cpu)
	}
	if r.kind != kindFence {
		c.stats.latency[kindIndex(r.kind)].addSample(c.poller.Now() - r.sentAt)
	}
}

// kindIndex is 0 for a READ, 1 for a WRITE.
func kindIndex(k requestKind) int {
	if k == kindRead {
		return 0
	}
	return 1
}

// finish gives the permit back and informs the submitter, in this order: the
// upcall may submit again.
func (q *Queue) finish(sl *requestSlots, id uint32, r *request, errno int) {
	tag, call := r.tag, r.call
	q.releaseSlot(sl, id, r)
	q.notifyDone(tag, call, errno)
}

// notifyDone calls OnDone, or finishes an admin request.
func (q *Queue) notifyDone(tag uint64, call *adminCall, errno int) {
	if call != nil {
		call.finishCall(errno)
		return
	}
	q.session.cfg.OnDone(q.cid-1, tag, errno)
}

// Inflight calls f for each request of the queue that is on a path, with its
// tag and the path's id.
func (q *Queue) Inflight(f func(tag uint64, path int)) {
	live := q.session.live.Load()
	if live == nil {
		return
	}
	live.slots.eachHeld(q.cid, func(_ uint32, r *request) {
		if r.call == nil && r.link != nil && r.kind <= kindRead {
			f(r.tag, r.link.path.id)
		}
	})
}

// releaseSlot makes the slot and its permit free.
func (q *Queue) releaseSlot(sl *requestSlots, id uint32, r *request) {
	spare, settled := r.spare, r.settled
	*r = request{}
	sl.unholdPermit(q.cid, id)
	if q.cid == 0 {
		q.running--
		if settled != nil {
			settled()
		}
	}
	if spare {
		sl.permits.putSpare(id)
		return
	}
	sl.permits.release(id)
}

// onCredit continues requests that waited for room in a send queue.
func (q *Queue) onCredit() {
	if q.noCredit {
		q.noCredit = false
		q.resumeWaiting()
	}
}

// wakeWaiters lets whoever waits for a permit try again.
func (q *Queue) wakeWaiters() {
	switch {
	case q.cid == 0:
		q.retryAdmin()
	case q.session.cfg.OnPermit != nil:
		q.session.cfg.OnPermit(q.cid - 1)
	}
}
