package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// options are the command line.
type options struct {
	settings
	quick          bool
	json, markdown string
	dir            string
	worker         workerConfig
}

func parse(args []string, out io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.SetOutput(out)
	f.IntVar(&o.Rounds, "rounds", 5, "how often everybody has a turn; fewer than 5 say little")
	f.DurationVar(&o.Cell, "cell", 500*time.Millisecond, "length of one run")
	f.Int64Var(&o.Size, "size", 256<<20, "bytes of each device")
	f.Float64Var(&o.Foreign, "foreign", 0.5, "cores of foreign load from which a round is flagged")
	f.BoolVar(&o.quick, "quick", false, "a try-out: one round of short runs on small devices")
	f.StringVar(&o.json, "json", "../bench-results.json", "where the results go")
	f.StringVar(&o.markdown, "markdown", "", "where the tables go, besides standard output")
	f.StringVar(&o.dir, "dir", "", "folder on the disk of the file targets (default: the system's temporary folder)")
	f.StringVar(&o.worker.kind, "worker", "", "internal: run as a load generator of this kind")
	f.StringVar(&o.worker.addr, "worker-addr", "", "internal")
	f.StringVar(&o.worker.device, "worker-device", "", "internal")
	f.BoolVar(&o.worker.crc, "worker-crc", true, "internal")
	f.StringVar(&o.worker.fabric, "worker-fabric", "", "internal")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	o.Depths = []int{1, 16, 64}
	if o.quick {
		o.Rounds, o.Cell, o.Size, o.Depths = 1, 60*time.Millisecond, 16<<20, []int{16}
	}
	if o.Rounds < 1 || o.Size < 16<<20 || o.Size%(1<<20) != 0 {
		return o, fmt.Errorf("at least 1 round, and a size of whole MiB from 16 up")
	}
	return o, nil
}

func main() {
	o, err := parse(os.Args[1:], os.Stderr)
	if err != nil {
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if o.worker.kind != "" {
		err = work(ctx, o.worker, os.Stdin, os.Stdout)
	} else {
		err = bench(ctx, o, os.Stdout)
		lab.Cleanup()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// bench starts everybody, measures and reports.
func bench(ctx context.Context, o options, out io.Writer) error {
	s, err := openSite(o.dir, o.Size)
	if err != nil {
		return err
	}
	defer s.close()
	if !s.have("everything through NBD", "fio") {
		return fmt.Errorf("fio is not installed")
	}
	if err := s.addOurs(ctx); err != nil {
		return err
	}
	s.addPeers(ctx)
	for _, why := range s.skipped {
		fmt.Fprintln(out, "left out:", why)
	}
	r, err := s.measure(ctx, o.settings, out)
	if err != nil {
		return err
	}
	return publish(newReport(o.settings, s, r), o, out)
}
