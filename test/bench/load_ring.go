package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// ring makes load as a server does: on a disk of a storage plugin, through
// shared memory, with neither session nor network before it.
type ring struct {
	process *plugin.Process
	shared  *shm.Ring
	sub     *shm.Submitter
	arena   *shm.Arena
	limits  blk.Limits
	cqes    [64]shm.CQE
}

// The numbers of the one disk and its memory.
const ringDisk, ringArena = 1, 1

// ringSlot is the memory of a request, as large as a chunk of a server.
const ringSlot = 128 << 10

// openRing runs the plugin of c on a file or device.
func openRing(ctx context.Context, c workerConfig) (_ *ring, err error) {
	r := &ring{}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	r.process, err = plugin.Launch(ctx, plugin.Config{Kind: plugin.KindIO, Path: c.plugin,
		Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return r, err
	}
	if r.shared, err = shm.NewRing(2 * librarySlots); err != nil {
		return r, err
	}
	r.sub = r.shared.Submitter()
	if r.arena, err = shm.NewArena("bench", librarySlots*ringSlot); err != nil {
		return r, err
	}
	err = errors.Join(r.process.AttachQueue(ctx, 0, r.shared), r.process.AttachArena(ctx, ringArena, r.arena))
	if err != nil {
		return r, err
	}
	fd, err := unix.Open(c.device, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return r, fmt.Errorf("open %s: %w", c.device, err)
	}
	f := os.NewFile(uintptr(fd), c.device)
	defer f.Close()
	r.limits, err = r.process.OpenDisk(ctx, plugin.OpenRequest{
		Device: ringDisk, Name: filepath.Base(c.device), Mode: blk.ReadWrite, File: f, Generation: 1})
	return r, err
}

func (r *ring) close() (err error) {
	if r.process != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		err = r.process.Stop(ctx)
	}
	if r.shared != nil {
		err = errors.Join(err, r.shared.Close())
	}
	if r.arena != nil {
		err = errors.Join(err, r.arena.Close())
	}
	return err
}

// run does workloads of one job: a ring has one owner.
func (r *ring) run(o order) (sample, error) {
	if o.Workload.Jobs != 1 {
		return sample{}, fmt.Errorf("%s: a ring takes one job", o.Workload.Name)
	}
	return runLanes(o, []*lane{newLane(o, 0, r, r.limits)})
}

func (r *ring) fill() error { return fillSlots(r, r.limits.Size) }

// The rest implements a lane.

func (r *ring) Slots() int    { return librarySlots }
func (r *ring) SlotSize() int { return ringSlot }
func (r *ring) Close()        {}

func (r *ring) Buf(slot int) []byte { return r.arena.Bytes()[slot*ringSlot:][:ringSlot:ringSlot] }

func (r *ring) Submit(q client.Request) bool {
	return r.sub.Push(&shm.SQE{Tag: uint64(q.Slot), Op: q.Op, Offset: q.Off, Len: q.Len,
		Device: ringDisk, Arena: ringArena, ArenaOff: uint64(q.Slot) * ringSlot})
}

// Wait looks for answers, and sleeps when there is none for long, as a pump does.
func (r *ring) Wait(done []client.Done) int {
	r.sub.Publish()
	for start := time.Now(); r.sub.InFlight() > 0; {
		n := r.sub.Pop(r.cqes[:min(len(done), len(r.cqes))])
		for i, c := range r.cqes[:n] {
			done[i] = client.Done{Slot: int(c.Tag), Errno: blk.Errno(c.Errno)}
		}
		switch {
		case n > 0:
			return n
		case time.Since(start) < pump.DefaultSpin:
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		case r.sub.Arm():
			r.sleep()
		}
	}
	return 0
}

// sleep ends with an answer. A plugin that has ended, or broken the ring, gives
// none: so does this process.
func (r *ring) sleep() {
	fds := []unix.PollFd{{Fd: int32(r.sub.FD()), Events: unix.POLLIN}}
	for {
		if err := errors.Join(r.sub.Err(), r.process.ExitError()); err != nil {
			panic(fmt.Sprintf("the plugin does not answer: %v", err))
		}
		if n, _ := unix.Poll(fds, 1000); n > 0 {
			r.sub.Disarm()
			return
		}
	}
}
