package main

import (
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

func TestQueue_FetchesEveryTagIntoItsSlot(t *testing.T) {
	s := newStand(t, 20, 128) // more tags than the driver's ring has entries
	s.q.Poll()
	if len(s.drv.fetches) != 20 {
		t.Fatalf("%d tags are fetched, want 20", len(s.drv.fetches))
	}
	for i, c := range s.drv.order {
		if c.op != uint64(ioEncoded(ioFetch)) || c.hw != 1 || int(c.tag) != i || c.addr != s.dev.arena+uint64(20+i)*standSlot {
			t.Errorf("fetch %d is %+v", i, c)
		}
	}
}

func TestQueue_RequestToAnswer(t *testing.T) {
	s := newStand(t, 4, 64)
	s.q.Poll()
	s.request(2, opWrite|flagFUA, 80, 16)
	s.q.Poll()
	got := s.hosted()
	if len(got) != 1 || got[0].Op != blk.Write || got[0].Flags != blk.FUA || got[0].Offset != 80*512 || got[0].Len != 8192 ||
		got[0].Device != 3 || got[0].Arena != 9 || got[0].ArenaOff != 6*standSlot {
		t.Fatalf("the daemon gets %+v", got)
	}
	s.reply(got[0].Tag, 0)
	s.q.Poll()
	if c := s.drv.order[len(s.drv.order)-1]; c.op != uint64(ioEncoded(ioCommitAndFetch)) || c.tag != 2 || c.result != 8192 {
		t.Errorf("the driver gets %+v", c)
	}
	s.request(2, opFlush, 0, 0)
	s.q.Poll()
	s.reply(s.hosted()[0].Tag, uint32(blk.EROFS))
	s.q.Poll()
	if c := s.drv.order[len(s.drv.order)-1]; c.result != -int32(blk.EIO) {
		t.Errorf("a failed flush is committed as %d", c.result)
	}
	if r, e := s.q.stats.requests.Load(), s.q.stats.errors.Load(); r != 2 || e != 1 {
		t.Errorf("counted %d requests, %d errors", r, e)
	}
}

// Requests reach the daemon in the driver's order, also past a ring that is
// full for a while.
func TestQueue_KeepsTheOrderWhenTheRingIsFull(t *testing.T) {
	s := newStand(t, 40, 16)
	s.q.Poll()
	for i := range 40 {
		s.request(39-i, opWrite, uint64(i), 1)
	}
	var sectors []uint64
	for range 10 {
		s.q.Poll()
		for _, e := range s.hosted() {
			sectors = append(sectors, e.Offset/512)
			s.reply(e.Tag, 0)
		}
	}
	if len(sectors) != 40 {
		t.Fatalf("%d requests arrive, want 40", len(sectors))
	}
	for i, sector := range sectors {
		if sector != uint64(i) {
			t.Fatalf("request %d is for sector %d", i, sector)
		}
	}
	s.q.Poll()
	if len(s.drv.fetches) != 40 {
		t.Errorf("%d tags are fetched again, want 40", len(s.drv.fetches))
	}
}

// A driver that takes no commands for a while gets them all later, in order.
func TestQueue_CommandsWaitForRoom(t *testing.T) {
	s := newStand(t, 20, 128)
	s.q.Poll()
	for i := range 20 {
		s.request(i, opRead, 0, 1)
	}
	s.q.Poll()
	s.drv.room = 0
	for _, e := range s.hosted() {
		s.reply(e.Tag, 0)
	}
	for range 3 {
		s.q.Poll()
	}
	if len(s.drv.fetches) != 0 {
		t.Fatal("the driver took commands without room")
	}
	s.drv.room = 8
	for range 5 {
		s.q.Poll()
	}
	if len(s.drv.fetches) != 20 {
		t.Errorf("%d tags are fetched again, want 20", len(s.drv.fetches))
	}
	for i, c := range s.drv.order[20:] {
		if int(c.tag) != i {
			t.Errorf("command %d is of tag %d", i, c.tag)
		}
	}
}

func TestQueue_StrayAnswersAndEvents(t *testing.T) {
	s := newStand(t, 4, 64)
	s.q.Poll()
	s.request(0, opRead, 0, 1)
	s.request(1, opRead, 8, 1)
	s.q.Poll()
	got := s.hosted()
	commands := len(s.drv.order)
	s.reply(0x9999<<16, 0) // no such hardware queue
	s.reply(got[0].Tag|0xfff, 0)
	s.drv.done = append(s.drv.done, uring.CQE{UserData: 1 << 40}, uring.CQE{UserData: got[1].Tag}) // not fetched
	s.q.Poll()
	if n := s.q.stats.stray.Load(); n != 4 || len(s.drv.order) != commands {
		t.Errorf("%d strays, %d commands", n, len(s.drv.order)-commands)
	}
}

func TestQueue_AnswersTwiceAreDropped(t *testing.T) {
	s := newStand(t, 4, 64)
	s.q.Poll()
	s.request(0, opRead, 0, 1)
	s.request(1, opRead, 8, 1)
	s.q.Poll()
	tag := s.hosted()[0].Tag
	s.reply(tag, 0)
	s.reply(tag, 0)
	s.q.Poll()
	if n := s.q.stats.stray.Load(); n != 1 || len(s.drv.fetches) != 3 {
		t.Errorf("%d strays, %d fetched", n, len(s.drv.fetches))
	}
}

func TestQueue_StopGivesEveryTagBack(t *testing.T) {
	s := newStand(t, 4, 64)
	s.q.Poll()
	s.request(3, opRead, 0, 1)
	s.q.Poll()
	for i := range 3 {
		s.drv.complete(uint64(i), resAbort)
	}
	s.q.Poll()
	select {
	case <-s.p.ended:
		t.Fatal("ended with a request in flight")
	default:
	}
	s.reply(s.hosted()[0].Tag, 0)
	s.q.Poll()
	s.drv.complete(3, resAbort)
	s.q.Poll()
	<-s.p.ended
	if s.q.parts[0] != nil || s.dev.failure.Load() != 0 {
		t.Error("the hardware queue is not forgotten, or an abort counts as a failure")
	}
	next := s.part(0, 4) // takes the place
	s.q.openPart(next)
	s.q.Poll()
	if next.id != 0 || len(s.drv.fetches) != 4 {
		t.Errorf("next hardware queue has number %d, %d fetched", next.id, len(s.drv.fetches))
	}
}

func TestQueue_RefusedFetchesAreRemembered(t *testing.T) {
	s := newStand(t, 2, 64)
	s.q.Poll()
	s.drv.complete(0, -22)
	s.drv.complete(1, -22)
	s.q.Poll()
	<-s.p.ended
	if s.dev.failure.Load() != 22 {
		t.Errorf("failure %d", s.dev.failure.Load())
	}
}

func TestQueue_GivenUpDeviceFailsItsRequests(t *testing.T) {
	s := newStand(t, 2, 64)
	s.q.Poll()
	s.p.fail = true
	s.request(0, opWrite, 0, 1)
	s.request(1, 99, 0, 1)
	s.q.Poll()
	s.q.Poll()
	if got := s.hosted(); len(got) != 0 {
		t.Errorf("the daemon gets %+v", got)
	}
	if a, b := s.drv.order[2].result, s.drv.order[3].result; a != -int32(blk.EIO) || b != -int32(blk.EOPNOTSUPP) {
		t.Errorf("results %d, %d", a, b)
	}
}

func TestAlloc_NonePerRequest(t *testing.T) {
	s := newStand(t, 8, 64)
	s.q.Poll()
	s.drv.order = make([]command, 0, 1<<16)
	s.drv.done = make([]uring.CQE, 0, 64)
	n := testing.AllocsPerRun(200, func() {
		for i := range 8 {
			s.request(i, opWrite, uint64(i), 8)
		}
		s.q.Poll()
		s.answerAll()
		s.q.Poll()
	})
	if n != 0 {
		t.Errorf("%v allocations per 8 requests", n)
	}
}

// One round commits the answers of the last requests and takes the next ones
// with a single call of the driver.
func TestQueue_OneCallPerRound(t *testing.T) {
	s := newStand(t, 8, 64)
	s.q.Poll()
	before := s.drv.submits
	for range 100 {
		for i := range 8 {
			s.request(i, opRead, uint64(i), 8)
		}
		s.q.Poll()
		s.answerAll()
		s.q.Poll()
	}
	if n := s.drv.submits - before; n != 100 {
		t.Errorf("%d calls for 800 requests in 100 rounds", n)
	}
}

// A request is measured from the driver's completion to the commit of its
// result, once.
func TestQueue_MeasuresRequests(t *testing.T) {
	s := newStand(t, 4, 64)
	now := int64(1000)
	type served struct {
		device uint32
		op     blk.Op
		ns     int64
	}
	var got []served
	s.q.now = func() int64 { return now }
	s.q.served = func(device uint32, op blk.Op, ns int64) { got = append(got, served{device, op, ns}) }
	s.q.Poll()
	s.request(2, opWrite, 80, 16)
	s.q.Poll()
	now = 1700
	s.reply(s.hosted()[0].Tag, uint32(blk.EIO))
	s.q.Poll()
	s.request(2, 99, 0, 1) // unknown, answered at once: not measured
	s.q.Poll()
	if want := (served{3, blk.Write, 700}); len(got) != 1 || got[0] != want {
		t.Errorf("measured %v, want %v", got, want)
	}
}
