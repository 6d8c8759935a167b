package main

// DATA PATH: replies of the server. It runs on the thread of the hub.

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

const (
	maxMessage = 4096     // bytes of the message in an error chunk
	maxStatus  = 16 << 20 // bytes of a BLOCK_STATUS chunk
)

// receive reads until the socket is empty. The payload that is due is read to its place,
// and what follows into the buffer.
func (c *conn) receive() {
	for !c.ended {
		k := 0
		if len(c.into) > 0 {
			setIovec(&c.iov[0], c.into)
			k = 1
		}
		room := c.buf[c.have:]
		setIovec(&c.iov[k], room)
		n, errno := readv(c.fd, c.iov[:k+1])
		switch {
		case errno == unix.EAGAIN:
			return
		case errno == unix.EINTR:
			continue
		case errno != 0:
			c.lost(errno)
			return
		case n == 0:
			c.lost(errEOF)
			return
		}
		whole := n == len(c.into)+len(room)
		placed := min(n, len(c.into))
		c.into = c.into[placed:]
		c.have += n - placed
		if err := c.handle(); err != nil {
			c.lost(err)
			return
		}
		if !whole && !c.hungUp { // the socket had no more, and reports what comes
			return
		}
	}
}

// handle takes the replies out of the buffer, up to the first incomplete one.
func (c *conn) handle() error {
	for !c.ended {
		if c.cur != nil {
			if !c.place() {
				break
			}
			if err := c.placed(); err != nil {
				return err
			}
			continue
		}
		used, err := c.reply(c.buf[c.at:c.have])
		if err != nil {
			return err
		}
		if used == 0 {
			break
		}
		c.at += used
	}
	c.have = copy(c.buf, c.buf[c.at:c.have])
	c.at = 0
	return nil
}

// place copies payload that came with headers, and reports whether all of it is there.
func (c *conn) place() bool {
	n := copy(c.into, c.buf[c.at:c.have])
	c.into = c.into[n:]
	c.at += n
	return len(c.into) == 0
}

// placed handles the end of the payload of c.cur.
func (c *conn) placed() error {
	o := c.cur
	c.cur, c.into = nil, nil
	if c.last {
		return c.finish(o)
	}
	return nil
}

// reply handles the header at the start of b and returns its length, or 0 if it is not
// complete.
func (c *conn) reply(b []byte) (int, error) {
	if len(b) < nbdwire.SimpleSize {
		return 0, nil
	}
	switch nbdwire.Simple(b).Magic() {
	case nbdwire.MagicSimple:
		return nbdwire.SimpleSize, c.simple(nbdwire.Simple(b))
	case nbdwire.MagicChunk:
		if len(b) < nbdwire.ChunkSize {
			return 0, nil
		}
		if c.export.Structured {
			return c.chunk(nbdwire.Chunk(b))
		}
	}
	return 0, fmt.Errorf("reply % x is malformed", b[:nbdwire.SimpleSize])
}

func (c *conn) simple(s nbdwire.Simple) error {
	o := c.hub.find(c, s.Cookie())
	switch {
	case o == nil:
		return fmt.Errorf("reply to request %#x, which is not in flight", s.Cookie())
	case s.Errno() != 0:
		c.done(o, toErrno(s.Errno()))
	case o.call != nil && o.call.command == nbdwire.CmdBlockStatus:
		return fmt.Errorf("simple reply to a request for extents")
	case o.call == nil && o.req.Op == blk.Read && c.export.Structured:
		return fmt.Errorf("simple reply to a read after structured replies were agreed on")
	case o.call == nil && o.req.Op == blk.Read:
		c.cur, c.into, c.last = o, o.req.Buf, true
		o.got = o.req.Len
	default:
		c.done(o, blk.OK)
	}
	return nil
}

// chunk handles a chunk of a structured reply. It returns the bytes that it has taken.
func (c *conn) chunk(h nbdwire.Chunk) (int, error) {
	o := c.hub.find(c, h.Cookie())
	if o == nil {
		return 0, fmt.Errorf("chunk for request %#x, which is not in flight", h.Cookie())
	}
	last, n := h.Flags()&nbdwire.ChunkDone != 0, int(h.Length())
	isRead := o.call == nil && o.req.Op == blk.Read
	switch kind := h.Type(); {
	case kind == nbdwire.ChunkOffsetData && isRead && n > 8:
		if len(h) < nbdwire.DataChunkSize {
			return 0, nil
		}
		dst, err := o.part(h.Offset(), uint64(n-8))
		c.cur, c.into, c.last = o, dst, last
		return nbdwire.DataChunkSize, err
	case kind == nbdwire.ChunkBlockStatus && o.call != nil && n >= 12 && n%8 == 4 && n <= maxStatus:
		if len(h) < nbdwire.ChunkSize+4 {
			return 0, nil
		}
		if h.ContextID() != c.export.ContextID || o.call.entries != nil {
			return 0, fmt.Errorf("extents of context %d, which was not asked for", h.ContextID())
		}
		o.call.entries = make([]byte, n-4)
		c.cur, c.into, c.last = o, o.call.entries, last
		return nbdwire.ChunkSize + 4, nil
	case len(h) < nbdwire.ChunkSize+n && n <= 6+maxMessage:
		return 0, nil
	case kind == nbdwire.ChunkNone && n == 0 && last:
	case kind == nbdwire.ChunkOffsetHole && isRead && n == 12:
		dst, err := o.part(h.Offset(), uint64(h.HoleLength()))
		if err != nil {
			return 0, err
		}
		clear(dst)
	case kind&nbdwire.ChunkErrors != 0 && n >= 6 && n <= 6+maxMessage:
		o.errno = toErrno(h.Errno())
	default:
		return 0, fmt.Errorf("chunk of type %d with %d bytes is malformed", kind, n)
	}
	if last {
		return nbdwire.ChunkSize + n, c.finish(o)
	}
	return nbdwire.ChunkSize + n, nil
}

// part returns the n bytes at off of the disk in the buffer of the read o. A read that
// comes in pieces has no bytes of earlier requests between them.
func (o *op) part(off, n uint64) ([]byte, error) {
	size := uint64(o.req.Len)
	if off < o.req.Off || off-o.req.Off > size || n > size-(off-o.req.Off) || n == 0 {
		return nil, fmt.Errorf("chunk of %d bytes at %d for a read of %d at %d", n, off, size, o.req.Off)
	}
	if o.got == 0 && n != size {
		clear(o.req.Buf)
	}
	if o.got += uint32(n); uint64(o.got) > size {
		return nil, fmt.Errorf("%d bytes for a read of %d", o.got, size)
	}
	return o.req.Buf[off-o.req.Off:][:n], nil
}

// finish answers o, whose last chunk is there.
func (c *conn) finish(o *op) error {
	e := o.errno
	if e == blk.OK && o.call == nil && o.req.Op == blk.Read && o.got != o.req.Len {
		return fmt.Errorf("reply of %d bytes to a read of %d", o.got, o.req.Len)
	}
	c.done(o, e)
	return nil
}
