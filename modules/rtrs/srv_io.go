package rtrs

import (
	"slices"
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH of the server. The functions stand in the order in which a request
// meets them. All run on the owner of the connection that brought it; the
// answer leaves on the same connection:
//
//	connRecv      a completion of a receive; the receive is posted again already (srv_conn.go)
//	onRequest     find the chunk; is it free
//	claim, hold   one compare-and-swap; a chunk in use on another path waits
//	load          header and user message are copied out of the chunk, once
//	submit        changing keys: the client cannot reach the chunk any more
//	              ... ServerHandler.Request, the consumer's turn ...
//	Respond       wait for room in the send queue, if there is none
//	answer        [WRITE data] [REG_MR] [SEND WITH INVALIDATE] [final immediate],
//	              posted as one chain; the chunk is free right before
//
// Requests of different chunks are in no order. Requests of one chunk run one
// after the other.

// maxUsrLen is the longest user message that a client may send.
const maxUsrLen = maxHdrSize - rtrswire.WriteHdrLen

// firstUsrLen is the size of an Op's buffer for it until a longer one comes.
const firstUsrLen = 64

const (
	maxChain = 4            // work requests of an answer
	opRoom   = maxChain + 2 // the rest is for heartbeats and their answers
	minSends = 16
)

// Op is one request. There is one for each chunk of a session.
//
// From ServerHandler.Request until Respond it belongs to the consumer. Any
// goroutine of the consumer may read it; only the owner of its poller calls
// Respond.
type Op struct {
	sess  *SrvSession
	chunk int
	mem   []byte // the chunk

	owner atomic.Uint32           // id of the path that uses the chunk, 0: free
	held  atomic.Pointer[heldReq] // a request of another path that waits for it

	// Of the path that owns it.
	conn    *srvConn
	req     rtrswire.Request
	dataLen int
	user    []byte // private copy of the message, req.UsrLen bytes of it
	errno   int
	stage   opStage
	cancel  func(*Op) // of Park; nil: not parked
	retired bool      // its path has ended without it; Respond only frees the chunk
	next    *Op       // in the connection's list of those that wait for room
}

// opStage is the next step of an Op that waits for room in a send queue.
type opStage uint8

const (
	opSubmitting opStage = iota // invalidation of the chunk
	opAnswering
)

// heldReq is a request for a chunk that is in use on another path.
type heldReq struct {
	conn *srvConn
	imm  rtrswire.Imm
}

// Session returns the session.
func (op *Op) Session() *SrvSession { return op.sess }

// Chunk returns the index of the chunk. The session has no other request under way
// with that index.
func (op *Op) Chunk() int { return op.chunk }

// Poller returns the index of the poller whose owner has the request.
func (op *Op) Poller() int { return op.conn.pollerIndex }

// Path returns the client's and the server's address of the path that the
// request came on, as SRC@DST. Only the owner of the poller calls it.
func (op *Op) Path() string {
	p := op.conn.path
	return verbs.AddrString(p.client.Addr()) + "@" + verbs.AddrString(p.server.Addr())
}

// IsRead reports whether the request is a READ: it sends ReplyLen bytes back.
// Else it is a WRITE.
func (op *Op) IsRead() bool { return op.req.Type == rtrswire.MsgRead }

// Data returns the chunk's first DataLen bytes: the payload of a WRITE, or
// the buffer for the payload of a READ. The client can write to it at any
// time, by mistake or malice.
func (op *Op) Data() []byte { return op.mem[:op.dataLen:op.dataLen] }

// DataLen returns the number of data bytes that the request announces.
func (op *Op) DataLen() int { return op.dataLen }

// ReplyLen returns the number of bytes from the start of the chunk that a
// successful answer sends, 0 if none. It may differ from DataLen.
func (op *Op) ReplyLen() int { return int(op.req.Desc.Len) }

// User returns the user message, a private copy that is valid until Respond.
func (op *Op) User() []byte { return op.user[:op.req.UsrLen] }

// onRequest starts the request that imm announces.
func (c *srvConn) onRequest(imm rtrswire.Imm) {
	p := c.path
	if !p.isConnected() {
		return
	}
	chunk, off := imm.IOReq(c.shift)
	if chunk >= len(c.sess.ops) || off >= len(c.sess.ops[chunk].mem) {
		p.close(protocolErrorf("request for chunk %d, offset %d", chunk, off))
		return
	}
	op := &c.sess.ops[chunk]
	if !c.claim(op, imm) {
		return
	}
	op.conn = c
	c.inflight++
	if err := op.loadRequest(off); err != nil {
		c.stats.started.Add(1)
		p.close(protocolErrorf("request in chunk %d at offset %d: %v", chunk, off, err))
		op.dropAnswer()
		return
	}
	c.countRequest(op, off)
	op.stage = opSubmitting
	if p.newRkey && c.mustWait(op) {
		return
	}
	c.submit(op)
}

// claim takes the chunk and reports whether the request goes on. A request for a
// chunk that this path uses already ends the path. A request for a chunk that
// another path uses waits for it.
func (c *srvConn) claim(op *Op, imm rtrswire.Imm) bool {
	me := uint32(c.path.id)
	for {
		if op.owner.CompareAndSwap(0, me) {
			return true
		}
		switch op.owner.Load() {
		case 0:
			continue
		case me:
			c.path.close(protocolErrorf("second request for chunk %d before the answer to the first", op.chunk))
			return false
		}
		if !c.awaitChunk(op, imm) {
			return false
		}
	}
}

// awaitChunk makes the request wait until the other path gives the chunk back. It returns
// true if the chunk is free already: the caller claims it again. It may allocate,
// because it is needed after a failover only.
func (c *srvConn) awaitChunk(op *Op, imm rtrswire.Imm) (free bool) {
	h := &heldReq{c, imm}
	for {
		old := op.held.Load()
		if old != nil && old.conn.path.isConnected() {
			c.path.close(protocolErrorf("third request for chunk %d before the answer to the first", op.chunk))
			return false
		}
		if op.held.CompareAndSwap(old, h) {
			// free looks for h after it has freed the chunk. So either free
			// finds h, or the chunk is found free here.
			return op.owner.Load() == 0 && op.held.CompareAndSwap(h, nil)
		}
	}
}

// freeChunk gives the chunk back and starts the request that waits for it. op may
// belong to another path from then on.
func (op *Op) freeChunk() {
	// A chunk may not be used again for long. Its op must not keep a path that has
	// ended in memory.
	op.conn = nil
	op.owner.Store(0)
	if op.held.Load() == nil {
		return
	}
	if h := op.held.Swap(nil); h != nil {
		h.conn.poller.Do(func() { h.conn.onRequest(h.imm) })
	}
}

// Errors of load.
var (
	errUsrLen  error = &sentinelError{"user message is longer than what precedes the header, or than headers may be", 0}
	errDescLen error = &sentinelError{"length of the descriptor is 0 or more than a chunk", 0}
)

// loadRequest copies header and user message out of the chunk and checks the copies. The
// client may still change the originals.
func (op *Op) loadRequest(off int) (err error) {
	var hdr [rtrswire.MaxReqHdrLen]byte
	n := copy(hdr[:], op.mem[off:])
	if op.req, err = rtrswire.ParseRequest(hdr[:n]); err != nil {
		return err
	}
	usr := op.req.UsrLen
	if usr > off || usr > maxUsrLen {
		return errUsrLen
	}
	if d := &op.req.Desc; op.req.HasDesc && (d.Len == 0 || int64(d.Len) > int64(len(op.mem))) {
		return errDescLen
	}
	op.dataLen = off - usr
	if usr > len(op.user) {
		op.user = make([]byte, maxUsrLen) // once: messages of requests are short
	}
	copy(op.user, op.mem[op.dataLen:off])
	return nil
}

// countRequest counts a request. Its header is n bytes from the start of the chunk,
// behind data and user message.
func (c *srvConn) countRequest(op *Op, n int) {
	if op.req.Type == rtrswire.MsgFence {
		c.stats.started.Add(1)
		return
	}
	c.stats.countRequest(op.req.Type == rtrswire.MsgRead, n)
}

// mustWait reports whether the send queue has no room for op now. If so, op is put
// into the list of those that wait, and connCredit goes on with it.
func (c *srvConn) mustWait(op *Op) bool {
	if c.head == nil && c.sendRoom() >= opRoom {
		return false
	}
	op.next = nil
	if c.head == nil {
		c.head = op
	} else {
		c.tail.next = op
	}
	c.tail = op
	return true
}

// connCredit goes on with the ops that wait, as far as there is room.
func (c *srvConn) connCredit() {
	for c.head != nil && c.sendRoom() >= opRoom {
		op := c.popWaiting()
		if op.stage == opSubmitting {
			c.submit(op)
		} else {
			c.postAnswer(op)
		}
	}
}

func (c *srvConn) popWaiting() *Op {
	op := c.head
	c.head, op.next = op.next, nil
	return op
}

// submit gives op to the consumer. With changing keys the client loses its access
// to the chunk first. submit does not wait for the invalidation to complete: it
// only has to precede the new key, and the send queue keeps that order.
func (c *srvConn) submit(op *Op) {
	p := c.path
	if p.newRkey {
		c.filled = 0
		c.nextRequest(verbs.OpLocalInv).RKey = p.rkeys[op.chunk]
		if err := c.postChain(c.chain[:1]); err != nil {
			p.close(err)
			op.dropAnswer()
			return
		}
	}
	if op.req.Type == rtrswire.MsgFence {
		c.onFence(op)
		return
	}
	c.handler.Request(op)
}

// Park marks op as waiting for news of the consumer, without a time limit. Such an
// op does not count as a request under way. When its path closes, the owner calls
// cancel, and the path waits until the consumer has responded. Only the owner of
// its poller calls Park, before Respond.
func (op *Op) Park(cancel func(*Op)) {
	c := op.conn
	if c.down {
		cancel(op)
		return
	}
	op.cancel = cancel
	c.parked = append(c.parked, op)
	c.stats.finished.Add(1)
}

// resumeOp makes op a request under way again.
func (c *srvConn) resumeOp(op *Op) {
	c.parked = slices.DeleteFunc(c.parked, func(o *Op) bool { return o == op })
	op.cancel = nil
	c.stats.started.Add(1)
}

// Respond finishes op with errno, positive or 0. It is called once, by the owner
// of its poller. op belongs to the transport from then on.
func (op *Op) Respond(errno int) {
	c := op.conn
	if op.retired {
		op.endRetired()
		return
	}
	if op.cancel != nil {
		c.resumeOp(op)
	}
	op.errno, op.stage = errno, opAnswering
	if c.down || !c.path.isConnected() {
		op.dropAnswer()
		return
	}
	if !c.mustWait(op) {
		c.postAnswer(op)
	}
}

// postAnswer posts the answer to op. It frees the chunk first, because the client may
// use the chunk again as soon as it has the answer, on any connection.
func (c *srvConn) postAnswer(op *Op) {
	if !c.path.isConnected() {
		op.dropAnswer()
		return
	}
	n := c.fillChain(op)
	op.freeChunk()
	err := c.postChain(c.chain[:n])
	c.endOp()
	if err != nil {
		c.path.close(err)
	}
}

// fillChain writes the chain for op and returns its length.
func (c *srvConn) fillChain(op *Op) int {
	p := c.path
	c.filled = 0
	if op.req.HasDesc && op.errno == 0 {
		d := &op.req.Desc
		c.data[0].Buf, c.data[0].LKey = op.mem[:d.Len:d.Len], p.localKey
		wr := c.nextRequest(verbs.OpWrite)
		wr.SGEs, wr.RemoteAddr, wr.RKey = c.data[:], d.Addr, d.Key
	}
	if p.newRkey {
		p.rkeys[op.chunk] = verbs.NextKey(p.rkeys[op.chunk])
		c.nextRequest(verbs.OpRegMR).RKey = p.rkeys[op.chunk]
	}
	inv := op.req.NeedInval && p.canInv
	if inv {
		c.nextRequest(verbs.OpSendInv).RKey = op.req.Desc.Key
	}
	c.appendFinal(op, rtrswire.IORspImm(inv, op.errno, op.chunk))
	return c.filled
}

// nextRequest returns the next work request of the chain, empty but for its opcode. It is
// filled in field by field: a literal is put together elsewhere and copied.
func (c *srvConn) nextRequest(code verbs.Opcode) *verbs.SendWR {
	wr := &c.chain[c.filled]
	c.filled++
	*wr = verbs.SendWR{}
	wr.Op = code
	return wr
}

// appendFinal writes the last work request of an answer. It carries the immediate, and
// with changing keys the chunk's next key.
func (c *srvConn) appendFinal(op *Op, imm rtrswire.Imm) {
	p := c.path
	if !p.newRkey {
		c.nextRequest(verbs.OpWriteImm).Imm = uint32(imm)
		return
	}
	m := p.ctl.rkeyRsp[op.chunk*rtrswire.RkeyRspLen:][:rtrswire.RkeyRspLen:rtrswire.RkeyRspLen]
	rtrswire.RkeyRsp(m).Put(op.chunk, p.rkeys[op.chunk])
	c.rkey[0].Buf, c.rkey[0].LKey = m, p.ctl.key
	wr := c.nextRequest(verbs.OpSendImm)
	wr.Imm, wr.SGEs = uint32(imm), c.rkey[:]
}

// dropAnswer finishes op without an answer: its path is closing.
func (op *Op) dropAnswer() {
	c := op.conn
	op.freeChunk()
	c.endOp()
}

// endOp takes one op off the connection.
func (c *srvConn) endOp() {
	c.stats.finished.Add(1)
	if c.inflight--; c.inflight == 0 && c.down {
		c.path.live.Done()
	}
}
