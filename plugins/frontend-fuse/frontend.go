package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
)

const version = "0.1.0"

// settingPath is the setting with the path of the device's file.
const settingPath = "path"

// queueTime is the time for the threads of queues to begin.
const queueTime = 15 * time.Second

// frontend implements plugin.Frontend: devices and queues come and go here.
type frontend struct {
	log func() *slog.Logger

	mu      sync.Mutex
	queues  []*queue // by pump
	devices map[uint32]*device
}

func newFrontend(log func() *slog.Logger) *frontend {
	return &frontend{log: log, devices: map[uint32]*device{}}
}

func (f *frontend) Describe() plugin.Info { return plugin.Info{Name: "fuse", Version: version} }

// AddDevice serves the mount that the daemon has made for a device.
func (f *frontend) AddDevice(ctx context.Context, s plugin.DeviceSpec) error {
	if s.Index >= maxIndex {
		return fmt.Errorf("device index %d: %w", s.Index, blk.EINVAL)
	}
	q, err := f.queueOf(ctx, &s)
	if err != nil {
		return err
	}
	d, err := newDevice(&s, q, f.log())
	if err != nil {
		return fmt.Errorf("device %q: %w", s.Name, err)
	}
	added := make(chan error, 1)
	q.do(func() { added <- q.add(d, s.Location != "") })
	select {
	case err = <-added:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("device %q: %w", s.Name, err)
	}
	f.mu.Lock()
	f.devices[s.Index] = d
	f.mu.Unlock()
	f.log().Info("file is ready", "device", s.Name, "path", d.location, "taken_over", s.Location != "")
	return nil
}

// queueOf returns the queue that serves the device, as soon as all queues of the daemon
// run: the choice must not depend on their order.
func (f *frontend) queueOf(ctx context.Context, s *plugin.DeviceSpec) (*queue, error) {
	for end := time.Now().Add(queueTime); ; time.Sleep(time.Millisecond) {
		f.mu.Lock()
		queues := f.queues
		f.mu.Unlock()
		if n := max(s.Queues, 1); len(queues) >= n {
			return queues[int(s.Index)%n], nil
		}
		if ctx.Err() != nil || time.Now().After(end) {
			return nil, fmt.Errorf("%d of %d queues serve: %w", len(queues), s.Queues, blk.ENODEV)
		}
	}
}

// RemoveDevice ends the service of a device. It fails with EBUSY if the file is open and
// force is not set. The daemon removes the mount.
func (f *frontend) RemoveDevice(ctx context.Context, index uint32, force bool) error {
	d := f.device(index)
	if d == nil {
		return blk.ENODEV
	}
	if n := d.opens.Load(); n > 0 && !force {
		return fmt.Errorf("%s is open %d times: %w", d.location, n, blk.EBUSY)
	}
	if err := d.remove(ctx); err != nil {
		return fmt.Errorf("device %q: %w", d.name, err)
	}
	f.mu.Lock()
	delete(f.devices, index)
	f.mu.Unlock()
	f.log().Info("file removed", "device", d.name, "path", d.location)
	return nil
}

// ResizeDevice changes the size of the file.
func (f *frontend) ResizeDevice(_ context.Context, index uint32, l blk.Limits) error {
	d := f.device(index)
	if d == nil {
		return blk.ENODEV
	}
	d.resize(l)
	return nil
}

// AddListener fails: files have no listeners.
func (f *frontend) AddListener(_ context.Context, name string, _ *os.File) error {
	return fmt.Errorf("files have no listeners, so no %q: %w", name, blk.EINVAL)
}

// Openers returns how often the file is open, as far as this process has seen.
func (f *frontend) Openers(index uint32) int {
	if d := f.device(index); d != nil {
		return max(int(d.opens.Load()), 0)
	}
	return 0
}

// Location returns the path of the file.
func (f *frontend) Location(index uint32) string {
	if d := f.device(index); d != nil {
		return d.location
	}
	return ""
}

func (f *frontend) device(index uint32) *device {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.devices[index]
}

// Serve runs one queue until the host closes it.
func (f *frontend) Serve(fq *plugin.FrontQueue) error {
	p, err := pump.New(pump.Config{Name: fmt.Sprintf("fuse%d", fq.Pump()), Logger: f.log()})
	if err != nil {
		return err
	}
	q, err := newQueue(fq, f.log())
	if err == nil {
		err = p.Add(q)
	}
	if err != nil {
		p.Stop()
		return err
	}
	q.pump, q.do, q.now, q.served = fq.Pump(), p.Do, p.Now, fq.Served
	f.setQueues(func(all []*queue) []*queue { return append(all, q) })
	err = p.Run(fq.Closed)
	f.setQueues(func(all []*queue) []*queue {
		return slices.DeleteFunc(all, func(other *queue) bool { return other == q })
	})
	q.close()
	return err
}

// setQueues changes the list of queues, ordered by pump.
func (f *frontend) setQueues(change func([]*queue) []*queue) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queues = change(slices.Clone(f.queues))
	slices.SortFunc(f.queues, func(a, b *queue) int { return a.pump - b.pump })
}
