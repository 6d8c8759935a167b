package main

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// runUsage is what a run took. alone leaves out the CPU time of other processes of the
// machine: a budget must hold on one that is busy, too.
type runUsage struct {
	wall, cpu, alone time.Duration
	cpus             int
}

// loadMeter measures a usage from its start on.
type loadMeter struct {
	begin    time.Time
	own, all time.Duration // CPU time at the start
}

func startLoadMeter() *loadMeter {
	return &loadMeter{begin: time.Now(), own: childrenCPU(), all: machineCPU()}
}

func (l *loadMeter) stopMeter() runUsage {
	u := runUsage{wall: time.Since(l.begin), cpu: childrenCPU() - l.own, cpus: runtime.NumCPU()}
	others := max(0, machineCPU()-l.all-u.cpu)
	u.alone = max(0, u.wall-others/time.Duration(u.cpus))
	return u
}

// childrenCPU returns the CPU time of the processes that this one has waited for, with
// their children.
func childrenCPU() time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_CHILDREN, &r); err != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

const tick = 10 * time.Millisecond // unit of /proc/stat (man 5 proc_stat)

// machineCPU returns the CPU time of all processes: user, nice, system, irq, softirq
// and steal in the first line of /proc/stat.
func machineCPU() (sum time.Duration) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(text), "\n")
	var user, nice, system, idle, iowait, irq, softirq, steal int64
	fmt.Sscanf(line, "cpu %d %d %d %d %d %d %d %d", &user, &nice, &system, &idle, &iowait, &irq, &softirq, &steal)
	return time.Duration(user+nice+system+irq+softirq+steal) * tick
}
