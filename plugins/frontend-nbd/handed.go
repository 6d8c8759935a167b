package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// What one process leaves to the next one of a connection: the bytes that the client
// has sent and that have had no effect, and the bytes that are owed to the client.
// A command that has had an effect in part is left as the command that is still to be
// done, under the same cookie, with the part of its payload that has come.
// docs/extend/abi/nbd-connection-v1.md is the format.

const handedVersion = 1

// maxHanded bounds the bytes that a connection leaves.
const maxHanded = 64 << 20

// handedState is the state of a connection in a plugin.Connection. The bytes are in
// its second descriptor, the received ones first; without any there is none.
type handedState struct {
	Version    int    `json:"version"`
	Peer       string `json:"peer"`
	Structured bool   `json:"structured,omitempty"`
	Allocation bool   `json:"allocation,omitempty"` // base:allocation is in force
	Draining   bool   `json:"draining,omitempty"`   // the client is done, and waits for replies at most
	ReadOnly   bool   `json:"read_only,omitempty"`
	Narrowed   bool   `json:"narrowed,omitempty"` // read-only by rules that changed later: the client was told that it may write
	Listener   string `json:"listener,omitempty"` // of a client that events are kept of
	Socket     string `json:"socket,omitempty"`   // the listener that the client came by
	Received   int64  `json:"received,omitempty"` // bytes
	Unsent     int64  `json:"unsent,omitempty"`   // bytes

	// Of the first command in the received bytes.
	Errno  uint32 `json:"errno,omitempty"`  // it has failed; its payload is skipped
	Headed bool   `json:"headed,omitempty"` // it is a read, and the header of its simple reply was queued
}

// handedConn is what is left of a connection's life in an earlier process.
type handedConn struct {
	received []byte // to be read before the socket
	unsent   []byte // to be sent before replies
	errno    blk.Errno
	headed   bool
}

func (h *handedConn) isOver() bool {
	return len(h.received) == 0 && len(h.unsent) == 0 && h.errno == blk.OK && !h.headed
}

// goOn gives a command what it has behind it.
func (h *handedConn) goOn(r *request) {
	if h.errno != blk.OK {
		r.errno = h.errno
	}
	r.headed = h.headed
	h.errno, h.headed = blk.OK, false
}

// readAgain is receive for the bytes of an earlier process. It reports whether there
// were any.
func (c *conn) readAgain() bool {
	from := c.handed.received
	if len(from) == 0 {
		return false
	}
	stage, n := c.stageRoom(), 0
	if o := c.fill; o != nil {
		n = copy(o.clientBytes()[o.got:], from)
	}
	n += copy(stage, from[n:])
	c.handed.received = from[n:]
	c.q.events++
	c.onBytes(n)
	c.advance()
	c.endHanded()
	return true
}

// sentHanded accounts for n sent bytes and returns the number of those that an earlier
// process owed.
func (c *conn) sentHanded(n int) int {
	if c.handed == nil {
		return 0
	}
	n = min(n, len(c.handed.unsent))
	c.handed.unsent = c.handed.unsent[n:]
	if len(c.handed.unsent) == 0 {
		c.handed.unsent = nil
	}
	c.endHanded()
	return n
}

func (c *conn) endHanded() {
	if c.handed != nil && c.handed.isOver() {
		c.handed = nil
	}
}

// inDevice returns the number of c's slots that the device has, or will get without
// another byte of the client.
func (c *conn) inDevice() (n int) {
	for i := range c.sh.ops {
		if o := &c.sh.ops[i]; o.conn == c && o != c.fill && !o.done {
			n++
		}
	}
	for i := range c.outLen {
		if o := c.out[(c.outHead+i)%len(c.out)].op; o != nil && !o.done {
			n--
		}
	}
	return n
}

// exportState returns the state of c, which is quiet, and its bytes.
func (c *conn) exportState() (s handedState, bytes []byte, err error) {
	s = handedState{Version: handedVersion, Peer: c.peer, Socket: c.listener, Structured: c.structured, Allocation: c.allocation, Draining: c.state == connDraining, ReadOnly: c.readOnly, Narrowed: c.readOnly && !c.toldReadOnly}
	if c.user != nil {
		s.Listener = c.user.listener
	}
	size := c.w - c.r + nbdwire.RequestSize
	if c.handed != nil {
		size += len(c.handed.received) + len(c.handed.unsent)
		s.Errno, s.Headed = uint32(c.handed.errno), c.handed.headed
	}
	if c.fill != nil {
		size += int(c.fill.got)
	}
	for i := range c.outLen {
		size += c.out[(c.outHead+i)%len(c.out)].replyBytes()
	}
	if size > maxHanded {
		return s, nil, fmt.Errorf("%d bytes are on their way to the client, at most %d can be handed over", size, maxHanded)
	}
	bytes = c.appendReceived(make([]byte, 0, size))
	s.Received = int64(len(bytes))
	if r := c.cur; r != nil {
		s.Errno, s.Headed = uint32(r.errno), r.headed
	}
	bytes = c.appendUnsent(bytes)
	s.Unsent = int64(len(bytes)) - s.Received
	return s, bytes, nil
}

// appendReceived appends what the client has sent and what has had no effect.
func (c *conn) appendReceived(b []byte) []byte {
	if c.cur != nil {
		b = append(b, c.cur.missingPayload(c.fill)...)
	}
	if o := c.fill; o != nil {
		b = append(b, o.clientBytes()[:o.got]...)
	}
	b = append(b, c.stage[c.r:c.w]...)
	if c.handed != nil {
		b = append(b, c.handed.received...)
	}
	return b
}

// appendUnsent appends what is owed to the client.
func (c *conn) appendUnsent(b []byte) []byte {
	if c.handed != nil {
		b = append(b, c.handed.unsent...)
	}
	skip := len(b) + c.outSent
	for i := range c.outLen {
		e := &c.out[(c.outHead+i)%len(c.out)]
		reply := len(b)
		b = append(b, e.header[:e.n]...)
		if e.op != nil {
			b = append(b, e.op.clientBytes()...)
		}
		if i == 0 {
			b = append(b[:reply], b[skip:]...)
		}
	}
	return b
}

// missingPayload returns the header of the command that is still to be done of r, whose payload
// goes to fill. Its children have ended.
func (r *request) missingPayload(fill *op) []byte {
	start := r.next
	switch {
	case fill != nil:
		start = fill.off + uint64(fill.skip)
	case r.first != nil: // not queued yet
		start = r.first.off + uint64(r.first.skip)
	}
	kinds := map[blk.Op]uint16{blk.Read: nbdwire.CmdRead, blk.Write: nbdwire.CmdWrite, blk.Flush: nbdwire.CmdFlush, blk.Discard: nbdwire.CmdTrim, blk.WriteZeroes: nbdwire.CmdWriteZeroes, blk.Extents: nbdwire.CmdBlockStatus}
	var flags uint16
	if r.flags&blk.FUA != 0 || r.flushAfter {
		flags |= nbdwire.CmdFlagFUA
	}
	if r.flags&blk.NoUnmap != 0 {
		flags |= nbdwire.CmdFlagNoHole
	}
	if r.one {
		flags |= nbdwire.CmdFlagReqOne
	}
	length := r.end - start
	if r.op == blk.Flush {
		start, length = 0, 0
	}
	b := binary.BigEndian.AppendUint32(nil, nbdwire.MagicRequest)
	b = binary.BigEndian.AppendUint16(b, flags)
	b = binary.BigEndian.AppendUint16(b, kinds[r.op])
	b = binary.BigEndian.AppendUint64(b, r.cookie)
	b = binary.BigEndian.AppendUint64(b, start)
	return binary.BigEndian.AppendUint32(b, uint32(length))
}

// wrapConn makes a Connection, which owns fd then.
func wrapConn(device string, fd int, s handedState, bytes []byte) (plugin.Connection, error) {
	text, err := json.Marshal(s)
	if err != nil {
		return plugin.Connection{}, err
	}
	c := plugin.Connection{Device: device, State: text, FDs: []int{fd}}
	if len(bytes) == 0 {
		return c, nil
	}
	mem, err := unix.MemfdCreate("nbd connection", unix.MFD_CLOEXEC)
	if err != nil {
		return c, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(mem), "nbd connection")
	defer f.Close()
	if _, err := f.Write(bytes); err != nil {
		return c, err
	}
	own, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return c, os.NewSyscallError("dup", err)
	}
	c.FDs = append(c.FDs, own)
	return c, nil
}

// unwrapConn is the reverse of wrap. It believes nothing of c.
func unwrapConn(c *plugin.Connection) (s handedState, h *handedConn, err error) {
	if err := json.Unmarshal(c.State, &s); err != nil {
		return s, nil, fmt.Errorf("state of a connection: %v: %w", err, unix.EPROTO)
	}
	want := 1
	if s.Received != 0 || s.Unsent != 0 {
		want = 2
	}
	switch {
	case s.Version != handedVersion:
		return s, nil, fmt.Errorf("state of a connection has version %d, this program knows %d: %w", s.Version, handedVersion, unix.EPROTO)
	case s.Received < 0 || s.Unsent < 0 || s.Received > maxHanded || s.Unsent > maxHanded-s.Received:
		return s, nil, fmt.Errorf("%d received and %d unsent bytes: %w", s.Received, s.Unsent, unix.EPROTO)
	case s.Allocation && !s.Structured:
		return s, nil, fmt.Errorf("a connection has a metadata context without structured replies: %w", unix.EPROTO)
	case len(c.FDs) != want:
		return s, nil, fmt.Errorf("%d descriptors of a connection, want %d: %w", len(c.FDs), want, unix.EPROTO)
	case s.Errno > math.MaxUint16 || (s.Errno != 0 || s.Headed) && s.Received < nbdwire.RequestSize:
		return s, nil, fmt.Errorf("state %q of a command that is not there: %w", c.State, unix.EPROTO)
	}
	if err := isStream(c.FDs[0]); err != nil {
		return s, nil, err
	}
	h = &handedConn{errno: blk.Errno(s.Errno), headed: s.Headed}
	if want == 2 {
		b, err := readWhole(c.FDs[1], s.Received+s.Unsent)
		if err != nil {
			return s, nil, err
		}
		h.received, h.unsent = b[:s.Received:s.Received], b[s.Received:]
	}
	return s, h, nil
}

// readWhole reads n bytes of a file that must have exactly so many.
func readWhole(fd int, n int64) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size != n {
		return nil, fmt.Errorf("the bytes of a connection are %d, mode %#o, want %d in a file: %w", st.Size, st.Mode, n, unix.EPROTO)
	}
	b := make([]byte, n)
	for got := int64(0); got < n; {
		m, err := unix.Pread(fd, b[got:], got)
		if err == nil && m <= 0 {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, fmt.Errorf("bytes of a connection: %w: %w", err, unix.EPROTO)
		}
		got += int64(m)
	}
	return b, nil
}

// isStream refuses a descriptor that is no socket of a stream.
func isStream(fd int) error {
	if kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE); err != nil || kind != unix.SOCK_STREAM {
		return fmt.Errorf("the descriptor of a connection is no stream socket: %w", unix.EPROTO)
	}
	return unix.SetNonblock(fd, true)
}
