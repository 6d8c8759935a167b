package client

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// IO gives the library's user direct access to a device that was mapped with
// front end "none": requests by slot, without another process.
//
//	io, err := dev.NewIO(0, 0, 1)
//	copy(io.Buf(slot), data)
//	io.Submit(client.Request{Op: blk.Write, Slot: slot, Off: off, Len: n})
//	n := io.Wait(done)
//
// One goroutine owns an IO. While it waits it may do the pump's work; see
// pump.Caller.
type IO struct {
	dev    *Device
	pump   *pumpShare
	source *ringSource
	caller *pump.Caller
	ring   *shm.Ring
	sub    *shm.Submitter
	slot   int // bytes of a slot
	first  int // number of the arena's slot that is slot 0 of the IO
	slots  int
	large  bool // the last request had largeCopy bytes or more
	cqes   [64]shm.CQE
	into   []Done   // argument of Wait
	bell   *os.File // a duplicate of the ring's doorbell
	token  [8]byte  // read from bell
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

// NewIO returns an IO on a pump (modulo the number of pumps). It uses slots
// slots of the device, from first on. The error is EBUSY if the device belongs
// to a front end.
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
	bell, err := unix.FcntlInt(uintptr(io.sub.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		ring.Close()
		return nil, fmt.Errorf("device %s: doorbell: %w", d.name, err)
	}
	io.bell = os.NewFile(uintptr(bell), "doorbell")
	if err := p.addSource(io.source); err != nil {
		io.bell.Close()
		ring.Close()
		return nil, err
	}
	io.caller = p.pump.NewCaller(io.source, (*ioWork)(io))
	p.pump.Call(func() { io.source.caller = io.caller })
	return io, nil
}

// Slots returns the number of slots, SlotSize the size of each in bytes.
func (io *IO) Slots() int    { return io.slots }
func (io *IO) SlotSize() int { return io.slot }

// Buf returns the memory of a slot.
func (io *IO) Buf(slot int) []byte {
	off := (io.first + slot) * io.slot
	return io.dev.arena.Bytes()[off : off+io.slot : off+io.slot]
}

// Submit queues r. Flush or Wait sends it. Submit returns false if the slot
// is out of range or Slots requests are queued already.
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

// Flush sends the queued requests, without waiting.
func (io *IO) Flush() {
	io.sub.Publish()
	io.pump.pump.Recall()
}

// Reap stores answers in done without waiting and returns their number.
func (io *IO) Reap(done []Done) int {
	n := io.sub.Pop(io.cqes[:min(len(done), len(io.cqes))])
	for i, c := range io.cqes[:n] {
		done[i] = Done{Slot: int(c.Tag), Errno: blk.Errno(c.Errno)}
	}
	return n
}

// Wait sends the queued requests and waits for at least one answer, unless
// nothing is in flight. It stores answers in done and returns their number.
func (io *IO) Wait(done []Done) int {
	io.into = done
	return io.caller.Wait()
}

// largeCopy is the smallest request, in bytes, that takes longer to copy than
// to handle.
const largeCopy = 32 << 10

// ioWork implements the work of a pump.Caller for an IO.
type ioWork IO

func (w *ioWork) Publish()      { w.sub.Publish() }
func (w *ioWork) Reap() int     { return (*IO)(w).Reap(w.into) }
func (w *ioWork) InFlight() int { return w.sub.InFlight() }
func (w *ioWork) Large() bool   { return w.large }

// Sleep blocks until the ring's doorbell rings. It blocks the goroutine and not
// its thread, so many callers wait on few threads.
func (w *ioWork) Sleep() {
	if !w.sub.Arm() {
		return // there are answers
	}
	if _, err := w.bell.Read(w.token[:]); err != nil {
		w.sub.Disarm()
		return
	}
	w.sub.Woken()
}

// Close waits for the requests in flight, and releases the IO.
func (io *IO) Close() {
	for io.sub.InFlight() > 0 {
		var done [64]Done
		io.Wait(done[:])
	}
	io.caller.Close()
	io.pump.removeSource(io.source)
	io.bell.Close()
	io.ring.Close()
}
