package shm

import (
	"errors"
	"math/rand"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// makers build a ring of each kind: one the race detector sees, one as it is
// used between processes, one opened a second time by descriptor.
var makers = map[string]func(t testing.TB, entries int) (*Submitter, *Completer){
	"heap": func(t testing.TB, entries int) (*Submitter, *Completer) {
		r := must(NewHeapRing(entries))
		t.Cleanup(func() { r.Close() })
		return r.Submitter(), r.Completer()
	},
	"two mappings": func(t testing.TB, entries int) (*Submitter, *Completer) {
		host := must(NewRing(entries))
		mem, sq, cq := host.FDs()
		peer := must(OpenRing(dup(t, mem), dup(t, sq), dup(t, cq)))
		t.Cleanup(func() { host.Close(); peer.Close() })
		return host.Submitter(), peer.Completer()
	},
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func dup(t testing.TB, fd int) int {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func eachRing(t *testing.T, entries int, f func(t *testing.T, s *Submitter, c *Completer)) {
	for name, mk := range makers {
		t.Run(name, func(t *testing.T) {
			s, c := mk(t, entries)
			f(t, s, c)
		})
	}
}

func TestRing_EntriesArriveWhole(t *testing.T) {
	eachRing(t, 4, func(t *testing.T, s *Submitter, c *Completer) {
		want := SQE{Tag: 1<<63 + 5, Offset: 1 << 40, ArenaOff: 1 << 33, Device: 7, Arena: 8, Len: 1<<32 - 1,
			Op: blk.Write, Flags: blk.FUA, Prio: 0x4004}
		if !s.Push(&want) {
			t.Fatal("push refused")
		}
		var got [2]SQE
		if n := c.Pop(got[:]); n != 0 {
			t.Fatalf("%d entries visible before Publish", n)
		}
		s.Publish()
		if n := c.Pop(got[:]); n != 1 || got[0] != want {
			t.Fatalf("popped %d: %+v, want %+v", n, got[0], want)
		}
		answer := CQE{Tag: want.Tag, Errno: uint32(blk.EIO)}
		if !c.Push(&answer) {
			t.Fatal("answer refused")
		}
		c.Publish()
		var cqe [2]CQE
		if n := s.Pop(cqe[:]); n != 1 || cqe[0] != answer {
			t.Fatalf("popped %d: %+v, want %+v", n, cqe[0], answer)
		}
	})
}

func TestRing_FullUntilCompletionIsPopped(t *testing.T) {
	eachRing(t, 4, func(t *testing.T, s *Submitter, c *Completer) {
		for i := range 4 {
			if s.Space() != 4-i || !s.Push(&SQE{Tag: uint64(i)}) {
				t.Fatalf("push %d refused, space %d", i, s.Space())
			}
		}
		refused := func(when string) {
			t.Helper()
			if s.Push(&SQE{}) || s.Space() != 0 || s.InFlight() != 4 {
				t.Fatalf("%s: a fifth request fits, space %d, in flight %d", when, s.Space(), s.InFlight())
			}
		}
		refused("pushed")
		s.Publish()
		var sqe [4]SQE
		if n := c.Pop(sqe[:]); n != 4 {
			t.Fatalf("popped %d", n)
		}
		refused("taken")
		c.Push(&CQE{Tag: 2})
		c.Publish()
		refused("answered")
		var cqe [4]CQE
		if n := s.Pop(cqe[:]); n != 1 || cqe[0].Tag != 2 {
			t.Fatalf("popped %d, tag %d", n, cqe[0].Tag)
		}
		if !s.Push(&SQE{Tag: 9}) || s.Err() != nil {
			t.Fatalf("push after completion refused: %v", s.Err())
		}
	})
}

func TestCompleter_RefusesAnswerWithoutRequest(t *testing.T) {
	eachRing(t, 4, func(t *testing.T, s *Submitter, c *Completer) {
		if c.Push(&CQE{}) || c.Err() != nil {
			t.Fatalf("answer to nothing accepted, err %v", c.Err())
		}
		s.Push(&SQE{})
		s.Publish()
		if c.Push(&CQE{}) {
			t.Fatal("answer to a request that was not taken accepted")
		}
		c.Pop(make([]SQE, 1))
		if !c.Push(&CQE{}) || c.Push(&CQE{}) {
			t.Fatal("want exactly one answer per request")
		}
	})
}

// The indices are free running 32-bit numbers: start just below their end.
func TestRing_IndicesWrapAround(t *testing.T) {
	eachRing(t, 8, func(t *testing.T, s *Submitter, c *Completer) {
		const start = 1<<32 - 5
		for _, p := range []*producer{&s.out, &c.out} {
			p.tail, p.published, p.head = start, start, start
			p.words.Tail.Store(start)
			p.words.Head.Store(start)
		}
		s.in.head, c.in.head = start, start
		var tag, want uint64
		for range 50 {
			for s.Push(&SQE{Tag: tag}) {
				tag++
			}
			s.Publish()
			var sqe [3]SQE
			for n := c.Pop(sqe[:]); n > 0; n = c.Pop(sqe[:]) {
				for _, e := range sqe[:n] {
					c.Push(&CQE{Tag: e.Tag})
				}
			}
			c.Publish()
			var cqe [3]CQE
			for n := s.Pop(cqe[:]); n > 0; n = s.Pop(cqe[:]) {
				for _, e := range cqe[:n] {
					if e.Tag != want {
						t.Fatalf("tag %d, want %d", e.Tag, want)
					}
					want++
				}
			}
		}
		if err := errors.Join(s.Err(), c.Err()); err != nil || want != 50*8 || s.InFlight() != 0 {
			t.Fatalf("%d of %d answered, in flight %d, err %v", want, 50*8, s.InFlight(), err)
		}
	})
}

func TestRing_BrokenPeerIsCaught(t *testing.T) {
	pushed := func(s *Submitter, n int) {
		for range n {
			s.Push(&SQE{})
		}
		s.Publish()
	}
	tests := []struct {
		name     string
		sabotage func(s *Submitter, c *Completer) // as the peer of the other end
		use      func(s *Submitter, c *Completer)
		err      func(s *Submitter, c *Completer) error
	}{
		{"completer shows an answer to nothing",
			func(s *Submitter, c *Completer) { c.out.words.Tail.Store(1) },
			func(s *Submitter, c *Completer) { s.Pop(make([]CQE, 8)) },
			func(s *Submitter, c *Completer) error { return s.Err() }},
		{"completer shows more answers than requests",
			func(s *Submitter, c *Completer) { pushed(s, 2); c.out.words.Tail.Store(3) },
			func(s *Submitter, c *Completer) { s.Pop(make([]CQE, 8)) },
			func(s *Submitter, c *Completer) error { return s.Err() }},
		{"completer answers a request that is not published",
			func(s *Submitter, c *Completer) { s.Push(&SQE{}); c.out.words.Tail.Store(1) },
			func(s *Submitter, c *Completer) { s.Pop(make([]CQE, 8)) },
			func(s *Submitter, c *Completer) error { return s.Err() }},
		{"completion tail goes backwards",
			func(s *Submitter, c *Completer) { pushed(s, 2); c.out.words.Tail.Store(1<<32 - 1) },
			func(s *Submitter, c *Completer) { s.Pop(make([]CQE, 8)) },
			func(s *Submitter, c *Completer) error { return s.Err() }},
		{"completer takes more than was published",
			func(s *Submitter, c *Completer) {
				pushed(s, 4)
				s.inFlight = 0 // all answered
				c.in.words.Head.Store(5)
			},
			func(s *Submitter, c *Completer) { s.Push(&SQE{}) },
			func(s *Submitter, c *Completer) error { return s.Err() }},
		{"completer takes what was not published",
			func(s *Submitter, c *Completer) {
				pushed(s, 2)
				s.inFlight = 0 // both answered
				s.Push(&SQE{})
				s.Push(&SQE{})
				c.in.words.Head.Store(3)
			},
			func(s *Submitter, c *Completer) { s.Push(&SQE{}) },
			func(s *Submitter, c *Completer) error { return s.Err() }},
		{"completer answers what it never took",
			func(s *Submitter, c *Completer) {
				pushed(s, 4)
				c.out.words.Tail.Store(4)
				s.Pop(make([]CQE, 4))
			},
			func(s *Submitter, c *Completer) { s.Push(&SQE{}) },
			func(s *Submitter, c *Completer) error { return s.Err() }},
		{"submitter shows more requests than the ring has",
			func(s *Submitter, c *Completer) { s.out.words.Tail.Store(5) },
			func(s *Submitter, c *Completer) { c.Pop(make([]SQE, 8)) },
			func(s *Submitter, c *Completer) error { return c.Err() }},
		{"submitter has more requests in flight than the ring has",
			func(s *Submitter, c *Completer) { pushed(s, 4); c.Pop(make([]SQE, 4)); s.out.words.Tail.Store(5) },
			func(s *Submitter, c *Completer) { c.Pop(make([]SQE, 8)) },
			func(s *Submitter, c *Completer) error { return c.Err() }},
		{"submission tail goes backwards",
			func(s *Submitter, c *Completer) { pushed(s, 2); c.Pop(make([]SQE, 2)); s.out.words.Tail.Store(1) },
			func(s *Submitter, c *Completer) { c.Pop(make([]SQE, 8)) },
			func(s *Submitter, c *Completer) error { return c.Err() }},
		{"submitter takes more than was answered",
			func(s *Submitter, c *Completer) {
				pushed(s, 4)
				c.Pop(make([]SQE, 4))
				for range 4 {
					c.Push(&CQE{})
				}
				c.Publish()
				s.in.words.Head.Store(1 << 31)
				s.out.words.Tail.Store(5)
				c.Pop(make([]SQE, 1))
			},
			func(s *Submitter, c *Completer) { c.Push(&CQE{}) },
			func(s *Submitter, c *Completer) error { return c.Err() }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			eachRing(t, 4, func(t *testing.T, s *Submitter, c *Completer) {
				tt.sabotage(s, c)
				if err := tt.err(s, c); err != nil {
					t.Fatalf("error before the index was looked at: %v", err)
				}
				tt.use(s, c)
				if err := tt.err(s, c); !errors.Is(err, ErrCorrupt) {
					t.Fatalf("err = %v, want ErrCorrupt", err)
				}
			})
		})
	}
}

func TestRing_BrokenRingDoesNothing(t *testing.T) {
	s, c := makers["heap"](t, 4)
	c.out.words.Tail.Store(100)
	s.Pop(make([]CQE, 1))
	c.out.words.Tail.Store(0)
	if s.Push(&SQE{}) || s.Pop(make([]CQE, 1)) != 0 || s.Space() != 0 {
		t.Error("broken submitter still works")
	}
	s.Publish()
	if s.out.words.Tail.Load() != 0 {
		t.Error("broken submitter published")
	}
	if !s.Arm() { // else its owner would never sleep again
		t.Error("broken submitter refuses to sleep")
	}
	s.Disarm()
}

// Two goroutines, one per end, with every pattern of sleeping and waking that
// random delays give. A lost wake-up is a time-out of poll.
func TestRing_NoWakeUpIsLost(t *testing.T) {
	const total = 20000
	for name, mk := range makers {
		t.Run(name, func(t *testing.T) {
			s, c := mk(t, 16)
			failed := make(chan string, 2)
			done := make(chan struct{})
			go func() {
				defer close(done)
				rnd := rand.New(rand.NewSource(1))
				batch := make([]SQE, 5)
				for got := 0; got < total; {
					n := c.Pop(batch)
					for _, e := range batch[:n] {
						if e.Tag != uint64(got) || e.Offset != e.Tag*3 {
							failed <- "request torn or out of order"
							return
						}
						got++
						if !c.Push(&CQE{Tag: e.Tag, Errno: uint32(e.Tag % 100)}) {
							failed <- "answer refused"
							return
						}
					}
					c.Publish()
					dither(rnd)
					if n == 0 && !sleepOn(c) {
						failed <- "completer's wake-up lost"
						return
					}
				}
			}()
			rnd := rand.New(rand.NewSource(2))
			batch := make([]CQE, 7)
			for sent, got := uint64(0), uint64(0); got < total; {
				for range rnd.Intn(10) {
					if sent < total && s.Push(&SQE{Tag: sent, Offset: sent * 3}) {
						sent++
					}
				}
				s.Publish()
				dither(rnd)
				n := s.Pop(batch)
				for _, e := range batch[:n] {
					if e.Tag != got || e.Errno != uint32(got%100) {
						t.Fatalf("answer %+v, want tag %d", e, got)
					}
					got++
				}
				if n == 0 && s.InFlight() > 0 && !sleepOn(s) {
					select {
					case why := <-failed:
						t.Fatal(why)
					default:
						t.Fatalf("submitter's wake-up lost: sent %d, got %d", sent, got)
					}
				}
			}
			<-done
			if err := errors.Join(s.Err(), c.Err()); err != nil {
				t.Fatal(err)
			}
			t.Logf("kicks: %d by the submitter, %d by the completer", s.Kicks(), c.Kicks())
		})
	}
}

func dither(rnd *rand.Rand) {
	switch rnd.Intn(300) {
	case 0:
		time.Sleep(time.Duration(rnd.Intn(50)) * time.Microsecond)
	case 1, 2, 3:
		runtime.Gosched()
	}
}

// sleepOn arms and waits; false: nothing came within the limit.
func sleepOn(e interface {
	Arm() bool
	Disarm()
	FD() int
}) bool {
	if !e.Arm() {
		return true
	}
	defer e.Disarm()
	return readable(e.FD(), 5*time.Second)
}

func readable(fd int, d time.Duration) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for end := time.Now().Add(d); ; {
		n, err := unix.Poll(fds, int(max(0, time.Until(end).Milliseconds())))
		if err != unix.EINTR {
			return n == 1
		}
	}
}

// TestRing_ArmLooksAgain lets an entry come in the one moment that counts:
// after Arm's first look, before its flag is up. A pipe in the place of the
// eventfd holds Arm there.
func TestRing_ArmLooksAgain(t *testing.T) {
	eachRing(t, 8, func(t *testing.T, s *Submitter, c *Completer) {
		var pipe [2]int
		if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		defer unix.Close(pipe[0])
		defer unix.Close(pipe[1])
		event := c.in.event
		c.in.event, c.in.stale = pipe[0], true // Arm takes an old token out first
		sleeps := make(chan bool)
		go func() { sleeps <- c.Arm() }()
		time.Sleep(10 * time.Millisecond) // it reads the pipe now; if not yet, its first look sees the entry
		s.Push(&SQE{})
		s.Publish()
		unix.Write(pipe[1], one)
		if <-sleeps {
			t.Fatal("Arm says sleep: nobody will wake it for the entry that came")
		}
		if s.Kicks() != 0 {
			t.Error("the submitter saw a flag that was not up yet")
		}
		c.in.event = event
	})
}

// TestRing_ReadingTheDoorbell: a reader of the eventfd before a sleep leaves
// nothing to be taken out, unless an older kick came late.
func TestRing_ReadingTheDoorbell(t *testing.T) {
	eachRing(t, 8, func(t *testing.T, s *Submitter, c *Completer) {
		var token [8]byte
		answer := func() { s.Push(&SQE{}); s.Publish(); c.Pop(make([]SQE, 1)); c.Push(&CQE{}); c.Publish() }
		for _, late := range []bool{false, true} {
			if !s.Arm() {
				t.Fatal("Arm sees work where there is none")
			}
			s.in.stale = late
			answer()
			if n, err := unix.Read(s.FD(), token[:]); n != len(token) {
				t.Fatalf("the doorbell: %d bytes, %v", n, err)
			}
			s.Woken()
			if s.in.stale != late || s.in.armed {
				t.Errorf("older kick %v: stale %v, armed %v", late, s.in.stale, s.in.armed)
			}
			s.Pop(make([]CQE, 1))
		}
		s.in.stale = false
		s.Arm()
		unix.Write(s.FD(), one) // the older kick comes; the flag is still up
		unix.Read(s.FD(), token[:])
		s.Woken()
		if s.in.stale {
			t.Error("a token is expected that has been taken out")
		}
	})
}

func TestRing_PeerAwakeIsNotKicked(t *testing.T) {
	eachRing(t, 8, func(t *testing.T, s *Submitter, c *Completer) {
		publish := func() { s.Push(&SQE{}); s.Publish() }
		publish()
		if readable(c.FD(), 0) || s.Kicks() != 0 {
			t.Fatal("a peer that did not ask was kicked")
		}
		if c.Arm() {
			t.Fatal("Arm says sleep while a request waits")
		}
		publish()
		if readable(c.FD(), 0) {
			t.Fatal("kicked though Arm returned false")
		}
		c.Pop(make([]SQE, 8))
		if !c.Arm() {
			t.Fatal("Arm refuses an empty ring")
		}
		publish()
		publish()
		if !readable(c.FD(), 0) || s.Kicks() != 1 {
			t.Fatalf("%d kicks for one Arm, want 1", s.Kicks())
		}
		s.Publish()
		if s.Kicks() != 1 {
			t.Fatal("kicked without news")
		}
		c.Disarm()
		c.Pop(make([]SQE, 8))
		if !c.Arm() || readable(c.FD(), 0) {
			t.Fatal("the token of the last wake-up is still there after Arm")
		}
		c.Disarm()
		publish()
		if s.Kicks() != 1 {
			t.Fatal("kicked after Disarm")
		}
	})
}

func TestRing_DataPathAllocatesNothing(t *testing.T) {
	eachRing(t, 64, func(t *testing.T, s *Submitter, c *Completer) {
		sqes, cqes := make([]SQE, 32), make([]CQE, 32)
		round := func() {
			c.Arm()
			for i := range 32 {
				s.Push(&SQE{Tag: uint64(i)})
			}
			s.Publish()
			c.Disarm()
			s.Arm()
			for i := range c.Pop(sqes) {
				c.Push(&CQE{Tag: sqes[i].Tag})
			}
			c.Publish()
			s.Disarm()
			s.Pop(cqes)
		}
		if n := testing.AllocsPerRun(100, round); n != 0 {
			t.Errorf("%v allocations per round, want 0", n)
		}
		if s.InFlight() != 0 {
			t.Errorf("%d in flight after the rounds", s.InFlight())
		}
	})
}

// A ring that is filled by devices that do not answer has room for each of the others.
func TestSubmitter_FitsKeepsRoom(t *testing.T) {
	r, err := NewHeapRing(DefaultEntries)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	s := r.Submitter()
	push := func() int {
		sent := 0
		for s.Fits(sent) && s.Push(&SQE{}) {
			sent++
		}
		return sent
	}
	if n := push(); n != DefaultEntries/4 {
		t.Errorf("a device alone gets %d of %d, want a quarter", n, DefaultEntries)
	}
	for range 100 {
		if n := push(); n < DefaultEntries/256 {
			t.Fatalf("a later device gets %d", n)
		}
	}
	for s.Push(&SQE{}) {
	}
	if s.Fits(0) {
		t.Error("a full ring has room")
	}
}

// The end that closes first leaves the other one its descriptors.
func TestHeapRing_PeerOutlivesTheRing(t *testing.T) {
	r, err := NewHeapRing(4)
	if err != nil {
		t.Fatal(err)
	}
	peer, err := r.Peer()
	if err != nil {
		t.Fatal(err)
	}
	if !peer.Completer().Arm() {
		t.Fatal("an empty ring does not arm")
	}
	s := r.Submitter()
	if !s.Push(&SQE{Tag: 7}) {
		t.Fatal("no room")
	}
	s.Publish()
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	var token [8]byte
	if n, err := unix.Read(peer.Completer().FD(), token[:]); n != 8 || err != nil {
		t.Fatalf("the wake of the closed end: %d bytes, %v", n, err)
	}
	if err := peer.Close(); err != nil {
		t.Error(err)
	}
	shared := must(NewRing(4))
	defer shared.Close()
	if _, err := shared.Peer(); err == nil {
		t.Error("a ring in shared memory has a peer in this process")
	}
}
