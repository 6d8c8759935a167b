package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

const (
	startTime = 20 * time.Second // for the first start and for recovery: requests are served meanwhile
	stopTime  = 10 * time.Second
	delTime   = 2 * time.Second // only an opener can make it longer
	nodeTime  = 5 * time.Second // until a device node is there
)

// ublkDevice is one device of the driver, and its requests' memory.
type ublkDevice struct {
	ctl   *ctrlDevice
	log   *slog.Logger
	name  string
	index uint32
	info  devInfo
	block uint32 // logical block size in bytes

	fetch    uint32 // I/O commands in the encoding of this kernel
	again    uint32
	arenaID  uint32
	arena    uint64 // address
	arenaFD  int32
	slotSize int

	char  *os.File
	desc  [][]byte // by hardware queue
	parts []*hardwareQueue

	ending   sync.Mutex // held during stop and resize; a caller that timed out may call stop again
	stopping bool       // stop has begun; guarded by ending
	size     uint64     // of the disk in bytes, 0: not known; guarded by ending

	failure atomic.Int32 // first errno that the driver refused a command with
}

// identityToken returns the mark of a device of this identity. The driver keeps it after
// this process has died.
func identityToken(identity string) uint64 {
	sum := sha256.Sum256([]byte("rnbd\x00" + identity))
	return native.Uint64(sum[:8]) | 1 // never 0
}

func newDevice(c *ctrlDevice, s *plugin.DeviceSpec, log *slog.Logger) *ublkDevice {
	fetch, again := c.ioCommands()
	return &ublkDevice{
		fetch: fetch, again: again, ctl: c, log: log, name: s.Name, index: s.Index, size: s.Limits.Size, block: s.Limits.LogicalBlockSize,
		arenaID: s.ArenaID, arena: uring.Address(s.Arena), arenaFD: int32(s.ArenaFD), slotSize: s.SlotSize,
	}
}

func (d *ublkDevice) slotAddr(slot uint32) uint64 { return d.arena + uint64(slot)*uint64(d.slotSize) }

// recordErrno records the errno of the first failed command of a tag.
func (d *ublkDevice) recordErrno(errno int32) { d.failure.CompareAndSwap(0, errno) }

// blockPath returns the node of a device's disk.
func blockPath(id uint32) string { return fmt.Sprintf("/dev/ublkb%d", id) }
func charPath(id uint32) string  { return fmt.Sprintf("/dev/ublkc%d", id) }

// idOf is the inverse of blockPath.
func idOf(path string) (uint32, bool) {
	digits, ok := strings.CutPrefix(path, "/dev/ublkb")
	id, err := strconv.ParseUint(digits, 10, 32)
	return uint32(id), ok && err == nil
}

func (d *ublkDevice) diskPath() string { return blockPath(d.info.id) }

// createDevice makes a new device with its settings.
func (d *ublkDevice) createDevice(ctx context.Context, s *plugin.DeviceSpec, queues []*queue) (err error) {
	want, err := parseSettings(s.Config)
	if err != nil {
		return err
	}
	n := min(len(queues), s.Slots, want.queues)
	d.info = devInfo{
		queues: uint16(n), depth: uint16(min(s.Slots/n, maxQueueDepth)), maxIO: uint32(s.SlotSize), id: want.number, pid: int32(os.Getpid()),
		flags: featUserRecovery | featUserRecoveryReissue | d.ctl.features&featUpdateSize | d.pageFeatures(want), private: identityToken(s.Identity),
	}
	if d.ctl.encoded {
		d.info.flags |= featIoctlEncode
	}
	if err := d.ctl.addDevice(&d.info); err != nil {
		return addError(want.number, err)
	}
	defer func() {
		if err != nil {
			err = d.giveUp(err)
		}
	}()
	p := paramsOf(&s.Limits, d.info.maxIO)
	if err := d.ctl.setParams(d.info.id, &p); err != nil {
		return fmt.Errorf("the ublk driver refuses the device's parameters (%+v): %w", p, err)
	}
	if err := d.serveTags(ctx, queues); err != nil {
		return err
	}
	if err := d.ctl.startDevice(d.info.id, remainingTime(ctx, startTime)); err != nil {
		return d.withCause("start the device", err)
	}
	return awaitNode(ctx, d.diskPath())
}

// errStuck means that the driver does not release a device. Its tags point into
// memory that would be reused, so the process exits; its end releases them.
var errStuck = errors.New("the ublk driver does not let go of the device")

// giveUp undoes a create or recover that failed.
func (d *ublkDevice) giveUp(cause error) error {
	d.failRequests()
	if err := d.removeDevice(); err != nil {
		return fmt.Errorf("%w; %w: %w", cause, errStuck, err)
	}
	return cause
}

// pageFeatures returns the features for registered pages, or 0 if they are not
// wanted or the driver does not offer them.
func (d *ublkDevice) pageFeatures(want deviceSettings) uint64 {
	const feats = featZeroCopy | featAutoBufReg
	switch {
	case !want.zeroCopy:
		return 0
	case d.ctl.features&feats != feats:
		d.log.Warn("this kernel's ublk does not register pages (Linux 6.16 does): setting zero_copy is left out", "device", d.name)
		return 0
	}
	return feats
}

func addError(id uint32, err error) error {
	switch {
	case errors.Is(err, unix.EEXIST) && id != anyDevice:
		return fmt.Errorf("%s is taken: %w", blockPath(id), err)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("ublk devices need root (CAP_SYS_ADMIN): %w", err)
	case errors.Is(err, unix.ENOSPC):
		return fmt.Errorf("the driver takes no more ublk devices (module parameter ublks_max): %w", err)
	}
	return fmt.Errorf("add a ublk device: %w", err)
}

// serveTags opens the character device and gives all tags to the driver. Hardware
// queue i belongs to queue i mod P.
func (d *ublkDevice) serveTags(ctx context.Context, queues []*queue) (err error) {
	if err := awaitNode(ctx, charPath(d.info.id)); err != nil {
		return err
	}
	if d.char, err = os.OpenFile(charPath(d.info.id), os.O_RDWR, 0); err != nil {
		return err
	}
	for i := range int(d.info.queues) {
		desc, err := unix.Mmap(int(d.char.Fd()), descOffset(i), descSize(int(d.info.depth)), unix.PROT_READ, unix.MAP_SHARED|unix.MAP_POPULATE)
		if err != nil {
			return fmt.Errorf("map requests of hardware queue %d: %w", i, err)
		}
		d.desc = append(d.desc, desc)
	}
	for i, desc := range d.desc {
		p := &hardwareQueue{
			dev: d, queue: queues[i%len(queues)], hw: uint16(i), char: int32(d.char.Fd()), desc: desc, base: uint32(i) * uint32(d.info.depth),
			pages: d.info.flags&featAutoBufReg != 0,
			tags:  make([]requestTag, d.info.depth), ended: make(chan struct{}),
		}
		d.parts = append(d.parts, p)
		p.queue.do(func() { p.queue.openPart(p) })
	}
	return nil
}

// removeDevice removes the device. After an error it still exists.
func (d *ublkDevice) removeDevice() error {
	if err := d.stopDisk(stopTime); err != nil {
		return err
	}
	d.deleteStopped()
	return nil
}

// deleteStopped deletes a stopped device. Its number is free then.
func (d *ublkDevice) deleteStopped() {
	err := d.ctl.deleteDevice(d.info.id, delTime)
	switch {
	case errors.Is(err, errLate), errors.Is(err, unix.EINTR):
		d.log.Info("the number of the device is free when its last user closes it", "device", d.name, "path", d.diskPath())
	case err != nil && !errors.Is(err, unix.ENODEV):
		d.log.Warn("deleting a stopped ublk device failed", "device", d.name, "number", d.info.id, "err", err)
	}
}

// stopDisk ends the disk and gets all tags back.
func (d *ublkDevice) stopDisk(limit time.Duration) error {
	d.ending.Lock()
	defer d.ending.Unlock()
	d.stopping = true
	end := time.Now().Add(limit)
	if err := d.ctl.stopDevice(d.info.id, limit); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("stop ublk device %d: %w", d.info.id, err)
	}
	for _, p := range d.parts {
		select {
		case <-p.ended:
		case <-time.After(time.Until(end)):
			return fmt.Errorf("stop ublk device %d: requests of hardware queue %d have not ended: %w", d.info.id, p.hw, blk.ETIMEDOUT)
		}
	}
	d.parts = nil
	d.closeCharDevice()
	return nil
}

// closeCharDevice closes the character device: its last tag has ended.
func (d *ublkDevice) closeCharDevice() {
	for _, m := range d.desc {
		unix.Munmap(m)
	}
	d.desc = nil
	if d.char != nil {
		d.char.Close()
		d.char = nil
	}
}

// withCause returns err with the cause or, if none is known, the device's state.
func (d *ublkDevice) withCause(what string, err error) error {
	if errno := d.failure.Load(); errno != 0 {
		return fmt.Errorf("%s: the driver refuses to hand out requests: %w", what, unix.Errno(errno))
	}
	state := "unknown"
	if info, ierr := d.ctl.deviceInfo(d.info.id); ierr == nil {
		state = stateName(info.state)
	}
	return fmt.Errorf("%s (ublk device %d, %s): %w", what, d.info.id, state, err)
}

// failRequests answers requests that come from now on with EIO, so that no user
// waits for a device that is given up.
func (d *ublkDevice) failRequests() {
	for _, p := range d.parts {
		p.queue.do(func() { p.fail = true })
	}
}

// remainingTime returns limit, or less if ctx ends earlier: a second is left for
// cleaning up.
func remainingTime(ctx context.Context, limit time.Duration) time.Duration {
	if end, ok := ctx.Deadline(); ok {
		limit = min(limit, time.Until(end)-time.Second)
	}
	return max(limit, 100*time.Millisecond)
}

// awaitNode waits until devtmpfs or udev has made a device node.
func awaitNode(ctx context.Context, path string) error {
	for end := time.Now().Add(remainingTime(ctx, nodeTime)); ; {
		_, err := os.Stat(path)
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("the kernel has made the device, but its node does not appear (no devtmpfs or udev here?): %w", err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
