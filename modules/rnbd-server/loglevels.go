package server

import (
	"context"
	"fmt"
	"log/slog"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
)

// LogLevels and SetLogLevels are about the parts of the daemon.
func (c *controlAPI) LogLevels(context.Context, *controlpb.LogLevelsRequest) (*controlpb.LogLevelsReply, error) {
	if c.s.cfg.Logs == nil {
		return nil, errNoLogs
	}
	return control.LogLevels(c.s.cfg.Logs), nil
}

func (c *controlAPI) SetLogLevels(ctx context.Context, r *controlpb.SetLogLevelsRequest) (*controlpb.LogLevelsReply, error) {
	if c.s.cfg.Logs == nil {
		return nil, errNoLogs
	}
	if err := c.s.setLogLevels(ctx, r.Levels); err != nil {
		return nil, err
	}
	return control.LogLevels(c.s.cfg.Logs), nil
}

// setLogLevels changes levels, those of plugins in the plugins as well.
func (s *Server) setLogLevels(ctx context.Context, set []*controlpb.LogLevel) error {
	l := s.cfg.Logs
	before := l.Level("plugins")
	if err := control.SetLogLevels(l, set); err != nil {
		return err
	}
	if level := l.Level("plugins"); level != before {
		for _, p := range s.plugins {
			p.setLog(ctx, level)
		}
	}
	return nil
}

// logLevels are the files that the kernel's drivers have none of.
func (t tree) logLevels() ctltree.Dir {
	return ctltree.LogLevels(t.s.cfg.Logs, func(ctx context.Context, subsystem string, level slog.Level) error {
		return t.s.setLogLevels(ctx, []*controlpb.LogLevel{{Subsystem: subsystem, Level: logs.LevelName(level)}})
	})
}

var errNoLogs = fmt.Errorf("this daemon has one log level for all: %w", syscall.EOPNOTSUPP)

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
