package logs

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
)

// Everything are the options of the handler given to New: it must not drop
// lines itself, and spells names.
var Everything = &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: spell}

// spell spells the names that peers choose as commands take them.
func spell(_ []string, a slog.Attr) slog.Attr {
	switch a.Key {
	case "session", "device", "path", "export", "identity":
		if a.Value.Kind() == slog.KindString {
			a.Value = slog.StringValue(names.Spell(a.Value.String()))
		}
	}
	return a
}

// All stands for every subsystem.
const All = "all"

// Logs are the loggers of one process.
type Logs struct {
	out   slog.Handler
	limit *limiter

	mu         sync.Mutex
	first      slog.Level // of subsystems to come
	subsystems []*subsystem
}

type subsystem struct {
	name  string
	level slog.LevelVar
}

// New makes loggers that write to out.
func New(out slog.Handler, level slog.Level) *Logs {
	return &Logs{out: out, first: level, limit: newLimiter()}
}

// Logger returns the logger of a subsystem. The subsystem exists from its first
// use on. Its lines have the attribute subsystem.
func (l *Logs) Logger(name string) *slog.Logger {
	return slog.New(&handler{out: l.out.WithAttrs([]slog.Attr{slog.String("subsystem", name)}), of: l.get(name), limit: l.limit})
}

func (l *Logs) get(name string) *subsystem {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.subsystems {
		if s.name == name {
			return s
		}
	}
	s := &subsystem{name: name}
	s.level.Set(l.first)
	l.subsystems = append(l.subsystems, s)
	return s
}

// Level is the log level of a subsystem.
type Level struct {
	Subsystem string
	Level     slog.Level
}

// Levels lists the subsystems, by name.
func (l *Logs) Levels() (out []Level) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.subsystems {
		out = append(out, Level{s.name, s.level.Level()})
	}
	slices.SortFunc(out, func(a, b Level) int { return strings.Compare(a.Subsystem, b.Subsystem) })
	return out
}

// Level returns the log level of a subsystem.
func (l *Logs) Level(name string) slog.Level { return l.get(name).level.Level() }

// SetLevel changes the log level of a subsystem, or of All.
func (l *Logs) SetLevel(name string, level slog.Level) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var names []string
	found := false
	for _, s := range l.subsystems {
		if s.name == name || name == All {
			s.level.Set(level)
			found = true
		}
		names = append(names, s.name)
	}
	if !found {
		slices.Sort(names)
		return fmt.Errorf("there is no subsystem %q, but %s and %s: %w", name, strings.Join(names, ", "), All, syscall.ENOENT)
	}
	return nil
}

// ParseLevel reads "debug", "info", "warn" or "error".
func ParseLevel(s string) (slog.Level, error) {
	for _, l := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError} {
		if s == LevelName(l) {
			return l, nil
		}
	}
	return 0, fmt.Errorf("log level %q: use debug, info, warn or error: %w", s, syscall.EINVAL)
}

// LevelName is the inverse of ParseLevel.
func LevelName(l slog.Level) string { return strings.ToLower(l.String()) }

// Flush writes the pending counts of lines left out, and waits until those that
// a timer began to write are written.
func (l *Logs) Flush() { l.limit.flush() }

// handler is one subsystem's way to the output.
type handler struct {
	out   slog.Handler
	of    *subsystem
	limit *limiter
}

func (h *handler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= h.of.level.Level()
}

func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	if !h.limit.allow(h, &r) {
		return nil
	}
	return h.out.Handle(ctx, r)
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &handler{h.out.WithAttrs(attrs), h.of, h.limit}
}

func (h *handler) WithGroup(name string) slog.Handler {
	return &handler{h.out.WithGroup(name), h.of, h.limit}
}
