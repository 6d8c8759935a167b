package main

import (
	"bufio"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm/wire"
)

// agent answers one host.
type agent struct {
	mu        sync.Mutex // of the encoder
	out       *gob.Encoder
	flush     func() error
	procs     map[uint32]*os.Process
	procsLock sync.Mutex
}

func serve() error {
	port, err := openPort()
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(port, 64<<10)
	a := &agent{out: gob.NewEncoder(w), flush: w.Flush, procs: map[uint32]*os.Process{}}
	a.send(wire.Event{})
	in := gob.NewDecoder(bufio.NewReader(port))
	for {
		var r wire.Request
		if err := in.Decode(&r); err != nil {
			return fmt.Errorf("from the host: %w", err)
		}
		switch r.Op {
		case wire.Off:
			return nil
		case wire.Signal:
			a.signal(r)
		case wire.Start:
			a.start(r)
		case wire.Write, wire.Read:
			go a.file(r)
		}
	}
}

// openPort finds the port by its name. The file is not polled: a read blocks
// its thread. That works with every kernel.
func openPort() (*os.File, error) {
	names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
	for _, n := range names {
		b, err := os.ReadFile(n)
		if err == nil && strings.TrimSpace(string(b)) == wire.Port {
			fd, err := syscall.Open("/dev/"+filepath.Base(filepath.Dir(n)), syscall.O_RDWR|syscall.O_CLOEXEC, 0)
			if err != nil {
				return nil, err
			}
			return os.NewFile(uintptr(fd), wire.Port), nil
		}
	}
	return nil, errors.New("there is no port " + wire.Port)
}

func (a *agent) send(e wire.Event) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.out.Encode(e); err == nil {
		_ = a.flush() // a host that is gone ends the guest
	}
}

// done reports the end of a request.
func (a *agent) done(e wire.Event, err error) {
	e.Done = true
	if err != nil {
		e.Err = err.Error()
		var errno syscall.Errno
		if errors.As(err, &errno) {
			e.Errno = int(errno)
		}
	}
	a.send(e)
}

func (a *agent) start(r wire.Request) {
	cmd := exec.Command(r.Argv[0], r.Argv[1:]...)
	cmd.Dir = r.Dir
	cmd.Env = append(os.Environ(), r.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	read, write, err := os.Pipe()
	if err != nil {
		a.done(wire.Event{ID: r.ID, Code: -1}, err)
		return
	}
	cmd.Stdout, cmd.Stderr = write, write
	err = cmd.Start()
	write.Close()
	if err != nil {
		read.Close()
		a.done(wire.Event{ID: r.ID, Code: -1}, err)
		return
	}
	a.procsLock.Lock()
	a.procs[r.ID] = cmd.Process
	a.procsLock.Unlock()
	go a.wait(r.ID, cmd, read)
}

// wait forwards output until the process has ended. Output of children that
// outlive it is dropped.
func (a *agent) wait(id uint32, cmd *exec.Cmd, read *os.File) {
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		buf := make([]byte, 32<<10)
		for {
			n, err := read.Read(buf)
			if n > 0 {
				a.send(wire.Event{ID: id, Data: buf[:n]})
			}
			if err != nil {
				return
			}
		}
	}()
	err := cmd.Wait()
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // its children
	<-copied
	read.Close()
	a.procsLock.Lock()
	delete(a.procs, id)
	a.procsLock.Unlock()
	e := wire.Event{ID: id}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		e.Code, err = exit.ExitCode(), nil
		if ws := exit.Sys().(syscall.WaitStatus); ws.Signaled() {
			e.Code = 128 + int(ws.Signal())
		}
	}
	a.done(e, err)
}

func (a *agent) signal(r wire.Request) {
	a.procsLock.Lock()
	defer a.procsLock.Unlock()
	if p := a.procs[r.ID]; p != nil {
		_ = syscall.Kill(-p.Pid, syscall.Signal(r.Number)) // it may be ending
	}
}

func (a *agent) file(r wire.Request) {
	e := wire.Event{ID: r.ID}
	var err error
	if r.Op == wire.Read {
		e.Data, err = os.ReadFile(r.Path)
	} else {
		err = write(r.Path, r.Data)
	}
	a.done(e, err)
}

// write is one system call, as files of sysfs want it.
func write(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	n, err := f.Write(data)
	if err == nil && n < len(data) {
		err = io.ErrShortWrite
	}
	return err
}
