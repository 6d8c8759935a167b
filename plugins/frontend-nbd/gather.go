package main

import "github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"

// A simple reply carries the result of a read ahead of its payload, so a read
// that needs several slots holds all of them until its last child is done. Two
// such reads that hold half of the slots each would deadlock, so only one read
// of a share gathers slots at a time. A read that cannot get its slots is
// streamed instead: its header reports success, and a later error can only
// close the connection. A streamed read is alone on its connection: it begins
// when every earlier command is answered, and the next command is taken when
// its last byte is queued. Structured replies need none of this.

// tooLong reports whether the children of r would take most of the slots.
func (c *conn) tooLong(r *request, l *blk.Limits) bool {
	return c.exp.childCount(r.next, r.end, l)*4 > len(c.sh.ops)*3
}

// childCount returns the number of slots that a read of [off, end) takes.
func (e *export) childCount(off, end uint64, l *blk.Limits) int {
	most := e.slotBytes(l)
	off &^= e.block - 1
	return int((end - off + most - 1) / most)
}

// mayTake reports whether r may take a slot now. An ordered read of several
// children must be the read that gathers, or a stream.
func (s *slotShare) mayTake(c *conn, r *request, l *blk.Limits) bool {
	if !r.ordered || r.stream {
		return true
	}
	left := s.exp.childCount(r.next, r.end, l)
	if r.first == nil && left <= 1 {
		return true
	}
	if s.gather == nil {
		s.gather = r
	}
	if s.gather != r {
		return false
	}
	if !s.allowsConn(c) && (c.sendBlocked() || left > s.comingBack(c)) {
		s.allowGather(r)
		r.stream = true
	}
	return true
}

// allowGather lets the next read gather.
func (s *slotShare) allowGather(r *request) {
	if s.gather == r {
		s.gather = nil
		s.q.again = true
	}
}

// comingBack returns the number of slots that come back to c even if the
// clients that do not read their replies never do.
func (s *slotShare) comingBack(c *conn) int {
	n := len(s.ops) - 1 // the last slot is reserved for a connection without any
	for _, other := range s.conns {
		if other.sendBlocked() {
			n -= other.held
		}
	}
	for o := c.cur.first; o != nil; o = o.sibling {
		n-- // held by the read that asks
	}
	return n
}
