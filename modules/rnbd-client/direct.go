package client

import (
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// IO is the library's own way to a device that was mapped with front end
// "none": requests by slot, without another process.
//
//	io, err := dev.NewIO(0)
//	copy(io.Buf(slot), data)
//	io.Submit(client.Request{Op: blk.Write, Slot: slot, Off: off, Len: n})
//	n := io.Wait(done)
//
// One goroutine owns an IO. At low depth Wait drives the pump on the caller's
// thread, so that a request is handed to no other thread.
type IO struct {
	dev    *Device
	pump   *pumpShare
	source *source
	ring   *shm.Ring
	sub    *shm.Submitter
	slot   int
	first  int // slot of the arena that is our slot 0
	slots  int
	large  bool // the last request was of largeCopy and more
	slow   bool // the last answer took longer than Wait looks for one
	cqes   [64]shm.CQE
	drive  func()   // the work of Wait on the pump, made once
	bell   *os.File // the ring's doorbell, a descriptor of its own
	token  [8]byte  // room for what it says
	into   []Done
	got    int
}

// Request is one request of an IO. Its payload is Buf(Slot)[:Len]; a slot has
// one request at a time.
type Request struct {
	Op    blk.Op
	Flags blk.Flags
	Slot  int
	Off   uint64 // bytes
	Len   uint32 // bytes
	Prio  uint16 // Linux ioprio, a hint; 0: none
}

// Done is the answer to the request in Slot.
type Done struct {
	Slot  int
	Errno blk.Errno
}

// NewIO makes a way to the device that uses pump (modulo their number) and
// the device's slots from first on, slots of them.
func (d *Device) NewIO(pump, first, slots int) (*IO, error) {
	if fe := d.fe.Load(); fe != nil {
		return nil, fmt.Errorf("device %s belongs to front end %s: %w", d.name, fe.cfg.Name, syscall.EBUSY)
	}
	if have := d.arena.Size() / d.slotSize(); first < 0 || slots < 1 || first+slots > have {
		return nil, fmt.Errorf("device %s: slots %d to %d of %d: %w", d.name, first, first+slots-1, have, syscall.EINVAL)
	}
	entries := 16
	for entries < slots {
		entries *= 2
	}
	ring, err := shm.NewHeapRing(entries)
	if err != nil {
		return nil, err
	}
	p := d.client.pumps[pump%len(d.client.pumps)]
	io := &IO{dev: d, pump: p, ring: ring, sub: ring.Submitter(), slot: d.slotSize(), first: first, slots: slots}
	io.source = newSource(p, nil, ring.Completer(), entries)
	io.source.caller.bell = make(chan struct{}, 1)
	io.drive = io.driven
	bell, err := unix.FcntlInt(uintptr(io.sub.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		ring.Close()
		return nil, fmt.Errorf("device %s: doorbell: %w", d.name, err)
	}
	io.bell = os.NewFile(uintptr(bell), "doorbell")
	if err := p.add(io.source); err != nil {
		io.bell.Close()
		ring.Close()
		return nil, err
	}
	return io, nil
}

// Slots is the number of slots, SlotSize the bytes of each.
func (io *IO) Slots() int    { return io.slots }
func (io *IO) SlotSize() int { return io.slot }

// Buf is the memory of a slot.
func (io *IO) Buf(slot int) []byte {
	off := (io.first + slot) * io.slot
	return io.dev.arena.Bytes()[off : off+io.slot : off+io.slot]
}

// Submit queues r; Flush or Wait sends what is queued. False: the slot is out
// of range or more than Slots are queued.
func (io *IO) Submit(r Request) bool {
	if r.Slot < 0 || r.Slot >= io.slots {
		return false
	}
	io.large = r.Len >= largeCopy
	e := shm.SQE{
		Tag: uint64(r.Slot), Op: r.Op, Flags: r.Flags, Offset: r.Off, Len: r.Len, Prio: r.Prio,
		Device: io.dev.index, Arena: io.dev.index, ArenaOff: uint64((io.first + r.Slot) * io.slot),
	}
	return io.sub.Push(&e)
}

// Flush shows what was submitted to the pump.
func (io *IO) Flush() {
	io.sub.Publish()
	io.pump.pump.Recall()
}

// Reap takes answers without waiting.
func (io *IO) Reap(done []Done) int {
	n := io.sub.Pop(io.cqes[:min(len(done), len(io.cqes))])
	for i, c := range io.cqes[:n] {
		done[i] = Done{Slot: int(c.Tag), Errno: blk.Errno(c.Errno)}
	}
	return n
}

// Wait sends what was submitted and returns at least one answer, unless
// nothing is in flight: then 0.
func (io *IO) Wait(done []Done) int {
	waiters := int(io.dev.client.waiters.Add(1))
	defer io.dev.client.waiters.Add(-1)
	alone := io.pump.enter()
	defer io.pump.waiters.Add(-1)
	for io.sub.InFlight() > 0 {
		if waiters <= len(io.dev.client.pumps) && io.sub.InFlight() <= io.drivenDepth(alone) && io.driveFor(done, alone) {
			return io.got
		}
		io.sub.Publish()
		if !alone && !io.large && io.pump.attended() {
			if n := io.rest(done); n > 0 {
				return n
			}
			continue
		}
		io.pump.pump.Recall() // the thread is to do it
		if waiters <= mostSpinners {
			if n := io.spin(done); n > 0 {
				io.slow = false
				return n
			}
		}
		if io.sub.Arm() {
			io.sleep()
		}
		if n := io.Reap(done); n > 0 {
			return n
		}
	}
	return 0
}

// mostSpinners is the number of callers of a client that look for answers
// before they sleep. More would take the CPUs from the pumps they wait for.
var mostSpinners = max(runtime.NumCPU()/2, 1)

// drivenDepth is the number of requests up to which the caller's thread does the
// pump's work. With more of them two threads get more done than one, where there
// are CPUs for both and the server, or much to copy.
func (io *IO) drivenDepth(alone bool) int {
	if alone && fewCPUs && !io.large && !io.slow {
		return io.slots
	}
	return 4
}

// fewCPUs: a thread more takes the CPU from one that has work.
var fewCPUs = runtime.NumCPU() <= 2

// largeCopy is the size from which a request is much to copy.
const largeCopy = 32 << 10

// patience is how long Wait looks before it sleeps.
const patience = 100 * time.Microsecond

// crowdedFor is how many calls of Wait a pump is not borrowed for after two callers
// have waited at once.
const crowdedFor = 64

// enter counts a caller of Wait and tells whether he may borrow the pump: not
// while there are others, who would wait for answers that nobody looks for.
func (p *pumpShare) enter() (alone bool) {
	if p.waiters.Add(1) > 1 {
		p.crowded.Store(crowdedFor)
		return false
	}
	if p.crowded.Load() > 0 {
		p.crowded.Add(-1)
		return false
	}
	return true
}

// driveFor does the pump's work until there is an answer. False: there is
// none, or the pump's own thread is at work.
func (io *IO) driveFor(done []Done, borrow bool) bool {
	io.got, io.into = 0, done
	drive := io.pump.pump.TryDrive
	if borrow {
		drive = io.pump.pump.Drive
	}
	return drive(io.drive) && io.got > 0
}

// driven runs as the pump: its work until there is an answer. What was
// submitted is published here, where the ring is not armed and nobody needs to
// be woken, and taken at once, so that it is sent before answers are received.
func (io *IO) driven() {
	io.sub.Publish()
	io.source.Poll()
	p := io.pump.pump
	for start := p.Now(); ; yield() {
		p.Turn()
		io.got = io.Reap(io.into)
		if io.got == 0 && time.Duration(p.Now()-start) <= 2*patience {
			continue
		}
		io.slow = io.got == 0
		if io.slow || io.pump.waiters.Load() > 1 {
			p.GiveBack()
		}
		return
	}
}

// spin looks for answers of a pump that is awake.
func (io *IO) spin(done []Done) int {
	for start := time.Now(); time.Since(start) < patience; {
		if n := io.Reap(done); n > 0 {
			return n
		}
		yield()
	}
	return 0
}

// yield gives the CPU to another thread. runtime.Gosched would park a thread
// that is locked, as that of a driver is.
//
//go:noinline
func yield() { unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// sleep blocks until the ring's doorbell rings. It leaves the thread to others:
// many callers wait on few threads.
func (io *IO) sleep() {
	if _, err := io.bell.Read(io.token[:]); err != nil {
		io.sub.Disarm()
		return
	}
	io.sub.Woken()
}

// Close ends the IO. Requests in flight end first.
func (io *IO) Close() {
	for io.sub.InFlight() > 0 {
		var done [64]Done
		io.Wait(done[:])
	}
	io.pump.remove(io.source)
	io.bell.Close()
	io.ring.Close()
}
