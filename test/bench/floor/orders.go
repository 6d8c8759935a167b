package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// order is a load. A line of standard input spells it as `rnbd bench --orders` wants it.
type order struct {
	rw                 string
	block, depth, jobs int
	time               time.Duration
}

// result is the answer to an order, in the spelling of `rnbd bench --orders`: times in
// nanoseconds.
type result struct {
	Elapsed  float64 `json:"elapsed"`
	CPU      float64 `json:"cpu"`
	Mean     float64 `json:"mean"`
	P50      float64 `json:"p50"`
	P99      float64 `json:"p99"`
	Requests uint64  `json:"requests"`
	Bytes    uint64  `json:"bytes"`
}

func parseOrder(line string) (o order, err error) {
	f := flag.NewFlagSet("order", flag.ContinueOnError)
	f.StringVar(&o.rw, "rw", "randread", "")
	f.IntVar(&o.block, "bs", 4096, "")
	f.IntVar(&o.depth, "depth", 1, "")
	f.IntVar(&o.jobs, "jobs", 1, "")
	f.DurationVar(&o.time, "time", time.Second, "")
	words := strings.Fields(line)
	if len(words) == 0 {
		return o, errors.New("an order is empty")
	}
	if err := f.Parse(words[1:]); err != nil { // the first is the name of the device
		return o, err
	}
	if o.jobs*o.depth > extents || o.block > extent {
		return o, fmt.Errorf("an order for %d requests of %d bytes: at most %d of %d are served", o.jobs*o.depth, o.block, extents, extent)
	}
	return o, nil
}

// follow carries out orders until there are no more.
func (l *library) follow() error {
	out := json.NewEncoder(os.Stdout)
	type answer struct {
		Line    int      `json:"line"`
		Results []result `json:"results"`
	}
	if err := out.Encode(answer{}); err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	for n := 1; lines.Scan(); n++ {
		o, err := parseOrder(lines.Text())
		if err != nil {
			return err
		}
		if err := out.Encode(answer{n, []result{l.carryOut(o)}}); err != nil {
			return err
		}
	}
	return lines.Err()
}

// carryOut makes the load.
func (l *library) carryOut(o order) (r result) {
	jobs := make([]*job, o.jobs)
	for i := range jobs {
		jobs[i] = l.newJob(i*o.depth, o.depth)
	}
	parts := make([]latency.Snapshot, o.jobs)
	var group sync.WaitGroup
	start, cpu := latency.Now(), cpuTime()
	for i := range jobs {
		group.Go(func() { parts[i] = l.load(jobs[i], i, o, start+int64(o.time)) })
	}
	group.Wait()
	r.Elapsed, r.CPU = float64(latency.Now()-start), float64(cpuTime()-cpu)
	var all latency.Snapshot
	for i := range jobs {
		l.endJob(jobs[i])
		all.Add(parts[i])
	}
	r.Requests = all.Count()
	r.Bytes = r.Requests * uint64(o.block)
	r.Mean, r.P50, r.P99 = float64(all.Mean()), float64(all.Quantile(0.5)), float64(all.Quantile(0.99))
	return r
}

// load is what the goroutine of a job does until end.
func (l *library) load(j *job, number int, o order, end int64) latency.Snapshot {
	var took latency.Fine
	begun, pending := make([]int64, o.depth), make([]int, o.depth) // by slot: when, and pieces without an answer
	blocks := l.size / int64(o.block)
	next, sequential := blocks/int64(o.jobs)*int64(number), !strings.HasPrefix(o.rw, "rand")
	op := blk.Read
	if strings.HasSuffix(o.rw, "write") {
		op = blk.Write
	}
	begin := func(slot int, now int64) {
		block := next % blocks
		if next++; !sequential {
			block = rand.Int64N(blocks)
		}
		begun[slot] = now
		pending[slot] = l.submit(j, number*o.depth+slot, op, uint64(block)*uint64(o.block), o.block)
	}
	now := latency.Now()
	for slot := range o.depth {
		begin(slot, now)
	}
	for j.caller.Wait() > 0 {
		now = latency.Now()
		for _, c := range j.cqes[:j.got] {
			slot := int(c.Tag/extentTags) - number*o.depth
			if pending[slot]--; pending[slot] > 0 {
				continue
			}
			took.Record(now - begun[slot])
			if now < end {
				begin(slot, now)
			}
		}
	}
	return took.Snapshot()
}

// cpuTime is the CPU time of this process in nanoseconds.
func cpuTime() int64 {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // cannot fail
	return u.Utime.Nano() + u.Stime.Nano()
}
