package plugin

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/go-plugin/runner"
	"golang.org/x/sys/unix"
)

// child runs the plugin's executable for go-plugin, and keeps facts that
// go-plugin does not report: the exit status at once, the text of the
// handshake, and the last lines of stderr.
type child struct {
	path   string
	cmd    *exec.Cmd
	stdout *os.File
	stderr *os.File
	ended  chan struct{} // closed when reaped
	heard  chan struct{} // closed when all of stderr is read
	status error         // of cmd.Wait; read after ended

	once  sync.Once
	mu    sync.Mutex
	hello bytes.Buffer // first bytes of stdout

	mute    atomic.Bool // stdout is closed: it is about to end
	killed  atomic.Bool // Kill was called while it lived
	words   *lastWords
	started func(pid int)
}

// newChild prepares path to run with the environment that go-plugin has made.
// executable is the file to execute: path, unless a checksum pinned an open
// file.
func newChild(path, executable string, args, env []string, control *os.File) *child {
	cmd := exec.Command(executable, args...)
	cmd.Args[0] = path
	cmd.Env = env
	cmd.ExtraFiles = []*os.File{control} // descriptor 3
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return &child{path: path, cmd: cmd, ended: make(chan struct{}), heard: make(chan struct{})}
}

// Start runs the plugin. Stdin is /dev/null.
func (p *child) Start(context.Context) error {
	out, outW, err := os.Pipe()
	if err != nil {
		return err
	}
	errR, errW, err := os.Pipe()
	if err != nil {
		_, _ = out.Close(), outW.Close()
		return err
	}
	p.stdout, p.stderr = out, errR
	p.cmd.Stdout, p.cmd.Stderr = outW, errW
	err = p.cmd.Start()
	_, _ = outW.Close(), errW.Close()
	if err != nil {
		_, _ = out.Close(), errR.Close()
		return err
	}
	p.started(p.cmd.Process.Pid)
	go func() {
		p.status = p.cmd.Wait()
		close(p.ended)
	}()
	return nil
}

func (p *child) Wait(context.Context) error {
	<-p.ended
	_, _ = p.stdout.Close(), p.stderr.Close()
	return p.status
}

// Kill is go-plugin's, when a handshake fails.
func (p *child) Kill(context.Context) error {
	if p.cmd.Process == nil {
		return nil
	}
	if p.mute.Load() {
		select {
		case <-p.ended:
		case <-time.After(muteGrace):
		}
	}
	return p.kill()
}

// kill waits for nothing.
func (p *child) kill() error {
	select {
	case <-p.ended:
		return nil
	default:
	}
	p.killed.Store(true)
	err := p.cmd.Process.Kill()
	if err == os.ErrProcessDone {
		return nil
	}
	return err
}

// muteGrace lets a process that ends by itself say why.
const muteGrace = 2 * time.Second

func (p *child) pid() int {
	if p.cmd.Process == nil {
		return 0
	}
	return p.cmd.Process.Pid
}

func (p *child) ID() string {
	if p.pid() == 0 {
		return ""
	}
	return strconv.Itoa(p.pid())
}

func (p *child) Name() string                    { return p.path }
func (p *child) Diagnose(context.Context) string { return "" }
func (p *child) Stdout() io.ReadCloser           { return tee{p.stdout, p.hear} }
func (p *child) Stderr() io.ReadCloser           { return tee{p.stderr, p.listen} }

func (p *child) PluginToHost(n, a string) (string, string, error) { return n, a, nil }
func (p *child) HostToPlugin(n, a string) (string, string, error) { return n, a, nil }

var _ runner.Runner = (*child)(nil)

// tee passes the bytes that are read to see.
type tee struct {
	*os.File
	see func([]byte, error)
}

func (t tee) Read(b []byte) (int, error) {
	n, err := t.File.Read(b)
	t.see(b[:n], err)
	return n, err
}

// listen is called by one goroutine, up to the first error.
func (p *child) listen(_ []byte, err error) {
	if err != nil {
		p.once.Do(func() { close(p.heard) })
	}
}

// hearOut waits for the last words, but not long: whoever has inherited stderr
// keeps it open.
func (p *child) hearOut(most time.Duration) {
	select {
	case <-p.heard:
	case <-time.After(most):
	}
}

const helloSize = 4096

func (p *child) hear(b []byte, err error) {
	if err != nil {
		p.mute.Store(true)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hello.Write(b[:min(len(b), helloSize-p.hello.Len())])
}

// said is the first line of stdout, if it printed anything there.
func (p *child) said() (string, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	line, _, _ := strings.Cut(p.hello.String(), "\n")
	return strings.TrimSpace(line), p.hello.Len() > 0
}

// protocol is the application protocol that the plugin named in its handshake.
func (p *child) protocol() (int, bool) {
	hello, _ := p.said()
	parts := strings.Split(hello, "|")
	if len(parts) < 4 {
		return 0, false
	}
	v, err := strconv.Atoi(parts[1])
	return v, err == nil
}

// lastWords keeps the line of stderr that says most about an end: where a Go
// program panicked, else its last line.
type lastWords struct {
	mu    sync.Mutex
	part  []byte
	line  string
	panic bool
}

func (w *lastWords) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.part = append(w.part, p...)
	for {
		i := bytes.IndexByte(w.part, '\n')
		if i < 0 {
			break
		}
		w.see(strings.TrimSpace(string(w.part[:i])))
		w.part = w.part[i+1:]
	}
	if len(w.part) > helloSize {
		w.part = nil
	}
	return len(p), nil
}

func (w *lastWords) see(line string) {
	if line == "" || w.panic {
		return
	}
	w.panic = strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ")
	w.line = line
}

// String is empty or `; it said: "..."`.
func (w *lastWords) String() string {
	if w == nil {
		return ""
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.line == "" {
		return ""
	}
	return fmt.Sprintf("; it said: %q", w.line)
}

// pin opens an executable in a way that survives exec: by a number that the
// child's set-up does not use.
func pin(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	n, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 100)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(n), path), nil
}
