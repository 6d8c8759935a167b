package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/selfstats"
)

// A worker is this program again, as a load generator. It takes one order per
// line of its standard input and answers each with a line; the end of its
// input ends it.

// order asks for one run, or, without a workload, to fill the devices.
type order struct {
	Workload *workload
	Duration time.Duration
	Verify   bool // write and read back as the workload would, and compare
	// Stick, if positive, starts that many writes to the last device instead and does
	// not wait for them; if negative, it waits for them. For kind "rnbd".
	Stick int
}

type answer struct {
	Sample sample
	Error  string
}

// loader makes load in the worker's process.
type loader interface {
	run(o order) (sample, error)
	fill() error
	close() error
}

// workerConfig is the command line of a worker.
type workerConfig struct {
	kind    string   // "rnbd": the client library; "nbd": test/nbdclient; "plugin": a storage plugin's ring
	addrs   []string // of more than one path, if of kind "rnbd"
	device  string   // of kind "plugin": a file or device of this machine; of kind "rnbd": a name, or several with commas between
	plugin  string   // of kind "plugin": its program
	devices int      // of kind "rnbd"; 0: one, else device0, device1 and so on
	fabric  string   // of kind "rnbd"; empty: iwarp
	crc     bool     // of iwarp
	prefix  []string // a program that runs the worker
}

// flags are the command line of the worker.
func (c workerConfig) flags() []string {
	return []string{"-worker", c.kind, "-worker-addr", strings.Join(c.addrs, ","), "-worker-device", c.device,
		fmt.Sprintf("-worker-devices=%d", c.devices), "-worker-plugin", c.plugin, "-worker-fabric", c.fabric, fmt.Sprintf("-worker-crc=%t", c.crc)}
}

func (c workerConfig) open(ctx context.Context) (loader, error) {
	switch c.kind {
	case "rnbd":
		return openLibrary(ctx, c)
	case "nbd":
		return openNBD(ctx, c)
	case "plugin":
		return openRing(ctx, c)
	}
	return nil, fmt.Errorf("unknown kind of worker %q", c.kind)
}

// work is the main function of a worker.
func work(ctx context.Context, c workerConfig, in io.Reader, out io.Writer) error {
	selfstats.Start(slog.Default())
	l, err := c.open(ctx)
	enc := json.NewEncoder(out)
	if err != nil {
		return errors.Join(err, enc.Encode(answer{Error: err.Error()}))
	}
	if err := enc.Encode(answer{}); err != nil {
		return err
	}
	for dec := json.NewDecoder(in); ; {
		var o order
		if err := dec.Decode(&o); err == io.EOF {
			return l.close()
		} else if err != nil {
			return err
		}
		var a answer
		switch {
		case o.Stick != 0:
			err = l.(*library).stick(o.Stick)
		case o.Workload == nil:
			err = l.fill()
		default:
			a.Sample, err = l.run(o)
		}
		if err != nil {
			a.Error = err.Error()
		}
		if err := enc.Encode(a); err != nil {
			return err
		}
	}
}

// worker is the parent's side.
type worker struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// startWorker runs this program, exe, as a worker.
func startWorker(exe string, c workerConfig, env ...string) (*worker, error) {
	argv := slices.Concat(c.prefix, []string{exe}, c.flags())
	w := &worker{cmd: exec.Command(argv[0], argv[1:]...)}
	w.cmd.Stderr = os.Stderr
	w.cmd.Env = append(os.Environ(), env...)
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // ^C is for the parent
	var err error
	if w.in, err = w.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	w.out = bufio.NewReader(out)
	if err := w.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start worker: %w", err)
	}
	if _, err := w.answer(); err != nil {
		w.stop()
		return nil, err
	}
	return w, nil
}

func (w *worker) pid() int { return w.cmd.Process.Pid }

func (w *worker) answer() (sample, error) {
	line, err := w.out.ReadBytes('\n')
	if err != nil {
		return sample{}, fmt.Errorf("worker: %w", err)
	}
	var a answer
	if err := json.Unmarshal(line, &a); err != nil {
		return sample{}, fmt.Errorf("worker: %w", err)
	}
	if a.Error != "" {
		return sample{}, fmt.Errorf("worker: %s", a.Error)
	}
	return a.Sample, nil
}

func (w *worker) do(o order) (sample, error) {
	if err := json.NewEncoder(w.in).Encode(o); err != nil {
		return sample{}, fmt.Errorf("worker: %w", err)
	}
	return w.answer()
}

// run has the worker do one run.
func (w *worker) run(l workload, d time.Duration) (sample, error) {
	before := clockOf(w.pid())
	s, err := w.do(order{Workload: &l, Duration: d})
	s.ClientCPU = clockOf(w.pid()) - before
	s.processes = s.ClientCPU
	return s, err
}

// verify has it write and read back as l would.
func (w *worker) verify(l workload, d time.Duration) error {
	_, err := w.do(order{Workload: &l, Duration: d, Verify: true})
	return err
}

// stick has it start n writes to the last device, or wait for them; see order.
func (w *worker) stick(n int) error {
	_, err := w.do(order{Stick: n})
	return err
}

func (w *worker) fill() error {
	_, err := w.do(order{})
	return err
}

// stop ends the worker, by force if it does not want to.
func (w *worker) stop() {
	w.in.Close()
	force := time.AfterFunc(5*time.Second, func() { w.cmd.Process.Kill() })
	defer force.Stop()
	w.cmd.Wait()
}
