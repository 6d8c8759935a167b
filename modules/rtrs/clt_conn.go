package rtrs

import (
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// cltConn is one connection of a link. It joins the shared connection with the
// queue that owns it.
type cltConn struct {
	*conn
	link  *link
	queue *Queue
	gone  chan struct{} // closed when nothing more will be completed

	// Owner's. sized: the link's sizes are known and may be looked at; those
	// come when connection 0 is up already.
	sized     bool
	infoTaken bool // the INFO_RSP was passed on

	silent int // see link.watchConn; of the owner of connection 0

	sges  [2]verbs.SGE // of the request being posted
	chain [1]verbs.SendWR
}

// infoRecv is the id of the receive for the INFO_RSP, above all others.
const infoRecv = 1 << 32

// postRequest sends sges to addr, with the immediate of a request. It fails with
// errNoCredit, or with ErrDisconnected: then the path is being given up.
func (c *cltConn) postRequest(sges []verbs.SGE, addr uint64, rkey uint32, imm rtrswire.Imm) error {
	c.chain[0] = verbs.SendWR{Op: verbs.OpWriteImm, SGEs: sges, RemoteAddr: addr, RKey: rkey, Imm: uint32(imm)}
	err := c.postChain(c.chain[:])
	if err == nil || err == errNoCredit {
		return err
	}
	c.connFailed(err)
	return ErrDisconnected
}

// connRecv handles a message of the server. Each used receive is posted again
// at once, so the number of posted receives is constant. A receive with a
// buffer (NEW_RKEY) is posted here, after its buffer was read; a receive
// without one is posted by conn before connRecv is called.
func (c *cltConn) connRecv(wc *verbs.WC) {
	if wc.ID >= infoRecv && !c.infoTaken {
		c.onSetup(wc)
		return
	}
	if c.recvSize > 0 {
		defer c.repostReceive(wc.ID)
	}
	switch {
	case !wc.HasImm: // SEND WITH INVALIDATE, or nothing that we know
	case wc.Op == verbs.OpRecv && c.link.newRkey:
		c.onRkeyRsp(rtrswire.Imm(wc.Imm), c.recvBuf(wc.ID)[:wc.ByteLen])
	default: // a WRITE has left nothing in the receive, however long it was
		c.onImm(rtrswire.Imm(wc.Imm), nil)
	}
}

// onSetup handles a message that comes before answers do.
func (c *cltConn) onSetup(wc *verbs.WC) {
	if wc.ID == challengeRecv {
		c.onChallenge(wc)
		return
	}
	c.onInfoRsp(wc)
}

// onInfoRsp handles the completion of the receive posted for the INFO_RSP.
func (c *cltConn) onInfoRsp(wc *verbs.WC) {
	c.infoTaken = true
	if wc.Op != verbs.OpRecv || wc.HasImm {
		c.connFailed(protocolErrorf("immediate %#08x before INFO_RSP", wc.Imm))
		return
	}
	c.link.info <- c.link.infoRspBuf()[:wc.ByteLen]
}

// onImm dispatches on the type of an immediate; unknown types are ignored.
func (c *cltConn) onImm(imm rtrswire.Imm, rkey rtrswire.RkeyRsp) {
	switch imm.Type() {
	case rtrswire.ImmIORsp, rtrswire.ImmIORspInv:
		c.queue.onReply(c, imm, rkey)
	case rtrswire.ImmHeartbeat, rtrswire.ImmHeartbeatAck:
		c.link.hb.onImm(c.conn, imm)
	}
}

// onRkeyRsp checks an answer under NEW_RKEY. A peer that gets it wrong would
// have us use a wrong key later: the path is given up.
func (c *cltConn) onRkeyRsp(imm rtrswire.Imm, payload []byte) {
	msg := rtrswire.RkeyRsp(payload)
	if len(msg) < rtrswire.RkeyRspLen || !msg.Valid(msg.Buf()) || msg.Buf() >= c.link.queueDepth {
		c.connFailed(protocolErrorf("connection %d: malformed RKEY_RSP % x", c.cid, payload))
		return
	}
	if t := imm.Type(); t != rtrswire.ImmIORsp && t != rtrswire.ImmIORspInv {
		return
	}
	if _, buf := imm.IORsp(); buf != msg.Buf() {
		c.connFailed(protocolErrorf("connection %d: RKEY_RSP for buffer %d with an answer for %d", c.cid, msg.Buf(), buf))
		return
	}
	c.onImm(imm, msg)
}

// connCredit handles room in the send queue.
func (c *cltConn) connCredit() { c.queue.onCredit() }

// connFailed fails the path: the loss of one connection is the loss of the path.
func (c *cltConn) connFailed(err error) { c.link.failLink(err) }

// connDown marks the requests of this connection as lost. The queue fails them
// over when the path has decided how.
func (c *cltConn) connDown() {
	if c.sized {
		lost, counted := c.queue.markLost(c.link)
		c.stats.finished.Add(uint64(counted))
		c.link.unanswered.Add(lost)
	}
	if c.cid == 0 {
		c.poller.alarms.setAlarm(&c.link.hb.alarm, time.Time{})
	}
	c.link.failLink(ErrConnLost)
	close(c.gone)
}
