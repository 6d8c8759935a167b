package main

import (
	"io"
	"log/slog"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

const (
	rigSlot  = 8192
	rigIndex = 3
	rigSize  = 1 << 20
)

// rig is a queue with one device. A socket pair stands for /dev/fuse, and a disk in
// memory for the daemon.
type rig struct {
	t      testing.TB
	q      *queue
	d      *device
	host   *shm.Completer
	kernel int // the kernel's end of the channel

	disk    []byte
	holes   map[uint64]bool // blocks that a write zeroes without NoUnmap has freed
	errno   blk.Errno       // answer to every operation
	held    bool            // the daemon answers nothing
	entries []shm.SQE       // taken and not answered
	seen    []shm.SQE       // all entries
	unique  uint64
}

func limits() blk.Limits {
	return blk.Limits{Size: rigSize, LogicalBlockSize: 512, MaxIOSize: rigSlot, MaxWriteZeroes: 1 << 18, WriteCache: true, FUA: true}
}

func newRig(t testing.TB, slots int, l blk.Limits) *rig {
	t.Helper()
	ring, err := shm.NewHeapRing(64)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ring.Close() })
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	q, err := newQueue(ring.Submitter(), quiet())
	if err != nil {
		t.Fatal(err)
	}
	q.do = func(f func()) { f() }
	d, err := newDevice(&plugin.DeviceSpec{
		Index: rigIndex, Name: "x", Limits: l, ArenaID: 9, Arena: make([]byte, slots*rigSlot), SlotSize: rigSlot, Slots: slots,
		Channel: os.NewFile(uintptr(fds[0]), "channel"), Config: map[string]string{settingPath: "/x"},
	}, q, quiet())
	if err != nil {
		t.Fatal(err)
	}
	if err := q.add(d, false); err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, q: q, d: d, host: ring.Completer(), kernel: fds[1], disk: make([]byte, l.Size), holes: map[uint64]bool{}}
	if err := unix.SetNonblock(r.kernel, true); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { q.close(); unix.Close(r.kernel) })
	return r
}

// send makes the kernel send a request and returns the request's number.
func (r *rig) send(opcode uint32, args []byte) uint64 {
	r.t.Helper()
	r.unique += 2
	m := make([]byte, inHeaderSize+len(args))
	native.PutUint32(m, uint32(len(m)))
	native.PutUint32(m[4:], opcode)
	native.PutUint64(m[8:], r.unique)
	native.PutUint64(m[16:], rootNode)
	copy(m[inHeaderSize:], args)
	r.sendRaw(m)
	return r.unique
}

func (r *rig) sendRaw(m []byte) {
	r.t.Helper()
	if _, err := unix.Write(r.kernel, m); err != nil {
		r.t.Fatalf("send %d bytes: %v", len(m), err)
	}
}

// run runs the queue and the daemon until neither has work.
func (r *rig) run() {
	for idle := 0; idle < 2; idle++ {
		if r.q.Poll() > 0 || r.work() > 0 {
			idle = -1
		}
	}
}

// work is one round of the daemon.
func (r *rig) work() (n int) {
	var e [16]shm.SQE
	for k := r.host.Pop(e[:]); k > 0; k = r.host.Pop(e[:]) {
		r.entries = append(r.entries, e[:k]...)
		r.seen = append(r.seen, e[:k]...)
		n += k
	}
	if r.held {
		return n
	}
	for i := range r.entries { // the last one first: nothing may depend on the order
		s := &r.entries[len(r.entries)-1-i]
		r.host.Push(&shm.CQE{Tag: s.Tag, Errno: uint32(r.carryOut(s))})
		n++
	}
	r.entries = r.entries[:0]
	r.host.Publish()
	return n
}

// carryOut checks an entry as the daemon does and carries it out.
func (r *rig) carryOut(s *shm.SQE) blk.Errno {
	if s.Device != rigIndex || s.Arena != 9 || s.Offset%512 != 0 || s.Len%512 != 0 || s.Op != blk.Flush && s.Len == 0 ||
		s.Offset+uint64(s.Len) > uint64(len(r.disk)) || s.Op.HasData() && s.Len > rigSlot || s.ArenaOff%rigSlot != 0 {
		r.t.Errorf("entry %+v", *s)
		return blk.EINVAL
	}
	if r.errno != blk.OK {
		return r.errno
	}
	memory := r.d.arena[s.ArenaOff:][:rigSlot]
	var part []byte
	if s.Op != blk.Flush {
		part = r.disk[s.Offset:][:s.Len]
	}
	for b := s.Offset / 512; s.Op.Modifies() && b < (s.Offset+uint64(s.Len))/512; b++ {
		r.holes[b] = s.Op == blk.WriteZeroes && s.Flags&blk.NoUnmap == 0
	}
	switch s.Op {
	case blk.Read:
		copy(memory, part)
	case blk.Write:
		copy(part, memory)
	case blk.WriteZeroes:
		clear(part)
	case blk.Extents:
		var list []extents.Extent
		for b := s.Offset / 512; b < (s.Offset+uint64(s.Len))/512; b++ {
			more, ok := extents.Add(list, 512, r.holes[b])
			if list = more; !ok {
				break
			}
		}
		extents.Put(memory, list)
	}
	return blk.OK
}

// receive returns a reply of the queue, or nil if there is none.
func (r *rig) receive() (unique uint64, errno blk.Errno, body []byte) {
	r.t.Helper()
	b := make([]byte, messageRoom)
	n, err := unix.Read(r.kernel, b)
	if err == unix.EAGAIN {
		return 0, 0, nil
	}
	if err != nil || n < outHeaderSize || native.Uint32(b) != uint32(n) {
		r.t.Fatalf("reply of %d bytes: %v", n, err)
	}
	return native.Uint64(b[8:]), blk.Errno(-int32(native.Uint32(b[4:]))), b[outHeaderSize:n]
}

// call sends a request and returns the answer.
func (r *rig) call(opcode uint32, args []byte) (blk.Errno, []byte) {
	r.t.Helper()
	want := r.send(opcode, args)
	r.run()
	unique, errno, body := r.receive()
	if unique != want {
		r.t.Fatalf("answer to %d, want %d", unique, want)
	}
	return errno, body
}

func ioMessage(off uint64, size int, flags uint32, data []byte) []byte {
	b := make([]byte, ioInSize+len(data))
	native.PutUint64(b[8:], off)
	native.PutUint32(b[16:], uint32(size))
	native.PutUint32(b[32:], flags)
	copy(b[ioInSize:], data)
	return b
}

func (r *rig) read(off uint64, n int) (blk.Errno, []byte) {
	return r.call(opRead, ioMessage(off, n, 0, nil))
}

func (r *rig) write(off uint64, data []byte, flags uint32) blk.Errno {
	errno, body := r.call(opWrite, ioMessage(off, len(data), flags, data))
	if errno == blk.OK && len(body) != writeOutSize {
		r.t.Fatalf("answer to a write: %d bytes", len(body))
	}
	return errno
}

func (r *rig) fallocate(off, n uint64, mode uint32) blk.Errno {
	b := make([]byte, 32)
	native.PutUint64(b[8:], off)
	native.PutUint64(b[16:], n)
	native.PutUint32(b[24:], mode)
	errno, _ := r.call(opFallocate, b)
	return errno
}

func (r *rig) lseek(off uint64, whence uint32) (blk.Errno, uint64) {
	b := make([]byte, 24)
	native.PutUint64(b[8:], off)
	native.PutUint32(b[16:], whence)
	errno, body := r.call(opLseek, b)
	if errno != blk.OK {
		return errno, 0
	}
	return errno, native.Uint64(body)
}

// checkIdle fails the test if a slot or a request is lost.
func (r *rig) checkIdle() {
	r.t.Helper()
	n := 0
	for f := r.d.freeRequests; f != nil; f = f.free {
		n++
	}
	if !r.d.isIdle() || n != len(r.d.requests) || r.d.sent != 0 || r.d.writes != 0 || r.d.partial != nil {
		r.t.Errorf("%d of %d slots and %d of %d requests are free, %d sent, %d writes", r.d.freeOps, len(r.d.ops), n, len(r.d.requests), r.d.sent, r.d.writes)
	}
}
