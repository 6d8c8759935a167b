package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/load"
	"github.com/rnbd-go/rnbd/modules/rnbd-client"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
)

// openServer maps devices of a server with the client library in this process:
// the measurement has no daemon and no front end in it then.
func (o *benchOptions) openServer(ctx context.Context, c *call, b *benchTargets, ws []load.Workload) error {
	choices, err := resolvePaths(ctx, o.servers)
	if err != nil {
		return err
	}
	auth, err := o.tls.open()
	if err != nil {
		return err
	}
	lib, err := newBenchClient(ctx, o.slots(ws), o.mpaCRC, auth)
	if err != nil {
		return err
	}
	b.closers = append(b.closers, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), closing)
		defer cancel()
		return lib.Close(ctx)
	})
	mode := blk.ReadOnly
	if o.write {
		mode = blk.ReadWrite
	}
	for i, name := range c.args {
		var d *client.Device
		err := tryPaths(ctx, choices, func(ctx context.Context, paths []string) (err error) {
			d, err = lib.Map(ctx, client.MapRequest{Path: name, Paths: paths, Mode: mode, IOMode: o.ioMode, Frontend: client.FrontendNone, Slots: o.slots(ws)})
			return err
		})
		if errors.Is(err, syscall.EPERM) && o.write {
			err = inUse(err) // one client may write
		}
		if err != nil {
			return fmt.Errorf("bench %s: %w", name, err)
		}
		s, err := newServerDevice(d, i)
		if err != nil {
			return err
		}
		t := &benchTarget{node: name, access: "client library", ioMode: o.ioMode, export: name}
		t.Name, t.Device = name, s
		b.list = append(b.list, t)
	}
	sessions, err := lib.Control(versionString()).ListSessions(ctx, &controlpb.ListRequest{})
	if err != nil {
		return err
	}
	for _, t := range b.list {
		for _, s := range sessions.Sessions { // there is one
			t.describePaths(s)
		}
	}
	return nil
}

// newBenchClient makes a client library. With auth all its paths have TLS.
func newBenchClient(ctx context.Context, slots int, mpaCRC bool, auth *tlsauth.Auth) (*client.Client, error) {
	return newTrialClient(ctx, slots, mpaCRC, auth, auth != nil, rtrs.AuthOff)
}

// newTrialClient is newBenchClient with keys for TLS, for challenges, or for both.
func newTrialClient(ctx context.Context, slots int, mpaCRC bool, auth *tlsauth.Auth, protect bool, mode rtrs.AuthMode) (*client.Client, error) {
	l := logs.New(slog.DiscardHandler, slog.LevelError)
	cfg := client.DefaultConfig()
	cfg.DefaultFabric, cfg.PreferredFabric, cfg.Logs = defaultFabric, preferredFabric, l
	for cfg.RingEntries < slots {
		cfg.RingEntries *= 2
	}
	if cfg.Protect, cfg.AuthMode = protect, mode; mode != rtrs.AuthOff {
		cfg.Auth = auth
	}
	if !protect {
		auth = nil
	}
	var err error
	if cfg.Fabrics, err = openFabrics(fabricConfig{MPACRC: mpaCRC, Timing: cfg.Timing, Logs: l, TLS: auth}); err != nil {
		return nil, err
	}
	if cfg.Hostname, err = os.Hostname(); err != nil {
		return nil, err
	}
	if limit, ok := ctx.Deadline(); ok { // --timeout
		cfg.MapTimeout = time.Until(limit)
	}
	pump.SetProcs(cfg.Pumps)
	return client.New(ctx, cfg)
}

// smallestMaxIO is the smallest request limit of servers, in bytes; longer
// requests go in parts.
const smallestMaxIO = 64 << 10

// orderSlots is the number of requests in flight, or of their parts, that orders
// may have on a device.
const orderSlots = 128

// slots returns the number of requests in flight that a device needs room for.
func (o *benchOptions) slots(ws []load.Workload) int {
	if o.orders != "" {
		return orderSlots
	}
	return slotsOf(ws)
}

// slotsOf is the number of requests in flight that the workloads need.
func slotsOf(ws []load.Workload) (n int) {
	for _, w := range ws {
		for _, b := range w.Blocks {
			n = max(n, w.Jobs*w.Depth*((b.Bytes+smallestMaxIO-1)/smallestMaxIO))
		}
	}
	return n
}

// serverDevice is a device of the client library as load sees it.
type serverDevice struct {
	device *client.Device
	number int
	limits blk.Limits
}

func newServerDevice(d *client.Device, number int) (*serverDevice, error) {
	io, err := d.NewIO(0, 0, 1)
	if err != nil {
		return nil, err
	}
	defer io.Close()
	s := &serverDevice{device: d, number: number, limits: d.Limits()}
	s.limits.MaxIOSize = uint32(io.SlotSize())
	return s, nil
}

func (s *serverDevice) Limits() blk.Limits { return s.limits }

// Open makes an IO of the device's slots that belong to the job.
func (s *serverDevice) Open(_ context.Context, job, jobs, slots, _ int) (load.Queue, error) {
	io, err := s.device.NewIO(s.number*jobs+job, job*slots, slots)
	if err != nil {
		return nil, err
	}
	return &ioQueue{io: io}, nil
}

// ioQueue is an IO as load sees it.
type ioQueue struct {
	io   *client.IO
	done [64]client.Done
}

func (q *ioQueue) Buf(slot int) []byte { return q.io.Buf(slot) }

func (q *ioQueue) Submit(r load.Request) {
	if !q.io.Submit(client.Request{Op: r.Op, Slot: r.Slot, Off: r.Off, Len: uint32(r.Len)}) {
		panic(fmt.Sprintf("slot %d of %d", r.Slot, q.io.Slots()))
	}
}

func (q *ioQueue) Wait(done []load.Done) int {
	n := q.io.Wait(q.done[:min(len(done), len(q.done))])
	for i, d := range q.done[:n] {
		done[i] = load.Done{Slot: d.Slot, Err: d.Errno.Err()}
	}
	return n
}

func (q *ioQueue) Close() error {
	q.io.Close()
	return nil
}
