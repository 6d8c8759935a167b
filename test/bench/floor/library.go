package main

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// library is an application with the client in its own process. A request has an extent
// of the arena, and its pieces the tags of it.
type library struct {
	config
	pump  *pump.Pump
	wire  wire
	arena []byte
	jobs  []*job // by extent
	cur   shm.SQE
}

// job is one goroutine of the application, and its ring as a source of the pump.
type job struct {
	client
	caller *pump.Caller
	sub    *shm.Submitter
	ring   *shm.Ring
	bell   *os.File // a duplicate of the ring's doorbell
	token  [8]byte  // read from bell
	large  bool
	cqes   [64]shm.CQE
	got    int // in cqes
}

func runLibrary(c config, fd int) error {
	arena, err := shm.NewArena("library", arenaSize)
	if err != nil {
		return err
	}
	l := &library{config: c, arena: arena.Bytes(), jobs: make([]*job, extents)}
	if l.pump, err = c.newPump("library"); err != nil {
		return err
	}
	if l.wire, err = c.newWire(fd, wireAnswer, l.onHeader, l.onPayload); err != nil {
		return err
	}
	if err := l.pump.Add(l.wire); err != nil {
		return err
	}
	pump.SetProcs(2) // as many pumps as the product has
	l.pump.Start()
	return l.follow()
}

// onHeader takes the header of an answer.
func (l *library) onHeader(h []byte) ([]byte, bool) {
	if l.cur = getHeader(h); l.cur.Op != blk.Read {
		return nil, true
	}
	return payload(l.arena, &l.cur), true
}

// onPayload hands an answer to its job.
func (l *library) onPayload(n int) {
	if l.cur.Op == blk.Read && n < int(l.cur.Len) {
		return
	}
	j := l.jobs[l.cur.Tag/extentTags]
	if !j.comp.Push(&shm.CQE{Tag: l.cur.Tag}) {
		fail("an answer without a request", j.comp.Err())
	}
	j.comp.Publish()
	j.caller.Notify()
}

// newJob makes a job with so many extents, from first on.
func (l *library) newJob(first, depth int) *job {
	ring, err := shm.NewHeapRing(entries)
	if err != nil {
		fail("ring", err)
	}
	j := &job{client: client{comp: ring.Completer(), arena: l.arena, wire: l.wire}, sub: ring.Submitter(), ring: ring}
	bell, err := unix.FcntlInt(uintptr(j.sub.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		fail("doorbell", err)
	}
	j.bell = os.NewFile(uintptr(bell), "doorbell")
	if err := l.pump.Add(j); err != nil {
		fail("job", err)
	}
	j.caller = l.pump.NewCaller(j, j)
	l.pump.Call(func() {
		for i := range depth {
			l.jobs[first+i] = j
		}
	})
	return j
}

func (l *library) endJob(j *job) {
	j.caller.Close()
	l.pump.Remove(j)
	j.bell.Close()
	j.ring.Close()
}

// submit begins a request in an extent, cut into pieces, and returns their number.
func (l *library) submit(j *job, in int, op blk.Op, off uint64, n int) (pieces int) {
	j.large = n >= 32<<10
	for from := 0; from < n; from += l.piece {
		e := shm.SQE{Tag: uint64(in*extentTags + from/4096), Op: op, Offset: off + uint64(from), ArenaOff: uint64(in*extent + from), Len: uint32(min(l.piece, n-from))}
		if !j.sub.Push(&e) {
			fail("the ring is full", j.sub.Err())
		}
		pieces++
	}
	return pieces
}

// The work of a pump.Caller.

func (j *job) Publish()      { j.sub.Publish() }
func (j *job) InFlight() int { return j.sub.InFlight() }
func (j *job) Large() bool   { return j.large }

func (j *job) Reap() int {
	j.got = j.sub.Pop(j.cqes[:])
	return j.got
}

func (j *job) Sleep() {
	if !j.sub.Arm() {
		return // there are answers
	}
	if _, err := j.bell.Read(j.token[:]); err != nil {
		fail("doorbell", err)
	}
	j.sub.Woken()
}
