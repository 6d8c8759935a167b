package main

// DATA PATH: requests to the server. It runs on the thread of the hub.

import (
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// payload is what follows the header of a write.
func (o *op) payload() []byte {
	if o.call == nil && o.req.Op == blk.Write {
		return o.req.Buf
	}
	return nil
}

// size is the length of o on the wire in bytes.
func (o *op) size() int { return nbdwire.RequestSize + len(o.payload()) }

// encode makes the header of o.
func (o *op) encode() {
	command, flags, off, n := uint16(0), uint16(0), o.req.Off, o.req.Len
	if o.call != nil {
		command, off, n = o.call.command, o.call.off, o.call.n
	} else {
		command, flags = o.command()
	}
	if command == nbdwire.CmdFlush {
		off, n = 0, 0
		o.epoch = o.disk.acked
	}
	nbdwire.PutRequest(o.header[:], flags, command, o.cookie, off, n)
}

// command translates the operation of a request. The limits of the disk let no other
// operation through.
func (o *op) command() (command, flags uint16) {
	if o.req.Flags&blk.FUA != 0 && o.disk.flags&nbdwire.SendFUA != 0 && o.req.Op.Modifies() {
		flags = nbdwire.CmdFlagFUA
	}
	switch o.req.Op {
	case blk.Write:
		return nbdwire.CmdWrite, flags
	case blk.Flush:
		return nbdwire.CmdFlush, 0
	case blk.Discard:
		return nbdwire.CmdTrim, flags
	case blk.WriteZeroes:
		if o.req.Flags&blk.NoUnmap != 0 {
			flags |= nbdwire.CmdFlagNoHole
		}
		return nbdwire.CmdWriteZeroes, flags
	}
	return nbdwire.CmdRead, 0
}

// flush sends until everything is sent or the socket takes no more.
func (c *conn) flush() {
	for c.sending.head != nil && !c.blocked && !c.ended {
		n, errno := writev(c.fd, c.iov[:c.gather()])
		switch errno {
		case 0:
			c.advance(n)
		case unix.EAGAIN:
			c.setBlocked(true)
		case unix.EINTR:
		default:
			c.lost(errno)
		}
	}
}

// gather fills the vector with what is to be sent, and returns its length.
func (c *conn) gather() (k int) {
	for o := c.sending.head; o != nil && k+2 <= len(c.iov); o = o.next {
		if o.sent == 0 {
			o.encode()
		}
		at := o.sent
		if at < nbdwire.RequestSize {
			setIovec(&c.iov[k], o.header[at:])
			k, at = k+1, nbdwire.RequestSize
		}
		if rest := o.payload(); len(rest) > at-nbdwire.RequestSize {
			setIovec(&c.iov[k], rest[at-nbdwire.RequestSize:])
			k++
		}
	}
	return k
}

// advance counts n bytes as sent.
func (c *conn) advance(n int) {
	for n > 0 {
		o := c.sending.head
		k := min(n, o.size()-o.sent)
		o.sent += k
		n -= k
		if o.sent < o.size() {
			return
		}
		c.sending.pop()
	}
}
