package client

import (
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// announce tells the client of a hand-over within grace, and waits until it holds
// back its requests.
func (s *target) announce(number uint64, grace time.Duration) {
	s.t.Helper()
	s.tell(rnbdwire.EventRspFields{Number: number, Sectors: uint64(grace.Milliseconds()), Kind: rnbdwire.EventHandOver})
	eventually(s.t, "the client has seen the news", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.seen) > 0 && s.seen[len(s.seen)-1] == number
	})
	s.set(func() {
		if last := rnbdwire.Event(s.events[len(s.events)-1].User()); last.Holds() != (grace > 0) {
			s.t.Errorf("E-036: the client says that it holds back: %t", last.Holds())
		}
	})
}

// submit sends a read; its answer comes later.
func submit(io *IO) {
	io.Submit(Request{Op: blk.Read, Len: 512})
	io.Flush()
}

// mustWait fails the test if the request is answered.
func mustWait(t *testing.T, io *IO) {
	t.Helper()
	var done [1]Done
	for end := time.Now().Add(100 * time.Millisecond); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if io.Reap(done[:]) > 0 {
			t.Fatalf("a request did not wait, errno %d", done[0].Errno)
		}
	}
}

func mustEnd(t *testing.T, io *IO, want blk.Errno) {
	t.Helper()
	var done [1]Done
	eventually(t, "the request is answered", func() bool { return io.Reap(done[:]) > 0 })
	if done[0].Errno != want {
		t.Errorf("errno %d, want %d", done[0].Errno, want)
	}
}

const longGrace = 25 * time.Second // more than the tests take

func TestE036_RequestsWaitForTheNextProcess(t *testing.T) {
	s := newsTarget(t)
	d, io := s.device(s.newClient()) // loss=fail
	s.announce(1, longGrace)
	submit(io)
	mustWait(t, io)
	s.kill()
	eventually(t, "closed", func() bool { return d.State() == Closed })
	mustWait(t, io)
	s.start()
	mustEnd(t, io, blk.OK)
	if d.State() != Open {
		t.Errorf("state %v", d.State())
	}
}

func TestE037_RequestsGoOnWhenItIsCalledOff(t *testing.T) {
	s := newsTarget(t)
	_, io := s.device(s.newClient())
	s.announce(1, longGrace)
	submit(io)
	mustWait(t, io)
	s.announce(2, 0)
	mustEnd(t, io, blk.OK)
	s.kill()
	if errno := do(t, io, Request{Op: blk.Read, Len: 512}); errno != blk.EIO {
		t.Errorf("errno %d: the loss policy does not hold again", errno)
	}
}

func TestE036_TheLossPolicyHoldsAfterTheGrace(t *testing.T) {
	s := newsTarget(t)
	d, io := s.device(s.newClient())
	s.announce(1, time.Second)
	submit(io)
	s.kill()
	mustEnd(t, io, blk.EIO)
	s.start()
	eventually(t, "open again", func() bool { return d.State() == Open })
}

func TestE036_AServerThatStaysGoesOnAfterTheGrace(t *testing.T) {
	s := newsTarget(t)
	_, io := s.device(s.newClient())
	s.announce(1, 300*time.Millisecond)
	submit(io)
	mustEnd(t, io, blk.OK)
}

// Requests that were sent and lost with their paths are sent again, too.
func TestE036_RequestsInFlightOutliveTheHandOver(t *testing.T) {
	s := newsTarget(t)
	_, io := s.device(s.newClient())
	s.set(func() { s.hold = true })
	submit(io)
	eventually(t, "it is on the server", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.held) == 1 })
	s.announce(1, longGrace)
	s.net.Cut(s.addrs[0].Addr(), s.net.Conns()[0][0].Addr())
	s.releaseAll(blk.OK)
	mustEnd(t, io, blk.OK)
}
