package kernelvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// place is where programs run: in the guest, or on the host in the guest's
// network. Errors of programs are *vm.Error.
type place interface {
	Try(ctx context.Context, argv ...string) (string, error)
	Start(t testing.TB, argv ...string) process
	Name() string
}

// process runs in a place until it is stopped, or the test ends.
type process interface {
	Terminate() // asks it to end
	Stop()
	Kill()
	Wait(limit time.Duration) error
	Output() string
}

// run is Try that fails the test.
func run(t testing.TB, p place, argv ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	out, err := p.Try(ctx, argv...)
	if err != nil {
		t.Fatalf("%s: %v", p.Name(), err)
	}
	return out
}

// guestPlace is the guest.
type guestPlace struct{ g *vm.Guest }

func (p guestPlace) Name() string { return "guest" }
func (p guestPlace) Try(ctx context.Context, argv ...string) (string, error) {
	return p.g.Try(ctx, argv...)
}
func (p guestPlace) Start(t testing.TB, argv ...string) process { return p.g.Start(t, argv...) }

// hostPlace is the host, in the network of a guest.
type hostPlace struct{ g *vm.Guest }

func (p hostPlace) Name() string { return "host" }

func (p hostPlace) Try(ctx context.Context, argv ...string) (string, error) {
	argv = append(p.g.InNetns(), argv...)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return string(out), fmt.Errorf("%v: %w\n%s", argv, ctx.Err(), out)
	}
	return string(out), exitError(argv[len(p.g.InNetns())], err, string(out))
}

func exitError(op string, err error, out string) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		code := exit.ExitCode()
		if ws := exit.Sys().(syscall.WaitStatus); ws.Signaled() {
			code = 128 + int(ws.Signal())
		}
		return &vm.Error{Op: op, Code: code, Output: out}
	}
	return err
}

// hostProcess is a process of the host, with its own process group.
type hostProcess struct {
	name string
	cmd  *exec.Cmd
	done chan struct{}
	err  error

	mu  sync.Mutex
	out bytes.Buffer
}

func (p *hostProcess) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Write(b)
}

func (p *hostProcess) Output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

func (p hostPlace) Start(t testing.TB, argv ...string) process {
	t.Helper()
	all := append(p.g.InNetns(), argv...)
	h := &hostProcess{name: argv[0], cmd: exec.Command(all[0], all[1:]...), done: make(chan struct{})}
	h.cmd.Stdout, h.cmd.Stderr = h, h
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	h.cmd.WaitDelay = 5 * time.Second // of children that keep the output open
	if err := h.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		h.err = exitError(h.name, h.cmd.Wait(), h.Output())
		close(h.done)
	}()
	t.Cleanup(h.Kill)
	return h
}

func (p *hostProcess) Wait(limit time.Duration) error {
	select {
	case <-p.done:
		return p.err
	case <-time.After(limit):
		return fmt.Errorf("%s: %w\n%s", p.name, context.DeadlineExceeded, p.Output())
	}
}

// Terminate asks it to end.
func (p *hostProcess) Terminate() { _ = p.cmd.Process.Signal(syscall.SIGTERM) } // it may have ended

// Stop lets it end in order, and kills it if it does not.
func (p *hostProcess) Stop() {
	p.Terminate()
	if errors.Is(p.Wait(30*time.Second), context.DeadlineExceeded) {
		p.Kill()
	}
}

// Kill ends the process and its children, since it may leave them behind.
func (p *hostProcess) Kill() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.done
}
