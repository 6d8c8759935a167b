package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
)

// deviceFields: the names and headers up to hostname are those of the tool
// for the kernel's RNBD.
var deviceFields = []report.Field[device]{
	report.F("sessname", "Session", "name of the session", func(d device) any { return d.session }).As(report.Name),
	report.F("mapping_path", "Mapping Path", "name on the server", func(d device) any { return d.path }).As(report.Name),
	report.F("devname", "Device", "name here: rnbd0; on the server that of the node or file", func(d device) any { return d.name }).As(report.Name),
	report.F("devpath", "Device path", "node here: /dev/...; on the server the node or file", func(d device) any { return d.node }).As(report.Name),
	report.F("state", "State", "open, closed, ...", func(d device) any { return d.state }).As(report.Exact),
	report.F("access_mode", "Access Mode", "ro, rw or migration", func(d device) any { return d.mode }).As(report.Exact),
	report.F("rx_sect", "RX", "read, in sectors of 512 bytes", func(d device) any { return report.Sectors(d.rx) }),
	report.F("tx_sect", "TX", "written, in sectors of 512 bytes", func(d device) any { return report.Sectors(d.tx) }),
	report.F("direction", "Direction", "imported or exported", func(d device) any { return d.direction() }).As(report.Exact),
	report.F("hostname", "Hostname", "host at the other end", func(d device) any { return d.hostname }).As(report.Name),

	report.F("size", "Size", "bytes", func(d device) any { return report.Bytes(d.limits.GetSize()) }),
	report.F("endpoint", "Endpoint", "what users open here", onMapped(func(d device) any { return d.mapped.Endpoint })).As(report.Exact),
	report.F("plugin", "Plugin", "front end here, io plugin on the server", func(d device) any { return d.plugin() }).As(report.Exact),
	report.F("id", "Id", "number in its session", func(d device) any { return d.id() }),
	report.F("loss", "On Loss", "what requests do without a path", onMapped(func(d device) any { return d.mapped.Loss })).As(report.Exact),
	report.F("openers", "Users", "that have it open here", onMapped(func(d device) any { return report.Count(d.mapped.Openers) })),
	report.F("inflights", "Inflights", "requests under way", onMapped(func(d device) any { return report.Count(d.mapped.Inflight) })),
	report.F("logical_block", "Logical Block", "bytes", func(d device) any { return bytes32(d.limits.GetLogicalBlockSize()) }),
	report.F("physical_block", "Physical Block", "bytes", func(d device) any { return bytes32(d.limits.GetPhysicalBlockSize()) }),
	report.F("max_io", "Max IO", "largest request in bytes", func(d device) any { return bytes32(d.limits.GetMaxIoSize()) }),
	report.F("write_cache", "Write Cache", "writes need a flush", func(d device) any { return d.limits.GetWriteCache() }),
	report.F("fua", "FUA", "single writes can go through the cache", func(d device) any { return d.limits.GetFua() }),
	report.F("max_discard", "Max Discard", "largest discard in bytes; 0: none", func(d device) any { return largest(d.limits.GetMaxDiscard()) }),
	report.F("max_write_zeroes", "Max Zeroes", "largest write-zeroes in bytes; 0: none", func(d device) any { return largest(d.limits.GetMaxWriteZeroes()) }),
	report.F("failed", "Failed", "requests that failed", func(d device) any { return report.Count(d.failedRequests()) }),
	report.F("hung", "Hung", "requests without an answer for long", func(d device) any { return d.hungRequests() }),
	report.F("fails_in", "Fails In", "until the requests that wait for a path fail", onMapped(func(d device) any { return d.failsIn(time.Now()) })),
	report.F("rule", "Rule", "access rule that allows it; empty: none", func(d device) any { return d.ruleNumber() }),
	report.F("access_limits", "Access Limits", "of that rule, that hold up its requests", func(d device) any { return limitsText(d.use.GetLimits()) }),
	report.F("last_error", "Last Error", "why it is not open", onMapped(func(d device) any { return d.mapped.LastError })),
	report.F("writes_lost", "Writes Lost", "why a flush fails: acknowledged writes were lost", func(d device) any { return d.writesLost() }),
}

// size limits are no amounts: they are not summed up.
type limit = report.Limit

func bytes32(n uint32) limit { return limit(n) }
func largest(n uint64) limit { return limit(n) }

// onMapped is the value of a field that exported devices do not have.
func onMapped(get func(device) any) func(device) any {
	return func(d device) any {
		if d.mapped == nil {
			return nil
		}
		return get(d)
	}
}

// failedRequests is the number of requests that failed.
func (d device) failedRequests() uint64 {
	if d.mapped != nil {
		return d.mapped.FailedRequests
	}
	return d.exported.FailedRequests
}

// hungRequests describes the requests that hang, those of one stage and path
// after those of another.
func (d device) hungRequests() string {
	all := d.exported.GetHung()
	if d.mapped != nil {
		all = d.mapped.Hung
	}
	var words []string
	for _, h := range all {
		if d.use != nil && h.Session != d.session {
			continue // another client's
		}
		one := fmt.Sprintf("%d in stage %s", h.Count, h.Stage)
		if h.Path != "" {
			one += ", path " + h.Path
		}
		words = append(words, fmt.Sprintf("%s, oldest %s %s at %d", one, time.Duration(h.OldestNs).Round(time.Second), h.Op, h.Offset))
	}
	return strings.Join(words, "; ")
}

// failsIn is the time until the requests that wait fail.
func (d device) failsIn(now time.Time) any {
	switch at := d.mapped.FailsUnixMs; {
	case at != 0:
		return max(time.UnixMilli(at).Sub(now), 0).Round(time.Second)
	case d.mapped.OpensAgain && d.mapped.Loss == "queue:forever":
		return "never"
	}
	return nil
}

func (d device) writesLost() string {
	if d.mapped != nil {
		return d.mapped.WritesLost
	}
	return d.exported.WritesLost
}

func (d device) direction() string {
	if d.mapped != nil {
		return "imported"
	}
	return "exported"
}

func (d device) plugin() string {
	if d.mapped != nil {
		return d.mapped.Frontend
	}
	return d.exported.IoMode
}

func (d device) id() uint64 {
	if d.mapped != nil {
		return uint64(d.mapped.DeviceId)
	}
	return uint64(d.use.DeviceId)
}

func deviceNoun() *noun {
	return &noun{
		name: "device", plural: "devices", short: "Mapped and exported devices",
		fields: report.Infos(deviceFields),
		usual: func(set daemonSet) []string {
			fields := []string{"sessname", "mapping_path", "devname", "state", "access_mode", "size"}
			if set == onServer {
				return fields
			}
			return append(fields, "endpoint") // the last, since it is long
		},
		spare: []string{"access_mode", "endpoint", "size"},
		wide:  []string{"hostname", "plugin", "loss", "openers", "inflights", "failed", "hung", "fails_in", "last_error", "writes_lost"},
		verbs: slices.Concat([]*verb{
			{
				name: "list", aliases: []string{"ls"}, on: onBoth, words: outputWords, max: -1, flags: listFlags, args: "[NAME]...", args0: deviceNames, run: listDevices,
				short: "List devices",
				example: `  rnbd device list
  rnbd list devices mapping_path,devname,size G
  rnbd server device list +hostname json`,
			},
			{
				name: "show", on: onBoth, words: outputWords | statsWord, min: 1, max: 1, args: "DEVICE", args0: deviceNames, run: showDevice,
				short: "Show all about a device",
				long: "Show all about a device, or the fields that are chosen.\n\nDEVICE is its name, its node, or its name on the server.\n\n" +
					"With stats the time of its requests follows, by stage and operation.",
				example: `  rnbd device show rnbd0
  rnbd client device show rnbd0 stats
  rnbd device show disk.img state,last_error`,
			},
			udevVerb(),
		}, mapVerbs(), deviceChanges()),
	}
}

func listDevices(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		inv, err := d.look(ctx, true)
		if err != nil {
			return err
		}
		if err := c.keepNamed(inv); err != nil {
			return err
		}
		if inv.devices, err = arrange(c, deviceFields, inv.devices); err != nil {
			return err
		}
		t, err := table(c, c.noun, deviceFields, d.both(), inv.devices)
		if err != nil {
			return err
		}
		a, err := c.attention(ctx, d)
		if err != nil {
			return err
		}
		t.Attention = a.things()
		a.noteDevices(t, inv.devices)
		return report.List(c.cmd.OutOrStdout(), c.Options, t)
	})
}

func showDevice(c *call) error {
	return c.with(func(ctx context.Context, d *daemons) error {
		inv, err := d.look(ctx, true)
		if err != nil {
			return err
		}
		dev, err := inv.device(c.arg(0), "")
		if err != nil {
			return err
		}
		return printDevice(ctx, c, d, dev)
	})
}

// printDevice shows one device: all of it, if no fields are chosen.
func printDevice(ctx context.Context, c *call, all *daemons, d device) error {
	t, err := selected(c, deviceNoun(), deviceFields, everyField(deviceFields), []device{d})
	if err != nil {
		return err
	}
	if c.stats {
		sub, err := deviceStats(ctx, all, d)
		if err != nil {
			return err
		}
		t.Rows[0].Sub = []report.Table{sub}
	}
	return report.Show(c.cmd.OutOrStdout(), c.Options, t)
}

func everyField[T any](fields []report.Field[T]) (names []string) {
	for _, f := range fields {
		names = append(names, f.Name)
	}
	return names
}

// ruleNumber is the number of the access rule by which a device is exported.
func (d device) ruleNumber() any {
	if d.use.GetRule() == 0 {
		return ""
	}
	return uint64(d.use.GetRule())
}
