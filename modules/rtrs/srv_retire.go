package rtrs

import (
	"context"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A path that closes waits for the requests that its consumer has not answered:
// a late one may still touch the chunk, and the disk behind it. A disk that
// does not answer at all must not hold up the path for ever, since others need
// it. So after a while such a request is retired: the path goes without it, and
// its chunk takes no other request until the consumer has answered. A request
// that a client sends for that chunk on another path is held meanwhile
// (srvConn.awaitChunk), which keeps the order of the two. The held request is the
// repetition of the retired one, with the same data: only a client that has lost
// all paths uses a chunk for another request. The path of such a client does not join
// (srv_join.go): it gets a new session, with memory of its own, as soon as the
// last path of the old one is gone.

// Retirer is an optional interface of a ServerHandler that is informed of
// retired requests. Retired is called on the owner of op's poller, at most
// once, before SessionDown; op is still to be answered, when it has ended.
type Retirer interface {
	Retired(op *Op)
}

// retiredOwner is the owner of a retired chunk: no path has that id.
const retiredOwner = ^uint32(0)

// awaitRequests returns when no connection of p has a request that is not
// retired.
func (p *srvPath) awaitRequests(conns []*srvConn) {
	ended := make(chan struct{})
	go func() { p.live.Wait(); close(ended) }()
	limit := p.sess.srv.cfg.RetireAfter
	if limit <= 0 {
		<-ended
		return
	}
	late := time.NewTicker(limit)
	defer late.Stop()
	for {
		select {
		case <-ended:
			return
		case <-late.C:
			p.retireConns(conns)
		}
	}
}

func (p *srvPath) retireConns(conns []*srvConn) {
	ctx := context.Background()
	for _, c := range conns { // writes of their owners are visible to the others
		_ = c.poller.Call(ctx, func() {})
	}
	retired := 0
	for _, c := range conns {
		_ = c.poller.Call(ctx, func() { retired += c.retireOps() })
	}
	if retired > 0 {
		p.logLine("rtrs: path closes without requests that do not end", "chunks", retired)
	}
}

// retireOps lets the path go without the requests of c that the consumer has. Owner.
func (c *srvConn) retireOps() (n int) {
	if !c.down {
		return 0 // connDown follows and handles the operations without a consumer
	}
	me := uint32(c.path.id)
	told, _ := c.handler.(Retirer)
	for i := range c.sess.ops {
		op := &c.sess.ops[i]
		if op.owner.Load() != me || op.conn != c {
			continue
		}
		op.retired = true
		op.owner.Store(retiredOwner)
		c.sess.countRetired(c.path.uuid, 1)
		if told != nil {
			told.Retired(op)
		}
		n++
		c.endOp()
	}
	return n
}

// endRetired gives the chunk of a request that has ended at last back. Owner.
func (op *Op) endRetired() {
	path := op.conn.path.uuid
	op.retired = false
	op.freeChunk()
	op.sess.countRetired(path, -1)
}

// countRetired counts the retired chunks of a path. The last one frees the memory of
// a session that has ended.
func (s *SrvSession) countRetired(path rtrswire.UUID, n int) {
	s.retireMu.Lock()
	s.readers.Add(int32(n))
	if s.retired[path] += n; s.retired[path] == 0 {
		delete(s.retired, path)
	}
	free := len(s.retired) == 0 && s.freeLater
	if free {
		s.freeLater = false
	}
	s.retireMu.Unlock()
	s.changed.ringAll()
	if free {
		go s.closeMemory()
	}
}

// guard makes the provider verify what the client writes to mr before it is placed, while
// retired requests read chunks. The client writes the same again to these chunks; what
// damage, or a guess of the provider, would place in between must not reach a disk.
func (s *SrvSession) guard(mr verbs.MR) {
	if g, ok := mr.(verbs.Guarded); ok {
		g.Guard(&s.readers)
	}
}

// Retired returns how many chunks are retired now.
func (s *SrvSession) Retired() (n int) {
	s.retireMu.Lock()
	defer s.retireMu.Unlock()
	for _, of := range s.retired {
		n += of
	}
	return n
}

// retiredOf returns how many of them are of the path with that name.
func (s *SrvSession) retiredOf(path rtrswire.UUID) int {
	s.retireMu.Lock()
	defer s.retireMu.Unlock()
	return s.retired[path]
}

// freeChunks frees the memory, now or after the last retired request.
func (s *SrvSession) freeChunks() {
	s.retireMu.Lock()
	s.freeLater = len(s.retired) > 0
	later := s.freeLater
	s.retireMu.Unlock()
	if !later {
		s.closeMemory()
	}
}
