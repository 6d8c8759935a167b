package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"time"
)

// besideBusy is the suffix of targets that are measured while a program computes on
// one core.
const besideBusy = ", a busy neighbour"

// userClaims are the rows of what users reach: a socket and a disk, not a library.
// They share the workloads of P1, P5, P6, P8 and P11 where these have them.
func userClaims(write bool) []claim {
	one, d16, d64, seq := random(write, 1, 1), random(write, 16, 1), random(write, 64, 1), sequential(write)
	d32, many, jobs64 := random(write, 32, 1), random(write, 16, 4), random(write, 1, 64)
	memory, socket := []string{nbdkitMemory}, []string{frontEnd}
	all := []claim{
		{"U1", one, median50, frontEnd, memory, nil, 0.8},
		{"U2", d16, kiops, frontEnd, oneHop, nil, 1.3},
		{"U2", d64, kiops, frontEnd, oneHop, nil, 1.3},
		{"U3", seq, bandwidth, frontEnd, oneHop, nil, 0.8},
		{"U3", seq, bandwidth, frontEnd, twoHops, nil, 1.1},
		{"U7", d32, kiops, ioFileio, []string{localFile}, nil, 0.6},
		{"U7", d32, kiops, ioBlockio, []string{localLoop}, nil, 0.6},
		{"U8", d32, cpuPerIO, frontEnd, memory, nil, 1},
		{"U9", jobs64, kiops, frontEnd, socket, []workload{d16, d64, many}, 0.8},
		{"U9", jobs64, kiops, direct, []string{direct}, []workload{d16, d64, many}, 0.8},
	}
	for _, c := range []struct {
		w      workload
		target float64
	}{{one, 0.8}, {d32, 1}} {
		all = append(all, claim{"U11", c.w, kiops, fuseFile, socket, nil, c.target})
	}
	all = append(all, claim{"U12", d32, kiops, fuseLoop, []string{fuseFile}, nil, 0.7})
	for _, w := range []workload{one, d64} {
		all = append(all,
			claim{"U10", w, kiops, frontEnd + besideBusy, socket, nil, 0.45},
			claim{"U10", w, tail99, frontEnd + besideBusy, socket, nil, 0.2}) // 5 times as long
	}
	return all
}

// addBusy adds the targets that have a busy neighbour, each beside the one without.
func (s *site) addBusy() {
	for _, t := range s.targets {
		name := t.name + besideBusy
		if !s.wants(name) || !s.have(name, "stress-ng") {
			continue
		}
		b := *t
		b.name = name
		b.run = func(ctx context.Context, w workload, d time.Duration) (m sample, err error) {
			cpu, err := s.besideNeighbour(ctx, func() (err error) {
				m, err = t.run(ctx, w, d)
				return err
			})
			m.processes += cpu // it is no foreign load
			return m, err
		}
		b.verify = func(ctx context.Context, w workload, d time.Duration) error {
			_, err := s.besideNeighbour(ctx, func() error { return t.verify(ctx, w, d) })
			return err
		}
		s.targets = append(s.targets, &b)
	}
}

// besideNeighbour calls f while stress-ng computes on the last CPU. It returns the CPU
// seconds of the neighbour.
func (s *site) besideNeighbour(ctx context.Context, f func() error) (cpu float64, err error) {
	p, err := start(s.dir, "stress-ng", "stress-ng", "--cpu", "1", "--taskset", strconv.Itoa(runtime.NumCPU()-1))
	if err != nil {
		return 0, err
	}
	defer p.stop()
	// The process that computes is a child. Its start is over when it has used some
	// of its CPU.
	for end := time.Now().Add(20 * time.Second); cpuOf([]int{p.pid()}) < 0.03; time.Sleep(time.Millisecond) {
		if time.Now().After(end) || ctx.Err() != nil {
			return 0, errors.Join(ctx.Err(), fmt.Errorf("stress-ng does not compute: %s", p.output()))
		}
	}
	err = f()
	select {
	case <-p.done:
		return 0, errors.Join(err, fmt.Errorf("stress-ng has ended: %s", p.output()))
	default:
	}
	return cpuOf([]int{p.pid()}), err
}
