package devices

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// testZeroCopy has the driver hand out the pages of requests. Where it cannot,
// the disk works without.
func testZeroCopy(t *testing.T, s *stack) {
	d, node := s.disk(t, s.ram, options("zero_copy", "yes"), queueing)
	if !registersPages(t, s) {
		if s.resizes(t) { // as old as pages: Linux 6.16
			t.Error("the driver registers no pages")
		}
		if !strings.Contains(s.client.Log(), "zero_copy is left out") {
			t.Error("the log does not say that the driver copies")
		}
		run(t, fio(node, "--rw=randrw", "--bs=4k", "--size=2m")...)
		return
	}
	run(t, fio(node, "--rw=randrw", "--bsrange=512-256k", "--bs_unaligned=0", "--blockalign=512", "--size=32m", "--fsync=32")...)
	run(t, "blkdiscard", "--zeroout", "--length", "1048576", node)
	run(t, "cmp", "-n", "1048576", node, "/dev/zero")
	end := load(t, node, "2m")
	for range 5 {
		awaitIO(t, node)
		killFrontend(t, s, node)
		awaitIO(t, node)
	}
	end()
	if !registersPages(t, s) {
		t.Error("the next process does not know that the driver registers pages")
	}
	must(t, s.client.Unmap(d.Name, false))
	compareCopies(t, s)
}

var featuresInLog = regexp.MustCompile(`msg="disk is ready".* features=(0x[0-9a-f]+)`)

// registersPages: the driver does for the disk that was made or taken over last.
func registersPages(t *testing.T, s *stack) bool {
	t.Helper()
	all := featuresInLog.FindAllStringSubmatch(s.client.Log(), -1)
	if len(all) == 0 {
		t.Fatalf("the log has no disk:\n%s", s.client.Log())
	}
	n, err := strconv.ParseUint(all[len(all)-1][1], 0, 64)
	must(t, err)
	const autoBufReg = 1 << 11
	return n&autoBufReg != 0
}

// compareCopies tells how fast the disk is when the driver registers pages,
// against the driver copying: medians of interleaved rounds.
func compareCopies(t *testing.T, s *stack) {
	const rounds = 5
	loads := []string{
		"--bs=4k --iodepth=1 --rw=randread", "--bs=4k --iodepth=1 --rw=randwrite",
		"--bs=4k --iodepth=32 --rw=randread", "--bs=4k --iodepth=32 --rw=randwrite",
		"--bs=1m --iodepth=4 --rw=read", "--bs=1m --iodepth=4 --rw=write",
	}
	ratios := make([][]float64, len(loads))
	for range rounds {
		var speed [2][]float64
		for i, word := range []string{"no", "yes"} {
			d, node := s.disk(t, s.ram, options("zero_copy", word))
			for _, l := range loads {
				speed[i] = append(speed[i], throughput(t, node, strings.Fields(l)...))
			}
			must(t, s.client.Unmap(d.Name, false))
		}
		for i := range loads {
			ratios[i] = append(ratios[i], speed[1][i]/speed[0][i])
		}
	}
	for i, l := range loads {
		slices.Sort(ratios[i])
		t.Logf("registered pages against the driver's copy, %s: %.2f of the throughput (%.2f to %.2f)",
			l, ratios[i][rounds/2], ratios[i][0], ratios[i][rounds-1])
	}
}

// throughput returns fio's throughput, in KiB a second.
func throughput(t *testing.T, node string, args ...string) float64 {
	t.Helper()
	out := run(t, append([]string{"fio", "--name=s", "--filename=" + node, "--direct=1", "--ioengine=libaio", "--size=128m",
		"--time_based", "--runtime=3", "--minimal"}, args...)...)
	f := strings.Split(out, ";")
	if len(f) < 49 {
		t.Fatalf("fio says %q", out)
	}
	var n float64
	for _, field := range []string{f[6], f[47]} { // reads, writes
		v, err := strconv.ParseFloat(field, 64)
		must(t, err)
		n += v
	}
	if n == 0 {
		t.Fatalf("nothing done in %q", out)
	}
	return n
}
