package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/test/lab"
)

// benchmark is the output of `rnbd bench` for programs.
type benchmark struct {
	CPU        string
	Complete   bool
	LoadBefore *float64 `json:"load_before"`
	Verified   uint64
	Devices    []struct {
		Name, Access, Plugin, Fabric string
		Size                         uint64
		IOMode                       string `json:"io_mode"`
	}
	Results []struct {
		Workload, Op                           string
		Elapsed, Requests, IOPS, Bandwidth     uint64
		Mean, P50, P99, P999, Max, Depth, Jobs uint64
	}
}

// parseBench reads it, and checks the rules for every result.
func parseBench(t *testing.T, r result, workloads ...string) benchmark {
	t.Helper()
	var b benchmark
	if err := json.Unmarshal([]byte(r.out), &b); r.code != 0 || err != nil {
		t.Fatalf("exit code %d: %s%s%v", r.code, r.err, r.out, err)
	}
	var names []string
	for _, m := range b.Results {
		names = append(names, m.Workload+" "+m.Op)
		if m.Requests == 0 || m.IOPS == 0 || m.Bandwidth < m.IOPS*512 || m.Mean == 0 || m.P50 > m.P99 || m.P99 > m.P999 || m.P999 > m.Max {
			t.Errorf("figures of %s are not sane: %+v", m.Workload, m)
		}
		// Little's law: as many are in flight as are asked for. The mean is
		// exact, but short runs on a busy machine have ends.
		if inFlight := float64(m.IOPS) * float64(m.Mean) / 1e9; inFlight > 1.2*float64(m.Depth*m.Jobs*uint64(len(b.Devices))) {
			t.Errorf("%s has %.1f requests in flight, more than were asked for", m.Workload, inFlight)
		}
	}
	if !slices.Equal(names, workloads) {
		t.Errorf("results are of %q, want %q", names, workloads)
	}
	if b.CPU == "" || b.LoadBefore == nil {
		t.Errorf("nothing is said about the machine: %s", r.out)
	}
	return b
}

func TestBenchOfAServerNeedsNoClientDaemon(t *testing.T) {
	l := lab.New(t)
	dir := l.Image("a.img", 16<<20)
	l.Image("b.img", 16<<20)
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	r := rnbdAt(t, s.Socket, "bench", "a.img", "b.img", "--server", s.Addrs[0], "--rw", "randread", "--depth", "4", "--jobs", "2", "--time", "1s", "json")
	b := parseBench(t, r, "4k-randread-d4 read")
	if !b.Complete || len(b.Devices) != 2 {
		t.Fatalf("it is %+v", b)
	}
	for _, d := range b.Devices {
		if d.Access != "client library" || d.Fabric != "iwarp" || d.Plugin != "" || d.IOMode != "fileio" || d.Size != 16<<20 {
			t.Errorf("device %+v", d)
		}
	}
	if m := b.Results[0]; m.Elapsed < 1e9 || m.Elapsed > 10e9 {
		t.Errorf("it ran for %v", time.Duration(m.Elapsed))
	}
	sdktest.Eventually(t, "no session is left", func() bool {
		list := rnbdAt(t, s.Socket, "session", "list", "csv", "noheaders")
		return list.code == 0 && list.out == ""
	})
}

func TestBenchWritesThroughTheFrontEnd(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("a.img", 64<<20), Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	d := l.Map(c, "a.img", s)
	if r := rnbd(t, c, "bench", d.Name, "--rw", "randwrite"); r.code != 2 || !strings.Contains(r.err, "--write") {
		t.Errorf("writes without being asked to: exit code %d, %s", r.code, r.err)
	}
	if r := rnbd(t, c, "bench", d.Name, "--time", "100ms", "json"); r.code == 0 {
		parseBench(t, r, "4k-randread-d1 read", "4k-randread-d4 read", "4k-randread-d16 read", "4k-randread-d64 read", "1m-seqread-d8 read")
	} else {
		t.Errorf("reads: exit code %d, %s", r.code, r.err)
	}
	if after, err := c.Device(d.Name); err != nil || after.TxSectors != 0 {
		t.Errorf("%d sectors were written, %v", after.GetTxSectors(), err)
	}
	sdktest.Eventually(t, "nobody has the device open", func() bool {
		idle, err := c.Device(d.Name)
		return err == nil && idle.Openers == 0
	})
	r := rnbd(t, c, "bench", d.Name, "--rw", "mixed", "--depth", "16", "--time", "500ms", "--write", "--yes", "--verify", "json")
	b := parseBench(t, r, "mixed-d16 read", "mixed-d16 write")
	if b.Verified == 0 || len(b.Devices) != 1 || b.Devices[0].Plugin != "nbd-socket" || b.Devices[0].Fabric != "iwarp" {
		t.Errorf("it is %+v", b)
	}
}

func TestBenchOfAnExportNeedsNoDaemonOfOurs(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("a.img", 16<<20), Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	d := l.Map(c, "a.img", s)
	r := rnbdAt(t, filepath.Join(t.TempDir(), "none.sock"), "bench", c.URI(d.Name), "--rw", "randrw", "--depth", "8", "--time", "300ms", "--size", "4M",
		"--fill", "--write", "--yes", "json")
	b := parseBench(t, r, "4k-randrw-d8 read", "4k-randrw-d8 write")
	if len(b.Devices) != 1 || b.Devices[0].Name != c.URI(d.Name) || b.Devices[0].Access != "NBD" || b.Devices[0].Size != 4<<20 {
		t.Errorf("devices %+v", b.Devices)
	}
	if r := rnbdAt(t, s.Socket, "bench", c.URI("nothing")); r.code == 0 || !strings.Contains(r.err, "nothing") {
		t.Errorf("an export that is not there: exit code %d, %s", r.code, r.err)
	}
}

func TestBenchOfAPluginAlone(t *testing.T) {
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(path, make([]byte, 16<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"bench", path, "--plugin", filepath.Join(bin, "io-fileio"), "--depth", "8", "--time", "300ms", "json"}
	none := filepath.Join(t.TempDir(), "none.sock")
	b := parseBench(t, rnbdAt(t, none, append(args, "--rw", "randrw", "--size", "8M", "--write", "--yes", "--verify")...), "4k-randrw-d8 read", "4k-randrw-d8 write")
	if b.Verified == 0 || b.Devices[0].Access != "plugin alone" || b.Devices[0].Plugin != "io-fileio" {
		t.Errorf("it is %+v", b)
	}
	parseBench(t, rnbdAt(t, none, append(args, "--rw", "read", "--bs", "1M")...), "1m-seqread-d8 read") // in parts
}

// A plugin that dies takes the measurement with it, not the command.
func TestBenchOfAPluginThatDies(t *testing.T) {
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(bin, "rnbd"), "bench", path, "--plugin", filepath.Join(bin, "io-fileio"), "--depth", "8", "--time", "1m")
	var errs strings.Builder
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	var plugin int
	sdktest.Eventually(t, "the plugin runs", func() bool {
		plugin = lab.ChildOf(cmd.Process.Pid, "io-fileio") // other children only try what this host can do
		return plugin != 0
	})
	time.Sleep(200 * time.Millisecond) // for the load to run, usually
	if err := syscall.Kill(plugin, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() < 1 || strings.Contains(errs.String(), "panic") {
		t.Errorf("it ended with %v: %s", err, errs.String())
	}
}

func TestBenchDoesNotWriteToWhatOthersUse(t *testing.T) {
	l := lab.New(t)
	dir := l.Image("a.img", 4<<20)
	l.Image("b.img", 4<<20)
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	used := l.Map(c, "a.img", s)
	ro := l.Map(c, "b.img", s, func(r *controlpb.MapRequest) { r.AccessMode = "ro" })
	dial(t, c, used.Name)
	write := []string{"--rw", "randwrite", "--depth", "1", "--time", "100ms", "--write", "--yes"}
	for _, tt := range []struct {
		name string
		args []string
		code int
		text string
	}{
		{"a device that somebody has open", []string{used.Name}, 5, "users that have it open: 1"},
		{"a device that is mapped read-only", []string{ro.Name}, 6, "mapped read-only"},
		{"a device that another client writes to", []string{"a.img", "--server", s.Addrs[0]}, 6, "stop them, or measure reads"},
		{"a file that a server has open", []string{filepath.Join(dir, "a.img")}, 5, "the plugin of a server"},
		{"a device that is not there", []string{"c.img", "--server", s.Addrs[0]}, 3, "no such file"},
		{"a name that is not mapped", []string{"rnbd9"}, 3, "there is no device"},
	} {
		if r := rnbd(t, c, append(append([]string{"bench"}, tt.args...), write...)...); r.code != tt.code || !strings.Contains(r.err, tt.text) || r.out != "" {
			t.Errorf("%s: exit code %d, %s%s", tt.name, r.code, r.err, r.out)
		}
	}
}

func TestAnInterruptedBenchPrintsWhatItHas(t *testing.T) {
	path := filepath.Join(lab.New(t).Image("a.img", 4<<20), "a.img")
	screen, tty := terminal(t)
	cmd := exec.CommandContext(t.Context(), program(t), "bench", path, "--depth", "1,4", "--time", "1h", "json")
	var out, shown strings.Builder
	cmd.Stdout, cmd.Stderr = &out, tty
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	tty.Close()
	for buf := make([]byte, 4096); !strings.Contains(shown.String(), "kIOPS"); { // it measures
		n, err := screen.Read(buf)
		shown.Write(buf[:n])
		if err != nil {
			t.Fatalf("%v: %s", err, shown.String())
		}
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	io.Copy(&shown, screen) // ends with EIO when nobody has the terminal any more
	cmd.Wait()
	b := parseBench(t, result{code: cmd.ProcessState.ExitCode(), out: out.String(), err: shown.String()}, "4k-randread-d1 read")
	if b.Complete {
		t.Error("it says that it is complete")
	}
}

// TestBenchAsksBeforeItWrites types an answer at a terminal.
func TestBenchAsksBeforeItWrites(t *testing.T) {
	for answer, code := range map[string]int{"no": 1, "yes": 0} {
		path := filepath.Join(lab.New(t).Image("a.img", 4<<20), "a.img")
		keyboard, tty := terminal(t)
		cmd := exec.Command(program(t), "bench", path, "--rw", "write", "--depth", "1", "--time", "1s", "--write")
		cmd.Stdin, cmd.Stderr = tty, tty
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		tty.Close()
		fmt.Fprintln(keyboard, answer)
		screen, _ := io.ReadAll(keyboard) // ends with EIO when nobody has the terminal any more
		cmd.Wait()
		if got := cmd.ProcessState.ExitCode(); got != code || !strings.Contains(string(screen), "all data will be lost") || !strings.Contains(string(screen), path+" (4M)") {
			t.Errorf("%s: exit code %d, want %d:\n%s", answer, got, code, screen)
		}
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		written := strings.Trim(string(data), "\x00") != ""
		if progress := strings.Contains(string(screen), "kIOPS"); written != (code == 0) || progress != written {
			t.Errorf("%s: written is %t, progress was shown is %t:\n%s", answer, written, progress, screen)
		}
	}
}

// terminal makes one: text written to the first file is typed at the second.
func terminal(t *testing.T) (*os.File, *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no terminals here: %v", err)
	}
	t.Cleanup(func() { master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no terminals here: %v", err)
	}
	return master, tty
}
