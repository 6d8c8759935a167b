package vm

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/kernelvm/kernel"
	"github.com/rnbd-go/rnbd/test/kernelvm/vm/wire"
)

// runLimit bounds commands that have no context of their own.
const runLimit = 3 * time.Minute

// Guest is a running virtual machine. Its methods may be used from several
// goroutines; those that take a test fail it, and must run in its goroutine.
type Guest struct {
	Kernel kernel.Kernel

	dir      string
	qemu     *os.Process
	gone     chan struct{} // closed when qemu has ended
	stopOnce sync.Once
	net      network
	conn     net.Conn

	mu    sync.Mutex
	out   *gob.Encoder
	next  uint32
	calls map[uint32]*call
	lost  error // why nothing can be asked any more
}

// call is a request with an answer that is awaited.
type call struct {
	mu     sync.Mutex
	output []byte
	last   wire.Event
	done   chan struct{}
}

func (c *call) text() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return string(c.output)
}

// Error says how a command or a file operation in the guest failed.
type Error struct {
	Op     string
	Code   int // exit code, 128+signal for a killed process; -1 if it did not run
	Errno  syscall.Errno
	Why    string
	Output string
}

func (e *Error) Error() string {
	if e.Code > 0 {
		return fmt.Sprintf("%s: exit code %d: %s", e.Op, e.Code, tail(e.Output, 40))
	}
	return fmt.Sprintf("%s: %s", e.Op, e.Why)
}

// Unwrap lets errors.Is find the errno of a file operation.
func (e *Error) Unwrap() error {
	if e.Errno == 0 {
		return nil
	}
	return e.Errno
}

// receive hands the agent's events to their calls until the guest is gone.
func (g *Guest) receive(in *gob.Decoder) {
	for {
		var e wire.Event
		err := in.Decode(&e)
		g.mu.Lock()
		if err != nil {
			g.lost = fmt.Errorf("the guest is gone: %w", err)
			for id, c := range g.calls {
				c.last = wire.Event{Code: -1, Err: g.lost.Error()}
				close(c.done)
				delete(g.calls, id)
			}
			g.mu.Unlock()
			return
		}
		c := g.calls[e.ID]
		if e.Done {
			delete(g.calls, e.ID)
		}
		g.mu.Unlock()
		if c == nil {
			continue
		}
		c.mu.Lock()
		c.output = append(c.output, e.Data...)
		c.mu.Unlock()
		if e.Done {
			c.last = e
			close(c.done)
		}
	}
}

// ask sends a request that has an answer.
func (g *Guest) ask(r wire.Request) (uint32, *call, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.lost != nil {
		return 0, nil, g.lost
	}
	g.next++
	r.ID = g.next
	c := &call{done: make(chan struct{})}
	g.calls[r.ID] = c
	if err := g.out.Encode(r); err != nil {
		g.lost = fmt.Errorf("the guest is gone: %w", err)
	}
	return r.ID, c, g.lost
}

// crashed reports whether the guest has ended or its kernel has crashed.
func (g *Guest) crashed() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.lost != nil
}

func (g *Guest) tell(r wire.Request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.lost == nil {
		_ = g.out.Encode(r) // a guest that is gone needs no signals
	}
}

func (c *call) result(op string) error {
	if c.last.Err == "" && c.last.Code == 0 {
		return nil
	}
	return &Error{Op: op, Code: c.last.Code, Errno: syscall.Errno(c.last.Errno), Why: c.last.Err, Output: c.text()}
}

// Try runs a command and returns its output, both streams. The error is an
// *Error. When ctx ends the command is killed.
func (g *Guest) Try(ctx context.Context, argv ...string) (string, error) {
	p, err := g.spawn(argv)
	if err != nil {
		return "", err
	}
	select {
	case <-p.call.done:
	case <-ctx.Done():
		p.signal(syscall.SIGKILL)
		select {
		case <-p.call.done:
		case <-time.After(5 * time.Second): // it hangs in the kernel
		}
		return p.Output(), fmt.Errorf("%s: %w\n%s", p.name, ctx.Err(), tail(p.Output(), 40))
	}
	return p.Output(), p.call.result(p.name)
}

func (g *Guest) try(argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), runLimit)
	defer cancel()
	return g.Try(ctx, argv...)
}

// Run runs a command and returns its output. One that fails, or takes longer
// than three minutes, fails the test.
func (g *Guest) Run(t testing.TB, argv ...string) string {
	t.Helper()
	out, err := g.try(argv...)
	if err != nil {
		t.Fatalf("in the guest: %v\nkernel log:\n%s", err, tail(g.KernelLog(), 25))
	}
	return out
}

// Write writes data to a file in one system call; the error wraps the errno.
func (g *Guest) Write(path, data string) error {
	return g.file(wire.Request{Op: wire.Write, Path: path, Data: []byte(data)}, "write "+path, nil)
}

// Read reads a file; the error wraps the errno.
func (g *Guest) Read(path string) (s string, err error) {
	err = g.file(wire.Request{Op: wire.Read, Path: path}, "read "+path, &s)
	return s, err
}

func (g *Guest) file(r wire.Request, op string, data *string) error {
	_, c, err := g.ask(r)
	if err != nil {
		return err
	}
	select {
	case <-c.done:
	case <-time.After(runLimit):
		return fmt.Errorf("%s: %w", op, context.DeadlineExceeded)
	}
	if data != nil {
		*data = c.text()
	}
	return c.result(op)
}

// WriteFile is Write that fails the test.
func (g *Guest) WriteFile(t testing.TB, path, data string) {
	t.Helper()
	if err := g.Write(path, data); err != nil {
		t.Fatalf("in the guest: %v (%q)\nkernel log:\n%s", err, data, tail(g.KernelLog(), 25))
	}
}

// ReadFile is Read that fails the test.
func (g *Guest) ReadFile(t testing.TB, path string) string {
	t.Helper()
	s, err := g.Read(path)
	if err != nil {
		t.Fatalf("in the guest: %v", err)
	}
	return s
}

// Process is a command that runs in the guest meanwhile.
type Process struct {
	g    *Guest
	id   uint32
	name string
	call *call
}

func (g *Guest) spawn(argv []string) (*Process, error) {
	if len(argv) == 0 {
		return nil, errors.New("no command")
	}
	id, c, err := g.ask(wire.Request{Op: wire.Start, Argv: argv})
	return &Process{g: g, id: id, name: argv[0], call: c}, err
}

// Start runs a command in the background. It is killed at the end of the test.
func (g *Guest) Start(t testing.TB, argv ...string) *Process {
	t.Helper()
	p, err := g.spawn(argv)
	if err != nil {
		t.Fatalf("in the guest: %v", err)
	}
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("output of %s in the guest:\n%s", p.name, tail(p.Output(), 60))
		}
	})
	return p
}

func (p *Process) signal(s syscall.Signal) {
	p.g.tell(wire.Request{ID: p.id, Op: wire.Signal, Number: int(s)})
}

// Wait waits for the end of the process, at most for limit.
func (p *Process) Wait(limit time.Duration) error {
	select {
	case <-p.call.done:
		return p.call.result(p.name)
	case <-time.After(limit):
		return fmt.Errorf("%s: %w\n%s", p.name, context.DeadlineExceeded, tail(p.Output(), 40))
	}
}

// Terminate asks it to end, by SIGTERM.
func (p *Process) Terminate() { p.signal(syscall.SIGTERM) }

// Stop ends it by SIGTERM, after half a minute by SIGKILL.
func (p *Process) Stop() {
	p.Terminate()
	if errors.Is(p.Wait(30*time.Second), context.DeadlineExceeded) {
		p.Kill()
	}
}

// Kill ends it and its children by SIGKILL.
func (p *Process) Kill() {
	p.signal(syscall.SIGKILL)
	_ = p.Wait(10 * time.Second) // one that hangs in the kernel ends with the guest
}

// Output returns the output so far.
func (p *Process) Output() string { return p.call.text() }
