package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strconv"
	"time"
)

// runFio runs w on the export of uri with fio's nbd engine.
func runFio(ctx context.Context, uri string, size int64, w workload, d time.Duration) (sample, error) {
	ctx, cancel := context.WithTimeout(ctx, d+20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "fio", "--name=bench", "--ioengine=nbd", "--uri="+uri, "--thread",
		"--rw="+w.fioMode(), "--bs="+strconv.Itoa(w.Block), "--iodepth="+strconv.Itoa(w.Depth),
		"--size="+strconv.FormatInt(size, 10), "--time_based", "--norandommap", "--randrepeat=0",
		"--runtime="+strconv.FormatInt(d.Milliseconds(), 10)+"ms", "--output-format=json")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return sample{}, fmt.Errorf("fio %s: %w: %s%s", w.Name, err, errs.String(), out.String())
	}
	s, err := parseFio(out.Bytes(), w)
	if err != nil {
		return s, fmt.Errorf("fio %s: %w", w.Name, err)
	}
	s.processes = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
	return s, nil
}

type fioSide struct {
	IOs     uint64 `json:"total_ios"`
	Bytes   uint64 `json:"io_bytes"`
	Runtime uint64 `json:"runtime"` // ms
	Lat     struct {
		Mean float64 `json:"mean"`
	} `json:"lat_ns"`
	Completion struct {
		Percentile map[string]float64 `json:"percentile"`
	} `json:"clat_ns"`
}

type fioOutput struct {
	Jobs []struct {
		Error   int     `json:"error"`
		Read    fioSide `json:"read"`
		Write   fioSide `json:"write"`
		Runtime float64 `json:"job_runtime"` // ms
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
		P50:  side.Completion.Percentile["50.000000"] / 1e3, P99: side.Completion.Percentile["99.000000"] / 1e3,
		ClientCPU: (j.User + j.System) / 100 * j.Runtime / 1e3,
	}, nil
}
