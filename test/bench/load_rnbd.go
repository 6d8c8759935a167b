package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/selfstats"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// library makes load with the client library in this process.
type library struct {
	client  *client.Client
	devices []*client.Device
	stuck   *client.IO // nil: nothing
	unstuck chan error // results of its requests
}

// librarySlots is the most parts in flight on a device.
const librarySlots = 128

func openLibrary(ctx context.Context, c workerConfig) (*library, error) {
	dev, err := c.openFabric(slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	cfg := client.DefaultConfig()
	cfg.Fabrics = map[string]verbs.Device{dev.Info().Fabric: dev}
	cfg.Hostname, cfg.Slots = "bench", librarySlots
	pump.SetProcs(cfg.Pumps)
	selfstats.Count(selfstats.PayloadCopied, func() uint64 { return verbs.PlacedByCopy(cfg.Fabrics) })
	l := &library{}
	if l.client, err = client.New(ctx, cfg); err != nil {
		return nil, err
	}
	if err := l.mapAll(ctx, c); err != nil {
		return nil, errors.Join(err, l.client.Close(ctx))
	}
	return l, nil
}

// mapAll maps the devices of c, all in one session.
func (l *library) mapAll(ctx context.Context, c workerConfig) error {
	names := strings.Split(c.device, ",")
	if c.devices > 0 {
		names = nil
	}
	for i := range c.devices {
		names = append(names, fmt.Sprintf("%s%d", c.device, i))
	}
	for _, name := range names {
		d, err := l.client.Map(ctx, client.MapRequest{
			Path: name, Paths: c.addrs, Session: "bench-" + path.Base(names[0]), Mode: blk.ReadWrite, Frontend: "none",
		})
		if err != nil {
			return err
		}
		l.devices = append(l.devices, d)
	}
	return nil
}

// openFabric opens the fabric as the daemon has it.
func (c workerConfig) openFabric(log *slog.Logger) (verbs.Device, error) {
	if c.fabric == "rocev2" {
		return rocev2.Open(rocev2.Config{IRD: -1, ORD: -1, Logger: log})
	}
	cfg := iwarp.DefaultConfig()
	cfg.CRC, cfg.RNRTimeout, cfg.Logger = c.crc, -1, log
	return iwarp.Open(cfg)
}

func (l *library) close() error { return l.client.Close(context.Background()) }

// run gives every job of the workload a lane.
func (l *library) run(o order) (sample, error) {
	lanes, err := l.open(o)
	defer func() {
		for _, lane := range lanes {
			lane.io.Close()
		}
	}()
	if err != nil {
		return sample{}, err
	}
	return runLanes(o, lanes)
}

// runLanes gives every lane a goroutine.
func runLanes(o order, lanes []*lane) (s sample, err error) {
	errs := make([]error, len(lanes))
	var wg sync.WaitGroup
	start := time.Now()
	for i, lane := range lanes {
		wg.Go(func() { errs[i] = lane.run(start, o.Duration) })
	}
	wg.Wait()
	s.Elapsed = time.Since(start).Seconds()
	if err := errors.Join(errs...); err != nil {
		return s, fmt.Errorf("%s: %w", o.Workload.Name, err)
	}
	for _, lane := range lanes[1:] {
		lanes[0].h.merge(&lane.h)
	}
	lanes[0].h.fill(&s)
	s.Bytes = s.IOs * uint64(o.Workload.Block)
	return s, nil
}

// open makes the lanes: job i on device i and pump i, modulo their numbers.
func (l *library) open(o order) (lanes []*lane, err error) {
	w := *o.Workload
	for job := range w.Jobs {
		on := job % max(w.Devices, 1)
		if on >= len(l.devices) {
			return lanes, fmt.Errorf("%s: there are %d devices only", w.Name, len(l.devices))
		}
		d := l.devices[on]
		lane := newLane(o, job, nil, d.Limits())
		slots := w.Depth * lane.parts
		if lane.io, err = d.NewIO(job, job/max(w.Devices, 1)*slots, slots); err != nil {
			return lanes, fmt.Errorf("%s: %w", w.Name, err)
		}
		lanes = append(lanes, lane)
	}
	return lanes, nil
}

// slotIO takes requests by slot: a client.IO, or a ring.
type slotIO interface {
	Slots() int
	SlotSize() int
	Buf(slot int) []byte
	Submit(client.Request) bool
	Wait([]client.Done) int
	Close()
}

// lane is one job. Requests longer than a slot are cut; an I/O is done when
// all its parts are.
type lane struct {
	io      slotIO
	size    uint64
	w       workload
	part    int // bytes of the longest part
	parts   int // of an I/O
	next    uint64
	started []time.Time // by I/O
	left    []int       // parts under way, by I/O
	done    [64]client.Done
	h       histogram
	check   *checker // nil: the payload is of no interest
}

func newLane(o order, job int, io slotIO, limits blk.Limits) *lane {
	w := *o.Workload
	l := &lane{io: io, size: limits.Size, w: w, part: min(w.Block, int(limits.MaxIOSize)),
		started: make([]time.Time, w.Depth), left: make([]int, w.Depth)}
	l.parts = (w.Block + l.part - 1) / l.part
	if o.Verify {
		l.check = newChecker(w, job, l.size)
	}
	return l
}

func (l *lane) run(start time.Time, d time.Duration) error {
	for i := range l.w.Depth {
		l.submit(i, start)
	}
	stop := false
	for inFlight := l.w.Depth; inFlight > 0; {
		n := l.io.Wait(l.done[:])
		now := time.Now()
		stop = stop || now.Sub(start) >= d
		for _, done := range l.done[:n] {
			if done.Errno != blk.OK {
				return done.Errno
			}
			i := done.Slot / l.parts
			if l.left[i]--; l.left[i] > 0 {
				continue
			}
			if err := l.finish(i, now); err != nil {
				return err
			}
			if stop {
				inFlight--
			} else {
				l.submit(i, now)
			}
		}
	}
	return nil
}

// finish is the end of I/O i.
func (l *lane) finish(i int, now time.Time) error {
	l.h.add(now.Sub(l.started[i]))
	if l.check == nil {
		return nil
	}
	return l.check.finish(i, func(off int) []byte { return l.buf(i, off) })
}

// buf returns the memory of I/O i from its byte off to the end of the part.
func (l *lane) buf(i, off int) []byte {
	return l.io.Buf(i*l.parts + off/l.part)[off%l.part : min(l.part, l.w.Block-off/l.part*l.part)]
}

// submit starts I/O i at the next place.
func (l *lane) submit(i int, now time.Time) {
	l.started[i], l.left[i] = now, l.parts
	off, op := l.place(), blk.Read
	if l.w.Write {
		op = blk.Write
	}
	if l.check != nil {
		off, op = l.check.begin(i, func(off int) []byte { return l.buf(i, off) })
	}
	for k, rest := 0, l.w.Block; rest > 0; k++ {
		n := min(rest, l.part)
		l.io.Submit(client.Request{Op: op, Slot: i*l.parts + k, Off: off, Len: uint32(n)})
		off, rest = off+uint64(n), rest-n
	}
}

func (l *lane) place() uint64 {
	blocks := l.size / uint64(l.w.Block)
	if !l.w.Seq {
		return rand.Uint64N(blocks) * uint64(l.w.Block)
	}
	l.next++
	return l.next % blocks * uint64(l.w.Block)
}

// stick starts n writes to the last device, and a goroutine that waits for them.
// n < 0 waits until they have ended.
func (l *library) stick(n int) (err error) {
	if n < 0 {
		err = <-l.unstuck
		l.stuck.Close()
		return err
	}
	d := l.devices[len(l.devices)-1]
	if l.stuck, err = d.NewIO(0, 0, n); err != nil {
		return err
	}
	for i := range n {
		l.stuck.Submit(client.Request{Op: blk.Write, Slot: i, Off: uint64(i) * 4096, Len: 4096})
	}
	l.unstuck = make(chan error, 1)
	go func() { l.unstuck <- awaitAll(l.stuck, n) }()
	return nil
}

// awaitAll waits for n answers.
func awaitAll(io *client.IO, n int) (err error) {
	var done [64]client.Done
	for n > 0 {
		got := io.Wait(done[:])
		for _, d := range done[:got] {
			if d.Errno != blk.OK {
				err = d.Errno
			}
		}
		n -= got
	}
	return err
}

// fill writes every byte of the devices once.
func (l *library) fill() error {
	for _, d := range l.devices {
		if err := fillDevice(d); err != nil {
			return err
		}
	}
	return nil
}

func fillDevice(d *client.Device) error {
	io, err := d.NewIO(0, 0, librarySlots)
	if err != nil {
		return err
	}
	defer io.Close()
	return fillSlots(io, d.Limits().Size)
}

// fillSlots writes every byte of a disk.
func fillSlots(io slotIO, size uint64) error {
	for i := range io.Slots() {
		noise(io.Buf(i), uint64(i))
	}
	step := uint64(io.SlotSize())
	var done [1]client.Done
	for off := uint64(0); off < size; off += step {
		n := min(step, size-off)
		io.Submit(client.Request{Op: blk.Write, Slot: int(off / step % librarySlots), Off: off, Len: uint32(n)})
		if io.Wait(done[:]); done[0].Errno != blk.OK {
			return fmt.Errorf("fill at %d: %w", off, done[0].Errno)
		}
	}
	return nil
}

// noise fills b with bytes that do not compress and are not zero.
func noise(b []byte, seed uint64) {
	var key [32]byte
	key[0], key[1] = byte(seed), byte(seed>>8)
	rand.NewChaCha8(key).Read(b)
}
