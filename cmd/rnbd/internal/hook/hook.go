// Package hook runs a program of the operator for each event of a daemon.
package hook

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
)

// limit bounds one run of the program.
const limit = 30 * time.Second

// outputLimit is how many bytes of the program's output go to the log.
const outputLimit = 1024

// Hook runs one program, once for each event and one at a time. While it runs,
// events wait in the journal; those that the journal does not keep are left out, and
// the log says how many.
type Hook struct {
	Program string // absolute path
	Daemon  string // "client" or "server"
	Journal *journal.Journal
	Log     *slog.Logger
	Limit   time.Duration // of one run; 0: 30 s
}

// Check returns an error if others than root and the daemon's user could have
// written the program.
func Check(program string) error {
	if !filepath.IsAbs(program) {
		return fmt.Errorf("event hook %q: write its absolute path: %w", program, syscall.EINVAL)
	}
	st, err := os.Stat(program)
	if err != nil {
		return fmt.Errorf("event hook: %w", err)
	}
	owner := st.Sys().(*syscall.Stat_t).Uid
	switch {
	case !st.Mode().IsRegular() || st.Mode().Perm()&0o111 == 0:
		return fmt.Errorf("event hook %s is no program: %w", program, syscall.EACCES)
	case owner != 0 && int(owner) != os.Geteuid():
		return fmt.Errorf("event hook %s belongs to user %d: give it to root: %w", program, owner, fs.ErrPermission)
	case st.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("event hook %s may be written by others: chmod go-w: %w", program, fs.ErrPermission)
	}
	return nil
}

// Run runs the program for each event from now on until ctx ends. The program that
// runs then is killed.
func (h *Hook) Run(ctx context.Context) {
	for seen := uint64(0); ; {
		events := h.Journal.Await(ctx, seen)
		if len(events) == 0 {
			return
		}
		if first := events[0].Number; seen > 0 && first > seen+1 {
			h.Log.Warn("events were too many for the event hook, which did not see some of them", "path", h.Program, "missed", first-seen-1)
		}
		for _, e := range events {
			if seen = e.Number; ctx.Err() != nil {
				return
			}
			if err := h.once(ctx, e); err != nil && ctx.Err() == nil {
				h.Log.Warn("event hook failed", "path", h.Program, "number", e.Number, "err", err)
			}
			if h.Journal.Last()-seen >= journal.DefaultSize { // ask for what is kept
				break
			}
		}
	}
}

// once runs the program for e and waits for its end.
func (h *Hook) once(ctx context.Context, e journal.Event) error {
	ctx, cancel := context.WithTimeoutCause(ctx, h.limit(), fmt.Errorf("it did not end within %s and was killed: %w", h.limit(), syscall.ETIMEDOUT))
	defer cancel()
	c := exec.CommandContext(ctx, h.Program)
	c.Env = append(os.Environ(), h.environment(e)...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) }
	c.WaitDelay = time.Second
	out := &head{}
	c.Stdout, c.Stderr = out, out
	err := c.Run()
	if err == nil || ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if out.Len() > 0 {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(out.String()))
	}
	return err
}

func (h *Hook) limit() time.Duration {
	if h.Limit > 0 {
		return h.Limit
	}
	return limit
}

// environment describes e in variables, with the spellings of names.
func (h *Hook) environment(e journal.Event) []string {
	vars := []struct{ name, value string }{
		{"DAEMON", h.Daemon}, {"NUMBER", fmt.Sprint(e.Number)}, {"TIME", e.Time.UTC().Format(time.RFC3339Nano)}, {"KIND", string(e.Kind)},
		{"SESSION", names.Spell(e.Session)}, {"PATH", e.Path}, {"DEVICE", names.Spell(e.Device)}, {"PLUGIN", e.Plugin}, {"FROM", e.From}, {"TO", e.To}, {"WHY", names.Text(e.Why)},
	}
	var out []string
	for _, v := range vars {
		out = append(out, "RNBD_EVENT_"+v.name+"="+v.value)
	}
	return out
}

// head keeps the first outputLimit bytes written to it.
type head struct{ bytes.Buffer }

func (h *head) Write(b []byte) (int, error) {
	if room := outputLimit - h.Len(); room > 0 {
		h.Buffer.Write(b[:min(room, len(b))])
	}
	return len(b), nil
}
