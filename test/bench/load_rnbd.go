package main

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// library makes load with the client library in this process. Requests longer
// than a slot are cut; an I/O is done when all its parts are.
type library struct {
	client *client.Client
	device *client.Device
	io     *client.IO
	size   uint64

	w       workload
	parts   int // of an I/O
	next    uint64
	started []time.Time // by I/O
	left    []int       // parts under way, by I/O
	done    [64]client.Done
}

// librarySlots is the most parts in flight.
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
	l := &library{}
	if l.client, err = client.New(ctx, cfg); err != nil {
		return nil, err
	}
	l.device, err = l.client.Map(ctx, client.MapRequest{
		Path: c.device, Paths: []string{c.addr}, Session: "bench-" + c.device, Mode: blk.ReadWrite, Frontend: "none",
	})
	if err == nil {
		l.size = l.device.Limits().Size
		l.io, err = l.device.NewIO(0, 0, librarySlots)
	}
	if err != nil {
		l.client.Close(ctx)
		return nil, err
	}
	return l, nil
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

func (l *library) close() error {
	l.io.Close()
	return l.client.Close(context.Background())
}

func (l *library) run(w workload, d time.Duration) (s sample, err error) {
	if err := l.begin(w); err != nil {
		return s, err
	}
	var h histogram
	start := time.Now()
	for i := range w.Depth {
		l.submit(i, start)
	}
	stop := false
	for inFlight := w.Depth; inFlight > 0; {
		n := l.io.Wait(l.done[:])
		now := time.Now()
		stop = stop || now.Sub(start) >= d
		for _, done := range l.done[:n] {
			if done.Errno != blk.OK {
				return s, fmt.Errorf("%s: %w", w.Name, done.Errno)
			}
			i := done.Slot / l.parts
			if l.left[i]--; l.left[i] > 0 {
				continue
			}
			h.add(now.Sub(l.started[i]))
			if stop {
				inFlight--
			} else {
				l.submit(i, now)
			}
		}
	}
	s.Elapsed = time.Since(start).Seconds()
	h.fill(&s)
	s.Bytes = s.IOs * uint64(w.Block)
	return s, nil
}

func (l *library) begin(w workload) error {
	l.w, l.next = w, 0
	l.parts = (w.Block + l.io.SlotSize() - 1) / l.io.SlotSize()
	if w.Depth*l.parts > l.io.Slots() {
		return fmt.Errorf("%s: %d requests of %d parts need more than %d slots", w.Name, w.Depth, l.parts, l.io.Slots())
	}
	l.started, l.left = make([]time.Time, w.Depth), make([]int, w.Depth)
	return nil
}

// submit starts I/O i at the next place.
func (l *library) submit(i int, now time.Time) {
	l.started[i], l.left[i] = now, l.parts
	off, op := l.place(), blk.Read
	if l.w.Write {
		op = blk.Write
	}
	for part, rest := 0, l.w.Block; rest > 0; part++ {
		n := min(rest, l.io.SlotSize())
		l.io.Submit(client.Request{Op: op, Slot: i*l.parts + part, Off: off, Len: uint32(n)})
		off, rest = off+uint64(n), rest-n
	}
}

func (l *library) place() uint64 {
	blocks := l.size / uint64(l.w.Block)
	if !l.w.Seq {
		return rand.Uint64N(blocks) * uint64(l.w.Block)
	}
	l.next++
	return l.next % blocks * uint64(l.w.Block)
}

// fill writes every byte of the device once.
func (l *library) fill() error {
	for i := range l.io.Slots() {
		noise(l.io.Buf(i), uint64(i))
	}
	step := uint64(l.io.SlotSize())
	for off := uint64(0); off < l.size; off += step {
		n := min(step, l.size-off)
		l.io.Submit(client.Request{Op: blk.Write, Slot: int(off / step % librarySlots), Off: off, Len: uint32(n)})
		if l.io.Wait(l.done[:1]); l.done[0].Errno != blk.OK {
			return fmt.Errorf("fill at %d: %w", off, l.done[0].Errno)
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
