package lab

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process is one daemon. Its output goes to a file of the lab.
type process struct {
	log   string
	path  string
	args  []string
	env   []string
	files []*os.File // inherited, from descriptor 3 on

	mu   sync.Mutex
	proc *os.Process
	done chan struct{}
	err  error
}

// start runs the program; the log is appended to.
func (p *process) start() error {
	f, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	cmd := exec.Command(p.path, p.args...)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = f, f, p.files
	cmd.Env = append(os.Environ(), p.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan struct{})
	p.mu.Lock()
	p.proc, p.done = cmd.Process, done
	p.mu.Unlock()
	go func() {
		err := cmd.Wait()
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		close(done)
	}()
	return nil
}

// adopt makes p the process with another number, which the last one has started. It
// is no child of this process, so its exit status is not known.
func (p *process) adopt(pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fmt.Errorf("process %d: %w", pid, err)
	}
	proc, err := os.FindProcess(pid)
	if err != nil {
		unix.Close(fd)
		return err
	}
	done := make(chan struct{})
	p.mu.Lock()
	p.proc, p.done, p.err = proc, done, nil
	p.mu.Unlock()
	go func() {
		defer unix.Close(fd)
		for {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
			if n > 0 || err != nil && err != unix.EINTR {
				close(done)
				return
			}
		}
	}()
	return nil
}

// PID of the running process; 0 before the start.
func (p *process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.proc == nil {
		return 0
	}
	return p.proc.Pid
}

// Signal sends sig to the process, and to it alone. After SIGSTOP it does
// nothing any more.
func (p *process) Signal(sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	err := p.proc.Signal(sig)
	if err == nil && sig == syscall.SIGSTOP {
		err = awaitStopped(p.proc.Pid)
	}
	return err
}

// Children are the processes that a process has started, as plugins of a daemon.
func Children(pid int) (pids []int) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, task := range tasks {
		text, _ := os.ReadFile(task)
		for _, field := range strings.Fields(string(text)) {
			if child, err := strconv.Atoi(field); err == nil {
				pids = append(pids, child)
			}
		}
	}
	return pids
}

// ChildOf is the child of a process that runs a program of that name; 0: there is none.
func ChildOf(pid int, program string) int {
	for _, child := range Children(pid) {
		argv, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", child))
		if name, _, _ := strings.Cut(string(argv), "\x00"); filepath.Base(name) == program {
			return child
		}
	}
	return 0
}

// Freeze stops a process by SIGSTOP. It does nothing any more then.
func Freeze(pid int) error {
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return err
	}
	return awaitStopped(pid)
}

// awaitStopped waits until no thread of a process that got SIGSTOP runs any
// more: where processors are busy, that takes a while.
func awaitStopped(pid int) error {
	for end := time.Now().Add(Patience); runs(pid); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return fmt.Errorf("process %d does not stop", pid)
		}
	}
	return nil
}

// runs reports whether a thread of the process runs, or will run after a wait.
func runs(pid int) bool {
	stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, name := range stats {
		stat, _ := os.ReadFile(name)
		if _, state, ok := bytes.Cut(stat, []byte(") ")); ok && bytes.ContainsAny(state[:1], "RS") {
			return true
		}
	}
	return false
}

// end sends sig and waits for the end, at most for limit; then SIGKILL.
func (p *process) end(sig syscall.Signal, limit time.Duration) error {
	p.mu.Lock()
	proc, done := p.proc, p.done
	p.mu.Unlock()
	if proc == nil {
		return nil
	}
	_ = proc.Signal(sig) // it may have ended already
	_ = proc.Signal(syscall.SIGCONT)
	select {
	case <-done:
		return nil
	case <-time.After(limit):
	}
	_ = proc.Kill()
	<-done
	if sig == syscall.SIGKILL {
		return nil
	}
	return fmt.Errorf("%s did not end within %s of %s", p.path, limit, sig)
}

// Exited reports whether the process has ended, and how.
func (p *process) Exited() (bool, error) {
	p.mu.Lock()
	done := p.done
	p.mu.Unlock()
	select {
	case <-done:
		p.mu.Lock()
		defer p.mu.Unlock()
		return true, p.err
	default:
		return false, nil
	}
}

// Log returns the output of the process so far.
func (p *process) Log() string {
	b, _ := os.ReadFile(p.log)
	return string(b)
}
