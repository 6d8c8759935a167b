package main

import (
	"context"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// pluginNoun has no list and no fields: `show` lists the plugins of a daemon.
func pluginNoun() *noun {
	return &noun{
		name: "plugin", plural: "plugins", short: "Storage plugins",
		usual: func(daemonSet) []string { return nil },
		verbs: []*verb{pluginTestVerb(), {
			name: "reset", on: onServer, min: 1, max: 1, args: "PLUGIN", run: resetPlugin, interrupted: partLeft,
			short:   "Start a storage plugin again that crashed too often",
			long:    "Start a storage plugin again that crashed too often, or that does not start: at\nonce, and with its crashes forgotten. Its devices come back with it. `rnbd server\nshow` lists the plugins.",
			example: "  rnbd server plugin reset fileio",
		}},
	}
}

func resetPlugin(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		p, err := d.server.ResetPlugin(ctx, &controlpb.PluginRequest{Name: c.args[0]})
		if err != nil {
			return err
		}
		c.say("plugin %s is %s, process %d", p.Name, p.State, p.Pid)
		return nil
	})
}
