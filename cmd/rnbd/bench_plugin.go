package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/load"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// pluginDisk is a disk of a storage plugin as load sees it. This process uses the
// plugin as a server does: through a ring and shared memory, with neither session
// nor network before it.
type pluginDisk struct {
	process *plugin.Process
	ring    *shm.Ring
	arena   *shm.Arena
	limits  blk.Limits
}

// The numbers of the one disk and its memory.
const pluginDevice, pluginArena = 1, 1

// Sizes of a pluginDisk: slots of as many bytes as a chunk of a server.
const (
	pluginSlots    = 128
	pluginSlotSize = 128 << 10
)

// openPlugin starts the plugin and has it open the device.
func (o *benchOptions) openPlugin(ctx context.Context, c *call, b *benchTargets) error {
	path := c.args[0]
	p, err := startPlugin(ctx, o.plugin)
	if err != nil {
		return fmt.Errorf("bench --plugin %s: %w", o.plugin, err)
	}
	b.closers = append(b.closers, p.close)
	if err := p.open(ctx, path, o.write); err != nil {
		return fmt.Errorf("bench %s: %w", path, err)
	}
	t := &benchTarget{node: path, access: "plugin alone", plugin: filepath.Base(o.plugin)}
	t.Name, t.Device = path, p
	b.list = append(b.list, t)
	return nil
}

// startPlugin starts a plugin with one queue and one arena.
func startPlugin(ctx context.Context, program string) (p *pluginDisk, err error) {
	p = &pluginDisk{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	p.process, err = plugin.Launch(ctx, plugin.Config{Kind: plugin.KindIO, Path: program, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return p, err
	}
	if p.ring, err = shm.NewRing(2 * pluginSlots); err != nil {
		return p, err
	}
	if p.arena, err = shm.NewArena("bench", pluginSlots*pluginSlotSize); err != nil {
		return p, err
	}
	return p, errors.Join(p.process.AttachQueue(ctx, 0, p.ring), p.process.AttachArena(ctx, pluginArena, p.arena))
}

// open has the plugin open a file or block device.
func (p *pluginDisk) open(ctx context.Context, path string, write bool) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	mode := blk.ReadOnly
	if write {
		mode = blk.ReadWrite
	}
	p.limits, err = p.process.OpenDisk(ctx, plugin.OpenRequest{
		Device: pluginDevice, Name: filepath.Base(path), Mode: mode, File: f, Generation: 1})
	return err
}

func (p *pluginDisk) close() (err error) {
	if p.process != nil {
		ctx, cancel := context.WithTimeout(context.Background(), closing)
		defer cancel()
		err = p.process.Stop(ctx)
	}
	if p.ring != nil {
		err = errors.Join(err, p.ring.Close())
	}
	if p.arena != nil {
		err = errors.Join(err, p.arena.Close())
	}
	return err
}

// Limits are those of the plugin, and a slot is the largest request.
func (p *pluginDisk) Limits() blk.Limits {
	l := p.limits
	if l.MaxIOSize == 0 || l.MaxIOSize > pluginSlotSize {
		l.MaxIOSize = pluginSlotSize
	}
	return l
}

// Open returns the one queue.
func (p *pluginDisk) Open(_ context.Context, _, _, slots, _ int) (load.Queue, error) {
	if slots > pluginSlots {
		return nil, fmt.Errorf("%d requests and parts in flight are more than %d: use a smaller --depth or --bs: %w", slots, pluginSlots, syscall.EINVAL)
	}
	return &pluginQueue{pluginDisk: p, sub: p.ring.Submitter()}, nil
}

// pluginQueue is the submitter's side of the ring.
type pluginQueue struct {
	*pluginDisk
	sub  *shm.Submitter
	cqes [64]shm.CQE
	err  error // the plugin does not answer any more
	busy [pluginSlots]bool
}

func (q *pluginQueue) Buf(slot int) []byte {
	return q.arena.Bytes()[slot*pluginSlotSize:][:pluginSlotSize:pluginSlotSize]
}

func (q *pluginQueue) Submit(r load.Request) {
	q.busy[r.Slot] = true
	q.sub.Push(&shm.SQE{Tag: uint64(r.Slot), Op: r.Op, Offset: r.Off, Len: uint32(r.Len),
		Device: pluginDevice, Arena: pluginArena, ArenaOff: uint64(r.Slot) * pluginSlotSize})
}

// Wait looks for answers, and sleeps when there is none for long, as a pump does.
func (q *pluginQueue) Wait(done []load.Done) int {
	q.sub.Publish()
	for start := time.Now(); q.err == nil && q.sub.InFlight() > 0; {
		n := q.sub.Pop(q.cqes[:min(len(done), len(q.cqes))])
		for i, c := range q.cqes[:n] {
			if c.Tag >= pluginSlots || !q.busy[c.Tag] {
				q.err = fmt.Errorf("the plugin answers request %d, which was not made: %w", c.Tag, syscall.EPROTO)
				return i + q.fail(done[i:])
			}
			done[i] = load.Done{Slot: int(c.Tag), Err: blk.Errno(c.Errno).Err()}
			q.busy[c.Tag] = false
		}
		switch {
		case n > 0:
			return n
		case time.Since(start) < pump.DefaultSpin:
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		case q.sub.Arm():
			q.err = q.sleep()
		}
	}
	return q.fail(done)
}

// sleep ends with an answer. It returns an error when none will come: the plugin
// has ended, or has broken the ring.
func (q *pluginQueue) sleep() error {
	fds := []unix.PollFd{{Fd: int32(q.sub.FD()), Events: unix.POLLIN}}
	for {
		if err := errors.Join(q.sub.Err(), q.process.ExitError()); err != nil {
			return fmt.Errorf("the plugin does not answer: %w", err)
		}
		if n, _ := unix.Poll(fds, 1000); n > 0 {
			q.sub.Disarm()
			return nil
		}
	}
}

// fail answers the requests in flight of a plugin that does not.
func (q *pluginQueue) fail(done []load.Done) (n int) {
	for slot, busy := range q.busy {
		if busy && n < len(done) {
			done[n] = load.Done{Slot: slot, Err: q.err}
			q.busy[slot] = false
			n++
		}
	}
	return n
}

func (q *pluginQueue) Close() error { return nil }
