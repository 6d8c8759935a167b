package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// options are the command line.
type options struct {
	settings
	json, markdown string
	dir            string
}

// quick is the run that shows that everything works: its figures mean nothing.
var quick = settings{Rounds: 1, Cell: 200 * time.Millisecond, Size: 16 << 20, Foreign: 1000, Quick: true, Verify: true}

func parse(args []string, out io.Writer) (options, error) {
	var o options
	var only string
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.SetOutput(out)
	f.IntVar(&o.Rounds, "rounds", 7, "how often everybody has a turn; fewer than 7 say little")
	f.DurationVar(&o.Cell, "cell", 500*time.Millisecond, "length of one run")
	f.Int64Var(&o.Size, "size", 256<<20, "bytes of each device")
	f.Float64Var(&o.Foreign, "foreign", 0.5, "cores of foreign load from which a run is dropped")
	f.StringVar(&only, "only", "", "rows to measure, as P1,P5 (default: all)")
	f.BoolVar(&o.Net, "net", false, "compare networks in the place of block devices: IP over InfiniBand with wireguard-go (root)")
	f.BoolVar(&o.Quick, "quick", false, "a try-out: one round of short runs on small devices, a part of each row")
	f.BoolVar(&o.Verify, "verify", false, "check the data of every workload of ours first")
	f.BoolVar(&o.FloorSums, "floor-sums", false, "the skeletons compute checksums as the product does")
	f.StringVar(&o.json, "json", "../bench-results.json", "where the results go; raw output of fio goes to a folder beside it")
	f.StringVar(&o.markdown, "markdown", "", "where the tables go, besides standard output, with the plots beside them")
	f.StringVar(&o.dir, "dir", "", "folder on the disk of the file targets (default: the system's temporary folder)")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if o.Quick {
		net := o.Net
		o.settings = quick
		o.Net = net
	}
	if only != "" {
		o.Only = strings.Split(only, ",")
	}
	return o, o.check()
}

func (o options) check() error {
	for _, id := range o.Only {
		if !slices.ContainsFunc(o.rows(), func(c claim) bool { return c.id == id }) {
			return fmt.Errorf("-only %s: there is no such row, the first is %s", id, o.rows()[0].id)
		}
	}
	if o.Rounds < 1 || o.Size < 16<<20 || o.Size%(1<<20) != 0 {
		return fmt.Errorf("-rounds %d, -size %d: at least 1 round, and a size of whole MiB from 16 up", o.Rounds, o.Size)
	}
	return nil
}

// rows are the rows that can be measured.
func (o options) rows() []claim {
	if o.Net {
		return netClaims()
	}
	return claims()
}

func main() {
	o, err := parse(os.Args[1:], os.Stderr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err = bench(ctx, o, os.Stdout)
	lab.Cleanup()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// bench measures and reports.
func bench(ctx context.Context, o options, out io.Writer) error {
	raw := strings.TrimSuffix(o.json, ".json") + "-raw"
	if err := errors.Join(os.RemoveAll(raw), os.MkdirAll(raw, 0o755)); err != nil {
		return fmt.Errorf("folder of raw output: %w", err)
	}
	p := choose(o.Only, o.Quick)
	if o.Net {
		p = planOf(netClaims(), o.Only, o.Quick)
	}
	r, err := run(ctx, o.settings, p, o.dir, raw, out)
	if err != nil {
		return err
	}
	return publish(newReport(o.settings, p, r), o, out)
}
