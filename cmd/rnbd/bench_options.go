package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/load"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
)

// benchOptions are the flags of bench.
type benchOptions struct {
	servers []string
	ioMode  string
	mpaCRC  bool
	tls     clientTLS
	plugin  string
	orders  string
	write   bool
	yes     bool
	plot    string
	loadOptions
}

// loadOptions are the flags of a load.
type loadOptions struct {
	kind, block, size string
	depths            []int
	zipf              float64
	jobs              int
	time              time.Duration
	requests          uint64
	fill, verify      bool
}

func (o *benchOptions) register(f *pflag.FlagSet) {
	f.StringArrayVar(&o.servers, "server", nil, "path to a server whose devices are measured: [SRC@]ADDRESS[:PORT][%FABRIC]; repeatable")
	f.StringVar(&o.ioMode, "io-mode", "", "with --server: io plugin that opens the device: fileio, blockio (default the server's choice)")
	f.BoolVar(&o.mpaCRC, "mpa-crc", true, "with --server: checksums on iWARP connections")
	o.tls.register(f, "with --server: TLS: off or require")
	f.StringVar(&o.plugin, "plugin", "", "program of a storage plugin that opens the device, with no server before it")
	f.StringVar(&o.orders, "orders", "", "FILE of loads, one a line, - for standard input; see above")
	f.BoolVar(&o.write, "write", false, "write too: WHAT WAS ON THE DEVICE IS LOST")
	f.BoolVarP(&o.yes, "yes", "y", false, "with --write: do not ask")
	f.StringVar(&o.plot, "plot", "", "FILE.svg for curves over depth")
	o.loadOptions.register(f)
}

func (o *loadOptions) register(f *pflag.FlagSet) {
	f.StringVar(&o.kind, "rw", "", "kind of load: "+load.KindNames()+" (default randread)")
	f.StringVar(&o.block, "bs", "", "size of requests, as 4K")
	f.IntSliceVar(&o.depths, "depth", nil, "requests in flight per job, as 1,4,16,64")
	f.Float64Var(&o.zipf, "zipf", 0, "exponent of the popularity of random places, above 1 (default all alike)")
	f.IntVar(&o.jobs, "jobs", 1, "queues per device, each with a part of it")
	f.DurationVar(&o.time, "time", 2*time.Second, "how long each load runs")
	f.Uint64Var(&o.requests, "requests", 0, "end after so many requests of each job, if --time is not over before (default no limit)")
	f.StringVar(&o.size, "size", "", "use only so much of each device, from its start, as 1G")
	f.BoolVar(&o.fill, "fill", false, "with --write: write all of it once before")
	f.BoolVar(&o.verify, "verify", false, "with --write: write patterns, and compare all that is read")
}

// Bounds of one measurement.
const (
	maxBenchDevices = 64
	maxBenchMemory  = 4 << 30 // of the requests in flight
)

// plan checks the options, and makes workloads and the size of them.
func (o *benchOptions) plan(devices int) (ws []load.Workload, size uint64, err error) {
	if ws, err = o.workloads(); err != nil {
		return nil, 0, err
	}
	if o.size != "" {
		if size, err = report.ParseSize(o.size, 0); err != nil || size == 0 {
			return nil, 0, fmt.Errorf("--size %q: write a number of bytes, or of K, M, G, T", o.size)
		}
	}
	memory := 0
	for _, w := range ws {
		memory = max(memory, w.Memory()*devices)
	}
	switch {
	case memory > maxBenchMemory:
		err = fmt.Errorf("requests in flight of %s are more than %s: choose a smaller --depth, --jobs or --bs, or fewer devices", report.Human(uint64(memory)), report.Human(maxBenchMemory))
	case devices > maxBenchDevices:
		err = fmt.Errorf("%d devices are more than %d", devices, maxBenchDevices)
	case o.time < time.Millisecond:
		err = fmt.Errorf("--time %v is too short", o.time)
	case o.verify && !o.write:
		err = errors.New("--verify compares what it has written: it needs --write")
	case o.fill && !o.write:
		err = errors.New("--fill destroys what is on the device: it needs --write")
	case o.plugin != "" && (len(o.servers) > 0 || devices > 1 || o.jobs > 1):
		err = errors.New("--plugin measures one device with one job, without --server: a plugin has one queue then")
	case o.orders != "" && o.plot != "":
		err = errors.New("--plot is not for --orders: the results of orders are lines of JSON")
	case o.orders == "-" && o.write && !o.yes:
		err = errors.New("--orders from standard input leaves nobody to ask: --write needs --yes, too")
	case o.ioMode != "" && len(o.servers) == 0:
		err = errors.New("--io-mode is for --server: a mapped device is open already")
	case o.plot != "" && filepath.Ext(o.plot) != ".svg":
		err = fmt.Errorf("--plot %q: the name must end in .svg", o.plot)
	}
	return ws, size, err
}

// checkTLS refuses options of TLS without a server.
func (o *benchOptions) checkTLS() error {
	if o.tls != (clientTLS{tlsOptions: tlsOptions{TLS: tlsOff}}) && len(o.servers) == 0 {
		return errors.New("TLS is for --server: a mapped device has it or not, and an export by NBD is named nbds://")
	}
	return nil
}

// workloads are those that are asked for, else the usual ones.
func (o *benchOptions) workloads() ([]load.Workload, error) {
	if o.kind == "" && o.block == "" && len(o.depths) == 0 && o.zipf == 0 {
		if o.jobs < 1 {
			return nil, fmt.Errorf("--jobs %d: there must be one", o.jobs)
		}
		return load.Usual(o.write, o.jobs), nil
	}
	kind, block := o.kind, uint64(0)
	if kind == "" {
		kind = "randread"
	}
	if o.block != "" {
		var err error
		if block, err = report.ParseSize(o.block, 0); err != nil || block == 0 || block > 1<<30 {
			return nil, fmt.Errorf("--bs %q: write a number of bytes, or of K, M", o.block)
		}
	}
	ws, err := load.Custom(kind, int(block), o.zipf, o.depths, o.jobs)
	if err == nil && ws[0].Writes() && !o.write {
		err = fmt.Errorf("--rw %s destroys what is on the device: say --write if that may be lost", kind)
	}
	return ws, err
}
