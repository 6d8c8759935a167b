// Command timeline shows where the time of one request goes: it runs fio with one request
// in flight through the NBD front end of real processes, records switches, wake-ups and
// system calls of all CPUs by perf, and prints a line for each hand-over of a median
// request. For a transfer of 1 MiB, whose pieces are under way at once, it prints a line for
// each process. It needs root. How to read it is in docs/results/benchmarking.md.
//
// Files: main.go (flags), lab.go (processes and load), record.go (perf), parse.go (its
// output), calls.go (system calls), states.go (threads), requests.go (hand-overs),
// transfers.go (large requests), print.go (tables).
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// options are the command line.
type options struct {
	window time.Duration
	keep   string
	spin   string
	calls  bool
}

func main() {
	var o options
	flag.DurationVar(&o.window, "window", 200*time.Millisecond, "how long is recorded")
	flag.BoolVar(&o.calls, "calls", false, "record every system call of small requests, too: shows the time in the scheduler, and makes them several times as long")
	flag.StringVar(&o.keep, "keep", "", "folder for what perf printed")
	flag.StringVar(&o.spin, "spin", "", "--spin of both daemons (default: the product's)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := timeline(ctx, o, os.Stdout)
	lab.Cleanup()
	if err != nil {
		fmt.Fprintln(os.Stderr, "timeline:", err)
		os.Exit(1)
	}
}

// timeline records each load and prints it.
func timeline(ctx context.Context, o options, out io.Writer) error {
	if err := check(); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "rnbd-timeline-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var flags []string
	if o.spin != "" {
		flags = []string{"--spin", o.spin}
	}
	p, err := openPlace(flags)
	if err != nil {
		return err
	}
	defer p.lab.Close()
	for _, l := range []load{{"write", 1 << 20}, {"read", 1 << 20}, {"write", 4096}, {"read", 4096}} {
		if err := o.one(ctx, p, l, dir, out); err != nil {
			return fmt.Errorf("%v: %w", l, err)
		}
	}
	return nil
}

// one records a load and prints it.
func (o options) one(ctx context.Context, p *place, l load, dir string, out io.Writer) error {
	events := few()
	if o.calls || l.large() {
		events = every()
	}
	quiet, err := p.run(ctx, l, time.Second, nil)
	if err != nil {
		return err
	}
	var text []byte
	var threads map[int]string
	_, err = p.run(ctx, l, 3*time.Second+o.window, func() (err error) {
		threads = p.threads()
		text, err = record(ctx, dir, events, o.window)
		return err
	})
	if err != nil {
		return err
	}
	if o.keep != "" {
		name := strings.NewReplacer(" ", "-", ",", "").Replace(l.String()) + ".txt"
		if err := os.WriteFile(filepath.Join(o.keep, name), text, 0o644); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "## %v\n\nMedian latency by fio %.1f us, when nothing is recorded.\n\n", l, quiet)
	return write(out, l, text, threads)
}
