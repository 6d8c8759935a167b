package uring

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// The functions of the thread engine, in the order in which a request meets
// them:
//
//	submit   owner: copy to ops[i], i into a place of the queue
//	flush    owner: as many tokens into the semaphore as there are requests
//	work     worker: take a token, then the next place of the queue; do it;
//	         put i into the next place of done; kick the owner if it sleeps
//	reap     owner: take from done in order, stop at the first empty place
//
// Places hold 1+i, 0 is empty. At most depth requests are in flight, so no two
// ever need the same place of done; a place of the queue can still be occupied
// by a worker that was slow to empty it, then submit says full.

type threadEngine struct {
	pool
	free []uint32 // ops not in use
}

// pool is the part that workers share with the owner.
type pool struct {
	ops   []threadOp
	queue []atomic.Uint32
	done  []atomic.Uint32

	head     atomic.Uint32 // next place of the queue for a worker
	doneTail atomic.Uint32 // next place of done for a worker
	wake     atomic.Uint32 // 1: the owner sleeps on event
	stop     atomic.Bool

	// Of the owner.
	tail, doneHead uint32
	unflushed      uint64
	inFlight       int
	started, most  int // workers
	token          [8]byte

	sem, event int // tokens for workers; wakes the owner
	ownsEvent  bool
	workers    sync.WaitGroup
}

type threadOp struct {
	Request
	res  int32
	vec  unix.Iovec
	span [2]uint64
}

func newThreadEngine(cfg EngineConfig) (Engine, error) {
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("new thread engine: eventfd: %w", err)
	}
	e, err := newThreads(cfg, event)
	if err != nil {
		unix.Close(event)
		return nil, err
	}
	e.ownsEvent = true
	return e, nil
}

// newThreads makes an engine that wakes its owner by event.
func newThreads(cfg EngineConfig, event int) (*threadEngine, error) {
	sem, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_SEMAPHORE)
	if err != nil {
		return nil, fmt.Errorf("new thread engine: eventfd: %w", err)
	}
	e := &threadEngine{pool: pool{
		ops: make([]threadOp, cfg.Depth), queue: make([]atomic.Uint32, cfg.Depth), done: make([]atomic.Uint32, cfg.Depth),
		sem: sem, event: event, most: min(cfg.Threads, cfg.Depth),
	}}
	for i := range cfg.Depth {
		e.free = append(e.free, uint32(i))
	}
	return e, nil
}

func (e *threadEngine) Name() string  { return "threads" }
func (e *threadEngine) FD() int       { return e.event }
func (e *threadEngine) InFlight() int { return e.inFlight }

func (e *threadEngine) Workers(Op) int { return e.most }

func (e *threadEngine) Submit(r *Request) bool {
	place := &e.queue[e.tail&uint32(len(e.queue)-1)]
	if len(e.free) == 0 || place.Load() != 0 {
		return false
	}
	i := e.free[len(e.free)-1]
	e.free = e.free[:len(e.free)-1]
	e.ops[i].Request = *r
	place.Store(i + 1)
	e.tail++
	e.unflushed++
	e.inFlight++
	if e.inFlight > e.started && e.started < e.most {
		e.started++
		e.workers.Go(e.work)
	}
	return true
}

func (e *threadEngine) Flush() {
	if e.unflushed == 0 {
		return
	}
	binary.NativeEndian.PutUint64(e.token[:], e.unflushed)
	if _, err := unix.Write(e.sem, e.token[:]); err == nil {
		e.unflushed = 0
	}
}

// work is the main of a worker.
func (p *pool) work() {
	var token [8]byte
	for {
		if n, err := unix.Read(p.sem, token[:]); n != 8 {
			if err == unix.EINTR {
				continue
			}
			return // the engine is closed
		}
		if p.stop.Load() {
			return
		}
		place := p.head.Add(1) - 1
		i := p.queue[place&uint32(len(p.queue)-1)].Swap(0) - 1
		p.ops[i].do()
		p.finish(i)
	}
}

func (p *pool) finish(i uint32) {
	place := p.doneTail.Add(1) - 1
	p.done[place&uint32(len(p.done)-1)].Store(i + 1)
	if p.wake.Load() != 0 && p.wake.Swap(0) != 0 {
		unix.Write(p.event, one)
	}
}

// one is the number 1 as eventfd takes it: 64 bits in host order.
var one = binary.NativeEndian.AppendUint64(nil, 1)

// do blocks until the request is done.
func (o *threadOp) do() {
	for o.res = o.once(); o.res == -int32(unix.EINTR); {
		o.res = o.once()
	}
}

func (o *threadOp) once() int32 {
	switch o.Op {
	case Nop:
		return 0
	case Pread:
		return transferAt(unix.SYS_PREADV2, o.FD, &o.vec, o.Buf, o.Off, o.RWFlags)
	case Pwrite:
		return transferAt(unix.SYS_PWRITEV2, o.FD, &o.vec, o.Buf, o.Off, o.RWFlags)
	case Fdatasync:
		return errnoOf(unix.Fdatasync(int(o.FD)))
	case Fsync:
		return errnoOf(unix.Fsync(int(o.FD)))
	case PunchHole, ZeroRange:
		return errnoOf(unix.Fallocate(int(o.FD), o.Op.fallocateMode(), int64(o.Off), int64(o.Len)))
	case Discard:
		o.span = [2]uint64{o.Off, o.Len}
		return rangeIoctl(o.FD, unix.BLKDISCARD, &o.span)
	case SecureErase:
		o.span = [2]uint64{o.Off, o.Len}
		return rangeIoctl(o.FD, unix.BLKSECDISCARD, &o.span)
	}
	return -int32(unix.EOPNOTSUPP)
}

func errnoOf(err error) int32 {
	if err == nil {
		return 0
	}
	var errno unix.Errno
	if errors.As(err, &errno) {
		return -int32(errno)
	}
	return -int32(unix.EIO)
}

func (e *threadEngine) Reap(done []Completion) int {
	n := 0
	for ; n < len(done); n++ {
		place := &e.done[e.doneHead&uint32(len(e.done)-1)]
		v := place.Load()
		if v == 0 {
			break
		}
		place.Store(0)
		e.doneHead++
		done[n] = Completion{Tag: e.ops[v-1].Tag, Res: e.ops[v-1].res}
		e.ops[v-1].Buf = nil
		e.free = append(e.free, v-1)
	}
	e.inFlight -= n
	return n
}

func (e *threadEngine) ready() bool {
	return e.unflushed > 0 || e.done[e.doneHead&uint32(len(e.done)-1)].Load() != 0
}

func (e *threadEngine) Arm() bool {
	e.Flush()
	if e.ready() {
		return false
	}
	unix.Read(e.event, e.token[:])
	return e.arm()
}

// arm is Arm for an event that is drained.
func (e *threadEngine) arm() bool {
	e.wake.Store(1)
	if e.ready() {
		e.wake.Store(0)
		return false
	}
	return true
}

func (e *threadEngine) Close() error {
	if e.sem < 0 {
		return nil
	}
	err := drain(e)
	e.stop.Store(true)
	binary.NativeEndian.PutUint64(e.token[:], uint64(len(e.ops)))
	_, werr := unix.Write(e.sem, e.token[:])
	e.workers.Wait()
	err = errors.Join(err, werr, unix.Close(e.sem))
	if e.ownsEvent {
		err = errors.Join(err, unix.Close(e.event))
	}
	e.sem, e.event = -1, -1
	return err
}
