package main

import (
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"path/filepath"
	"sync"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// server is an NBD server in this process, with one export. The fields are set before
// serve is called.
type server struct {
	flags      uint16
	blocks     [3]uint32 // minimum, preferred, payload; zero: none are told
	structured bool
	pieces     bool // reads are answered by two chunks, and holes
	tls        *tls.Config

	mu    sync.Mutex
	disk  []byte
	data  map[int]bool // sectors that are allocated
	conns map[net.Conn]bool
	// hook is asked before a command is carried out; true: there is no reply.
	hook   func(r nbdwire.Request, conn net.Conn) bool
	counts map[uint16]int // commands by type
	noHole int            // WRITE_ZEROES with NO_HOLE

	address string
}

const allFlags = nbdwire.HasFlags | nbdwire.SendFlush | nbdwire.SendFUA | nbdwire.SendTrim | nbdwire.SendWriteZeroes | nbdwire.CanMultiConn

func newServer(size int) *server {
	return &server{flags: allFlags, structured: true, disk: make([]byte, size), data: map[int]bool{}, conns: map[net.Conn]bool{}, counts: map[uint16]int{}}
}

// serve listens until the end of the test.
func (s *server) serve(t testing.TB) *server {
	t.Helper()
	s.address = filepath.Join(t.TempDir(), "nbd.sock")
	s.listen(t)
	return s
}

// listen listens on the address again. The listener is closed by the function that it
// returns, or by the end of the test.
func (s *server) listen(t testing.TB) (stop func()) {
	l, err := net.Listen("unix", s.address)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns[c] = true
			s.mu.Unlock()
			go s.talk(c)
		}
	}()
	stop = func() { l.Close(); s.cut() }
	t.Cleanup(stop)
	return stop
}

// cut closes all connections.
func (s *server) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.Close()
	}
	clear(s.conns)
}

func (s *server) uri() string { return "nbd+unix:///?socket=" + s.address }

func (s *server) talk(raw net.Conn) {
	defer raw.Close()
	conn := raw
	conn.Write(nbdwire.AppendGreeting(nil, nbdwire.FlagFixedNewstyle|nbdwire.FlagNoZeroes))
	b := make([]byte, 4)
	if _, err := io.ReadFull(conn, b); err != nil {
		return
	}
	structured := false
	for {
		h := make(nbdwire.Option, nbdwire.OptionSize)
		if _, err := io.ReadFull(conn, h); err != nil {
			return
		}
		data := make([]byte, h.Length())
		io.ReadFull(conn, data)
		answer := func(kind uint32, data []byte) { conn.Write(nbdwire.AppendOptionReply(nil, h.Number(), kind, data)) }
		switch {
		case h.Number() == nbdwire.OptStartTLS && s.tls != nil:
			answer(nbdwire.RepAck, nil)
			conn = tls.Server(conn, s.tls)
		case h.Number() == nbdwire.OptStructuredReply && s.structured:
			structured = true
			answer(nbdwire.RepAck, nil)
		case h.Number() == nbdwire.OptSetMetaContext && structured:
			answer(nbdwire.RepMetaCtx, append([]byte{0, 0, 0, 7}, nbdwire.AllocationContext...))
			answer(nbdwire.RepAck, nil)
		case h.Number() == nbdwire.OptGo:
			s.mu.Lock()
			answer(nbdwire.RepInfo, nbdwire.AppendExportInfo(nil, uint64(len(s.disk)), s.flags))
			s.mu.Unlock()
			if s.blocks != [3]uint32{} {
				answer(nbdwire.RepInfo, nbdwire.AppendBlockSizeInfo(nil, s.blocks[0], s.blocks[1], s.blocks[2]))
			}
			answer(nbdwire.RepAck, nil)
			s.transmit(conn, raw, structured)
			return
		default:
			answer(nbdwire.RepErrUnsup, nil)
		}
	}
}

func (s *server) transmit(conn, raw net.Conn, structured bool) {
	for {
		h := make(nbdwire.Request, nbdwire.RequestSize)
		if _, err := io.ReadFull(conn, h); err != nil || h.Type() == nbdwire.CmdDisc || h.Magic() != nbdwire.MagicRequest {
			return
		}
		var payload []byte
		if h.Type() == nbdwire.CmdWrite {
			payload = make([]byte, h.Length())
			if _, err := io.ReadFull(conn, payload); err != nil {
				return
			}
		}
		if s.hook != nil && s.hook(h, raw) {
			continue
		}
		if _, err := conn.Write(s.carryOut(h, payload, structured)); err != nil {
			return
		}
	}
}

// carryOut does a command and returns the reply.
func (s *server) carryOut(h nbdwire.Request, payload []byte, structured bool) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[h.Type()]++
	off, n := int(h.Offset()), int(h.Length())
	mark := func(data bool) {
		for i := off / 512; i < (off+n)/512; i++ {
			s.data[i] = data
		}
	}
	simple := make([]byte, nbdwire.SimpleSize)
	nbdwire.PutSimple(simple, h.Cookie(), 0)
	if off+n > len(s.disk) {
		nbdwire.PutSimple(simple, h.Cookie(), 22)
		return simple
	}
	switch h.Type() {
	case nbdwire.CmdRead:
		if !structured {
			return append(simple, s.disk[off:off+n]...)
		}
		return s.chunks(h, off, n)
	case nbdwire.CmdWrite:
		copy(s.disk[off:], payload)
		mark(true)
	case nbdwire.CmdTrim, nbdwire.CmdWriteZeroes:
		clear(s.disk[off : off+n])
		keep := h.Type() == nbdwire.CmdWriteZeroes && h.Flags()&nbdwire.CmdFlagNoHole != 0
		mark(keep)
		if keep {
			s.noHole++
		}
	case nbdwire.CmdBlockStatus:
		return s.status(h, off, n)
	}
	return simple
}

// chunks is the structured reply to a read.
func (s *server) chunks(h nbdwire.Request, off, n int) []byte {
	data := func(flags uint16, off, n int) []byte {
		b := make([]byte, nbdwire.DataChunkSize)
		nbdwire.PutDataChunk(b, flags, h.Cookie(), uint64(off), uint32(n))
		return append(b, s.disk[off:off+n]...)
	}
	if !s.pieces || n < 1024 {
		return data(nbdwire.ChunkDone, off, n)
	}
	half := n / 2
	second := data(0, off+half, n-half)
	first := data(0, off, half)
	if allZero(s.disk[off : off+half]) {
		first = make([]byte, nbdwire.HoleChunkSize)
		nbdwire.PutHoleChunk(first, 0, h.Cookie(), uint64(off), uint32(half))
	}
	done := make([]byte, nbdwire.ChunkSize)
	nbdwire.PutChunk(done, nbdwire.ChunkDone, nbdwire.ChunkNone, h.Cookie(), 0)
	return append(append(second, first...), done...)
}

func allZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}

// status is the reply to BLOCK_STATUS.
func (s *server) status(h nbdwire.Request, off, n int) []byte {
	var entries []byte
	for i := off / 512; i < (off+n)/512; {
		j := i
		for j < (off+n)/512 && s.data[j] == s.data[i] {
			j++
		}
		flags := uint32(nbdwire.StateHole | nbdwire.StateZero)
		if s.data[i] {
			flags = 0
		}
		entries = binary.BigEndian.AppendUint32(entries, uint32(j-i)*512)
		entries = binary.BigEndian.AppendUint32(entries, flags)
		i = j
	}
	b := make([]byte, nbdwire.ChunkSize)
	nbdwire.PutChunk(b, nbdwire.ChunkDone, nbdwire.ChunkBlockStatus, h.Cookie(), uint32(4+len(entries)))
	return append(append(b, 0, 0, 0, 7), entries...)
}
