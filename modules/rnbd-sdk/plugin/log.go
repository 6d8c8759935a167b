package plugin

import (
	"context"
	"io"
	"log"
	"log/slog"
	"math"
	"os"
	"strings"

	hclog "github.com/hashicorp/go-hclog"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
)

// logLevelKey tells a plugin how much its host wants to hear.
const logLevelKey = "RNBD_PLUGIN_LOG"

// newLogger writes lines that the host's end of go-plugin understands: JSON
// with @level, @message and @timestamp.
func newLogger(w io.Writer) *slog.Logger { return slog.New(newLogHandler(w)) }

func newLogHandler(w io.Writer) slog.Handler {
	_ = logLevel.UnmarshalText([]byte(os.Getenv(logLevelKey))) // unset or unknown: info
	return slog.NewJSONHandler(w, &slog.HandlerOptions{Level: &logLevel, ReplaceAttr: hclogKeys})
}

// logLevel is the log level of this process, if it is a plugin.
var logLevel slog.LevelVar

// SetLog changes it on the host's word.
func (s *server) SetLog(_ context.Context, r *pluginpb.SetLogRequest) (*pluginpb.SetLogResponse, error) {
	level, err := logs.ParseLevel(r.GetLevel())
	if err != nil {
		return nil, err
	}
	logLevel.Set(level)
	return &pluginpb.SetLogResponse{}, nil
}

// SetLog changes the plugin's log level. A plugin without that call keeps its
// level: the host does not write lines below its own level anyway.
func (p *Process) SetLog(ctx context.Context, level slog.Level) error {
	_, err := p.plugin.SetLog(ctx, &pluginpb.SetLogRequest{Level: logs.LevelName(level)})
	if status.Code(err) == codes.Unimplemented {
		return nil
	}
	return p.failed("set log level", err)
}

func hclogKeys(groups []string, a slog.Attr) slog.Attr {
	if len(groups) > 0 {
		return a
	}
	switch a.Key {
	case slog.TimeKey:
		return slog.String("@timestamp", a.Value.Time().Format(hclog.TimeFormatJSON))
	case slog.LevelKey:
		l, _ := a.Value.Any().(slog.Level)
		return slog.String("@level", levelName(l))
	case slog.MessageKey:
		return slog.Attr{Key: "@message", Value: a.Value}
	}
	return a
}

func levelName(l slog.Level) string {
	switch {
	case l < slog.LevelInfo:
		return "debug"
	case l < slog.LevelWarn:
		return "info"
	case l < slog.LevelError:
		return "warn"
	}
	return "error"
}

// hclogger lets go-plugin log to slog. The lines of go-plugin itself are of
// interest for debugging only; its named children carry the plugin's lines.
type hclogger struct {
	hclog.Logger // the methods that go-plugin does not use
	to           *slog.Logger
	name         string
	extra        func() []any // attributes that become known later
}

func newHclog(to *slog.Logger, extra func() []any) *hclogger {
	return &hclogger{Logger: hclog.NewNullLogger(), to: to, extra: extra}
}

func (h *hclogger) log(l slog.Level, msg string, args []any) {
	if h.name == "" || h.name == "stdio" {
		l = slog.LevelDebug
	}
	if !h.to.Enabled(context.Background(), l) {
		return
	}
	h.to.Log(context.Background(), l, msg, append(h.extra(), withoutTime(args)...)...)
}

// withoutTime drops the plugin's timestamp: the line gets ours. Numbers are
// whole again: JSON has made them floating point.
func withoutTime(args []any) []any {
	var out []any
	for i := 0; i+1 < len(args); i += 2 {
		if args[i] == "timestamp" {
			continue
		}
		value := args[i+1]
		if f, ok := value.(float64); ok && f == math.Trunc(f) && math.Abs(f) < 1<<53 {
			value = int64(f)
		}
		out = append(out, args[i], value)
	}
	return out
}

func (h *hclogger) Log(l hclog.Level, msg string, args ...any) { h.log(slogLevel(l), msg, args) }
func (h *hclogger) Trace(msg string, args ...any)              { h.log(slog.LevelDebug, msg, args) }
func (h *hclogger) Debug(msg string, args ...any)              { h.log(slog.LevelDebug, msg, args) }
func (h *hclogger) Info(msg string, args ...any)               { h.log(slog.LevelInfo, msg, args) }
func (h *hclogger) Warn(msg string, args ...any)               { h.log(slog.LevelWarn, msg, args) }
func (h *hclogger) Error(msg string, args ...any)              { h.log(slog.LevelError, msg, args) }

func (h *hclogger) Named(name string) hclog.Logger {
	n := *h
	n.name = strings.TrimPrefix(h.name+"."+name, ".")
	return &n
}

func (h *hclogger) With(args ...any) hclog.Logger {
	n := *h
	n.to = h.to.With(args...)
	return &n
}

func (h *hclogger) ResetNamed(name string) hclog.Logger { n := *h; n.name = name; return &n }
func (h *hclogger) Name() string                        { return h.name }
func (h *hclogger) ImpliedArgs() []any                  { return nil }
func (h *hclogger) SetLevel(hclog.Level)                {}
func (h *hclogger) GetLevel() hclog.Level               { return hclog.Trace }
func (h *hclogger) IsTrace() bool                       { return false }
func (h *hclogger) IsDebug() bool                       { return h.to.Enabled(context.Background(), slog.LevelDebug) }
func (h *hclogger) IsInfo() bool                        { return true }
func (h *hclogger) IsWarn() bool                        { return true }
func (h *hclogger) IsError() bool                       { return true }

func (h *hclogger) StandardLogger(*hclog.StandardLoggerOptions) *log.Logger {
	return slog.NewLogLogger(h.to.Handler(), slog.LevelDebug)
}

func slogLevel(l hclog.Level) slog.Level {
	switch l {
	case hclog.Error:
		return slog.LevelError
	case hclog.Warn:
		return slog.LevelWarn
	case hclog.Info:
		return slog.LevelInfo
	}
	return slog.LevelDebug
}

// lineWriter logs the lines that a plugin prints instead of logging them.
type lineWriter struct{ log func(line string) }

func (w lineWriter) Write(p []byte) (int, error) {
	for line := range strings.Lines(string(p)) {
		if line = strings.TrimSpace(line); line != "" {
			w.log(line)
		}
	}
	return len(p), nil
}
