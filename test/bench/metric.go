package main

// sample is the result of one run of a workload on a target. Latencies in
// microseconds, times in seconds.
type sample struct {
	IOs       uint64  `json:"ios,omitempty"`
	Bytes     uint64  `json:"bytes,omitempty"`
	Elapsed   float64 `json:"elapsed_s"`
	Mean      float64 `json:"mean_us,omitempty"`
	P50       float64 `json:"p50_us,omitempty"`
	P99       float64 `json:"p99_us,omitempty"`
	ClientCPU float64 `json:"client_cpu_s,omitempty"` // of the load generator
	ServerCPU float64 `json:"server_cpu_s,omitempty"` // of all others that take part
	Foreign   float64 `json:"foreign_cores"`
	Dropped   bool    `json:"dropped,omitempty"` // for its foreign load; counts nowhere

	// Of daemons that have nothing to do.
	Resident float64 `json:"resident_mb,omitempty"`
	Wakes    float64 `json:"wakes_per_s,omitempty"` // of the process with most

	processes float64 // CPU of the load generator with its start, for Foreign
	raw       []byte  // output of the load generator
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
	gigabits     = metric{"throughput", "Gbit/s", false, func(s sample) float64 { return float64(s.Bytes) * 8 / s.Elapsed / 1e9 }}
	daemonsPerGB = metric{"CPU, both daemons", "s/GB", true, func(s sample) float64 { return s.ServerCPU / float64(s.Bytes) * 1e9 }}
	trip50       = metric{"round trip p50", "us", true, func(s sample) float64 { return s.P50 }}
	trip99       = metric{"round trip p99", "us", true, func(s sample) float64 { return s.P99 }}
	idleCPU      = metric{"CPU, all processes", "% of a core", true, func(s sample) float64 { return s.ServerCPU / s.Elapsed * 100 }}
	idleResident = metric{"memory, all processes", "MB", true, func(s sample) float64 { return s.Resident }}
	idleWakes    = metric{"wake-ups of a process", "per second", true, func(s sample) float64 { return s.Wakes }}
)

// better is the ratio of two figures, above 1 if the first is the better one.
func (m metric) better(ours, peer float64) float64 {
	if m.lower {
		ours, peer = peer, ours
	}
	if peer == 0 {
		return 0
	}
	return ours / peer
}
