package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os/signal"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/load"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/machine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/selfstats"
)

// bench is in these files: bench.go (the steps), bench_options.go,
// bench_target.go, bench_server.go and bench_plugin.go (the devices),
// bench_orders.go (loads that are read from a file or pipe), bench_report.go,
// bench_plot.go and bench_progress.go (the output).

func benchVerb() *verb {
	o := &benchOptions{}
	return &verb{
		name: "bench", on: onClient, min: 1, max: -1, args: "DEVICE...", words: outputWords, anyFields: report.Infos(benchFields),
		flags: o.register, args0: deviceNames, atLength: true, run: o.run, interrupted: "the measurement was not finished",
		short: "Measure how fast devices are",
		long: `Make load on devices and measure requests per second, bandwidth and latency.

DEVICE is a mapped device, by its name or its node; a block device or file of
this host, by a path that begins with / or a dot; an export of any NBD server,
as nbd://HOST:PORT/NAME or nbd+unix:///NAME?socket=PATH; or with --server a
device of that server, which is then used by the client library in this
process, without a daemon. With --plugin it is a path that the storage plugin
opens, which is then measured by itself. Several devices have the same load at
the same time.

An export as nbds:// or nbds+unix:// is reached by TLS; tls-certificates=FOLDER
behind a ? names a folder with ca-cert.pem, and client-cert.pem and
client-key.pem if the server asks for them.

Without --rw, --bs, --depth and --zipf the load is 4 KiB random reads with 1, 4,
16 and 64 in flight and 1 MiB sequential reads with 8; with --write the same as
writes too, and the mixed load of a storage server: reads and writes of 512
bytes to 64 KiB, some places far more popular than others, 129 in flight.

Only with --write anything is written, and THEN WHAT WAS ON THE DEVICE IS LOST.

Latencies are the upper ends of their buckets, at most a 32nd too long. An
interrupt ends the measurement; what was measured is printed. --timeout is for
opening devices, not for the load.

With --orders the loads come from a file, or from standard input if it is "-",
one a line: devices of the command line (none: all of them) and --rw, --bs,
--depth, --zipf, --jobs, --time, --size, --requests, --fill and --verify. The
results are a line of JSON each, with the number of the order's line; line 0
comes when the devices are open. An "&" at the end of an order runs it
beside those that follow. So a program can measure many loads without opening the
devices again.

Fields:
` + fieldHelp(report.Infos(benchFields)) + "\nUsual fields: " + strings.Join(benchUsual, ",") + "; for programs all.",
		example: `  rnbd bench rnbd0
  rnbd bench rnbd0 --write --plot rnbd0.svg
  rnbd bench disk.img --server 192.0.2.1 --rw randread --bs 4K --depth 1,32 json
  rnbd bench /dev/nvme0n1 --rw read --bs 1M --depth 8 --time 10s
  rnbd bench ./disk.img --plugin /usr/lib/rnbd/io-fileio --rw randread
  rnbd bench rnbd0 rnbd1 --orders loads.txt`,
	}
}

// run is the command.
func (o *benchOptions) run(c *call) error {
	ws, size, err := o.plan(len(c.args))
	if err == nil {
		err = o.checkTLS()
	}
	if err != nil {
		return usageError{err}
	}
	selfstats.Start(slog.New(slog.DiscardHandler))
	fields, err := benchColumns(c)
	if err != nil {
		return usageError{err}
	}
	if o.write && !o.yes && !isTerminal(c.cmd.InOrStdin()) {
		return usageError{errors.New("--write destroys what is on the devices: say --yes too, since nobody can be asked here")}
	}
	// A second interrupt ends the process, should a device not answer.
	defer context.AfterFunc(c.cmd.Context(), func() { signal.Reset(syscall.SIGINT, syscall.SIGTERM) })()
	targets, err := o.open(c, ws)
	if err != nil {
		return err
	}
	defer targets.close()
	if o.orders != "" {
		if err := o.confirm(c, targets); err != nil {
			return err
		}
		return o.follow(c, targets)
	}
	if err := o.prepare(targets, ws, size); err != nil {
		return err
	}
	if err := o.confirm(c, targets); err != nil {
		return err
	}
	if err := o.fillAll(c.cmd.Context(), targets); err != nil {
		return err
	}
	r := newBenchRun(o, targets)
	p := newProgress(c.cmd.ErrOrStderr(), len(ws), o.time)
	return errors.Join(o.measure(c.cmd.Context(), r, ws, p), o.show(c, r, fields))
}

// prepare checks that all workloads can run, and makes patterns.
func (o *benchOptions) prepare(targets *benchTargets, ws []load.Workload, size uint64) error {
	seed := rand.Uint64()
	for _, t := range targets.list {
		if t.Size = size; size > t.Device.Limits().Size {
			return fmt.Errorf("--size: %s has %d bytes only: %w", t.Name, t.Device.Limits().Size, syscall.EINVAL)
		}
		if o.verify {
			if t.Used() > maxVerified {
				return fmt.Errorf("--verify of %s takes too much memory: choose a part of it, up to %s, with --size: %w", t.Name, report.Human(maxVerified), syscall.EINVAL)
			}
			t.Pattern = load.NewPattern(t.Used(), seed)
		}
		for _, w := range ws {
			if err := t.Fits(w); err != nil {
				return err
			}
		}
	}
	return nil
}

// fillAll writes every byte that the load may read, if that is wanted.
func (o *benchOptions) fillAll(ctx context.Context, targets *benchTargets) error {
	if !o.fill {
		return nil
	}
	for _, t := range targets.list {
		plain := t.Target
		plain.Pattern = nil // the fill is not compared
		if err := load.Fill(ctx, &plain); err != nil {
			return err
		}
	}
	return nil
}

// maxVerified is the largest part of a device that --verify uses, in bytes. Its
// record takes 512 MiB of memory.
const maxVerified = 64 << 30

// confirm asks whether the data may be lost.
func (o *benchOptions) confirm(c *call, targets *benchTargets) error {
	if !o.write || o.yes {
		return nil
	}
	w := c.cmd.ErrOrStderr()
	fmt.Fprintln(w, "WARNING: all data will be lost on")
	for _, t := range targets.list {
		fmt.Fprintf(w, "  %s (%s)\n", t.Name, report.Human(t.Used()))
	}
	fmt.Fprint(w, "Write \"yes\" to go on: ")
	in := bufio.NewScanner(c.cmd.InOrStdin())
	if in.Scan(); strings.TrimSpace(in.Text()) != "yes" {
		return errors.New("nothing was written: the answer was not \"yes\"")
	}
	return nil
}

// measure runs the workloads, until one fails or the user has enough.
func (o *benchOptions) measure(ctx context.Context, r *benchRun, ws []load.Workload, p *progress) error {
	defer p.clear()
	defer func() { r.loadAfter = machine.LoadAverage() }()
	for i, w := range ws {
		if ctx.Err() != nil {
			break
		}
		result, err := load.Run(ctx, w, r.loads(), load.Options{Time: o.time, Requests: o.requests, Progress: p.of(i, w.Name)})
		if err != nil {
			return err
		}
		r.add(result)
	}
	if ctx.Err() != nil && len(r.rows) == 0 {
		return errors.New("interrupted before anything was measured")
	}
	if o.verify && ctx.Err() == nil {
		p.say("reading back what was written")
		if err := r.readBack(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
	r.complete = ctx.Err() == nil
	return nil
}

// readBack compares everything that was written.
func (r *benchRun) readBack(ctx context.Context) error {
	for _, t := range r.loads() {
		n, err := load.ReadBack(ctx, t)
		r.verified += n
		if err != nil {
			return err
		}
	}
	return nil
}

// show prints the results, and draws them.
func (o *benchOptions) show(c *call, r *benchRun, fields []report.Field[benchRow]) error {
	if len(r.rows) == 0 {
		return nil
	}
	if err := r.print(c, fields); err != nil || o.plot == "" {
		return err
	}
	return r.draw(o.plot)
}

// isTerminal reports whether a person is at the other end of f.
func isTerminal(f any) bool {
	file, ok := f.(interface{ Fd() uintptr })
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err == nil
}
