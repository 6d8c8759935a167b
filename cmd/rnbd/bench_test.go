package main

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/load"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/machine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plot"
)

// benchFile is a file full of a byte, to measure.
func benchFile(t *testing.T, size int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(path, []byte(strings.Repeat("x", size)), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// benchDocument is the JSON that programs read.
type benchDocument struct {
	CPU, Kernel string
	Cores       int
	Complete    bool
	Verified    *uint64
	Devices     []struct{ Name, Access string }
	Results     []struct {
		Workload, Op          string
		Depth, Requests, IOPS uint64
		Bandwidth             uint64
		Mean, P50, P99, Max   uint64
	}
}

func TestBenchMeasuresAFile(t *testing.T) {
	path := benchFile(t, 4<<20)
	plot := filepath.Join(t.TempDir(), "curves.svg")
	out, err := command(t, "bench", path, "--time", "20ms", "--rw", "randread", "--depth", "1,4", "--plot", plot, "json")
	if err != nil {
		t.Fatal(err, out)
	}
	var d benchDocument
	if err := json.Unmarshal([]byte(out), &d); err != nil {
		t.Fatalf("%v in\n%s", err, out)
	}
	if d.CPU == "" || d.Kernel == "" || d.Cores == 0 || !d.Complete || d.Verified != nil {
		t.Errorf("the run is %+v", d)
	}
	if len(d.Devices) != 1 || d.Devices[0].Name != path || d.Devices[0].Access == "" {
		t.Errorf("devices are %+v", d.Devices)
	}
	if len(d.Results) != 2 {
		t.Fatalf("%d results, want 2:\n%s", len(d.Results), out)
	}
	for i, r := range d.Results {
		if r.Depth != []uint64{1, 4}[i] || r.Op != "read" || r.Requests == 0 || r.IOPS == 0 || r.Mean == 0 || r.P50 > r.P99 || r.P99 > r.Max {
			t.Errorf("result %+v", r)
		}
	}
	if svg, err := os.ReadFile(plot); err != nil || !strings.Contains(string(svg), "4k-randread, 99 %") {
		t.Errorf("the plot is %q, %v", svg, err)
	}
	if data, err := os.ReadFile(path); err != nil || strings.Trim(string(data), "x") != "" {
		t.Errorf("the file was written, %v", err)
	}
}

func TestBenchVerifiesWhatItWrites(t *testing.T) {
	path := benchFile(t, 2<<20)
	out, err := command(t, "bench", path, "--time", "20ms", "--rw", "randrw", "--depth", "32", "--size", "1M", "--write", "--yes", "--verify", "json")
	if err != nil {
		t.Fatal(err, out)
	}
	var d benchDocument
	if err := json.Unmarshal([]byte(out), &d); err != nil || len(d.Results) != 2 || d.Verified == nil || *d.Verified == 0 {
		t.Errorf("%v in\n%s", err, out)
	}
	data, err := os.ReadFile(path)
	if err != nil || strings.Trim(string(data[1<<20:]), "x") != "" {
		t.Errorf("it wrote behind --size, %v", err)
	}
}

// benchOrders runs bench on devices with orders, and returns the answers by line.
func benchOrders(t *testing.T, orders string, devices ...string) map[int]benchAnswer {
	t.Helper()
	file := filepath.Join(t.TempDir(), "orders")
	if err := os.WriteFile(file, []byte(orders), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := command(t, slices.Concat([]string{"bench", "--orders", file, "--write", "--yes"}, devices)...)
	if err != nil {
		t.Fatal(err, out)
	}
	answers := map[int]benchAnswer{}
	for line := range strings.Lines(out) {
		var a benchAnswer
		if err := json.Unmarshal([]byte(line), &a); err != nil {
			t.Fatalf("%v in\n%s", err, line)
		}
		answers[a.Line] = a
	}
	return answers
}

type benchAnswer struct {
	Line  int
	Error string
	benchDocument
}

func TestBenchFollowsOrders(t *testing.T) {
	a, b := benchFile(t, 1<<20), benchFile(t, 1<<20)
	got := benchOrders(t, strings.Join([]string{
		"--rw randread --depth 2,4 --requests 10 --time 1m",
		"# a remark, then nothing", "",
		b + " --rw randwrite --depth 4 --requests 50 --time 1m --size 64K &",
		"--rw trim",
		"/nonexistent --depth 1",
		"--write",
		a + " --rw randrw --verify --size 128K --depth 4 --time 20ms",
	}, "\n"), a, b)
	if zero := got[0]; len(zero.Devices) != 2 || zero.CPU == "" || len(zero.Results) != 0 {
		t.Errorf("it begins with %+v", zero)
	}
	if r := got[1].Results; len(r) != 2 || r[0].Requests != 20 || r[1].Requests != 20 || !got[1].Complete {
		t.Errorf("ten requests of each of two devices, twice, are %+v", got[1])
	}
	if r := got[4]; len(r.Results) != 1 || r.Results[0].Requests != 50 || len(r.Devices) != 1 || r.Devices[0].Name != b {
		t.Errorf("fifty writes in the background are %+v", r)
	}
	for line, want := range map[int]string{5: "use one of read, write", 6: "none of the devices", 7: "unknown flag"} {
		if !strings.Contains(got[line].Error, want) {
			t.Errorf("line %d has the error %q, want %q", line, got[line].Error, want)
		}
	}
	if r := got[8]; r.Error != "" || r.Verified == nil || *r.Verified == 0 {
		t.Errorf("the order that verifies has %+v", r)
	}
	if len(got) != 7 {
		t.Errorf("%d answers, want 7", len(got))
	}
}

func TestBenchFillsADevice(t *testing.T) {
	path := benchFile(t, 1<<20)
	if got := benchOrders(t, "--fill --size 512K --rw randread --depth 1 --requests 1", path); got[1].Error != "" {
		t.Fatal(got[1].Error)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < 512<<10; i += 4096 {
		if strings.Trim(string(data[i:i+4096]), "x") == "" {
			t.Fatalf("the block at %d was not written", i)
		}
	}
	if strings.Trim(string(data[512<<10:]), "x") != "" {
		t.Error("it wrote behind --size")
	}
}

func TestEachLineOfCSVSaysWhereItIsFrom(t *testing.T) {
	a, b := benchFile(t, 1<<20), benchFile(t, 1<<20)
	out, err := command(t, "bench", a, b, "--time", "5ms", "--depth", "1", "iops,mean", "csv")
	if err != nil {
		t.Fatal(err, out)
	}
	lines, err := csv.NewReader(strings.NewReader(out)).ReadAll()
	if err != nil || len(lines) != 2 {
		t.Fatalf("%v in\n%s", err, out)
	}
	cell := func(name string) string { return lines[1][slices.Index(lines[0], name)] }
	if lines[0][0] != "iops" || lines[0][1] != "mean" || slices.Contains(lines[0], "p99") {
		t.Errorf("columns %v", lines[0])
	}
	if cell("cpu") != machine.CPU() || cell("kernel") != machine.Kernel() || cell("device_name") != a+" "+b || cell("device_size") != "1048576" {
		t.Errorf("line %v", lines[1])
	}
}

func TestBenchRefuses(t *testing.T) {
	path, none := benchFile(t, 64<<10), "--socket="+filepath.Join(t.TempDir(), "none.sock")
	for _, c := range []struct {
		name string
		args []string
		code int
		text string
	}{
		{"writes without --write", []string{path, "--rw", "randwrite"}, exitUsage, "say --write"},
		{"the mixed load without --write", []string{path, "--rw", "mixed"}, exitUsage, "say --write"},
		{"to write where nobody can be asked", []string{path, "--write"}, exitUsage, "say --yes too"},
		{"to compare what it has not written", []string{path, "--verify"}, exitUsage, "needs --write"},
		{"kinds that there are not", []string{path, "--rw", "trim"}, exitUsage, "use one of read, write"},
		{"sizes that are none", []string{path, "--bs", "big"}, exitUsage, "--bs"},
		{"fields that there are not", []string{path, "--fields", "speed"}, exitUsage, `no field "speed"`},
		{"plots of other kinds", []string{path, "--plot", "x.png"}, exitUsage, ".svg"},
		{"an io mode without a server", []string{path, "--io-mode", "fileio"}, exitUsage, "--server"},
		{"TLS without a server", []string{path, "--tls", "require", "--tls-psk", "x"}, exitUsage, "TLS is for --server"},
		{"TLS that is allowed", []string{"x", "--server", "127.0.0.1", "--tls", "allow"}, exitUsage, "use off or require"},
		{"TLS without files", []string{"x", "--server", "127.0.0.1", "--tls", "require"}, exitUsage, "TLS needs"},
		{"times that are none", []string{path, "--time", "0s"}, exitUsage, "--time"},
		{"more in flight than there is memory for", []string{path, "--depth", "4096", "--jobs", "64", "--bs", "1M"}, exitUsage, "256G are more than 4G"},
		{"no jobs", []string{path, "--jobs", "0"}, exitUsage, "jobs"},
		{"to fill what it must not write", []string{path, "--fill"}, exitUsage, "needs --write"},
		{"plots of orders", []string{path, "--orders", "-", "--plot", "x.svg"}, exitUsage, "lines of JSON"},
		{"several devices of one plugin", []string{path, path, "--plugin", "/bin/true"}, exitUsage, "one device"},
		{"orders that are not there", []string{path, "--orders", "/nonexistent"}, exitNotFound, "no such file"},
		{"plugins that are none", []string{path, "--plugin", "/bin/true"}, exitFailure, "--plugin /bin/true"},
		{"devices that are too small", []string{path}, exitUsage, "too few for 1m-seqread-d8"},
		{"more than there is", []string{path, "--size", "1G", "--depth", "1"}, exitUsage, "65536 bytes only"},
		{"files that are not there", []string{"/nonexistent"}, exitNotFound, "no such file"},
		{"folders", []string{"/"}, exitUsage, "neither a block device nor a regular file"},
		{"names where no daemon runs", []string{"rnbd0"}, exitUnreachable, "no daemon"},
		{"servers that are not there", []string{"x", "--server", "127.0.0.1:1"}, exitUnreachable, "connection refused"},
		{"servers without an address", []string{"x", "--server", "no.such.host.invalid"}, exitUsage, "no host that is known"},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, err := command(t, append(append([]string{"bench"}, c.args...), none)...)
			if got := exitCode(err); got != c.code || !strings.Contains(err.Error(), c.text) {
				t.Errorf("exit code %d, %v; want %d, %q", got, err, c.code, c.text)
			}
			if out != "" {
				t.Errorf("it prints %s", out)
			}
		})
	}
	if data, err := os.ReadFile(path); err != nil || strings.Trim(string(data), "x") != "" {
		t.Errorf("the file was written, %v", err)
	}
}

func TestBenchNeedsTheRight(t *testing.T) {
	path := benchFile(t, 1<<20)
	if err := os.Chmod(path, 0); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 { // root may open every file: be nobody to file systems for a while
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := errors.Join(os.Chmod(filepath.Dir(filepath.Dir(path)), 0o755), unix.Setfsuid(65534)); err != nil {
			t.Fatal(err)
		}
		defer unix.Setfsuid(0)
	}
	if _, err := command(t, "bench", path); exitCode(err) != exitDenied {
		t.Errorf("error %v", err)
	}
}

func TestAHintOfItsMakerComesFirst(t *testing.T) {
	if got := hintOf(inUse(syscall.EBUSY)); !strings.Contains(got, "without --write") {
		t.Errorf("hint %q", got)
	}
	if err := inUse(syscall.EBUSY); !errors.Is(err, syscall.EBUSY) || exitCode(err) != exitBusy {
		t.Errorf("%v has lost its errno", err)
	}
}

// fakeDevice is a device of 1 GiB.
type fakeDevice struct{ load.Device }

func (fakeDevice) Limits() blk.Limits { return blk.Limits{Size: 1 << 30} }

// madeUp is a run that has not taken place.
func madeUp() *benchRun {
	r := &benchRun{start: time.Unix(0, 0), each: time.Second, complete: true, targets: []*benchTarget{{
		Target: load.Target{Name: "rnbd0", Device: fakeDevice{}}, access: "NBD", plugin: "nbd-socket", fabric: []string{"iwarp"},
	}}}
	for i, w := range load.Usual(false, 1)[:2] {
		var h latency.Histogram
		for range 1000 * (100*i + 1) {
			h.Record(int64(1000 * (i + 1)))
		}
		r.add(load.Result{Workload: w, Elapsed: time.Second, Latency: [2]latency.Snapshot{h.Snapshot()}, Bytes: [2]uint64{4096000}})
	}
	return r
}

func TestBenchTableIsAligned(t *testing.T) {
	var out strings.Builder
	c := &call{cmd: newRoot()}
	c.cmd.SetOut(&out)
	fields, err := benchColumns(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := madeUp().print(c, fields); err != nil {
		t.Fatal(err)
	}
	_, results, _ := strings.Cut(out.String(), "\nWorkload")
	want := `        Op      IOPS  Bytes/s  Mean    50 %    99 %  99.9 %
4k-randread-d1  read    1000     3.9M   1µs  1.02µs  1.02µs  1.02µs
4k-randread-d4  read  101000     3.9M   2µs  2.05µs  2.05µs  2.05µs
`
	if results != want {
		t.Errorf("results are\n%swant\n%s", out.String(), want)
	}
	if !strings.Contains(out.String(), "rnbd0     1G  -         NBD     nbd-socket  iwarp") {
		t.Errorf("devices are\n%s", out.String())
	}
}

func TestTheFigureHasALineForEachKind(t *testing.T) {
	f := madeUp().figure()
	if f.Title != "rnbd0: NBD, nbd-socket, iwarp" || len(f.Panels) != 2 || len(f.Panels[0].Lines) != 1 || len(f.Panels[1].Lines) != 2 {
		t.Fatalf("figure %+v", f)
	}
	want := []plot.Point{{X: 1, Y: 1000}, {X: 4, Y: 101000}}
	if got := f.Panels[0].Lines[0]; got.Name != "4k-randread" || !slices.Equal(got.Points, want) {
		t.Errorf("line %+v", got)
	}
}

func TestBarsAreAsLongAsTheirShare(t *testing.T) {
	for share, want := range map[float64]string{
		0: "▕" + strings.Repeat(" ", 30) + "▏", 0.5: "▕" + strings.Repeat("█", 15) + strings.Repeat(" ", 15) + "▏",
		0.51: "▕" + strings.Repeat("█", 15) + "▎" + strings.Repeat(" ", 14) + "▏", 1: "▕" + strings.Repeat("█", 30) + "▏",
	} {
		if got := bar(share); got != want {
			t.Errorf("%v is %q, want %q", share, got, want)
		}
	}
}
