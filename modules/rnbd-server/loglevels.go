package server

import (
	"context"
	"log/slog"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
)

// LogLevels and SetLogLevels are about the parts of the daemon.
func (c *controlAPI) LogLevels(context.Context, *controlpb.LogLevelsRequest) (*controlpb.LogLevelsReply, error) {
	return c.s.logs().Levels()
}

func (c *controlAPI) SetLogLevels(ctx context.Context, r *controlpb.SetLogLevelsRequest) (*controlpb.LogLevelsReply, error) {
	return c.s.logs().Set(ctx, r.Levels)
}

// logLevels are the files that the kernel's drivers have none of.
func (t tree) logLevels() ctltree.Dir {
	return ctltree.LogLevels(t.s.cfg.Logs, t.s.logs().SetOne)
}

func (s *Server) logs() control.LogControl {
	return control.LogControl{Logs: s.cfg.Logs, Plugins: func(ctx context.Context, level slog.Level) {
		for _, p := range s.plugins {
			p.sup.SetLog(ctx, level)
		}
	}}
}
