package main

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugintest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// start starts the plugin in this process, with a disk on s.
func start(t testing.TB, s *server, settings map[string]string) *plugintest.IO {
	t.Helper()
	all := map[string]string{"uri": s.uri()}
	for k, v := range settings {
		all[k] = v
	}
	return plugintest.StartIO(t, newBackend(), plugintest.Options{Configure: all})
}

// cutOnce is a hook that closes all connections at the first command of that kind.
func (s *server) cutOnce(command uint16) {
	done := false
	s.hook = func(r nbdwire.Request, _ net.Conn) bool {
		s.mu.Lock()
		now := !done && r.Type() == command
		done = done || now
		s.mu.Unlock()
		if now {
			s.cut()
		}
		return now
	}
}

func TestALostConnection(t *testing.T) {
	write := shm.SQE{Op: blk.Write, Len: 4096}
	for _, c := range []struct {
		name     string
		settings map[string]string
		command  uint16
		request  shm.SQE
		want     blk.Errno
	}{
		{"a read is sent again", nil, nbdwire.CmdRead, shm.SQE{Op: blk.Read, Len: 4096}, blk.OK},
		{"a write fails", nil, nbdwire.CmdWrite, write, blk.EIO},
		{"a discard fails", nil, nbdwire.CmdTrim, shm.SQE{Op: blk.Discard, Len: 4096}, blk.EIO},
		{"zeroes fail", nil, nbdwire.CmdWriteZeroes, shm.SQE{Op: blk.WriteZeroes, Len: 4096}, blk.EIO},
		{"a flush fails", nil, nbdwire.CmdFlush, shm.SQE{Op: blk.Flush}, blk.EIO},
		{"a write is sent again by name", map[string]string{"replay": "unsafe"}, nbdwire.CmdWrite, write, blk.OK},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newServer(1 << 20)
			s.cutOnce(c.command)
			h := start(t, s.serve(t), c.settings)
			if e := h.Do(c.request); e != c.want {
				t.Errorf("the request that the server had: %v, want %v", e, c.want)
			}
			if e := h.Do(write); e != blk.OK {
				t.Errorf("a write after it: %v", e)
			}
		})
	}
}

// A server that was started again may have lost what was written and not flushed.
func TestAFlushAfterALossFailsOnce(t *testing.T) {
	s := newServer(1 << 20)
	h := start(t, s.serve(t), map[string]string{"connections": "1"})
	do := func(op blk.Op, want blk.Errno) {
		t.Helper()
		if e := h.Do(shm.SQE{Op: op, Len: 4096}); e != want {
			t.Errorf("%v: %v, want %v", op, e, want)
		}
	}
	do(blk.Write, blk.OK)
	do(blk.Flush, blk.OK)
	s.cut()
	do(blk.Read, blk.OK)
	do(blk.Flush, blk.OK) // nothing was unflushed
	do(blk.Write, blk.OK)
	s.cut()
	do(blk.Read, blk.OK)
	do(blk.Flush, blk.EIO)
	do(blk.Flush, blk.OK)
}

func TestAServerThatIsAway(t *testing.T) {
	s := newServer(1 << 20)
	s.address = filepath.Join(t.TempDir(), "s")
	stop := s.listen(t)
	h := start(t, s, map[string]string{"reconnect": "100ms"})
	stop()
	begun := time.Now()
	if e := h.Do(shm.SQE{Op: blk.Read, Len: 512}); e != blk.EIO || time.Since(begun) < 50*time.Millisecond {
		t.Errorf("a read without a server: %v after %v", e, time.Since(begun))
	}
	s.listen(t)
	for end := time.Now().Add(10 * time.Second); h.Do(shm.SQE{Op: blk.Read, Len: 512}) != blk.OK; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the server is back and reads fail")
		}
	}
}

// TestReplies: a server that breaks the protocol costs its connection and nothing else.
func TestReplies(t *testing.T) {
	chunk := func(flags, kind uint16, cookie uint64, rest ...byte) []byte {
		b := make([]byte, nbdwire.ChunkSize)
		nbdwire.PutChunk(b, flags, kind, cookie, uint32(len(rest)))
		return append(b, rest...)
	}
	data := func(flags uint16, cookie, off uint64, n int) []byte {
		b := make([]byte, nbdwire.DataChunkSize, nbdwire.DataChunkSize+n)
		nbdwire.PutDataChunk(b, flags, cookie, off, uint32(n))
		return b[:cap(b)]
	}
	for name, reply := range map[string]func(cookie uint64) []byte{
		"garbage":               func(uint64) []byte { return make([]byte, 32) },
		"another cookie":        func(c uint64) []byte { return chunk(1, 0, c+1) },
		"a cookie of no queue":  func(c uint64) []byte { return chunk(1, 0, c|1<<40) },
		"a call's cookie":       func(c uint64) []byte { return chunk(1, 0, c|callCookie) },
		"a simple reply":        func(c uint64) []byte { b := make([]byte, 16); nbdwire.PutSimple(b, c, 0); return b },
		"no data":               func(c uint64) []byte { return chunk(1, 0, c) },
		"half of the data":      func(c uint64) []byte { return data(1, c, 0, 2048) },
		"too many data":         func(c uint64) []byte { return data(1, c, 0, 8192) },
		"data of another range": func(c uint64) []byte { return data(1, c, 4096, 4096) },
		"data twice":            func(c uint64) []byte { return append(data(0, c, 0, 4096), data(1, c, 0, 4096)...) },
		"an empty chunk":        func(c uint64) []byte { return chunk(1, nbdwire.ChunkOffsetData, c, make([]byte, 8)...) },
		"extents":               func(c uint64) []byte { return chunk(1, nbdwire.ChunkBlockStatus, c, make([]byte, 12)...) },
		"an error that ends":    func(c uint64) []byte { return chunk(1, nbdwire.ChunkError, c, 0, 0) },
		"an unknown chunk":      func(c uint64) []byte { return chunk(1, 99, c) },
		"a long message":        func(c uint64) []byte { return chunk(1, nbdwire.ChunkError, c, make([]byte, 9000)...) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(1 << 20)
			s.disk[4095] = 9
			first := true
			s.hook = func(r nbdwire.Request, conn net.Conn) bool {
				s.mu.Lock()
				defer s.mu.Unlock()
				if !first || r.Type() != nbdwire.CmdRead {
					return false
				}
				first = false
				conn.Write(reply(r.Cookie()))
				return true
			}
			h := start(t, s.serve(t), map[string]string{"connections": "1"})
			mem := h.Memory.Bytes()
			if e := h.Do(shm.SQE{Op: blk.Read, Len: 4096}); e != blk.OK || mem[4095] != 9 {
				t.Errorf("the read, which is sent again on another connection: %v, %d", e, mem[4095])
			}
		})
	}
}

// TestErrors: the server's errors are those of their requests, in both kinds of reply.
func TestErrors(t *testing.T) {
	for _, structured := range []bool{false, true} {
		s := newServer(1 << 20)
		s.structured = structured
		s.hook = func(r nbdwire.Request, conn net.Conn) bool {
			b := make([]byte, nbdwire.SimpleSize)
			if nbdwire.PutSimple(b, r.Cookie(), uint32(r.Offset()/512)); structured {
				b = make([]byte, nbdwire.ErrorChunkSize)
				nbdwire.PutErrorChunk(b, r.Cookie(), uint32(r.Offset()/512))
			}
			conn.Write(b)
			return true
		}
		h := start(t, s.serve(t), nil)
		for code, want := range map[uint64]blk.Errno{1: blk.EPERM, 5: blk.EIO, 12: blk.ENOMEM, 22: blk.EINVAL, 28: blk.ENOSPC, 75: blk.EINVAL, 95: blk.EOPNOTSUPP, 108: blk.EIO, 300: blk.EIO} {
			if e := h.Do(shm.SQE{Op: blk.Read, Offset: code * 512, Len: 512}); e != want {
				t.Errorf("structured %v, error %d: %v, want %v", structured, code, e, want)
			}
		}
	}
}

func TestResize(t *testing.T) {
	for _, flags := range []uint16{allFlags, allFlags &^ nbdwire.CanMultiConn} {
		s := newServer(1 << 20)
		s.flags = flags
		h := start(t, s.serve(t), nil)
		if e := h.Do(shm.SQE{Op: blk.Write, Len: 512}); e != blk.OK {
			t.Fatal(e)
		}
		resize := func() blk.Limits {
			t.Helper()
			l, err := h.Process.ResizeDisk(t.Context(), plugintest.Device)
			if err != nil {
				t.Fatal(err)
			}
			return l
		}
		if l := resize(); l.Size != 1<<20 {
			t.Errorf("%d bytes without a change", l.Size)
		}
		s.mu.Lock()
		s.disk = append(s.disk, make([]byte, 1<<20)...)
		flushes := s.counts[nbdwire.CmdFlush]
		s.mu.Unlock()
		if l := resize(); l.Size != 2<<20 {
			t.Errorf("%d bytes", l.Size)
		}
		s.mu.Lock()
		if s.counts[nbdwire.CmdFlush] != flushes+1 {
			t.Error("no flush before the connections were replaced")
		}
		s.mu.Unlock()
		if e := h.Do(shm.SQE{Op: blk.Write, Offset: 2<<20 - 512, Len: 512}); e != blk.OK {
			t.Errorf("a write at the new end: %v", e)
		}
	}
}

// TestFlags: FUA and the ban of holes reach the server.
func TestFlags(t *testing.T) {
	s := newServer(1 << 20)
	seen := map[uint16]uint16{}
	s.hook = func(r nbdwire.Request, _ net.Conn) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		seen[r.Type()] |= r.Flags()
		return false
	}
	h := start(t, s.serve(t), nil)
	for _, e := range []shm.SQE{
		{Op: blk.Write, Len: 512, Flags: blk.FUA}, {Op: blk.WriteZeroes, Len: 512, Flags: blk.NoUnmap}, {Op: blk.Discard, Len: 512, Flags: blk.FUA},
	} {
		if errno := h.Do(e); errno != blk.OK {
			t.Error(e.Op, errno)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if seen[nbdwire.CmdWrite] != nbdwire.CmdFlagFUA || seen[nbdwire.CmdWriteZeroes] != nbdwire.CmdFlagNoHole || seen[nbdwire.CmdTrim] != nbdwire.CmdFlagFUA {
		t.Errorf("flags by command: %v", seen)
	}
}

// TestTheLockOutlivesThePlugin: a server is started when all that had the lock are dead.
func TestTheLockOutlivesThePlugin(t *testing.T) {
	lock := t.TempDir()
	f, err := takeLock(t.Context(), lock)
	if err != nil {
		t.Fatal(err)
	}
	heir := exec.Command("sleep", "60")
	heir.ExtraFiles = []*os.File{f}
	if err := heir.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = heir.Wait() }()
	f.Close()
	short, cancel := context.WithTimeout(t.Context(), 3*lockPause)
	defer cancel()
	if g, err := takeLock(short, lock); err == nil {
		g.Close()
		t.Error("the lock is free while a process that inherited it lives")
	}
	_ = heir.Process.Kill()
	g, err := takeLock(t.Context(), lock)
	if err != nil {
		t.Fatal(err)
	}
	g.Close()
}

// TestACaptiveServerThatDies ends the plugin, and takes no answer with it.
func TestACaptiveServerThatDies(t *testing.T) {
	program(t, "nbdkit")
	exited := make(chan int, 1)
	b := newBackend()
	b.exit = func(code int) { exited <- code }
	h := plugintest.StartIO(t, b, plugintest.Options{Configure: map[string]string{"run": "nbdkit memory 1M", "lock": t.TempDir(), "keeps": "nothing"}})
	if e := h.Do(shm.SQE{Op: blk.Write, Len: 512}); e != blk.OK {
		t.Fatal(e)
	}
	b.mu.Lock()
	pid := b.captive.cmd.Process.Pid
	b.mu.Unlock()
	if err := unix.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case code := <-exited:
		if code == 0 {
			t.Error("it ends in order")
		}
	case <-time.After(10 * time.Second):
		t.Fatal("it lives on")
	}
}

// TestAllocations: requests allocate nothing.
func TestAllocations(t *testing.T) {
	program(t, "nbdkit")
	h := plugintest.StartIO(t, newBackend(), plugintest.Options{Configure: map[string]string{"run": "nbdkit memory 1M", "lock": t.TempDir()}})
	var cqes [1]shm.CQE
	n := uint64(0)
	do := func() {
		n++
		h.Submitter.Push(&shm.SQE{Device: plugintest.Device, Arena: plugintest.Arena, Op: blk.Op(n % 2), Len: 4096, Tag: n})
		h.Submitter.Publish()
		for h.Submitter.Pop(cqes[:]) == 0 {
			if h.Submitter.Arm() {
				p := [1]unix.PollFd{{Fd: int32(h.Submitter.FD()), Events: unix.POLLIN}}
				_, _ = unix.Poll(p[:], 100)
				h.Submitter.Disarm()
			}
		}
		if cqes[0].Errno != 0 {
			t.Fatal(cqes[0].Errno)
		}
	}
	if got := testing.AllocsPerRun(2000, do); got > 0 {
		t.Errorf("%v allocations a request", got)
	}
}
