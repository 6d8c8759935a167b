package devices

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// The disks of testHung: one hangs, the others have the load.
const (
	healthyDisks  = 15
	stuckRequests = 32
	measureFor    = 3 // seconds
)

// testHung suspends the device behind one of 16 disks while requests are on their way
// to it. No request of the other 15 fails, and they keep a quarter of their requests per
// second in the short form, half in the long one: the machine is emulated, and two
// measurements of the same differ by a factor of two. The log has the figures.
func testHung(t *testing.T, s *stack) {
	const bad = "rnbd-hung"
	run(t, "modprobe", "dm-mod")
	t.Setenv("DM_DISABLE_UDEV", "1") // dmsetup has to make the node
	sectors := strings.TrimSpace(run(t, "blockdev", "--getsz", s.ram))
	run(t, "dmsetup", "create", bad, "--table", "0 "+sectors+" linear "+s.ram+" 0")
	t.Cleanup(func() { exec.Command("dmsetup", "remove", "--retry", bad).Run() })
	var nodes []string
	for range healthyDisks {
		_, node := s.disk(t, s.image(t, 4<<20))
		nodes = append(nodes, node)
	}
	_, hung := s.disk(t, "/dev/mapper/"+bad)
	for _, node := range nodes {
		run(t, "dd", "if=/dev/zero", "of="+node, "bs=1M", "count=4", "oflag=direct")
	}
	s.measure(t, nodes) // warm up

	var alone, beside []figures
	for range pick(3, 7) {
		alone = append(alone, s.measure(t, nodes))
		run(t, "dmsetup", "suspend", "--noflush", bad)
		stuck := exec.Command("fio", "--name=stuck", "--filename="+hung, "--direct=1", "--ioengine=libaio", "--rw=randwrite", "--bs=4k",
			fmt.Sprint("--iodepth=", stuckRequests), fmt.Sprint("--number_ios=", stuckRequests))
		must(t, stuck.Start())
		eventually(t, "requests are on their way", func() bool { return inFlight(hung) >= stuckRequests })
		beside = append(beside, s.measure(t, nodes))
		if n := inFlight(hung); n < stuckRequests {
			t.Errorf("%d requests hang at the end, want %d", n, stuckRequests)
		}
		run(t, "dmsetup", "resume", bad)
		if err := stuck.Wait(); err != nil {
			t.Errorf("the requests that waited: %v", err)
		}
	}
	a, b := middle(alone), middle(beside)
	t.Logf("alone %.0f requests per second, p99 %v; beside a disk that hangs %.0f, %v", a.iops, a.p99, b.iops, b.p99)
	if least := pick(0.25, 0.5); b.iops < a.iops*least {
		t.Errorf("beside a disk that hangs %d others have %.2f of their requests per second, want at least %g", healthyDisks, b.iops/a.iops, least)
	}
}

// inFlight is the number of requests that a disk has not answered.
func inFlight(node string) int {
	var reads, writes int
	fmt.Sscan(readFile("/sys/block/"+strings.TrimPrefix(node, "/dev/")+"/inflight"), &reads, &writes)
	return reads + writes
}

// figures are those of a run of fio.
type figures struct {
	iops float64
	p99  time.Duration
}

// middle takes the median of each figure.
func middle(list []figures) (m figures) {
	for _, of := range list {
		less, fewer := 0, 0
		for _, other := range list {
			if other.iops < of.iops {
				less++
			}
			if other.p99 < of.p99 {
				fewer++
			}
		}
		if less <= len(list)/2 && of.iops > m.iops {
			m.iops = of.iops
		}
		if fewer <= len(list)/2 && of.p99 > m.p99 {
			m.p99 = of.p99
		}
	}
	return m
}

// measure reads and writes all nodes at once.
func (s *stack) measure(t *testing.T, nodes []string) figures {
	t.Helper()
	args := []string{"fio", "--direct=1", "--ioengine=libaio", "--iodepth=4", "--rw=randrw", "--bs=4k", "--time_based",
		fmt.Sprint("--runtime=", measureFor), "--group_reporting", "--output-format=json"}
	for i, node := range nodes {
		args = append(args, fmt.Sprint("--name=disk", i), "--filename="+node)
	}
	out := run(t, args...)
	type side struct {
		IOPS float64
		Clat struct{ Percentile map[string]float64 } `json:"clat_ns"`
	}
	var report struct{ Jobs []struct{ Read, Write side } }
	if err := json.Unmarshal([]byte(out[max(strings.Index(out, "{"), 0):]), &report); err != nil || len(report.Jobs) != 1 {
		t.Fatalf("%d jobs, %v, in the output of fio: %s", len(report.Jobs), err, out)
	}
	j := report.Jobs[0]
	return figures{iops: j.Read.IOPS + j.Write.IOPS,
		p99: time.Duration(max(j.Read.Clat.Percentile["99.000000"], j.Write.Clat.Percentile["99.000000"])).Round(time.Microsecond)}
}
