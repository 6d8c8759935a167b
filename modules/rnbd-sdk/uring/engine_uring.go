package uring

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// uringEngine runs requests on an io_uring; the few that io_uring does not have
// on every kernel (ioctls) go to threads that it starts at the first of them.
type uringEngine struct {
	ring   *Ring
	event  int
	ops    []uringOp
	free   []uint32
	failed []failure // requests that the kernel refused to take at all
	again  bool      // it had no memory to take some
	cqes   [64]CQE
	token  [8]byte
	side   *threadEngine // nil until needed; wakes the owner by event too
}

// uringOp keeps the buffer reachable while the kernel has it.
type uringOp struct {
	tag uint64
	buf []byte
}

type failure struct {
	op  uint32
	res int32
}

const (
	// sideThreads bounds the threads for operations that io_uring does not
	// have.
	sideThreads = 64
	// blockedWorkers bounds the kernel's threads of a ring for requests that it
	// cannot start without waiting. By itself it takes a few per CPU, and a file
	// system that hangs would have all of them.
	blockedWorkers = 512
)

func newURingEngine(cfg EngineConfig) (Engine, error) {
	ring, err := NewRing(cfg.Depth, Options{})
	if err != nil {
		return nil, fmt.Errorf("new io_uring engine: %w", err)
	}
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		ring.Close()
		return nil, fmt.Errorf("new io_uring engine: eventfd: %w", err)
	}
	if err := ring.RegisterEventfd(event); err != nil {
		unix.Close(event)
		ring.Close()
		return nil, fmt.Errorf("new io_uring engine: %w", err)
	}
	ring.allowWorkers(blockedWorkers) // as far as it can: kernels before 5.15 do not
	e := &uringEngine{ring: ring, event: event, ops: make([]uringOp, cfg.Depth), failed: make([]failure, 0, cfg.Depth)}
	for i := range cfg.Depth {
		e.free = append(e.free, uint32(i))
	}
	return e, nil
}

func (e *uringEngine) Name() string { return "uring" }
func (e *uringEngine) FD() int      { return e.event }

func (e *uringEngine) Workers(op Op) int {
	if op >= Discard {
		return min(sideThreads, len(e.ops))
	}
	return 0
}

func (e *uringEngine) RegisterBuffers(bufs [][]byte) error { return e.ring.RegisterBuffers(bufs) }

func (e *uringEngine) InFlight() int {
	n := len(e.ops) - len(e.free)
	if e.side != nil {
		n += e.side.InFlight()
	}
	return n
}

func (e *uringEngine) Submit(r *Request) bool {
	if e.InFlight() == len(e.ops) {
		return false
	}
	if r.Op >= Discard { // or unknown
		return e.submitSide(r)
	}
	s := e.ring.Next()
	if s == nil {
		return false
	}
	r.fill(s)
	s.UserData = uint64(e.take(r))
	return true
}

func (r *Request) fill(s *SQE) {
	switch r.Op {
	case Nop:
		s.Nop()
	case Pread:
		if r.Fixed > 0 {
			s.ReadFixed(r.FD, r.Buf, r.Off, r.RWFlags, r.Fixed-1)
		} else {
			s.Read(r.FD, r.Buf, r.Off, r.RWFlags)
		}
		s.IOPrio, s.Flags = allowedPrio(r.Prio), r.async()
	case Pwrite:
		if r.Fixed > 0 {
			s.WriteFixed(r.FD, r.Buf, r.Off, r.RWFlags, r.Fixed-1)
		} else {
			s.Write(r.FD, r.Buf, r.Off, r.RWFlags)
		}
		s.IOPrio, s.Flags = allowedPrio(r.Prio), r.async()
	case Fdatasync, Fsync:
		s.Fsync(r.FD, r.Op == Fdatasync)
	case PunchHole, ZeroRange:
		s.Fallocate(r.FD, r.Op.fallocateMode(), r.Off, r.Len)
	}
}

// async returns the flag of a request with a start that may block.
func (r *Request) async() uint8 {
	if r.Blocks {
		return Async
	}
	return 0
}

// allowedPrio keeps best-effort and idle, since every process may ask for
// them: 3 bits of class above 13 bits of data. The level is 3 of these.
func allowedPrio(p uint16) uint16 {
	const classShift, bestEffort, idle, level = 13, 2, 3, 7
	switch class := p >> classShift; class {
	case bestEffort, idle:
		return class<<classShift | p&level
	}
	return 0
}

func (e *uringEngine) submitSide(r *Request) bool {
	if e.side == nil {
		side, err := newThreads(EngineConfig{Depth: len(e.ops), Threads: sideThreads}, e.event)
		if err != nil { // out of descriptors
			return e.refuse(r, unix.EAGAIN)
		}
		e.side = side
	}
	return e.side.Submit(r)
}

// refuse answers a request that never ran.
func (e *uringEngine) refuse(r *Request, errno unix.Errno) bool {
	e.failed = append(e.failed, failure{e.take(r), -int32(errno)})
	return true
}

func (e *uringEngine) take(r *Request) uint32 {
	i := e.free[len(e.free)-1]
	e.free = e.free[:len(e.free)-1]
	e.ops[i] = uringOp{tag: r.Tag, buf: r.Buf}
	return i
}

func (e *uringEngine) Flush() {
	if e.ring.Pending() > 0 {
		e.submit()
	}
	if e.side != nil {
		e.side.Flush()
	}
}

// submit hands the entries over. Entries for which the kernel has no memory
// now stay for the next Reap or Arm; if it refuses the ring itself, the
// requests fail.
func (e *uringEngine) submit() {
	err := e.ring.Submit()
	e.again = err == unix.EAGAIN || err == unix.EBUSY
	if err == nil || e.again {
		return
	}
	res := errnoOf(err)
	e.ring.takeBack(func(i uint64) { e.failed = append(e.failed, failure{uint32(i), res}) })
}

func (e *uringEngine) Reap(done []Completion) int {
	if e.again {
		e.Flush()
	}
	n := 0
	for n < len(done) {
		got := e.ring.Peek(e.cqes[:min(len(e.cqes), len(done)-n)])
		if got == 0 {
			break
		}
		for _, c := range e.cqes[:got] {
			done[n] = e.complete(uint32(c.UserData), c.Res)
			n++
		}
	}
	for n < len(done) && len(e.failed) > 0 {
		f := e.failed[len(e.failed)-1]
		e.failed = e.failed[:len(e.failed)-1]
		done[n] = e.complete(f.op, f.res)
		n++
	}
	if e.side != nil {
		n += e.side.Reap(done[n:])
	}
	return n
}

func (e *uringEngine) complete(i uint32, res int32) Completion {
	c := Completion{Tag: e.ops[i].tag, Res: res}
	e.ops[i] = uringOp{}
	e.free = append(e.free, i)
	return c
}

// Arm empties the event first, then looks: a completion after that signals it.
func (e *uringEngine) Arm() bool {
	e.Flush()
	if e.ready() {
		return false
	}
	unix.Read(e.event, e.token[:])
	return e.ring.Arm() && !e.ready() && (e.side == nil || e.side.arm())
}

func (e *uringEngine) ready() bool {
	return e.ring.Ready() || e.ring.Pending() > 0 || len(e.failed) > 0
}

func (e *uringEngine) Close() error {
	if e.event < 0 {
		return nil
	}
	var err error
	if e.InFlight() > 0 {
		err = e.finish()
	}
	if e.side != nil {
		err = errors.Join(err, e.side.Close())
	}
	err = errors.Join(err, e.ring.Close(), unix.Close(e.event))
	e.event = -1
	return err
}

// finish waits for the requests in flight. Only the owner's thread can do that.
func (e *uringEngine) finish() error {
	e.Flush()
	if err := e.ring.Run(); err != nil {
		return fmt.Errorf("close io_uring engine: %d requests in flight: %w", e.InFlight(), err)
	}
	return drain(e)
}
