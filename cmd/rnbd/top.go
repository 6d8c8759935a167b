package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/spell"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/top"
)

func topVerb() *verb {
	return &verb{
		name: "top", on: onBoth, atLength: true, run: showTop, anyFields: topColumns(), interrupted: "nothing was changed",
		flags: func(f *pflag.FlagSet) {
			f.Duration("interval", time.Second, "time between two screens; 100ms at least")
			f.String("view", "devices", "what is shown first: "+strings.Join(top.Views, ", "))
			f.String("sort", "", "column to sort the view by: numbers from the largest on")
			f.String("filter", "", "show only rows with this text, in upper or lower case")
			f.Bool("once", false, "print one screen as plain text, after one interval")
			f.Int("batch", 0, "print as many screens as plain text")
		},
		short: "Watch devices and paths",
		long: `Watch devices and paths on the terminal: requests and bytes per second, latency by
stage, requests under way, failed and hung ones, states. All rates and latencies are
those of the last interval; p50 and p99 are at most 25 % too long.

Keys: d, p, e show devices, paths, events; s sorts by the next column, S by the one
before, r reverses; / filters; space pauses; arrows, page up and page down scroll;
q ends.

What needs attention stands on top, and below its row. Names that do not fit lose
their middle; columns that do not fit are left out. Without a terminal, --once or --batch N prints
plain screens, as wide as COLUMNS in the environment or as they need.`,
		example: "  rnbd top\n  rnbd client top --interval 5s --sort wire_p99\n  rnbd server top --once --view paths",
	}
}

// topColumns are the columns of all views, for completion.
func topColumns() (all []report.Info) {
	for _, view := range top.Views {
		for _, name := range top.Columns(view) {
			if !slices.ContainsFunc(all, func(i report.Info) bool { return i.Name == name }) {
				all = append(all, report.Info{Name: name})
			}
		}
	}
	return all
}

// topOptions are the values of the flags.
type topOptions struct {
	interval time.Duration
	screens  int // in plain text; 0: on the terminal
	state    *top.State
}

func (c *call) topOptions() (o topOptions, err error) {
	f := c.cmd.Flags()
	if o.interval, err = f.GetDuration("interval"); err != nil {
		return o, err
	}
	if o.screens, err = f.GetInt("batch"); err != nil {
		return o, err
	}
	view, column := c.text("view"), c.text("sort")
	columns := top.Columns(view)
	switch {
	case o.interval < 100*time.Millisecond:
		return o, usageError{fmt.Errorf("--interval %s: 100ms is the shortest", o.interval)}
	case o.screens < 0 || f.Changed("batch") && o.screens == 0:
		return o, usageError{fmt.Errorf("--batch %d: write how many screens, 1 or more", o.screens)}
	case !slices.Contains(top.Views, view):
		return o, usageError{fmt.Errorf("--view %q: use one of %s", view, strings.Join(top.Views, ", "))}
	case column != "" && len(columns) == 0:
		return o, usageError{fmt.Errorf("--sort %s: %s stand in the order of their times", column, view)}
	case column != "" && !slices.Contains(columns, column):
		return o, usageError{fmt.Errorf("--sort %q: there is no such column of %s%s; there are %s", column, view, spell.Suggest(column, columns), strings.Join(columns, ", "))}
	case c.Format != "" && c.Format != "table" && c.Format != report.Wide:
		return o, usageError{fmt.Errorf("top as %q: it prints screens only; for programs there are show DEVICE stats and path show PATH stats", c.Format)}
	}
	if c.text("once") == "true" {
		if f.Changed("batch") && o.screens != 1 {
			return o, usageError{errors.New("--once and --batch: use one of them")}
		}
		o.screens = 1
	}
	o.state = top.NewState(view, column, c.text("filter"))
	return o, nil
}

func showTop(c *call) error {
	o, err := c.topOptions()
	if err != nil {
		return err
	}
	in, out := terminal(c.cmd.InOrStdin()), terminal(c.cmd.OutOrStdout())
	if o.screens == 0 && (in == nil || out == nil || os.Getenv("TERM") == "dumb") {
		return usageError{errors.New("top needs a terminal; without one: --once, or --batch and a number of screens")}
	}
	limit, err := c.cmd.Flags().GetDuration("timeout")
	if err != nil {
		return err
	}
	s := &topSampler{cmd: c.cmd, set: c.set, limit: min(limit, topPatience)}
	defer s.close()
	if err := s.open(c.cmd.Context()); err != nil {
		return err
	}
	if o.screens > 0 {
		return s.print(c.cmd.Context(), c.cmd.OutOrStdout(), o, top.Size{Width: c.Width, Color: c.Color})
	}
	return s.watch(c.cmd.Context(), in, out, o, c.Color)
}

// print writes screens as plain text. It fails if a daemon does not answer for the
// last one.
func (t *topSampler) print(ctx context.Context, w io.Writer, o topOptions, size top.Size) error {
	before := t.sample(ctx, o.state.View)
	for n := range o.screens {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(o.interval):
		}
		now := t.sample(ctx, o.state.View)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if o.screens == 1 && t.err != nil {
			return t.err
		}
		lines := top.Screen(o.state, before, now, o.interval, size)
		if n > 0 {
			lines = append([]string{""}, lines...)
		}
		if _, err := io.WriteString(w, strings.Join(lines, "\n")+"\n"); err != nil {
			return err
		}
		before = now
	}
	return t.err
}
