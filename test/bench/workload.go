package main

import "fmt"

// workload is one way to use a device.
type workload struct {
	Name  string `json:"name"`
	Write bool   `json:"write"`
	Seq   bool   `json:"sequential"`
	Block int    `json:"block"` // bytes
	Depth int    `json:"depth"` // requests in flight
}

func workloads(depths ...int) (ws []workload) {
	for _, depth := range depths {
		ws = append(ws,
			workload{fmt.Sprintf("4k-randread-d%d", depth), false, false, 4096, depth},
			workload{fmt.Sprintf("4k-randwrite-d%d", depth), true, false, 4096, depth})
	}
	return append(ws,
		workload{"1m-seqread-d8", false, true, 1 << 20, 8},
		workload{"1m-seqwrite-d8", true, true, 1 << 20, 8})
}

// fioMode is fio's name for it.
func (w workload) fioMode() string {
	switch {
	case w.Seq && w.Write:
		return "write"
	case w.Seq:
		return "read"
	case w.Write:
		return "randwrite"
	}
	return "randread"
}

// sample is what one run of a workload on a target gave. Latencies in
// microseconds, times in seconds.
type sample struct {
	IOs       uint64  `json:"ios"`
	Bytes     uint64  `json:"bytes"`
	Elapsed   float64 `json:"elapsed_s"`
	Mean      float64 `json:"mean_us"`
	P50       float64 `json:"p50_us"`
	P99       float64 `json:"p99_us"`
	ClientCPU float64 `json:"client_cpu_s"` // of the load generator
	ServerCPU float64 `json:"server_cpu_s"` // of all others that take part
	Foreign   float64 `json:"foreign_cores"`
	processes float64 // CPU of the load generator with its start, for Foreign
}

// metric is a figure that is compared.
type metric struct {
	name, unit string
	lower      bool // is better
	of         func(sample) float64
}

var (
	kiops     = metric{"throughput", "kIOPS", false, func(s sample) float64 { return float64(s.IOs) / s.Elapsed / 1e3 }}
	bandwidth = metric{"throughput", "MB/s", false, func(s sample) float64 { return float64(s.Bytes) / s.Elapsed / 1e6 }}
	mean      = metric{"latency mean", "us", true, func(s sample) float64 { return s.Mean }}
	median50  = metric{"latency p50", "us", true, func(s sample) float64 { return s.P50 }}
	tail99    = metric{"latency p99", "us", true, func(s sample) float64 { return s.P99 }}
	cpuPerIO  = metric{"CPU, all processes", "s/million I/Os", true, func(s sample) float64 {
		return (s.ClientCPU + s.ServerCPU) / float64(s.IOs) * 1e6
	}}
	cpuPerGB = metric{"CPU, all processes", "s/GB", true, func(s sample) float64 {
		return (s.ClientCPU + s.ServerCPU) / float64(s.Bytes) * 1e9
	}}
	serverCPUPerIO = metric{"CPU, without load generator", "s/million I/Os", true, func(s sample) float64 {
		return s.ServerCPU / float64(s.IOs) * 1e6
	}}
	serverCPUPerGB = metric{"CPU, without load generator", "s/GB", true, func(s sample) float64 {
		return s.ServerCPU / float64(s.Bytes) * 1e9
	}}
)

// metrics are the figures that tell something about w.
func (w workload) metrics() []metric {
	switch {
	case w.Seq:
		return []metric{bandwidth, cpuPerGB, serverCPUPerGB}
	case w.Depth == 1:
		return []metric{mean, median50, tail99, kiops, cpuPerIO, serverCPUPerIO}
	}
	return []metric{kiops, tail99, cpuPerIO, serverCPUPerIO}
}
