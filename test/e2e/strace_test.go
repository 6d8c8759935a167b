package e2e

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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

// traced reports whether every thread of the processes has a tracer.
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
	case <-s.done: // by the signal; that is no failure
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

// socketBytes adds up the bytes through sockets, by "UNIX" and "TCP". Each
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
	run(t, "nbdcopy", "--no-extents", "--request-size=4194304", r.tcpURI(), "null:")
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
