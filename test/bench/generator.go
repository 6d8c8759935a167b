package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// generator is a process of `rnbd bench` that makes load on its devices as it is
// ordered: it takes one order per line and answers each with a line of JSON.
// The end of its input ends it.
type generator struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Reader
	devices []string
	cipher  string           // of TLS, with its version; empty: none
	lines   int              // orders so far
	early   map[int]*figures // answers to other orders than the one waited for
}

// figures are an answer.
type figures struct {
	Line    int
	Error   string
	Devices []struct{ TLS string }
	Results []struct {
		Elapsed, CPU, Mean, P50, P99 float64 // ns
		Requests, Bytes              uint64
	}
}

// generatorConfig is the command line of a generator.
type generatorConfig struct {
	devices []string // their names
	args    []string // of `rnbd bench`, besides
	prefix  []string // a program that runs it
	program []string // another program that takes such orders, with its arguments; nil: `rnbd bench`
}

// library has the client library in the generator's process use devices of a server
// with these addresses.
func library(addrs []string, crc bool, devices ...string) generatorConfig {
	c := generatorConfig{devices: devices, args: []string{crcFlag(crc)}}
	for _, a := range addrs {
		c.args = append(c.args, "--server", a)
	}
	return c
}

// numbered returns the names prefix0, prefix1 and so on.
func numbered(prefix string, n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprint(prefix, i))
	}
	return names
}

// opening is the longest time for all devices to open.
const opening = time.Minute

// startGenerator returns when the devices are open.
func startGenerator(c generatorConfig, env ...string) (*generator, error) {
	argv, err := c.argv()
	if err != nil {
		return nil, err
	}
	g := &generator{cmd: exec.Command(argv[0], argv[1:]...), devices: c.devices, early: map[int]*figures{}}
	g.cmd.Stderr = os.Stderr
	g.cmd.Env = append(os.Environ(), env...)
	g.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // ^C is for the parent
	if g.in, err = g.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := g.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	g.out = bufio.NewReader(out)
	if err := g.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start rnbd bench: %w", err)
	}
	opened, err := g.answer(0)
	if err != nil {
		g.stop()
		return nil, err
	}
	if len(opened.Devices) > 0 {
		g.cipher = opened.Devices[0].TLS
	}
	return g, nil
}

func (c generatorConfig) argv() ([]string, error) {
	if c.program != nil {
		return c.program, nil
	}
	bin, err := lab.Bin()
	return slices.Concat(c.prefix, []string{filepath.Join(bin, "rnbd"), "bench", "--write", "--yes", "--orders", "-", "--timeout", opening.String()}, c.args, c.devices), err
}

func (g *generator) pid() int { return g.cmd.Process.Pid }

// order sends a line and returns its number.
func (g *generator) order(words ...string) (int, error) {
	g.lines++
	if _, err := fmt.Fprintln(g.in, strings.Join(words, " ")); err != nil {
		return 0, fmt.Errorf("rnbd bench: %w", err)
	}
	return g.lines, nil
}

// answer waits for the answer to an order.
func (g *generator) answer(line int) (*figures, error) {
	for g.early[line] == nil {
		text, err := g.out.ReadBytes('\n')
		if err != nil {
			return nil, fmt.Errorf("rnbd bench: %w", err)
		}
		var f figures
		if err := json.Unmarshal(text, &f); err != nil {
			return nil, fmt.Errorf("rnbd bench: %w: %s", err, text)
		}
		g.early[f.Line] = &f
	}
	f := g.early[line]
	delete(g.early, line)
	if f.Error != "" {
		return nil, fmt.Errorf("rnbd bench: %s", f.Error)
	}
	return f, nil
}

func (g *generator) do(words ...string) (*figures, error) {
	line, err := g.order(words...)
	if err != nil {
		return nil, err
	}
	return g.answer(line)
}

// words are the order for w, by so many in flight of each job.
func (g *generator) words(w workload, rw string, depth int, d time.Duration) ([]string, error) {
	used, jobs := g.devices[:1], w.Jobs
	if w.Devices > 0 {
		if w.Devices > len(g.devices) {
			return nil, fmt.Errorf("%s: there are %d devices only", w.Name, len(g.devices))
		}
		used, jobs = g.devices[:w.Devices], w.Jobs/w.Devices
	}
	return append(slices.Clone(used), "--rw", rw, fmt.Sprintf("--bs=%d", w.Block), fmt.Sprintf("--depth=%d", depth),
		fmt.Sprintf("--jobs=%d", jobs), fmt.Sprintf("--time=%v", d)), nil
}

// run has it make one run.
func (g *generator) run(w workload, d time.Duration) (sample, error) {
	words, err := g.words(w, w.fioMode(), w.Depth, d)
	if err != nil {
		return sample{}, err
	}
	before := clockOf(g.pid())
	f, err := g.do(words...)
	if err != nil {
		return sample{}, err
	}
	s, err := f.sample()
	s.processes = clockOf(g.pid()) - before
	return s, err
}

// sample is the one result of an order that only reads or only writes.
func (f *figures) sample() (sample, error) {
	if len(f.Results) != 1 {
		return sample{}, fmt.Errorf("rnbd bench: %d results, want one", len(f.Results))
	}
	r := f.Results[0]
	return sample{IOs: r.Requests, Bytes: r.Bytes, Elapsed: r.Elapsed / 1e9, ClientCPU: r.CPU / 1e9,
		Mean: r.Mean / 1e3, P50: r.P50 / 1e3, P99: r.P99 / 1e3}, nil
}

// verify has it write and read back, with requests of the size and number of w, and
// compare. size is that of the device. The part of it that is used is small, so that
// each block is written and read many times.
func (g *generator) verify(w workload, size int64, d time.Duration) error {
	jobs := w.Jobs / max(w.Devices, 1)
	depth := min(w.Depth, int(size)/w.Block/jobs/roomOfVerify)
	words, err := g.words(w, "randrw", depth, d)
	if err != nil {
		return err
	}
	_, err = g.do(append(words, "--verify", fmt.Sprintf("--size=%d", roomOfVerify*depth*jobs*w.Block))...)
	return err
}

// roomOfVerify is the number of blocks that `rnbd bench --verify` wants for each
// request in flight.
const roomOfVerify = 4

// fill has it write every byte of all devices once.
func (g *generator) fill() error {
	_, err := g.do("--fill", "--rw", "randwrite", "--depth=1", "--requests=1")
	return err
}

// stick starts n writes to the last device and does not wait for them. It returns a
// function that does.
func (g *generator) stick(n int) (wait func() error, err error) {
	depth := fmt.Sprint(n)
	line, err := g.order(g.devices[len(g.devices)-1], "--rw=write", "--bs=4K", "--depth", depth, "--requests", depth, "--time=1h", "&")
	return func() error {
		_, err := g.answer(line)
		return err
	}, err
}

// stop ends the process, by force if it does not want to.
func (g *generator) stop() {
	err := g.in.Close()
	force := time.AfterFunc(5*time.Second, func() { err = errors.Join(err, g.cmd.Process.Kill()) })
	defer force.Stop()
	g.cmd.Wait()
}
