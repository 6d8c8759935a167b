package selfstats

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/metrics"
	"strconv"
	"syscall"
)

// FileEnv names the environment variable that turns the reports on.
const FileEnv = "RNBD_METRICS_FILE"

// Start makes the process write a report at each SIGUSR1, if FileEnv is set.
// It returns at once; later errors go to log.
func Start(log *slog.Logger) {
	path := os.Getenv(FileEnv)
	if path == "" {
		return
	}
	path += "." + strconv.Itoa(os.Getpid())
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGUSR1)
	go func() {
		for range asked {
			if err := write(path); err != nil {
				log.Error("metrics are not written", "err", err)
			}
		}
	}()
}

// write replaces path, so that a reader never finds half a report and no link is
// followed.
func write(path string) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".new-")
	if err != nil {
		return err
	}
	_, err = f.Write(report())
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// report reads the metrics that are a number.
func report() []byte {
	all := metrics.All()
	samples := make([]metrics.Sample, len(all))
	for i := range all {
		samples[i].Name = all[i].Name
	}
	// Threads count allocations on their own; this collects them.
	runtime.ReadMemStats(new(runtime.MemStats))
	metrics.Read(samples)
	var b bytes.Buffer
	for _, s := range samples {
		switch s.Value.Kind() {
		case metrics.KindUint64:
			fmt.Fprintf(&b, "%s %d\n", s.Name, s.Value.Uint64())
		case metrics.KindFloat64:
			fmt.Fprintf(&b, "%s %g\n", s.Name, s.Value.Float64())
		}
	}
	writeCounts(&b)
	return b.Bytes()
}
