package control

import (
	"context"
	"fmt"
	"log/slog"
	"path"
	"syscall"
	"time"

	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
)

// LogCalls logs each call of the API, for debugging.
func LogCalls(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if !log.Enabled(ctx, slog.LevelDebug) {
			return next(ctx, req)
		}
		start := time.Now()
		resp, err := next(ctx, req)
		log.Debug("control call", "call", path.Base(info.FullMethod), "took", time.Since(start), "err", err)
		return resp, err
	}
}

// LogControl changes and lists the log levels of a daemon, for its API and its
// control files.
type LogControl struct {
	Logs *logs.Logs // nil: the daemon has one level for all, and every call says so
	// Plugins tells the plugins that run their new level.
	Plugins func(context.Context, slog.Level)
}

var errNoLogs = fmt.Errorf("this daemon has one log level for all: %w", syscall.EOPNOTSUPP)

// Set changes levels, all that are named or none, those of plugins in the
// plugins as well.
func (c LogControl) Set(ctx context.Context, set []*controlpb.LogLevel) (*controlpb.LogLevelsReply, error) {
	if c.Logs == nil {
		return nil, errNoLogs
	}
	before := c.Logs.Level("plugins")
	if err := setLogLevels(c.Logs, set); err != nil {
		return nil, err
	}
	if level := c.Logs.Level("plugins"); level != before {
		c.Plugins(ctx, level)
	}
	return c.Levels()
}

// SetOne is Set for one subsystem.
func (c LogControl) SetOne(ctx context.Context, subsystem string, level slog.Level) error {
	_, err := c.Set(ctx, []*controlpb.LogLevel{{Subsystem: subsystem, Level: logs.LevelName(level)}})
	return err
}

// Levels lists the levels of the subsystems.
func (c LogControl) Levels() (*controlpb.LogLevelsReply, error) {
	if c.Logs == nil {
		return nil, errNoLogs
	}
	r := &controlpb.LogLevelsReply{}
	for _, s := range c.Logs.Levels() {
		r.Levels = append(r.Levels, &controlpb.LogLevel{Subsystem: s.Subsystem, Level: logs.LevelName(s.Level)})
	}
	return r, nil
}

func setLogLevels(l *logs.Logs, set []*controlpb.LogLevel) error {
	before := l.Levels()
	for _, s := range set {
		level, err := logs.ParseLevel(s.GetLevel())
		if err == nil {
			err = l.SetLevel(s.GetSubsystem(), level)
		}
		if err != nil {
			for _, b := range before {
				_ = l.SetLevel(b.Subsystem, b.Level) // it exists
			}
			return err
		}
	}
	return nil
}
