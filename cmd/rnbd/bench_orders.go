package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
)

// order is one line of --orders.
type order struct {
	line       int
	devices    []string // of the command line; none: all
	options    benchOptions
	background bool
}

// parseOrder reads a line. write is that of the command line.
func parseOrder(line int, text string, write bool) (*order, error) {
	o := &order{line: line, options: benchOptions{write: write}}
	text, o.background = strings.CutSuffix(strings.TrimSpace(text), "&")
	f := pflag.NewFlagSet("order", pflag.ContinueOnError)
	f.SetOutput(io.Discard)
	o.options.loadOptions.register(f)
	if err := f.Parse(strings.Fields(text)); err != nil {
		return o, err
	}
	o.devices = f.Args()
	return o, nil
}

// follower carries out orders.
type follower struct {
	c       *call
	targets *benchTargets
	write   bool
	beside  sync.WaitGroup // orders in the background
	mu      sync.Mutex     // of the output
}

// follow carries out the orders of a file, one after the other. It ends with the
// file, or with an interrupt.
func (o *benchOptions) follow(c *call, targets *benchTargets) error {
	in := io.NopCloser(c.cmd.InOrStdin())
	if o.orders != "-" {
		var err error
		if in, err = os.Open(o.orders); err != nil {
			return err
		}
	}
	defer in.Close()
	f := &follower{c: c, targets: targets, write: o.write}
	defer f.beside.Wait()
	if err := f.answer(0, newBenchRun(&benchOptions{}, targets), nil); err != nil {
		return err
	}
	lines, over := readLines(in), c.cmd.Context().Done()
	for n := 1; ; n++ {
		select {
		case <-over:
			return c.cmd.Context().Err()
		case line, ok := <-lines:
			if !ok {
				return nil
			}
			if err := f.do(n, line); err != nil {
				return err
			}
		}
	}
}

// readLines returns the lines of in. Its goroutine ends with in, or with the
// process.
func readLines(in io.Reader) <-chan string {
	lines := make(chan string)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(in); s.Scan(); {
			lines <- s.Text()
		}
	}()
	return lines
}

// do carries out one line. The error of an order is its answer; an error of do
// says that answers cannot be written.
func (f *follower) do(n int, text string) error {
	if text = strings.TrimSpace(text); text == "" || text[0] == '#' {
		return nil
	}
	o, err := parseOrder(n, text, f.write)
	if err != nil {
		return f.answer(n, nil, err)
	}
	if o.background {
		f.beside.Go(func() { _ = f.run(o) }) // the next answer finds the output closed, too
		return nil
	}
	return f.run(o)
}

// run measures and answers.
func (f *follower) run(o *order) error {
	r, err := f.measure(f.c.cmd.Context(), o)
	return f.answer(o.line, r, err)
}

func (f *follower) measure(ctx context.Context, o *order) (*benchRun, error) {
	targets, err := f.targets.choose(o.devices)
	if err != nil {
		return nil, err
	}
	ws, size, err := o.options.plan(len(targets.list))
	if err != nil {
		return nil, err
	}
	if err := errors.Join(o.options.prepare(targets, ws, size), o.options.fillAll(ctx, targets)); err != nil {
		return nil, err
	}
	r := newBenchRun(&o.options, targets)
	return r, o.options.measure(ctx, r, ws, newProgress(io.Discard, len(ws), o.options.time))
}

// choose returns copies of the targets with these names, in their order; of all
// if there are none.
func (b *benchTargets) choose(names []string) (*benchTargets, error) {
	out := &benchTargets{}
	for _, t := range b.list {
		if len(names) == 0 {
			own := *t
			out.list = append(out.list, &own)
		}
	}
	for _, name := range names {
		t, err := b.named(name)
		if err != nil {
			return nil, err
		}
		own := *t
		out.list = append(out.list, &own)
	}
	return out, nil
}

func (b *benchTargets) named(name string) (*benchTarget, error) {
	for _, t := range b.list {
		if t.Name == name {
			return t, nil
		}
	}
	return nil, fmt.Errorf("%s is none of the devices of the command line", name)
}

// answer prints a line of JSON: the number of the order's line, then what a
// measurement prints as JSON, or the error.
func (f *follower) answer(line int, r *benchRun, err error) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, `{"line":%d`, line)
	switch {
	case err != nil:
		text, _ := json.Marshal(err.Error()) // of a string
		fmt.Fprintf(&b, `,"error":%s}`, text)
	default:
		var doc, plain bytes.Buffer
		if err := report.Show(&doc, report.Options{Format: "json"}, r.table(benchFields)); err != nil {
			return err
		}
		if err := json.Compact(&plain, doc.Bytes()); err != nil {
			return err
		}
		b.WriteByte(',')
		b.Write(bytes.TrimSpace(plain.Bytes())[1:]) // behind its opening brace
	}
	b.WriteByte('\n')
	f.mu.Lock()
	defer f.mu.Unlock()
	_, err = f.c.cmd.OutOrStdout().Write(b.Bytes())
	return err
}
