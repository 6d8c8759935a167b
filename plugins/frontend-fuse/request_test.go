package main

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

func pattern(seed byte, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = seed + byte(i*7)
	}
	return b
}

// TestRandomRequestsMatchAModel compares reads, writes and zeroes of any offset and
// length with a slice of bytes.
func TestRandomRequestsMatchAModel(t *testing.T) {
	r := newRig(t, 16, limits())
	rng := rand.New(rand.NewPCG(1, 2))
	model := make([]byte, rigSize)
	for i := range 2000 {
		off := rng.Uint64N(rigSize)
		n := min(1+rng.IntN(40000), rigSize-int(off))
		if rng.IntN(3) == 0 {
			off, n = off&^511, max(n&^511, 512)
		}
		switch rng.IntN(4) {
		case 0:
			data := pattern(byte(i), n)
			if errno := r.write(off, data, 0); errno != blk.OK {
				t.Fatal(errno)
			}
			copy(model[off:], data)
		case 1:
			mode := uint32(unix.FALLOC_FL_ZERO_RANGE)
			if rng.IntN(2) == 0 {
				mode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
			}
			if errno := r.fallocate(off, uint64(n), mode); errno != blk.OK {
				t.Fatal(errno)
			}
			clear(model[off:][:n])
		default:
			errno, got := r.read(off, n)
			if errno != blk.OK || !bytes.Equal(got, model[off:][:n]) {
				t.Fatalf("request %d: read %d bytes at %d: %v, %d bytes", i, n, off, errno, len(got))
			}
		}
	}
	r.checkIdle()
}

func TestTheEndOfTheDevice(t *testing.T) {
	r := newRig(t, 16, limits())
	if errno, got := r.read(rigSize-100, 1000); errno != blk.OK || len(got) != 100 {
		t.Errorf("read across the end: %v, %d bytes", errno, len(got))
	}
	if errno, got := r.read(rigSize+5, 1000); errno != blk.OK || len(got) != 0 {
		t.Errorf("read behind the end: %v, %d bytes", errno, len(got))
	}
	errno, body := r.call(opWrite, ioMessage(rigSize-100, 300, 0, pattern(1, 300)))
	if errno != blk.OK || native.Uint32(body) != 100 {
		t.Errorf("write across the end: %v", errno)
	}
	if errno := r.write(rigSize, pattern(1, 10), 0); errno != blk.ENOSPC {
		t.Errorf("write behind the end: %v", errno)
	}
	if errno := r.fallocate(rigSize-512, 1024, unix.FALLOC_FL_ZERO_RANGE); errno != blk.EINVAL {
		t.Errorf("zeroes across the end: %v", errno)
	}
	r.checkIdle()
}

// TestPartOfABlock_ExcludesOtherWrites holds the daemon's answers: a write that reads
// a block first is sent alone, and later writes wait until the block is back.
func TestPartOfABlock_ExcludesOtherWrites(t *testing.T) {
	r := newRig(t, 16, limits())
	r.held = true
	r.send(opWrite, ioMessage(0, 512, 0, pattern(1, 512)))
	r.send(opWrite, ioMessage(100, 50, 0, pattern(9, 50)))
	r.send(opWrite, ioMessage(0, 512, 0, pattern(5, 512)))
	r.run()
	if len(r.entries) != 1 || r.entries[0].Op != blk.Write {
		t.Fatalf("the daemon has %+v", r.entries)
	}
	r.held = false
	r.run()
	want := pattern(5, 512)
	if !bytes.Equal(r.disk[:512], want) {
		t.Errorf("the last write is not on the disk")
	}
	ops := []blk.Op{blk.Write, blk.Read, blk.Write, blk.Write}
	for i, s := range r.seen {
		if i >= len(ops) || s.Op != ops[i] {
			t.Errorf("entry %d: %v", i, s.Op)
		}
	}
	r.checkIdle()
}

func TestSyncAndFUA(t *testing.T) {
	r := newRig(t, 16, limits())
	r.write(0, pattern(1, 512), unix.O_DSYNC)
	if s := r.seen[0]; s.Flags&blk.FUA == 0 {
		t.Errorf("a write of O_DSYNC has no FUA: %+v", s)
	}
	if errno, _ := r.call(opFsync, make([]byte, 16)); errno != blk.OK || r.seen[1].Op != blk.Flush {
		t.Errorf("fsync: %v, %+v", errno, r.seen[1])
	}
	l := limits()
	l.FUA = false
	r = newRig(t, 16, l)
	r.write(0, pattern(1, 512), unix.O_SYNC)
	if len(r.seen) != 2 || r.seen[0].Flags != 0 || r.seen[1].Op != blk.Flush {
		t.Errorf("a write of O_SYNC without FUA: %+v", r.seen)
	}
	l.WriteCache = false
	r = newRig(t, 16, l)
	r.write(0, pattern(1, 512), unix.O_SYNC)
	if errno, _ := r.call(opFsync, make([]byte, 16)); errno != blk.OK || len(r.seen) != 1 {
		t.Errorf("without a cache: %v, %+v", errno, r.seen)
	}
}

func TestZeroesKeepBlocksOnlyIfAsked(t *testing.T) {
	r := newRig(t, 16, limits())
	r.fallocate(0, 4096, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE)
	r.fallocate(4096, 4096, unix.FALLOC_FL_ZERO_RANGE)
	if r.seen[0].Flags&blk.NoUnmap != 0 || r.seen[1].Flags&blk.NoUnmap == 0 {
		t.Errorf("%+v", r.seen)
	}
	if errno := r.fallocate(0, 4096, 0); errno != blk.EOPNOTSUPP {
		t.Errorf("an allocation: %v", errno)
	}
}

func TestSeek(t *testing.T) {
	r := newRig(t, 16, limits())
	for b := range uint64(rigSize / 512) {
		r.holes[b] = b < 100 || b >= 200
	}
	for _, c := range []struct {
		off    uint64
		whence uint32
		errno  blk.Errno
		want   uint64
	}{
		{0, unix.SEEK_DATA, blk.OK, 100 * 512},
		{0, unix.SEEK_HOLE, blk.OK, 0},
		{101 * 512, unix.SEEK_DATA, blk.OK, 101 * 512},
		{101*512 + 7, unix.SEEK_HOLE, blk.OK, 200 * 512},
		{200 * 512, unix.SEEK_DATA, blk.ENXIO, 0},
		{rigSize, unix.SEEK_HOLE, blk.ENXIO, 0},
		{0, 9, blk.EINVAL, 0},
	} {
		if errno, got := r.lseek(c.off, c.whence); errno != c.errno || got != c.want {
			t.Errorf("seek %d from %d: %v, %d", c.whence, c.off, errno, got)
		}
	}
	r.errno = blk.EOPNOTSUPP
	if errno, got := r.lseek(5, unix.SEEK_DATA); errno != blk.OK || got != 5 {
		t.Errorf("data without extents: %v, %d", errno, got)
	}
	if errno, got := r.lseek(5, unix.SEEK_HOLE); errno != blk.OK || got != rigSize {
		t.Errorf("hole without extents: %v, %d", errno, got)
	}
	r.checkIdle()
}

// TestSeek_BeyondOneList looks for data behind more ranges than one list has.
func TestSeek_BeyondOneList(t *testing.T) {
	r := newRig(t, 16, limits())
	for b := range uint64(rigSize / 512) {
		r.holes[b] = b%2 == 0 || b > 1500
	}
	if errno, got := r.lseek(1501*512, unix.SEEK_DATA); errno != blk.ENXIO {
		t.Errorf("%v, %d", errno, got)
	}
	if errno, got := r.lseek(0, unix.SEEK_DATA); errno != blk.OK || got != 512 {
		t.Errorf("%v, %d", errno, got)
	}
	r.checkIdle()
}

func TestErrorsReachTheUser(t *testing.T) {
	r := newRig(t, 16, limits())
	for _, errno := range []blk.Errno{blk.EIO, blk.ENOSPC, blk.ETIMEDOUT} {
		r.errno = errno
		if got, _ := r.read(0, 30000); got != errno {
			t.Errorf("read: %v, want %v", got, errno)
		}
		if got := r.write(100, pattern(1, 30000), 0); got != errno {
			t.Errorf("write: %v, want %v", got, errno)
		}
	}
	r.checkIdle()
}

func TestReadOnlyDevice(t *testing.T) {
	l := limits()
	l.ReadOnly = true
	r := newRig(t, 16, l)
	open := make([]byte, 8)
	native.PutUint32(open, unix.O_RDWR)
	if errno, _ := r.call(opOpen, open); errno != blk.EROFS {
		t.Errorf("open for writing: %v", errno)
	}
	if errno, _ := r.call(opOpen, make([]byte, 8)); errno != blk.OK {
		t.Errorf("open for reading: %v", errno)
	}
	if errno := r.write(0, pattern(1, 512), 0); errno != blk.EROFS || len(r.seen) != 0 {
		t.Errorf("write: %v", errno)
	}
}

// TestFullDevice_WaitsInTheKernel gives the daemon more requests than there are slots.
func TestFullDevice_WaitsInTheKernel(t *testing.T) {
	r := newRig(t, 8, limits())
	r.held = true
	const n = 20
	for i := range n {
		r.send(opRead, ioMessage(uint64(i)*4096, 4096, 0, nil))
	}
	r.run()
	if r.d.freeOps < 0 || len(r.entries) == 0 || len(r.entries) > len(r.d.ops) {
		t.Fatalf("%d entries, %d slots are free", len(r.entries), r.d.freeOps)
	}
	r.held = false
	r.run()
	for i := range n {
		if unique, errno, body := r.receive(); unique == 0 || errno != blk.OK || len(body) != 4096 {
			t.Fatalf("answer %d: %v, %d bytes", i, errno, len(body))
		}
	}
	r.checkIdle()
}

// TestStrayCompletions: the daemon is not trusted.
func TestStrayCompletions(t *testing.T) {
	r := newRig(t, 8, limits())
	for _, tag := range []uint64{0, tagOf(rigIndex, 0), tagOf(rigIndex, 99), tagOf(1<<20, 0), ^uint64(0)} {
		r.q.onDone(&shm.CQE{Tag: tag})
	}
	if n := r.q.stats.stray.Load(); n != 5 {
		t.Errorf("%d stray completions are counted", n)
	}
	r.checkIdle()
}

func TestRequests_AllocateNothing(t *testing.T) {
	r := newRig(t, 16, limits())
	m := make([]byte, inHeaderSize+ioInSize)
	native.PutUint32(m, uint32(len(m)))
	native.PutUint32(m[4:], opRead)
	copy(m[inHeaderSize:], ioMessage(4096, 4096, 0, nil))
	out := make([]byte, messageRoom)
	r.entries, r.seen = make([]shm.SQE, 0, 16), make([]shm.SQE, 0, 1<<16)
	if n := testing.AllocsPerRun(200, func() {
		unix.Write(r.kernel, m)
		r.q.Poll()
		var e [1]shm.SQE
		r.host.Pop(e[:])
		r.host.Push(&shm.CQE{Tag: e[0].Tag})
		r.host.Publish()
		r.q.Poll()
		unix.Read(r.kernel, out)
	}); n > 0 {
		t.Errorf("%v allocations per request", n)
	}
}

// FuzzDispatch feeds the queue one message of any bytes. No slot is lost, and the daemon
// sees only valid entries.
func FuzzDispatch(f *testing.F) {
	message := func(opcode uint32, args []byte) []byte {
		m := make([]byte, inHeaderSize+len(args))
		native.PutUint32(m, uint32(len(m)))
		native.PutUint32(m[4:], opcode)
		native.PutUint64(m[8:], 2)
		copy(m[inHeaderSize:], args)
		return m
	}
	f.Add(message(opRead, ioMessage(100, 9000, 0, nil)))
	f.Add(message(opWrite, ioMessage(1, 700, unix.O_SYNC, pattern(1, 700))))
	f.Add(message(opRead, ioMessage(0, rigSize, 0, nil)))
	f.Add(message(opWrite, ioMessage(0, 99<<10, 0, pattern(1, 99<<10))))
	f.Add(message(opFallocate, make([]byte, 32)))
	f.Add(message(opLseek, make([]byte, 24)))
	f.Add(message(opInit, make([]byte, 16)))
	f.Add(message(opSetattr, make([]byte, 88)))
	f.Add(message(opOpen, make([]byte, 8)))
	f.Fuzz(func(t *testing.T, m []byte) {
		if len(m) == 0 || len(m) > 100<<10 {
			return
		}
		r := newRig(t, 8, limits())
		r.sendRaw(m)
		r.run()
		r.checkIdle()
	})
}
