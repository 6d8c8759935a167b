package client

import (
	"context"
	"log/slog"
	"sync"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
)

// LogLevels and SetLogLevels are about the parts of the daemon.
func (a *controlAPI) LogLevels(context.Context, *controlpb.LogLevelsRequest) (*controlpb.LogLevelsReply, error) {
	return a.c.logs().Levels()
}

func (a *controlAPI) SetLogLevels(ctx context.Context, r *controlpb.SetLogLevelsRequest) (*controlpb.LogLevelsReply, error) {
	return a.c.logs().Set(ctx, r.Levels)
}

// logLevels are the files that the kernel's drivers have none of.
func (t tree) logLevels() ctltree.Dir {
	return ctltree.LogLevels(t.c.cfg.Logs, t.c.logs().SetOne)
}

func (c *Client) logs() control.LogControl {
	return control.LogControl{Logs: c.cfg.Logs, Plugins: func(ctx context.Context, level slog.Level) {
		var told sync.WaitGroup
		for _, f := range c.frontends {
			told.Go(func() { f.sup.SetLog(ctx, level) })
		}
		told.Wait()
	}}
}
