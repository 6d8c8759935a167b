package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"time"
)

// nbdEngine is how fio reaches an export.
func nbdEngine(uri string) []string { return []string{"--ioengine=nbd", "--uri=" + uri, "--thread"} }

// runFio runs w by an engine of fio.
func runFio(ctx context.Context, engine []string, size int64, w workload, d time.Duration) (sample, error) {
	return runFioJobs(ctx, slices.Concat([]string{"--name=bench"}, engine), size, w, d)
}

// runFioJobs runs w by each of the given jobs of fio, each a --name with its
// options, and returns the sum of their results.
func runFioJobs(ctx context.Context, jobs []string, size int64, w workload, d time.Duration) (sample, error) {
	return fioRun{size: size}.jobs(ctx, jobs, w, d)
}

// fioRun is fio on devices of size bytes.
type fioRun struct {
	size   int64
	change func(*exec.Cmd) // before it starts; nil: nothing
}

// jobs is runFioJobs.
func (r fioRun) jobs(ctx context.Context, jobs []string, w workload, d time.Duration) (sample, error) {
	args := slices.Concat(fioCommon(r.size, w), []string{"--rw=" + w.fioMode(), "--numjobs=" + strconv.Itoa(w.Jobs), "--group_reporting",
		"--time_based", "--lat_percentiles=1", "--clat_percentiles=0", "--norandommap", "--randrepeat=0", "--runtime=" + strconv.FormatInt(d.Milliseconds(), 10) + "ms"}, jobs)
	out, cmd, err := fio(ctx, d, args, r.change)
	if err != nil {
		return sample{}, fmt.Errorf("%s: %w", w.Name, err)
	}
	s, err := parseFio(out, w)
	if err != nil {
		return s, fmt.Errorf("fio %s: %w", w.Name, err)
	}
	s.processes = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
	s.raw = out
	return s, nil
}

func fioJob(engine []string, size int64, w workload) []string {
	return slices.Concat([]string{"--name=bench"}, fioCommon(size, w), engine)
}

func fioCommon(size int64, w workload) []string {
	return []string{"--bs=" + strconv.Itoa(w.Block), "--iodepth=" + strconv.Itoa(w.Depth),
		"--size=" + strconv.FormatInt(size, 10), "--output-format=json"}
}

// fio runs it to its end, with time to start besides d.
func fio(ctx context.Context, d time.Duration, args []string, change func(*exec.Cmd)) ([]byte, *exec.Cmd, error) {
	ctx, cancel := context.WithTimeout(ctx, d+20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "fio", args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if change != nil {
		change(cmd)
	}
	if err := cmd.Run(); err != nil {
		return nil, cmd, fmt.Errorf("fio: %w: %s%s", err, errs.String(), out.String())
	}
	return out.Bytes(), cmd, nil
}

// fioVerify is the verifying twin of workloads that fio makes: it writes some
// blocks of each job with checksums and reads them back.
func (s *site) fioVerify(engine []string) func(context.Context, workload, time.Duration) error {
	return func(ctx context.Context, w workload, d time.Duration) error {
		w.Write = true
		size := int64(4 * w.Depth * w.Block) // of each job
		args := append(fioJob(engine, min(size, s.Size/int64(w.Jobs)), w), "--rw="+w.fioMode(), "--numjobs="+strconv.Itoa(w.Jobs),
			"--offset_increment="+strconv.FormatInt(size, 10), "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--verify_state_save=0")
		_, _, err := fio(ctx, d, args, nil)
		return err
	}
}

type fioSide struct {
	IOs     uint64 `json:"total_ios"`
	Bytes   uint64 `json:"io_bytes"`
	Runtime uint64 `json:"runtime"` // ms
	Lat     struct {
		Mean       float64            `json:"mean"`
		Percentile map[string]float64 `json:"percentile"`
	} `json:"lat_ns"` // of all of a request; clat leaves out the sending, done by libnbd in the call
}

type fioOutput struct {
	Jobs []struct {
		Error   int     `json:"error"`
		Read    fioSide `json:"read"`
		Write   fioSide `json:"write"`
		Runtime float64 `json:"job_runtime"` // ms, of all jobs together
		User    float64 `json:"usr_cpu"`     // percent of it
		System  float64 `json:"sys_cpu"`
	} `json:"jobs"`
}

func parseFio(b []byte, w workload) (sample, error) {
	if i := bytes.IndexByte(b, '{'); i > 0 {
		b = b[i:] // fio prints notes in front
	}
	var o fioOutput
	if err := json.Unmarshal(b, &o); err != nil {
		return sample{}, err
	}
	if len(o.Jobs) != 1 || o.Jobs[0].Error != 0 {
		return sample{}, fmt.Errorf("jobs failed: %s", b)
	}
	j := o.Jobs[0]
	side := j.Read
	if w.Write {
		side = j.Write
	}
	if side.IOs == 0 || side.Runtime == 0 {
		return sample{}, fmt.Errorf("nothing was done: %s", b)
	}
	return sample{
		IOs: side.IOs, Bytes: side.Bytes, Elapsed: float64(side.Runtime) / 1e3,
		Mean: side.Lat.Mean / 1e3,
		P50:  side.Lat.Percentile["50.000000"] / 1e3, P99: side.Lat.Percentile["99.000000"] / 1e3,
		ClientCPU: (j.User + j.System) / 100 * j.Runtime / 1e3,
	}, nil
}
