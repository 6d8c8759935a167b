package client

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// Requests of the tests of lost writes.
var (
	aWrite    = Request{Op: blk.Write, Len: 512}
	aFUAWrite = Request{Op: blk.Write, Flags: blk.FUA, Len: 512}
	aFlush    = Request{Op: blk.Flush}
	aZero     = Request{Op: blk.WriteZeroes, Len: 512}
	aDiscard  = Request{Op: blk.Discard, Len: 4096}
	aRead     = Request{Op: blk.Read, Len: 512}
)

// verifyingTarget is a target that tells the incarnation of its storage.
func verifyingTarget(t *testing.T) *target {
	s := newTarget(t, 1<<20)
	s.features = rnbdwire.FeatureIdentity | rnbdwire.FeatureOnce | rnbdwire.FeatureVerifier
	s.rsp.Volume, s.rsp.Verifier = 1, 11
	return s
}

// restart ends the target and starts it with that verifier, and waits until d is open.
func (s *target) restart(d *Device, verifier rnbdwire.Verifier) {
	s.t.Helper()
	s.comeBackChanged(d, func() { s.rsp.Verifier = verifier })
	eventually(s.t, "open", func() bool { return d.State() == Open })
}

// A flush fails once if the storage came back without writes that it had acknowledged.
func TestE054_FlushFailsOnceAfterAPowerCutOfTheServer(t *testing.T) {
	for _, x := range []struct {
		name     string
		before   []Request
		verifier rnbdwire.Verifier // of the server that comes back; it was 11
		then     Request
		want     blk.Errno
	}{
		{"a write without a flush", []Request{aWrite}, 13, aFlush, blk.EIO},
		{"zeroes without a flush", []Request{aZero}, 13, aFlush, blk.EIO},
		{"a write behind the flush", []Request{aWrite, aFlush, aWrite}, 13, aFlush, blk.EIO},
		{"a write with FUA tells, too", []Request{aWrite}, 13, aFUAWrite, blk.EIO},
		{"a write without FUA does not tell", []Request{aWrite}, 13, aWrite, blk.OK},
		{"a read does not tell", []Request{aWrite}, 13, aRead, blk.OK},
		{"all writes were flushed", []Request{aWrite, aWrite, aFlush}, 13, aFlush, blk.OK},
		{"all writes had FUA", []Request{aFUAWrite}, 13, aFlush, blk.OK},
		{"a discard promises nothing", []Request{aDiscard}, 13, aFlush, blk.OK},
		{"only reads", []Request{aRead}, 13, aFlush, blk.OK},
		{"the daemon alone was restarted", []Request{aWrite}, 11, aFlush, blk.OK},
		{"the write cache is gone, too", []Request{aWrite}, 12, aFlush, blk.EIO},
		{"a server that does not tell any more", []Request{aWrite}, 0, aFlush, blk.OK},
	} {
		for _, loss := range []time.Duration{0, time.Minute} {
			t.Run(x.name+" loss="+Loss{loss}.String(), func(t *testing.T) {
				s := verifyingTarget(t)
				c := s.newClient(func(cfg *Config) { cfg.Journal = journal.New(100) })
				d, io := s.device(c, lossQueue(loss))
				for _, r := range x.before {
					if errno := do(t, io, r); errno != blk.OK {
						t.Fatalf("%s: errno %d", r.Op, errno)
					}
				}
				s.restart(d, x.verifier)
				if errno := do(t, io, x.then); errno != x.want {
					t.Errorf("%s after the return: errno %d, want %d", x.then.Op, errno, x.want)
				}
				if x.want == blk.EIO {
					if errno := do(t, io, x.then); errno != blk.OK {
						t.Errorf("the second %s: errno %d", x.then.Op, errno)
					}
					eventually(t, "events of the loss and of the report", func() bool { return lossEvents(c) == 2 })
				}
				told := d.describe(plugin.DeviceStatus{})
				if lost := x.verifier > 11 && x.name != "a discard promises nothing" && (x.want == blk.EIO || x.then.Op != blk.Flush); lost != (told.WriteLosses == 1) || lost != (told.WritesLost != "") {
					t.Errorf("%d losses, %q", told.WriteLosses, told.WritesLost)
				}
			})
		}
	}
}

// lossEvents counts the events of lost writes.
func lossEvents(c *Client) (n int) {
	for _, e := range c.cfg.Journal.After(0) {
		if e.From == "writes lost" || e.To == "writes lost" {
			n++
		}
	}
	return n
}

// A flush covers the writes that were acknowledged before it was sent, and no others.
func TestE055_FlushDoesNotCoverAWriteThatIsAcknowledgedMeanwhile(t *testing.T) {
	s := verifyingTarget(t)
	d, io := s.device(s.newClient(), lossQueue(time.Minute))
	s.set(func() { s.hold = true })
	io.Submit(Request{Op: blk.Flush, Slot: 1})
	io.Flush()
	eventually(t, "the flush is on the server", func() bool { return s.count("io") == 1 })
	s.set(func() { s.hold = false })
	if errno := do(t, io, Request{Op: blk.Write, Slot: 2, Len: 512}); errno != blk.OK {
		t.Fatalf("write: errno %d", errno)
	}
	s.releaseAll(blk.OK)
	var done [1]Done
	if io.Wait(done[:]); done[0] != (Done{Slot: 1}) {
		t.Fatalf("flush: %+v", done[0])
	}
	s.restart(d, 13)
	if errno := do(t, io, aFlush); errno != blk.EIO {
		t.Errorf("flush after the power cut: errno %d, want EIO", errno)
	}
}

// A flush that waits for the server is the one that fails, and a second cut without
// writes in between is no news.
func TestE054_FlushThatWaitsForTheServerFails(t *testing.T) {
	s := verifyingTarget(t)
	d, io := s.device(s.newClient(), lossQueue(time.Minute))
	if errno := do(t, io, aWrite); errno != blk.OK {
		t.Fatalf("write: errno %d", errno)
	}
	s.kill()
	eventually(t, "closed", func() bool { return d.State() == Closed })
	io.Submit(aFlush)
	io.Flush()
	s.set(func() { s.rsp.Verifier = 13 })
	s.start()
	var done [1]Done
	if io.Wait(done[:]); done[0].Errno != blk.EIO {
		t.Errorf("the flush that waited: errno %d, want EIO", done[0].Errno)
	}
	s.restart(d, 15)
	if errno := do(t, io, aFlush); errno != blk.OK {
		t.Errorf("a flush after another cut, without writes: errno %d", errno)
	}
}

// The knowledge of a client about lost writes goes to the next process: the incarnation, whether
// all was flushed, and a loss that no user knows yet.
func TestE056_NextProcessKnowsOfUnflushedWrites(t *testing.T) {
	for _, x := range []struct {
		name  string
		saved savedDevice
		then  rnbdwire.Verifier // of the server
		want  blk.Errno
	}{
		{"flushed", savedDevice{Clean: true, Known: &deviceFacts{Verifier: 11}}, 13, blk.OK},
		{"not flushed", savedDevice{Known: &deviceFacts{Verifier: 11}}, 13, blk.EIO},
		{"the same incarnation", savedDevice{Known: &deviceFacts{Verifier: 11}}, 11, blk.OK},
		{"not told yet", savedDevice{Unreported: true, Clean: true, Known: &deviceFacts{Verifier: 13}}, 13, blk.EIO},
	} {
		t.Run(x.name, func(t *testing.T) {
			s := verifyingTarget(t)
			s.rsp.Verifier = x.then
			b, err := json.Marshal(x.saved)
			must(t, err)
			var saved savedDevice
			must(t, json.Unmarshal(b, &saved))
			saved.Known.Volume, saved.Known.Block, saved.Known.MaxIO, saved.Known.WriteCache, saved.Known.FUA = 1, 512, 61440, true, true
			_, io := s.device(s.newClient(), func(r *MapRequest) {
				r.known, r.clean, r.unreported = saved.Known, saved.Clean, saved.Unreported
			})
			if errno := do(t, io, aFlush); errno != x.want {
				t.Errorf("flush: errno %d, want %d", errno, x.want)
			}
			if errno := do(t, io, aFlush); errno != blk.OK {
				t.Errorf("the next flush: errno %d", errno)
			}
		})
	}
}

// A hand-over tells the next process whether a device has writes without a flush.
func TestE056_HandOverTellsOfUnflushedWrites(t *testing.T) {
	for _, dirty := range []bool{false, true} {
		l := newLeaving(t)
		if dirty {
			l.d.shares[0].cached.Add(1)
			l.d.unreported.Store(true)
		}
		h := l.handOver()
		if s := h.state.Devices[0]; s.Clean == dirty || s.Unreported != dirty {
			t.Errorf("with unflushed writes %t: clean %t, unreported %t", dirty, s.Clean, s.Unreported)
		}
		must(t, l.c.TakeOver(t.Context(), h))
		l.c.ServeUsers(t.Context())
		if s := l.file(); strings.Contains(string(s), "clean") {
			t.Errorf("the state file makes a promise that the next write breaks: %s", s)
		}
	}
}

// A flush that fails while its front end is dead, or whose front end dies before it has sent
// a later one, fails again: a disk's requests are issued anew, and would succeed.
func TestFlushThatFailsForADeadFrontEndFailsAgain(t *testing.T) {
	for _, x := range []struct {
		name string
		errs []blk.Errno // of flushes before the end of the front end
		late blk.Errno   // of a flush that is answered afterwards
		want blk.Errno
	}{
		{"answered afterwards", nil, blk.EIO, blk.EIO},
		{"without an error", nil, blk.OK, blk.OK},
		{"not supported", nil, blk.EOPNOTSUPP, blk.OK},
		{"answered before", []blk.Errno{blk.EIO}, blk.OK, blk.EIO},
		{"answered before, and another one succeeds", []blk.Errno{blk.EIO, blk.OK}, blk.OK, blk.EIO},
	} {
		t.Run(x.name, func(t *testing.T) {
			s := verifyingTarget(t)
			c := s.newClient(func(cfg *Config) { cfg.Journal = journal.New(100) })
			d, io := s.device(c, lossQueue(time.Minute))
			for _, errno := range x.errs {
				s.set(func() { s.ioErr = errno })
				if got := do(t, io, aFlush); got != errno {
					t.Fatalf("flush: errno %d, want %d", got, errno)
				}
			}
			s.set(func() { s.ioErr = 0 })
			s.set(func() { s.hold = true })
			io.Submit(aFlush)
			io.Flush()
			eventually(t, "the flush is on the server", func() (is bool) { s.set(func() { is = len(s.held) == 1 }); return is })
			source := io.source
			source.pump.pump.Call(func() { source.orphaned = true })
			c.forgetAnswers(nil)
			s.releaseAll(x.late)
			eventually(t, "it has ended", func() bool { return d.inFlight() == 0 })
			next, err := d.NewIO(0, 0, 1)
			must(t, err)
			if errno := do(t, next, aFlush); errno != x.want {
				t.Errorf("the next flush: errno %d, want %d", errno, x.want)
			}
			if errno := do(t, next, aFlush); errno != blk.OK {
				t.Errorf("a later flush: errno %d", errno)
			}
			if x.want != blk.OK {
				eventually(t, "events", func() bool { return lossEvents(c) == 2 })
				if told := d.describe(plugin.DeviceStatus{}); told.WriteLosses != 1 || !strings.Contains(told.WritesLost, "front end") {
					t.Errorf("%d losses, %q", told.WriteLosses, told.WritesLost)
				}
			}
		})
	}
}

// A flush that the client itself fails for lost writes fails again if its front end dies
// then: users may not know.
func TestFlushThatTellsOfLostWritesFailsAgainForADeadFrontEnd(t *testing.T) {
	s := verifyingTarget(t)
	c := s.newClient()
	d, io := s.device(c, lossQueue(time.Minute))
	if errno := do(t, io, aWrite); errno != blk.OK {
		t.Fatalf("write: errno %d", errno)
	}
	s.restart(d, 13)
	if errno := do(t, io, aFlush); errno != blk.EIO {
		t.Fatalf("the flush after the power cut: errno %d, want EIO", errno)
	}
	c.forgetAnswers(nil)
	if errno := do(t, io, aFlush); errno != blk.EIO {
		t.Errorf("the flush after the end of the front end: errno %d, want EIO", errno)
	}
}

// A user that goes on for a while after a flush that failed knows of it.
func TestFlushThatSucceedsMuchLaterEndsTheDebt(t *testing.T) {
	for _, x := range []struct {
		op      blk.Op
		arrived time.Duration
		owed    bool
	}{
		{blk.Flush, time.Second + toldAfter + 1, false},
		{blk.Flush, time.Second + toldAfter, true},
		{blk.Write, time.Second + toldAfter + 1, true},
	} {
		d := &Device{}
		d.noteFlush(&request{}, blk.EIO, false, int64(time.Second))
		r := &request{arrived: int64(x.arrived)}
		r.sqe.Op = x.op
		d.noteFlush(r, blk.OK, false, int64(x.arrived)+1)
		if owed := d.flushFailed.Load() != 0; owed != x.owed {
			t.Errorf("%+v: owed %t", x, owed)
		}
	}
}
