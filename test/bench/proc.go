package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/test/lab"
)

// peer is a server of another project that the benchmark has started. It leads
// its own process group, since some fork.
type peer struct {
	cmd  *exec.Cmd
	done chan struct{}
	log  string
}

// start runs a program with its output in a file of dir.
func start(dir, name string, argv ...string) (*peer, error) {
	p := &peer{cmd: exec.Command(argv[0], argv[1:]...), done: make(chan struct{}), log: filepath.Join(dir, name+".log")}
	f, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p.cmd.Stdout, p.cmd.Stderr = f, f
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

func (p *peer) pid() int { return p.cmd.Process.Pid }

// stop ends the process and its children.
func (p *peer) stop() {
	syscall.Kill(-p.pid(), syscall.SIGKILL)
	<-p.done
}

// await waits until the peer listens at address.
func (p *peer) await(ctx context.Context, network, address string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		conn, err := net.Dial(network, address)
		if err == nil {
			conn.Close()
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended: %s", p.cmd.Path, p.output())
		case <-ctx.Done():
			return fmt.Errorf("%s does not listen: %w: %s", p.cmd.Path, err, p.output())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (p *peer) output() string {
	b, _ := os.ReadFile(p.log)
	return strings.TrimSpace(string(b))
}

// cpuOf returns the CPU seconds that the processes and their children, those
// that have ended included, have used.
func cpuOf(pids []int) (sum float64) {
	for _, pid := range pids {
		sum += clockOf(pid) + deadChildren(pid)
		for _, child := range lab.Children(pid) {
			sum += clockOf(child)
		}
	}
	return sum
}

// clockOf reads the CPU clock of a process (clock_getcpuclockid(3)): the
// complement of the pid above three bits; 2 in these is the scheduler's clock.
func clockOf(pid int) float64 {
	var ts unix.Timespec
	if unix.ClockGettime(int32(^pid)<<3|2, &ts) != nil {
		return 0
	}
	return float64(ts.Nano()) / 1e9
}

// clockTick is USER_HZ, the unit of times in /proc: 100 on every architecture
// that Go runs on.
const clockTick = 100

func deadChildren(pid int) float64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	f := strings.Fields(rest)
	if len(f) < 15 { // cutime and cstime are fields 16 and 17 of the line
		return 0
	}
	user, _ := strconv.ParseFloat(f[13], 64)
	system, _ := strconv.ParseFloat(f[14], 64)
	return (user + system) / clockTick
}
