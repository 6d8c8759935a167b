package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blockdev"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

const version = "0.1.0"

// frontend implements plugin.Frontend: devices and queues come and go here.
type frontend struct {
	log    func() *slog.Logger
	ctl    *ctrlDevice
	doomed atomic.Pointer[error] // the reason why the process must exit; nil: none

	mu      sync.Mutex
	queues  []*queue // by pump
	devices map[uint32]*ublkDevice
}

func newFrontend(log func() *slog.Logger) *frontend {
	return &frontend{log: log, ctl: newControl(), devices: map[uint32]*ublkDevice{}}
}

func (f *frontend) Describe() plugin.Info { return plugin.Info{Name: "ublk", Version: version} }

// AddDevice makes a disk of a device, or takes over the disk of an earlier
// process.
func (f *frontend) AddDevice(ctx context.Context, s plugin.DeviceSpec) error {
	if err := checkSpec(&s); err != nil {
		return fmt.Errorf("device %q: %w", s.Name, err)
	}
	if err := f.ctl.openCtrl(); err != nil {
		return err
	}
	d, taken, err := f.makeDevice(ctx, &s)
	if errors.Is(err, errStuck) {
		f.failQueues(err)
	}
	if err != nil {
		return fmt.Errorf("device %q: %w", s.Name, err)
	}
	f.mu.Lock()
	f.devices[s.Index] = d
	f.mu.Unlock()
	f.log().Info("disk is ready", "device", s.Name, "path", d.diskPath(), "taken_over", taken,
		"queues", d.info.queues, "depth", d.info.depth, "features", fmt.Sprintf("%#x", d.info.flags), "driver_offers", fmt.Sprintf("%#x", f.ctl.features))
	if d.info.flags&featUserRecovery == 0 {
		f.log().Warn("this kernel's ublk has no recovery: the disk goes when this process ends", "path", d.diskPath())
	}
	return nil
}

func (f *frontend) makeDevice(ctx context.Context, s *plugin.DeviceSpec) (d *ublkDevice, taken bool, err error) {
	queues, err := f.awaitQueues(ctx, s.Queues)
	if err != nil {
		return nil, false, err
	}
	if s.Location != "" {
		d = newDevice(f.ctl, s, f.log())
		if err = d.takeOver(ctx, s, queues); err == nil {
			return d, true, nil
		}
		if !errors.Is(err, errGone) {
			// The disk is left as it is, and the next attempt may succeed. If
			// tags are with the driver, their slots are given up with this
			// attempt, so the next one needs a new process.
			if len(d.parts) > 0 {
				err = fmt.Errorf("%w: %w", errStuck, err)
			}
			return nil, false, err
		}
		if s.Location == plugin.LocationUnknown {
			return nil, false, fmt.Errorf("%w: %w", err, blk.ENODEV)
		}
		f.log().Warn("disk is made anew", "device", s.Name, "cause", err)
	}
	d = newDevice(f.ctl, s, f.log())
	return d, false, d.createDevice(ctx, s, queues)
}

// failQueues makes the queues return err. This ends the process.
func (f *frontend) failQueues(err error) { f.doomed.CompareAndSwap(nil, &err) }

// awaitQueues returns the queues, ordered by pump, as soon as there are n.
func (f *frontend) awaitQueues(ctx context.Context, n int) ([]*queue, error) {
	for end := time.Now().Add(remainingTime(ctx, queueTime)); ; {
		f.mu.Lock()
		queues := slices.Clone(f.queues)
		f.mu.Unlock()
		if len(queues) >= max(n, 1) {
			return queues, nil
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("%d of %d queues serve: %w", len(queues), n, blk.ENODEV)
		}
		time.Sleep(time.Millisecond)
	}
}

// queueTime is the time for the threads of queues to begin.
const queueTime = 15 * time.Second

// RemoveDevice removes a disk. It fails with EBUSY if the disk is in use and
// force is not set.
func (f *frontend) RemoveDevice(ctx context.Context, index uint32, force bool) error {
	d := f.deviceAt(index)
	if d == nil {
		return blk.ENODEV
	}
	if err := d.endDisk(ctx, force); err != nil {
		return err
	}
	f.mu.Lock()
	delete(f.devices, index)
	f.mu.Unlock()
	if force {
		go d.deleteStopped() // users that have the disk open keep its number
	} else {
		d.deleteStopped()
	}
	f.log().Info("disk removed", "device", d.name, "path", d.diskPath())
	return nil
}

// endDisk stops the disk if it is not in use or force is set.
func (d *ublkDevice) endDisk(ctx context.Context, force bool) error {
	if force {
		return d.stopDisk(remainingTime(ctx, stopTime))
	}
	hold, err := blockdev.Claim(ctx, d.diskPath()) // no mount succeeds from here on
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO):
		err = d.onMissingNode(err)
	case err == nil:
		defer hold.Close()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", d.diskPath(), err)
	}
	return d.stopDisk(remainingTime(ctx, stopTime))
}

// onMissingNode decides about a disk with a node that cannot be opened. It returns
// nil if the device was deleted, or has no user. If users are found, or cannot
// be looked for, the error wraps EBUSY.
func (d *ublkDevice) onMissingNode(cause error) error {
	info, err := d.ctl.deviceInfo(d.info.id)
	if d.ctl.noDevice(err) || err == nil && info.state == stateDead {
		d.log.Warn("disk was deleted by another", "device", d.name, "path", d.diskPath())
		return nil
	}
	n, err := blockdev.UsersOf(filepath.Base(d.diskPath()))
	switch {
	case err != nil:
		return fmt.Errorf("the driver has the disk, but its node cannot be opened (%v), and whether it is in use is not known (%v): unmap it with --force: %w", cause, err, blk.EBUSY)
	case n > 0:
		return fmt.Errorf("its node cannot be opened (%v), and it has users: %d: %w", cause, n, blk.EBUSY)
	}
	d.log.Warn("the node of the disk is gone", "device", d.name, "path", d.diskPath())
	return nil
}

// ResizeDevice changes the size of a disk in use. It fails with EOPNOTSUPP
// before Linux 6.16.
func (f *frontend) ResizeDevice(_ context.Context, index uint32, l blk.Limits) error {
	d := f.deviceAt(index)
	if d == nil {
		return blk.ENODEV
	}
	return d.resizeDisk(l.Size)
}

// AddListener fails: ublk has no listeners.
func (f *frontend) AddListener(_ context.Context, name string, l *os.File) error {
	return fmt.Errorf("ublk devices have no listeners, so no %q: %w", name, blk.EINVAL)
}

// Openers returns the number of users of the disk: processes that have it open,
// mounts, and devices on top of it.
func (f *frontend) Openers(index uint32) int {
	d := f.deviceAt(index)
	if d == nil {
		return 0
	}
	n, err := blockdev.Users(d.diskPath())
	if err != nil {
		f.log().Warn("looking for users failed", "path", d.diskPath(), "err", err)
	}
	return n
}

// Location returns the disk's device node.
func (f *frontend) Location(index uint32) string {
	if d := f.deviceAt(index); d != nil {
		return d.diskPath()
	}
	return ""
}

func (f *frontend) deviceAt(index uint32) *ublkDevice {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.devices[index]
}

// Serve runs one queue until the host closes it.
func (f *frontend) Serve(fq *plugin.FrontQueue) error {
	// Allocations of this thread must not wait for writes to the disk it serves.
	unix.Prctl(unix.PR_SET_IO_FLUSHER, 1, 0, 0, 0) // optional; needs CAP_SYS_RESOURCE
	p, err := pump.New(pump.Config{Name: fmt.Sprintf("ublk%d", fq.Pump()), Logger: f.log()})
	if err != nil {
		return err
	}
	if err := p.Add(&ringBell{fq}); err != nil {
		p.Stop()
		return err
	}
	if uring.Supported() != nil { // AddDevice says so
		return p.Run(fq.Closed)
	}
	q, err := newQueue(fq, f.log())
	if err == nil {
		err = p.Add(q)
	}
	if err != nil {
		p.Stop()
		q.close()
		return err
	}
	q.pump, q.do, q.now, q.served = fq.Pump(), p.Do, p.Now, fq.Served
	f.attachQueue(q)
	err = p.Run(func() bool { return fq.Closed() || f.doomed.Load() != nil })
	f.detachQueue(q)
	q.close()
	f.log().Debug("queue ends", "queue", fq.Pump(), "requests", q.stats.requests.Load(),
		"errors", q.stats.errors.Load(), "stray_completions", q.stats.stray.Load())
	if cause := f.doomed.Load(); cause != nil {
		err = errors.Join(*cause, err)
	}
	return err
}

func (f *frontend) attachQueue(q *queue) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queues = append(f.queues, q)
	slices.SortFunc(f.queues, func(a, b *queue) int { return a.pump - b.pump })
}

func (f *frontend) detachQueue(q *queue) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queues = slices.DeleteFunc(f.queues, func(other *queue) bool { return other == q })
}
