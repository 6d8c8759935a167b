package main

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

const arenaFD = 55

// newPageStand is a stand with a driver that registers the pages of requests.
func newPageStand(t testing.TB, depth, entries int) *stand {
	s := newClosedStand(t, depth, entries)
	s.dev.arenaFD = arenaFD
	s.p.pages = true
	s.q.openPart(s.p)
	s.q.Poll()
	return s
}

func TestPages_TagsNameTheirBuffers(t *testing.T) {
	s := newPageStand(t, 20, 64)
	for i, c := range s.drv.order {
		if c.pages != uint64(i) || c.addr != 0 {
			t.Errorf("fetch %d is %+v", i, c)
		}
	}
	if len(s.drv.order) != 20 || s.drv.table != mostPages {
		t.Errorf("%d fetches, a table of %d buffers", len(s.drv.order), s.drv.table)
	}
}

func TestPages_WriteGoesToTheSlotFirst(t *testing.T) {
	s := newPageStand(t, 4, 64)
	s.request(2, opWrite|flagFUA, 80, 16)
	s.q.Poll()
	s.q.Poll()
	if got := s.hosted(); len(got) != 0 {
		t.Fatalf("the daemon gets %+v before the payload is there", got)
	}
	var want uring.SQE
	want.WritePages(arenaFD, 8192, 6*standSlot, 2)
	want.UserData = 2 | movedPages
	if s.drv.moves[2] != want {
		t.Fatalf("payload goes as %+v, want %+v", s.drv.moves[2], want)
	}
	s.drv.moved(2, 8192)
	s.q.Poll()
	got := s.hosted()
	if len(got) != 1 || got[0].Op != blk.Write || got[0].Flags != blk.FUA || got[0].Len != 8192 || got[0].ArenaOff != 6*standSlot {
		t.Fatalf("the daemon gets %+v", got)
	}
	s.reply(got[0].Tag, 0)
	s.q.Poll()
	if c := s.drv.order[len(s.drv.order)-1]; c.op != uint64(ioEncoded(ioCommitAndFetch)) || c.tag != 2 || c.result != 8192 || c.pages != 2 || c.addr != 0 {
		t.Errorf("the driver gets %+v", c)
	}
}

func TestPages_ReadComesOutOfTheSlotLast(t *testing.T) {
	s := newPageStand(t, 4, 64)
	s.request(1, opRead, 8, 8)
	s.q.Poll()
	got := s.hosted()
	if len(got) != 1 || len(s.drv.moves) != 0 {
		t.Fatalf("the daemon gets %+v, %d payloads are under way", got, len(s.drv.moves))
	}
	commands := len(s.drv.order)
	s.reply(got[0].Tag, 0)
	s.q.Poll()
	var want uring.SQE
	want.ReadPages(arenaFD, 4096, 5*standSlot, 1)
	want.UserData = 1 | movedPages
	if s.drv.moves[1] != want || len(s.drv.order) != commands {
		t.Fatalf("payload goes as %+v, want %+v; %d commands more", s.drv.moves[1], want, len(s.drv.order)-commands)
	}
	s.drv.moved(1, 4096)
	s.q.Poll()
	s.q.Poll()
	if c := s.drv.order[len(s.drv.order)-1]; len(s.drv.order) != commands+1 || c.tag != 1 || c.result != 4096 {
		t.Errorf("the driver gets %+v", c)
	}
}

// A request without payload, or with none left, takes the short way.
func TestPages_NothingToMove(t *testing.T) {
	s := newPageStand(t, 4, 64)
	s.request(0, opFlush, 0, 0)
	s.request(1, opDiscard, 0, 8)
	s.request(2, opWriteZeroes, 0, 8)
	s.request(3, opRead, 0, 8)
	s.q.Poll()
	for _, e := range s.hosted() {
		errno := blk.OK
		if e.Op == blk.Read {
			errno = blk.ENOSPC
		}
		s.reply(e.Tag, uint32(errno))
	}
	s.q.Poll()
	if len(s.drv.fetches) != 4 || len(s.drv.moves) != 0 {
		t.Errorf("%d of 4 are answered, %d payloads are under way", len(s.drv.fetches), len(s.drv.moves))
	}
	if c := s.drv.fetches[3]; c.result != -int32(blk.ENOSPC) {
		t.Errorf("the failed read is committed as %d", c.result)
	}
	s.p.fail = true
	s.request(0, opWrite, 0, 8)
	s.q.Poll()
	s.q.Poll()
	if c := s.drv.fetches[0]; len(s.drv.moves) != 0 || c.result != -int32(blk.EIO) {
		t.Errorf("a write to a device that is given up is committed as %d, %d payloads are under way", c.result, len(s.drv.moves))
	}
}

// Payload that does not arrive is an I/O error: a write does not reach the
// daemon, a read is not answered with old memory.
func TestPages_PayloadThatDoesNotArrive(t *testing.T) {
	for name, res := range map[string]int32{"error": -int32(unix.EFAULT), "short": 512} {
		t.Run(name, func(t *testing.T) {
			s := newPageStand(t, 4, 64)
			s.request(0, opWrite, 0, 8)
			s.request(1, opRead, 0, 8)
			s.q.Poll()
			s.reply(s.hosted()[0].Tag, 0)
			s.q.Poll()
			s.drv.moved(0, res)
			s.drv.moved(1, res)
			s.q.Poll()
			s.q.Poll()
			if got := s.hosted(); len(got) != 0 {
				t.Errorf("the daemon gets %+v", got)
			}
			for tag := range uint64(2) {
				if c, ok := s.drv.fetches[tag]; !ok || c.result != -int32(blk.EIO) {
					t.Errorf("tag %d is committed as %+v", tag, c)
				}
			}
			if n := s.q.stats.errors.Load(); n != 2 {
				t.Errorf("%d errors are counted, want 2", n)
			}
		})
	}
}

func TestPages_StrayMovesAreDropped(t *testing.T) {
	s := newPageStand(t, 4, 64)
	s.request(0, opRead, 0, 8)
	s.q.Poll()
	for _, user := range []uint64{0, 1, 77 << 16, 3 << 40} { // with the daemon, fetched, of no hardware queue
		s.drv.done = append(s.drv.done, uring.CQE{UserData: user | movedPages, Res: 4096})
	}
	commands := len(s.drv.order)
	s.q.Poll()
	s.q.Poll()
	if n := s.q.stats.stray.Load(); n != 4 || len(s.drv.order) != commands {
		t.Errorf("%d strays, %d commands", n, len(s.drv.order)-commands)
	}
}

// A device that stops gets its tags back when their payload has arrived.
func TestPages_StopWaitsForPayload(t *testing.T) {
	s := newPageStand(t, 2, 64)
	s.request(0, opWrite, 0, 8)
	s.q.Poll()
	s.drv.complete(1, resAbort)
	s.q.Poll()
	s.drv.moved(0, 4096)
	s.q.Poll()
	s.reply(s.hosted()[0].Tag, 0)
	s.q.Poll()
	select {
	case <-s.p.ended:
		t.Fatal("ended with a request in flight")
	default:
	}
	s.drv.complete(0, resAbort)
	s.q.Poll()
	<-s.p.ended
}

// Hardware queues that share a ring have buffers of their own; those of one
// that has ended are given to the next.
func TestPages_BuffersOfSeveralDisks(t *testing.T) {
	s := newPageStand(t, 4, 64)
	open := func(depth int) *hardwareQueue {
		p := s.part(0, depth)
		p.pages = true
		s.q.openPart(p)
		s.q.Poll()
		return p
	}
	second, third := open(6), open(2)
	if second.buffer != 4 || third.buffer != 10 {
		t.Fatalf("buffers begin at %d and %d, want 4 and 10", second.buffer, third.buffer)
	}
	for i := range 6 {
		s.drv.complete(uint64(second.id)<<16|uint64(i), resAbort)
	}
	s.q.Poll()
	<-second.ended
	if wide, narrow := open(7), open(5); wide.buffer != 12 || narrow.buffer != 4 {
		t.Errorf("buffers begin at %d and %d, want 12 and 4", wide.buffer, narrow.buffer)
	}
}

func TestPages_NoBuffersLeft(t *testing.T) {
	s := newPageStand(t, 4, 64)
	p := s.part(0, mostPages-3)
	p.pages = true
	s.q.openPart(p)
	<-p.ended
	if e := unix.Errno(s.dev.failure.Load()); e != unix.ENOSPC {
		t.Errorf("refused with %v", e)
	}
	s.q.Poll()
	if len(s.drv.fetches) != 4 || len(s.q.parts) != 2 || s.q.parts[1] != nil {
		t.Errorf("%d tags are fetched, want the 4 of the first", len(s.drv.fetches))
	}
}

func TestPages_AllocatesNothing(t *testing.T) {
	s := newPageStand(t, 8, 64)
	s.drv.order = make([]command, 0, 1<<16)
	s.drv.done = make([]uring.CQE, 0, 64)
	n := testing.AllocsPerRun(200, func() {
		for i := range 8 {
			s.request(i, uint32(i%2), uint64(i), 8) // reads and writes
		}
		for range 3 {
			s.q.Poll()
			for i := range uint64(8) {
				if _, ok := s.drv.moves[i]; ok {
					s.drv.moved(i, 4096)
				}
			}
			s.q.Poll()
			s.answerAll()
		}
		s.q.Poll()
	})
	if n != 0 {
		t.Errorf("%v allocations per 8 requests", n)
	}
	if len(s.drv.fetches) != 8 {
		t.Errorf("%d of 8 tags are with the driver", len(s.drv.fetches))
	}
}

// The features are asked for where they are wanted and there.
func TestCreate_ZeroCopyWhereTheDriverHasIt(t *testing.T) {
	const pages = featZeroCopy | featAutoBufReg
	for _, v := range []struct {
		word    string
		offered uint64
		want    uint64
		warns   bool
	}{
		{"yes", pages, pages, false},
		{"yes", featZeroCopy, 0, true},
		{"yes", 0, 0, true},
		{"no", pages, 0, false},
	} {
		var log bytes.Buffer
		disk, _, d := newFakeDisk(t, v.offered, slog.New(slog.NewTextHandler(&log, nil)))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		spec := plugin.DeviceSpec{Index: 3, Name: "x", Limits: limits(), Slots: 1, SlotSize: 4096, Arena: make([]byte, 4096),
			Config: map[string]string{"number": "5", "zero_copy": v.word}}
		disk.refuse[cmdSetParams] = unix.EINVAL // far enough
		if err := d.createDevice(ctx, &spec, []*queue{{}}); err == nil {
			t.Fatal("made without parameters")
		}
		if got := disk.added & pages; got != v.want || strings.Contains(log.String(), "zero_copy is left out") != v.warns {
			t.Errorf("zero_copy=%s of features %#x: made with %#x; log: %s", v.word, v.offered, got, &log)
		}
	}
}
