package plugincheck

import (
	"bytes"
	"context"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugincheck/medium"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

var mediumChecks = []Check{
	{"flush-medium", "a flush that was answered has brought the writes before it to the medium", faithful, flushMedium},
	{"fua-medium", "a write with FUA that was answered is on the medium", faithful, fuaMedium},
	{"zeroes-fua-medium", "so are zeroes that were written with FUA", append([]string{"fua-medium", "flush-medium", "zeroes-read"}, faithful...), zeroesFUAMedium},
	{"cache-medium", "a disk without write_cache has each answered write on the medium", append([]string{"flush-medium"}, faithful...), cacheMedium},
	{"answer-medium", "a write is not answered before it was written where another process sees it", append([]string{"fence-open-waits"}, faithful...), answerMedium},
	{"error-write", "an error of the medium on a write is the answer, EIO, and the disk works again afterwards", faithful, errorWrite},
	{"error-space", "a medium without space answers ENOSPC", append([]string{"error-write"}, faithful...), errorSpace},
	{"error-read", "a read error of the medium is EIO, or the right data from elsewhere", append([]string{"open-again"}, faithful...), errorRead},
	{"error-flush", "a sync that fails makes the flush fail", append([]string{"flush-medium"}, faithful...), errorFlush},
	{"error-fua", "a sync that fails makes the write with FUA fail", append([]string{"fua-medium"}, faithful...), errorFUA},
	{"short-transfers", "a medium that transfers less than it was asked loses nothing", faithful, shortTransfers},
	{"hang-other-disk", "a medium that hangs delays only its own disk", append([]string{"data-disks"}, faithful...), hangOtherDisk},
	{"hang-calls", "calls about other disks are answered while a medium hangs", append([]string{"hang-other-disk"}, faithful...), hangCalls},
	{"close-waits", "CloseDisk is answered when no request of the disk is in flight", faithful, closeWaits},
	{"detach-arena-waits", "DetachArena is answered when no request uses the arena", append([]string{"close-waits"}, faithful...), detachArenaWaits},
	{"drain-waits", "Drain is answered when nothing is in flight", append([]string{"close-waits"}, faithful...), drainWaits},
}

// settled is a disk on the medium whose first n bytes hold data that were flushed.
func (t *T) settled(n int) (*disk, []byte) {
	d := t.oneOnMedium()
	old := t.random.bytes(n)
	d.write(0, old, 0)
	d.flush()
	return d, old
}

// mediumBytes is how much the checks of the medium write, in several requests.
const mediumBytes = 256 << 10

// writePieces writes data in pieces.
func (d *disk) writePieces(data []byte, flags blk.Flags) {
	const piece = 32 << 10
	for at := 0; at < len(data); at += piece {
		d.write(uint64(at), data[at:][:piece], flags)
	}
}

// kept ends the check as failed if a power cut now would lose some of want. It plays the
// power cut, and reads by a new process: the storage may have a format of its own.
func (d *disk) kept(what string, want []byte) {
	t := d.h.t
	d.s.medium.CutPower()
	if bytes.Equal(d.s.medium.Kept(0, len(want)), want) {
		return
	}
	d.h.kill()
	if !d.h.awaitEnd(callTime) {
		t.Fatalf("the killed process has not ended after %v", callTime)
	}
	o := t.start(d.s, life{}).startOpen(d.s)
	defer o.end()
	next := o.goesOn(t, "after a power cut")
	if got := next.read(0, len(want)); !bytes.Equal(got, want) {
		t.Fatalf("%s: a power cut loses byte %d", what, differ(got, want))
	}
}

func flushMedium(t *T) {
	d, _ := t.settled(mediumBytes)
	want := t.random.bytes(mediumBytes)
	d.writePieces(want, 0)
	d.flush()
	d.kept("written and flushed", want)
}

func fuaMedium(t *T) {
	d, _ := t.settled(mediumBytes)
	if !d.limits.FUA {
		t.Skipf("Limits does not offer FUA")
	}
	want := t.random.bytes(mediumBytes)
	d.writePieces(want, blk.FUA)
	d.kept("written with FUA", want)
}

func zeroesFUAMedium(t *T) {
	d, want := t.settled(mediumBytes)
	if !d.limits.FUA || d.limits.MaxWriteZeroes == 0 {
		t.Skipf("Limits does not offer FUA and write-zeroes")
	}
	d.must(shm.SQE{Op: blk.WriteZeroes, Len: 64 << 10, Flags: blk.FUA})
	clear(want[:64<<10])
	d.kept("zeroes written with FUA", want)
}

func cacheMedium(t *T) {
	d, _ := t.settled(mediumBytes)
	if d.limits.WriteCache {
		t.Skipf("Limits says write_cache: answered writes may be lost until a flush")
	}
	want := t.random.bytes(mediumBytes)
	d.writePieces(want, 0)
	d.kept("Limits does not say write_cache, and the write was answered", want)
}

// answerMedium holds the medium: a plugin that keeps acknowledged writes cannot have
// answered one that the medium has not taken, unless the kernel has it.
func answerMedium(t *T) {
	d := t.oneOnMedium()
	if !d.limits.FUA && d.limits.WriteCache {
		t.Skipf("no write has to reach the medium before a flush")
	}
	d.s.medium.Set(medium.Faults{HoldWrites: true})
	q := d.h.queues[0]
	q.post(d.request(shm.SQE{Tag: 1, Op: blk.Write, Len: 4096, Flags: d.sure()}))
	if early := q.answers(1, 4*quietTime); len(early) > 0 {
		t.Fatalf("a write that must be on the medium is answered (errno %d) while the medium holds it", early[0].Errno)
	}
	d.s.medium.Release()
	if c := q.await(1)[0]; c.Errno != 0 {
		t.Fatalf("write on a slow medium: %v", blk.Errno(c.Errno))
	}
}

// failing makes writes on a medium that fails, until one of their answers or that of a
// flush is an error.
func (d *disk) failing(data []byte) blk.Errno {
	for i := range 8 {
		copy(d.h.mem.Bytes(), data)
		if errno := d.do(shm.SQE{Op: blk.Write, Offset: uint64(i * len(data)), Len: uint32(len(data)), Flags: d.sure()}); errno != blk.OK {
			return errno
		}
	}
	return d.do(shm.SQE{Op: blk.Flush})
}

func errorWrite(t *T) { mediumFails(t, syscall.EIO) }
func errorSpace(t *T) { mediumFails(t, syscall.ENOSPC) }

func mediumFails(t *T, errno syscall.Errno) {
	d, _ := t.settled(mediumBytes)
	d.s.medium.Set(medium.Faults{Write: errno})
	if got := d.failing(t.random.bytes(4096)); got != blk.Errno(errno) {
		t.Fatalf("writes and a flush on a medium that answers %v: %v", errno, answer(got))
	}
	d.s.medium.Release()
	want := t.random.bytes(mediumBytes)
	d.writePieces(want, 0)
	if got := d.do(shm.SQE{Op: blk.Flush}); got != blk.OK { // an error that was reported before may come once more
		d.writePieces(want, 0)
		d.flush()
	}
	d.expect("after the medium works again", 0, want)
}

// errorRead reads past caches: from a new process, without those of the file system.
func errorRead(t *T) {
	d, _ := t.settled(mediumBytes)
	s := d.s
	want := t.random.bytes(mediumBytes)
	d.writePieces(want, 0)
	d.flush()
	d.h.end()
	d = t.start(s, life{}).open(s, false)
	s.medium.Set(medium.Faults{Read: syscall.EIO})
	for at := 0; at < mediumBytes; at += 32 << 10 {
		mem := d.h.mem.Bytes()[:32<<10]
		switch errno := d.do(shm.SQE{Op: blk.Read, Offset: uint64(at), Len: uint32(len(mem))}); {
		case errno == blk.OK && !bytes.Equal(mem, want[at:][:len(mem)]):
			t.Fatalf("a read of a medium that fails succeeds with other bytes than were written, from byte %d on", at+differ(mem, want[at:][:len(mem)]))
		case errno != blk.OK && errno != blk.EIO:
			t.Fatalf("a read of a medium that fails: %v, want %v", errno, blk.EIO)
		}
	}
	s.medium.Release()
	d.expect("after the medium works again", 0, want)
}

func errorFlush(t *T) {
	d, _ := t.settled(mediumBytes)
	d.writePieces(t.random.bytes(mediumBytes), 0)
	d.s.medium.Set(medium.Faults{Sync: syscall.EIO})
	if errno := d.do(shm.SQE{Op: blk.Flush}); errno == blk.OK && d.limits.WriteCache {
		t.Fatalf("a flush succeeds, and the sync of the medium failed")
	}
}

func errorFUA(t *T) {
	d, _ := t.settled(mediumBytes)
	if !d.limits.FUA {
		t.Skipf("Limits does not offer FUA")
	}
	d.s.medium.Set(medium.Faults{Sync: syscall.EIO})
	if errno := d.do(shm.SQE{Op: blk.Write, Len: 4096, Flags: blk.FUA}); errno == blk.OK {
		t.Fatalf("a write with FUA succeeds, and the sync of the medium failed")
	}
}

// shortTransfers lets the medium move half of each request.
func shortTransfers(t *T) {
	d, _ := t.settled(mediumBytes)
	d.s.medium.Set(medium.Faults{Short: true})
	want := t.random.bytes(64 << 10)
	copy(d.h.mem.Bytes(), want)
	errno := d.do(shm.SQE{Op: blk.Write, Len: uint32(len(want))})
	if errno == blk.OK {
		errno = d.do(shm.SQE{Op: blk.Flush})
	}
	d.s.medium.Release()
	if errno == blk.OK {
		d.expect("a write that the medium took in parts", 0, want)
	}
	d.write(0, want, 0)
	d.s.medium.Set(medium.Faults{Short: true})
	mem := d.h.mem.Bytes()[:len(want)]
	clear(mem)
	if errno := d.do(shm.SQE{Op: blk.Read, Len: uint32(len(mem))}); errno == blk.OK && !bytes.Equal(mem, want) {
		t.Fatalf("a read that the medium gave in parts succeeds with other bytes from byte %d on", differ(mem, want))
	}
}

// beside returns a disk on an ordinary file, in the process of a disk on the medium.
func (t *T) beside(d *disk) *disk {
	if t.info.Names != plugin.NamesPath {
		t.Skipf("disks of the plugin lie in one folder, which is the medium")
	}
	return d.h.open(t.plain(), false)
}

func hangOtherDisk(t *T) {
	d := t.oneOnMedium()
	other := t.beside(d)
	d.holdWrites()
	h, q := d.h, d.h.queues[0]
	for i := range t.rounds(50) {
		want := t.random.bytes(4096)
		copy(h.mem.Bytes()[arenaSize/2:], want)
		q.post(other.request(shm.SQE{Tag: uint64(1000 + i), Op: blk.Write, Len: 4096, ArenaOff: arenaSize / 2}))
		got := q.answers(1, 5*time.Second)
		if len(got) == 0 {
			t.Fatalf("a write to another disk has no answer after 5 s, while the medium of the first hangs")
		}
		if got[0].Tag < 1000 {
			t.Skipf("writes are answered before they reach the medium")
		}
	}
	d.s.medium.Release()
	q.await(inFlight)
}

func hangCalls(t *T) {
	d := t.oneOnMedium()
	other := t.beside(d)
	d.holdWrites()
	most, cancel := context.WithTimeout(t.ctx, 5*time.Second)
	defer cancel()
	if err := d.h.p.CloseDisk(most, other.index); err != nil {
		t.Fatalf("CloseDisk of another disk, while the medium of the first hangs: %v", err)
	}
	if _, err := d.h.tryOpen(most, other.s, false); err != nil {
		t.Fatalf("OpenDisk of another disk, while the medium of the first hangs: %v", err)
	}
	d.s.medium.Release()
	d.h.queues[0].await(inFlight)
}

// answersLate checks that a call waits for the requests at the medium, and is answered
// when they are.
func (d *disk) answersLate(what string, f func(context.Context) error) {
	t := d.h.t
	d.holdWrites()
	early := len(d.h.queues[0].answers(inFlight, quietTime))
	if early == inFlight {
		d.h.t.Skipf("writes are answered before they reach the medium")
	}
	done := make(chan error, 1)
	go func() { done <- d.h.try(f) }()
	select {
	case err := <-done:
		t.Fatalf("%s is answered (error: %v) while %d writes are at the medium", what, err, inFlight-early)
	case <-time.After(4 * quietTime):
	}
	d.s.medium.Release()
	t.must(what+" after the writes", <-done)
	d.h.queues[0].await(inFlight - early)
}

func closeWaits(t *T) {
	d := t.oneOnMedium()
	d.answersLate("CloseDisk", func(ctx context.Context) error { return d.h.p.CloseDisk(ctx, d.index) })
}

func detachArenaWaits(t *T) {
	d := t.oneOnMedium()
	d.answersLate("DetachArena", func(ctx context.Context) error { return d.h.p.DetachArena(ctx, arenaID) })
}

func drainWaits(t *T) {
	d := t.oneOnMedium()
	d.answersLate("Drain", d.h.p.Drain)
}
