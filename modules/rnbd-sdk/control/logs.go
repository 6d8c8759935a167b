package control

import (
	"context"
	"log/slog"
	"path"
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

// SetLogLevels changes what subsystems log: all that are named, or none.
func SetLogLevels(l *logs.Logs, set []*controlpb.LogLevel) error {
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

// LogLevels lists what subsystems log.
func LogLevels(l *logs.Logs) *controlpb.LogLevelsReply {
	r := &controlpb.LogLevelsReply{}
	for _, s := range l.Levels() {
		r.Levels = append(r.Levels, &controlpb.LogLevel{Subsystem: s.Subsystem, Level: logs.LevelName(s.Level)})
	}
	return r
}
