package metrics

import (
	"fmt"
	"net/http"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// notReady returns why the daemon does not serve, plugin by plugin.
func notReady(info *controlpb.DaemonInfo) (why []string) {
	for _, p := range info.Plugins {
		if p.State != "running" {
			why = append(why, fmt.Sprintf("plugin %s: %s", p.Name, p.State))
		}
	}
	return why
}

// answerWith answers 200 if the daemon answers and problems has none, else 503
// with a line for each.
func answerWith(c *Daemon, problems func(*controlpb.DaemonInfo) []string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		ctx, cancel := collectTime()
		defer cancel()
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		info, err := c.api.Info(ctx, &controlpb.InfoRequest{})
		why := []string{}
		if err != nil {
			why = append(why, "the daemon does not answer: "+err.Error())
		} else {
			why = problems(info)
		}
		if len(why) == 0 {
			fmt.Fprintln(w, "ok")
			return
		}
		w.WriteHeader(http.StatusServiceUnavailable)
		for _, line := range why {
			fmt.Fprintln(w, line)
		}
	}
}
