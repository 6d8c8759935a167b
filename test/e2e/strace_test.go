package e2e

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// strace is attached to running processes.
type strace struct {
	t    *testing.T
	cmd  *exec.Cmd
	dir  string
	done chan error
}

// attach starts strace on processes; each thread gets a file of its own below
// dir, so that no call is torn over two lines.
func attach(t *testing.T, pids []int, args ...string) *strace {
	t.Helper()
	s := &strace{t: t, dir: t.TempDir(), done: make(chan error, 1)}
	args = append(args, "-f", "-o", filepath.Join(s.dir, "trace"))
	for _, pid := range pids {
		args = append(args, "-p", strconv.Itoa(pid))
	}
	s.cmd = exec.Command(lab.Tool(t, "strace"), args...)
	s.cmd.Stderr = nil
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { s.done <- s.cmd.Wait() }()
	t.Cleanup(func() { s.cmd.Process.Kill() })
	eventually(t, "strace is attached to all threads", func() bool {
		select {
		case err := <-s.done:
			t.Skipf("strace cannot attach here: %v", err)
		default:
		}
		return traced(pids)
	})
	return s
}

// traced tells whether every thread of the processes has a tracer.
func traced(pids []int) bool {
	for _, pid := range pids {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		if err != nil || len(tasks) == 0 {
			return false
		}
		for _, task := range tasks {
			if b, err := os.ReadFile(task); err == nil && strings.Contains(string(b), "TracerPid:\t0\n") {
				return false
			}
		}
	}
	return true
}

// stop detaches it and returns the files it wrote.
func (s *strace) stop() []string {
	s.t.Helper()
	if err := s.cmd.Process.Signal(syscall.SIGINT); err != nil {
		s.t.Fatal(err)
	}
	select {
	case <-s.done: // by the signal, which is no failure
	case <-time.After(enough):
		s.t.Fatal("strace does not end")
	}
	files, err := filepath.Glob(filepath.Join(s.dir, "trace*"))
	if err != nil || len(files) == 0 {
		s.t.Fatal("strace wrote nothing", err)
	}
	return files
}

// transfer is a call that moves bytes through a socket, as -yy prints it:
//
//	sendmsg(7<TCP:[127.0.0.1:41234->127.0.0.1:1234]>, ...) = 4096
//	read(9<UNIX-STREAM:[33->34]>, ""..., 16384) = 17
var transfer = regexp.MustCompile(`^\w+\(\d+<(TCP|UNIX|UNIX-[A-Z]+)(?:v6)?:\[.*\) = (\d+)$`)

// socketBytes adds up what went through sockets, by "UNIX" and "TCP". Each
// byte counts at both ends if both are traced.
func socketBytes(t *testing.T, files []string) map[string]int64 {
	t.Helper()
	sum := map[string]int64{}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(f)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			if m := transfer.FindStringSubmatch(lines.Text()); m != nil {
				n, err := strconv.ParseInt(m[2], 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				kind, _, _ := strings.Cut(m[1], "-")
				sum[kind] += n
			}
		}
		if err := lines.Err(); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	return sum
}

// TestReadingAGibibyteLeavesControlSocketsAlone proves that data takes its own
// way: while 1 GiB is read through the device, less than 1 MiB passes all
// sockets of control together.
//
// The method: strace is attached to the four running processes and prints
// every call that can move bytes through a descriptor, with the kind of the
// descriptor and the result. The NBD client uses TCP here, as the fabric does,
// so every unix socket of the four processes is one of control: the daemons'
// control API, the plugins' gRPC, and the socket pair that passes descriptors.
// The results of calls on unix sockets are added up; those on TCP sockets are
// too, to see that the sum misses nothing.
func TestReadingAGibibyteLeavesControlSocketsAlone(t *testing.T) {
	const size = 1 << 30
	r := newRig(t, rigOptions{size: size})
	var pids []int
	for _, pid := range r.pids() {
		pids = append(pids, pid)
	}
	s := attach(t, pids, "-ff", "-yy", "-s", "0", "-e",
		"trace=read,write,readv,writev,pread64,pwrite64,preadv,pwritev,preadv2,pwritev2,sendto,recvfrom,sendmsg,recvmsg,sendmmsg,recvmmsg,sendfile,splice")
	if _, err := r.client.API.ListDevices(context.Background(), &controlpb.ListRequest{}); err != nil {
		t.Fatal(err)
	}
	run(t, "nbdcopy", "--request-size=4194304", r.tcpURI(), "null:")
	sum := socketBytes(t, s.stop())
	t.Logf("1 GiB read: %d bytes through unix sockets, %d through TCP", sum["UNIX"], sum["TCP"])
	if sum["UNIX"] < 100 {
		t.Errorf("the listing of the devices was not seen: %d bytes through unix sockets", sum["UNIX"])
	}
	if sum["UNIX"] >= 1<<20 {
		t.Errorf("%d bytes went through sockets of control", sum["UNIX"])
	}
	if sum["TCP"] < 3*size { // sent by the server, received and sent by the client's side
		t.Errorf("%d bytes went through TCP sockets: the trace misses some", sum["TCP"])
	}
}

// calls counts the system calls of a process by name, from strace -c.
func calls(t *testing.T, file string) map[string]int {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]int{}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line) // % time, seconds, usecs/call, calls, [errors,] name
		if len(f) < 5 {
			continue
		}
		if n, err := strconv.Atoi(f[3]); err == nil && f[len(f)-1] != "total" {
			out[f[len(f)-1]] += n
		}
	}
	return out
}

// TestSystemCallsPerIO prints what the four processes ask of the kernel per
// 4 KiB request. strace makes each call some fifty times slower and so changes
// the batches, and pumps look around more often before they sleep: figures are
// for comparison with one another. The bounds only catch calls that multiply.
func TestSystemCallsPerIO(t *testing.T) {
	n := 1000
	if long() {
		n = 50000
	}
	r := newRig(t, rigOptions{size: 64 << 20,
		server: lab.ServerOptions{Extra: []string{"--pumps", "1"}}, client: lab.ClientOptions{Extra: []string{"--pumps", "1"}}})
	run(t, "nbdcopy", "--flush", randomFile(t, 64<<20), r.unixURI())
	for _, c := range []struct {
		rw    string
		depth int
		bound float64
	}{{"randread", 1, 200}, {"randread", 32, 40}, {"randwrite", 1, 200}, {"randwrite", 32, 40}} {
		t.Run(fmt.Sprintf("%s depth %d", c.rw, c.depth), func(t *testing.T) {
			traces := map[string]*strace{}
			for role, pid := range r.pids() {
				traces[role] = attach(t, []int{pid}, "-c")
			}
			run(t, "fio", "--name=calls", "--ioengine=nbd", "--uri="+r.unixURI(), "--rw="+c.rw, "--bs=4k",
				fmt.Sprintf("--iodepth=%d", c.depth), "--size=64m", "--norandommap", fmt.Sprintf("--io_size=%d", n*4096))
			total := 0
			for _, role := range []string{"frontend-nbd", "client", "server", "io-fileio"} {
				total += report(t, role, calls(t, traces[role].stop()[0]), n)
			}
			perIO := float64(total) / float64(n)
			t.Logf("%-13s %6.2f calls per request", "together", perIO)
			if perIO > c.bound {
				t.Errorf("%.1f system calls per request, want at most %.0f", perIO, c.bound)
			}
		})
	}
}

// waiting are calls that pass time: an idle pump yields, the Go runtime's
// monitor sleeps. They are printed, and not counted.
var waiting = map[string]bool{"sched_yield": true, "nanosleep": true}

// report prints the calls of one process per request, the frequent ones by
// name.
func report(t *testing.T, role string, calls map[string]int, n int) (total int) {
	t.Helper()
	var names []string
	for name, c := range calls {
		if !waiting[name] {
			total += c
		}
		names = append(names, name)
	}
	sort.Slice(names, func(i, j int) bool { return calls[names[i]] > calls[names[j]] })
	var b strings.Builder
	for _, name := range names {
		if perIO := float64(calls[name]) / float64(n); perIO >= 0.01 {
			fmt.Fprintf(&b, " %s %.2f", name, perIO)
		}
	}
	t.Logf("%-13s %6.2f calls per request:%s", role, float64(total)/float64(n), b.String())
	return total
}
