package rtrs

import (
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
)

// FENCE, an extension between our own ends: a client that lost a path asks on
// another one for the certainty that nothing of the lost path will run any
// more. The answer comes when the path is unknown to the server, or closed:
// its unread requests dropped, the others finished. See docs/protocol/rtrs.md.

// fence serves op, a FENCE. Owner of c.
func (c *srvConn) fence(op *Op) {
	if op.req.UsrLen != rtrswire.FenceUsrLen || op.dataLen != 0 {
		op.Respond(int(syscall.EINVAL))
		return
	}
	uuid := rtrswire.UUID(op.User())
	go func() {
		c.path.fence(uuid)
		c.poller.Do(func() { op.Respond(0) })
	}()
}

// fence returns when the path named uuid of p's session is gone, or p itself is
// about to go. A path that names itself was made again after its earlier life
// had ended: nothing is left to wait for.
func (p *srvPath) fence(uuid rtrswire.UUID) {
	s := p.sess
	s.srv.mu.Lock()
	lost := s.pathByUUID(uuid)
	s.srv.mu.Unlock()
	if lost == nil || lost == p {
		return
	}
	lost.close(fmt.Errorf("%w: the client gave it up", ErrConnLost))
	select {
	case <-lost.closed:
	case <-p.closing: // or two paths that fence each other would wait for ever
	}
}
