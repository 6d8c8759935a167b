package rtrs

import (
	"fmt"
	"slices"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
)

// FENCE, an extension between our own ends: a client that lost a path asks on
// another one for the certainty that nothing of the lost path will run any
// more. The answer comes when the path is unknown to the server, or closed:
// its unread requests dropped, the others finished. It is EBUSY while some of
// those are retired: the client may send them again, and must not use their
// chunks for anything else. See docs/extend/protocol/rtrs.md.

// onFence serves op, a FENCE. Owner of c.
func (c *srvConn) onFence(op *Op) {
	if op.req.UsrLen != rtrswire.FenceUsrLen || op.dataLen != 0 {
		op.Respond(int(syscall.EINVAL))
		return
	}
	uuid := rtrswire.UUID(op.User())
	go func() {
		errno := c.path.fencePath(uuid)
		c.poller.Do(func() { op.Respond(errno) })
	}()
}

// fencePath returns when the path named uuid of p's session is gone, or p itself is
// about to go, with the errno of the answer. A path that names itself was made
// again after its earlier life had ended: nothing is left to wait for.
func (p *srvPath) fencePath(uuid rtrswire.UUID) (errno int) {
	s := p.sess
	s.srv.mu.Lock()
	newest := s.pathByUUID(uuid)
	paths := slices.DeleteFunc(slices.Clone(s.paths), func(o *srvPath) bool { return o.uuid != uuid })
	s.srv.mu.Unlock()
	if newest == p {
		return 0
	}
	for _, lost := range paths { // a path and its successor
		lost.close(fmt.Errorf("%w: the client gave it up", ErrConnLost))
		select {
		case <-lost.closed:
		case <-p.closing: // or two paths that fence each other would wait for ever
		}
	}
	if s.retiredOf(uuid) > 0 {
		return int(syscall.EBUSY)
	}
	return 0
}
