package server

import (
	"context"
	"log/slog"
	"time"

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
			p.setLog(ctx, level)
		}
	}}
}

// setLogTimeout bounds the wait for one plugin.
const setLogTimeout = 2 * time.Second

// setLog tells the plugin, if one runs; the next one learns it at its start.
func (p *ioPlugin) setLog(ctx context.Context, level slog.Level) {
	proc, err := p.process()
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, setLogTimeout)
	defer cancel()
	if err := proc.SetLog(ctx, level); err != nil {
		p.log.Warn("the plugin keeps its log level", "error", err)
	}
}
