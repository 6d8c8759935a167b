package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"time"
)

// iperf is TCP without anything on top.
const iperf = "iperf3, 4 flows"

// addIperf starts a server of iperf3.
func (s *site) addIperf(ctx context.Context) error {
	if !s.wants(iperf) || !s.have(iperf, "iperf3") {
		return nil
	}
	p, addr, err := s.tcp(ctx, "iperf3", func(port string) []string {
		return []string{"iperf3", "-s", "-B", "127.0.0.1", "-p", port}
	})
	if err != nil {
		return err
	}
	s.targets = append(s.targets, &target{name: iperf, servers: []int{p.pid()},
		run: func(ctx context.Context, w workload, _ time.Duration) (sample, error) { return runIperf(ctx, addr, w) }})
	return nil
}

type iperfOutput struct {
	End struct {
		Received struct {
			Bytes   uint64  `json:"bytes"`
			Seconds float64 `json:"seconds"`
		} `json:"sum_received"`
	} `json:"end"`
}

// runIperf sends from the client for a write, to it for a read. A second is
// the shortest run that iperf3 knows.
func runIperf(ctx context.Context, addr string, w workload) (sample, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return sample{}, err
	}
	args := []string{"-c", host, "-p", port, "-P", "4", "-t", "1", "-J"}
	if !w.Write {
		args = append(args, "-R")
	}
	return iperfClient(ctx, nil, args...)
}

// iperfClient runs a client of iperf3, behind the words of prefix.
func iperfClient(ctx context.Context, prefix []string, args ...string) (sample, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	argv := slices.Concat(prefix, []string{"iperf3"}, args)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	out, err := cmd.Output()
	if err != nil {
		return sample{}, fmt.Errorf("iperf3: %w: %s", err, out)
	}
	s, err := parseIperf(out)
	if err == nil {
		s.processes = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
		s.ClientCPU = s.processes
	}
	return s, err
}

func parseIperf(out []byte) (sample, error) {
	var o iperfOutput
	if err := json.Unmarshal(out, &o); err != nil {
		return sample{}, fmt.Errorf("iperf3: %w", err)
	}
	r := o.End.Received
	if r.Bytes == 0 || r.Seconds <= 0 {
		return sample{}, fmt.Errorf("iperf3: nothing arrived: %s", out)
	}
	return sample{Bytes: r.Bytes, Elapsed: r.Seconds, raw: out}, nil
}
