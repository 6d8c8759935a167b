package main

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/spell"
)

// listFlags are those of lists of one kind of objects.
func listFlags(f *pflag.FlagSet) {
	f.StringArray("filter", nil, "FIELD=PATTERN or FIELD!=PATTERN: only what fits, * and ? stand for any letters; repeatable, all have to fit")
	f.String("sort", "", "field to order by, with - before it the other way round")
	watchFlag(f)
}

func watchFlag(f *pflag.FlagSet) {
	f.DurationP("watch", "w", 0, "print it again and again, with pauses of that length, until it is interrupted")
	f.Lookup("watch").NoOptDefVal = "2s"
}

// watchPause is the pause of --watch, 0 without it.
func watchPause(cmd *cobra.Command) (time.Duration, error) {
	f := cmd.Flags().Lookup("watch")
	if f == nil || !f.Changed {
		return 0, nil
	}
	d, err := cmd.Flags().GetDuration("watch")
	if err == nil && d <= 0 {
		err = usageError{fmt.Errorf("--watch=%s: write a pause, as 2s", d)}
	}
	return d, err
}

// watch runs show until a signal ends the command. That is no error.
func watch(cmd *cobra.Command, pause time.Duration, show func() error) error {
	signaled := cmd.Context()
	for first := true; ; first = false {
		switch {
		case terminal(cmd.OutOrStdout()) != nil:
			fmt.Fprint(cmd.OutOrStdout(), "\x1b[H\x1b[2J") // home, clear
		case !first:
			fmt.Fprintln(cmd.OutOrStdout())
		}
		cmd.SetContext(signaled)
		if err := show(); err != nil && signaled.Err() == nil {
			return err
		}
		select {
		case <-signaled.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// terminal returns the file that w is if it is a terminal, else nil.
func terminal(w any) *os.File {
	f, ok := w.(*os.File)
	if !ok {
		return nil
	}
	if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err != nil {
		return nil
	}
	return f
}

// screen sets the width and the colours of tables: those of the terminal that
// they go to. COLUMNS in the environment counts first, also where there is no
// terminal. Without a width no person is expected to read. NO_COLOR is that of no-color.org.
func screen(cmd *cobra.Command, o *report.Options) {
	f := terminal(cmd.OutOrStdout())
	if f != nil {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil {
			o.Width = int(size.Col)
		}
		o.Color = os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	}
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n > 0 {
		o.Width = n
	}
	o.Screen = o.Width > 0
	if o.Format == report.Wide {
		o.Width = 0
	}
}

// keepNamed removes from inv what has none of the names that c lists, if c lists names:
// its own, that on the server, or that of its session.
func (c *call) keepNamed(inv *inventory) error {
	if len(c.args) == 0 {
		return nil
	}
	found := map[string]bool{}
	named := func(names ...string) bool {
		some := false
		for _, arg := range c.args {
			if arg != "" && slices.Contains(names, arg) {
				found[arg], some = true, true
			}
		}
		return some
	}
	inv.devices = slices.DeleteFunc(inv.devices, func(d device) bool { return !named(d.name, d.path, d.node, d.session) })
	inv.sessions = slices.DeleteFunc(inv.sessions, func(s session) bool { return !named(s.Name, s.Hostname) })
	inv.paths = slices.DeleteFunc(inv.paths, func(p transportPath) bool {
		return !named(p.key(), p.Name, p.Session, p.Src, p.Dst, hostOf(p.Src), hostOf(p.Dst))
	})
	for _, arg := range c.args {
		if !found[arg] {
			return usageError{fmt.Errorf("%s does not take %q, which is no option and no name of what there is%s", c.name, arg, spell.Suggest(arg, c.knownWords()))}
		}
	}
	return nil
}

// arrange filters and orders objects by the flags of a list.
func arrange[T any](c *call, fields []report.Field[T], objects []T) ([]T, error) {
	if c.cmd.Flags().Lookup("filter") == nil {
		return objects, nil
	}
	conditions, err := c.cmd.Flags().GetStringArray("filter")
	if err == nil {
		objects, err = report.Filter(fields, objects, conditions)
	}
	if err == nil {
		objects, err = report.Sort(fields, objects, c.text("sort"))
	}
	if err != nil {
		return nil, usageError{err}
	}
	return objects, nil
}
