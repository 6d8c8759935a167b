package main

import (
	"context"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

var poolFields = []report.Field[*controlpb.Pool]{
	report.F("name", "Pool", "name in the configuration of the server", func(p *controlpb.Pool) any { return p.Name }),
	report.F("kind", "Kind", "files: sparse files in a folder", func(p *controlpb.Pool) any { return p.Kind }),
	report.F("path", "Path", "the folder", func(p *controlpb.Pool) any { return p.Path }),
	report.F("size", "Size", "bytes of its file system", func(p *controlpb.Pool) any { return report.Bytes(p.Size) }),
	report.F("free", "Free", "bytes of these that are free", func(p *controlpb.Pool) any { return report.Bytes(p.Free) }),
	report.F("volumes", "Volumes", "and snapshots in it", func(p *controlpb.Pool) any { return report.Count(p.Volumes) }),
	report.F("id", "ID", "made by rnbd pool init", func(p *controlpb.Pool) any { return p.Id }),
	report.F("state", "State", "ready, or why it cannot be used", func(p *controlpb.Pool) any { return p.State }),
}

// poolNoun makes the commands about pools.
func poolNoun() *noun {
	return &noun{
		name: "pool", plural: "pools", short: "Places for volumes on a server", newer: true,
		fields: report.Infos(poolFields),
		usual: func(daemonSet) []string {
			return []string{"name", "kind", "path", "size", "free", "volumes", "state"}
		},
		wide: []string{"id"},
		verbs: []*verb{{
			name: "list", aliases: []string{"ls"}, on: onServer, words: outputWords, flags: listFlags, run: listPools,
			short:   "List the pools of a server",
			long:    "List the pools of the server's configuration, below the key pools, and say why one\ncannot be used.",
			example: "  rnbd pool list",
		}, {
			name: "init", on: onServer, min: 1, max: 1, args: "POOL", run: initPool, interrupted: "the folder is a pool, or as before",
			short:   "Make the folder of a pool ready for volumes",
			long:    "Make the folder of a pool ready for volumes, by a file .rnbd-pool in it. By that file\nthe server tells it from an empty folder, over which a file system should be mounted,\nand from another pool. Files in the folder stay, and are volumes.",
			example: "  rnbd pool init fast",
		}},
	}
}

func listPools(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		list, err := d.server.ListPools(ctx, &controlpb.ListRequest{})
		if err != nil {
			return err
		}
		t, err := table(c, c.noun, poolFields, false, list.Pools)
		if err != nil {
			return err
		}
		return report.List(c.cmd.OutOrStdout(), c.Options, t)
	})
}

func initPool(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		p, err := d.server.InitPool(ctx, &controlpb.PoolRequest{Pool: c.args[0]})
		if err != nil {
			return err
		}
		c.say("pool %s is %s, with the id %s", p.Name, p.State, p.Id)
		return nil
	})
}
