package main

import (
	"context"
	"fmt"
	"log/slog"
	"math/bits"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

const (
	mostWrite    = 1 << 20 // largest read or write of the kernel, in bytes
	messageRoom  = mostWrite + pageSize
	rangesAtOnce = 4       // ops in flight of a request without payload
	maxRange     = 1 << 31 // longest op without payload, in bytes
	maxExtents   = 1 << 31 // longest range of one list of extents, in bytes
	extentsSize  = extents.Size
	receiveBatch = 32        // requests of one device in one round
	largeIO      = 256 << 10 // after I/O of this size the pump does not spin
)

// device is one device, the descriptor of its mount, and the memory of its requests.
// The queue's thread owns all of it but the fields above the empty line.
type device struct {
	index    uint32
	name     string
	location string // path of the file
	log      *slog.Logger
	queue    *queue
	limits   atomic.Pointer[blk.Limits] // replaced by a resize
	opens    atomic.Int32               // opens minus closes since this process serves the device
	ended    chan struct{}              // closed when the queue has left the device

	fd       int
	readable bool // fd may have a request
	removing bool // no further request is taken

	arena         []byte
	arenaID       uint32
	slotSize      int
	block         uint64 // logical block size in bytes
	maxWrite      uint32 // largest read or write of the kernel, in bytes
	opsPerRequest int    // slots that the largest read or write needs

	message      []byte // one message of the kernel
	ops          []op   // by slot
	free         opList
	freeOps      int
	requests     []request
	freeRequests *request

	sent     int    // ops that the daemon has
	writes   int    // modifying ops with the daemon or in the backlog
	partial  *op    // the write of a part of a block that excludes other writes
	excluded opList // writes that wait for partial, or for the writes in flight
	backlog  opList // ops that wait for room in the ring
}

// newDevice makes a device that serves the channel of s. The channel belongs to the
// device afterwards.
func newDevice(s *plugin.DeviceSpec, q *queue, log *slog.Logger) (*device, error) {
	if err := checkSpec(s); err != nil {
		return nil, err
	}
	d := &device{
		index: s.Index, name: s.Name, location: s.Config[settingPath], log: log, queue: q, ended: make(chan struct{}),
		readable: true, arena: s.Arena, arenaID: s.ArenaID, slotSize: s.SlotSize, block: uint64(s.Limits.LogicalBlockSize),
		message: make([]byte, messageRoom), ops: make([]op, s.Slots), requests: make([]request, s.Slots),
	}
	d.limits.Store(d.wholeBlocks(s.Limits))
	d.boundRequests(s.Slots)
	for i := range d.ops {
		d.ops[i] = op{dev: d, slot: uint32(i)}
		d.free.push(&d.ops[i])
	}
	d.freeOps = len(d.ops)
	for i := range d.requests {
		d.putRequest(&d.requests[i])
	}
	var err error
	d.fd, err = ownDescriptor(s.Channel)
	return d, err
}

func checkSpec(s *plugin.DeviceSpec) error {
	bs := s.Limits.LogicalBlockSize
	switch {
	case s.Channel == nil:
		return fmt.Errorf("the host has mounted no file for it: %w", blk.ENODEV)
	case bs < blk.SectorSize || bs > pageSize || bits.OnesCount32(bs) != 1:
		return fmt.Errorf("logical block size %d: %w", bs, blk.EINVAL)
	case s.SlotSize < int(2*bs) || s.SlotSize < extentsSize:
		return fmt.Errorf("slots of %d bytes for blocks of %d: %w", s.SlotSize, bs, blk.EINVAL)
	case s.Slots < minSlots:
		return fmt.Errorf("%d slots, want %d and more: %w", s.Slots, minSlots, blk.EINVAL)
	}
	return nil
}

// minSlots are the slots of the smallest request that crosses three blocks.
const minSlots = 3

// boundRequests chooses the largest read or write: at most half of the slots hold one.
func (d *device) boundRequests(slots int) {
	chunk := d.chunk(d.limits.Load())
	ops := max(min(slots/2, int(mostWrite/chunk)+1), 1)
	d.maxWrite = uint32(max(min(uint64(ops)*chunk, mostWrite)&^(pageSize-1), pageSize))
	d.opsPerRequest = min(int((uint64(d.maxWrite)+chunk-1)/chunk)+2, slots) // two parts of blocks at the ends
}

// chunk returns the most bytes that one slot transfers, in whole blocks.
func (d *device) chunk(l *blk.Limits) uint64 {
	n := uint64(d.slotSize)
	if l.MaxIOSize != 0 {
		n = min(n, uint64(l.MaxIOSize))
	}
	return max(n&^(d.block-1), d.block)
}

// wholeBlocks returns l with the size rounded down to whole blocks.
func (d *device) wholeBlocks(l blk.Limits) *blk.Limits {
	l.Size &^= d.block - 1
	return &l
}

// ownDescriptor returns a descriptor of f that does not block, and closes f.
func ownDescriptor(f *os.File) (fd int, err error) {
	defer f.Close()
	raw, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	var derr error
	err = raw.Control(func(old uintptr) { fd, derr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) })
	if err == nil {
		err = derr
	}
	if err != nil {
		return -1, fmt.Errorf("descriptor of the mount: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("descriptor of the mount: %w", err)
	}
	return fd, nil
}

// takeRequest returns a free request.
func (d *device) takeRequest() *request {
	r := d.freeRequests
	d.freeRequests = r.free
	*r = request{}
	return r
}

func (d *device) putRequest(r *request) {
	r.free = d.freeRequests
	d.freeRequests = r
}

// takeOp returns a free slot for a part of r.
func (d *device) takeOp(r *request, s step) *op {
	o := d.free.pop()
	d.freeOps--
	*o = op{dev: d, slot: o.slot, req: r, step: s}
	r.pending++
	return o
}

func (d *device) putOp(o *op) {
	o.req = nil
	d.free.push(o)
	d.freeOps++
}

// isIdle reports whether no slot is in use.
func (d *device) isIdle() bool { return d.freeOps == len(d.ops) }

// write sends a reply. A request that the kernel has cancelled has no reply (ENOENT),
// and neither has one of a mount that is gone.
func (d *device) write(iov []unix.Iovec) {
	for {
		_, err := writev(d.fd, iov)
		switch err {
		case unix.EINTR:
			continue
		case 0, unix.ENOENT:
		default:
			d.disconnect(err)
		}
		return
	}
}

// disconnect records that the mount is gone.
func (d *device) disconnect(cause error) {
	if !d.removing {
		d.log.Info("mount has ended", "device", d.name, "path", d.location, "cause", cause)
	}
	d.removing = true
}

// resize tells users of a new size.
func (d *device) resize(l blk.Limits) {
	d.limits.Store(d.wholeBlocks(l))
	d.queue.do(func() { d.notifySize() })
}

// notifySize makes the kernel ask for the attributes of the file again.
func (d *device) notifySize() {
	var b [outHeaderSize + 24]byte
	putNotification(b[:], notifyInvalInode, 24)
	native.PutUint64(b[outHeaderSize:], rootNode)
	offset := int64(-1) // attributes alone
	native.PutUint64(b[outHeaderSize+8:], uint64(offset))
	d.notify("attributes", b[:])
}

// resend makes the kernel send the requests again that an earlier process has taken.
func (d *device) resend() {
	var b [outHeaderSize]byte
	putNotification(b[:], notifyResend, 0)
	d.notify("requests of an earlier process", b[:])
}

// notify sends the kernel a message that answers no request.
func (d *device) notify(what string, b []byte) {
	if _, err := unix.Write(d.fd, b); err != nil && err != unix.ENOENT && err != unix.ENODEV {
		d.log.Warn("the kernel refuses a notification", "device", d.name, "of", what, "err", err)
	}
}

// remove makes the queue leave the device when the slots are free, and waits for that.
func (d *device) remove(ctx context.Context) error {
	d.queue.do(func() { d.removing = true; d.queue.again = true })
	select {
	case <-d.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for requests in flight: %w", context.Cause(ctx))
	}
}
