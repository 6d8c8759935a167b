package main

import "github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"

// A simple reply tells the outcome of a read before its payload, so a read
// that needs several slots must hold all of them until the last child is done.
// Two such reads that hold half of the slots each would wait for ever: one
// read of a share gathers at a time. A read that cannot have its slots is
// streamed instead: the header says success, and an error that comes later
// closes the connection, which is all that NBD leaves to do. A stream is alone:
// it begins when every earlier command is answered, and the next command is
// taken when its last byte is queued. Structured replies need none of this.

// tooLong: the children of r would take most of the slots.
func (c *conn) tooLong(r *request, l *blk.Limits) bool {
	return c.exp.children(r.next, r.end, l)*4 > len(c.sh.ops)*3
}

// children is how many slots a read of [off, end) takes.
func (e *export) children(off, end uint64, l *blk.Limits) int {
	most := e.chunk(l)
	off &^= e.block - 1
	return int((end - off + most - 1) / most)
}

// mayTake: an ordered read of several children needs to be the one that
// gathers, or a stream.
func (s *share) mayTake(c *conn, r *request, l *blk.Limits) bool {
	if !r.ordered || r.stream {
		return true
	}
	left := s.exp.children(r.next, r.end, l)
	if r.first == nil && left <= 1 {
		return true
	}
	if s.gather == nil {
		s.gather = r
	}
	if s.gather != r {
		return false
	}
	if !s.allows(c) && (c.blocked() || left > s.obtainable(c)) {
		s.ungather(r)
		r.stream = true
	}
	return true
}

// ungather lets the next read gather.
func (s *share) ungather(r *request) {
	if s.gather == r {
		s.gather = nil
		s.q.again = true
	}
}

// obtainable is how many slots come back to c without the help of clients that
// do not read their replies.
func (s *share) obtainable(c *conn) int {
	n := len(s.ops) - 1 // the last one is not for those who hold some
	for _, other := range s.conns {
		if other.blocked() {
			n -= other.held
		}
	}
	for o := c.cur.first; o != nil; o = o.sibling {
		n-- // held by the read that asks
	}
	return n
}
