package client

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-client/internal/mapline"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// Tree returns the control files of c, by the places that ctltree.Mount gives
// them. docs/use/control-tree.md lists them. The caller may add to the
// directories before they are served.
func (c *Client) Tree() map[string]ctltree.Node { return controlTree{c: c}.rootNodes() }

func (t controlTree) rootNodes() map[string]ctltree.Node {
	class := ctltree.Fixed{"ctl": ctltree.Fixed{
		"map_device": t.mapDevice(mapUsage, false),
		"devices":    t.deviceLinks(true),
	}}
	if t.c.cfg.Logs != nil {
		class["log_level"] = ctltree.LogLevels(t.c.cfg.Logs, t.c.logControl().SetOne)
	}
	return map[string]ctltree.Node{
		"class/rnbd-client": class,
		"class/rtrs-client": t.sessionFolders(&today),
		// The links in devices/ are to ../../../block. Below class/ this is
		// that folder.
		"class/block": ctltree.Link("../block"),
		"block":       t.blockFolders(),
		"kernel/ibnbd_client": ctltree.Fixed{
			"map_device": t.mapDevice(oldMapUsage, true),
			"devices":    t.deviceLinks(false),
		},
		"kernel/ibtrs_client": t.sessionFolders(&older),
	}
}

const (
	addrUsage = "addr ::= [ ip:<ipv4> | ip:<ipv6> | gid:<gid> ]"
	mapUsage  = `Usage: echo "[dest_port=server port number] sessname=<name of the rtrs session> path=<[srcaddr@]dstaddr> [path=<[srcaddr@]dstaddr>] device_path=<full path on remote side> [access_mode=<ro|rw|migration>] [nr_poll_queues=<number of queues>]" > map_device` +
		"\n\n" + addrUsage
	oldMapUsage = `Usage: echo "sessname=<name of the ibtrs session> path=<[srcaddr,]dstaddr> [path=<[srcaddr,]dstaddr>] device_path=<full path on remote side> [access_mode=<ro|rw|migration>] [input_mode=<mq|rq>] [io_mode=<fileio|blockio>]" > map_device` +
		"\n\n" + addrUsage
)

// mapDevice maps the device named by a line. Only the older file accepts the
// keys of the older line.
func (t controlTree) mapDevice(usage string, old bool) *ctltree.File {
	return ctltree.Command(usage, func(ctx context.Context, line string) error {
		l, err := mapline.Parse(line, rtrs.PossibleCPUs())
		if err != nil {
			return err
		}
		if !old && l.InputMode+l.IOMode != "" {
			return fmt.Errorf("map line: input_mode and io_mode are for kernel/ibnbd_client/map_device: %w", syscall.EINVAL)
		}
		r := requestOf(l)
		r.Loss, r.Frontend = t.c.cfg.Loss, t.frontend
		if l.InputMode == "rq" {
			r.Options = map[string]string{"queues": "1"}
		}
		_, err = t.c.Map(ctx, r)
		return err
	})
}

// deviceLinks has a link for each device.
func (t controlTree) deviceLinks(withSession bool) ctltree.Dir {
	links := func() map[string]ctltree.Node {
		out := map[string]ctltree.Node{}
		for _, d := range t.c.Devices() {
			id := strings.ReplaceAll(names.Spell(d.path), "/", "!")
			if _, taken := out[id]; withSession || taken {
				id += "@" + d.session.folderName()
			}
			out[id] = ctltree.Link("../../../block/" + d.name)
		}
		return out
	}
	return ctltree.Listing{
		Names: func() []string { return slices.Sorted(maps.Keys(links())) },
		Node:  func(name string) ctltree.Node { return links()[name] },
	}
}

func (t controlTree) blockFolders() ctltree.Dir {
	return ctltree.Listing{
		Names: func() (list []string) {
			for _, d := range t.c.Devices() {
				list = append(list, d.name)
			}
			return list
		},
		Node: func(name string) ctltree.Node {
			for _, d := range t.c.Devices() {
				if d.name == name {
					return t.blockFolder(d)
				}
			}
			return nil
		},
	}
}

// blockFolder is the folder of a device, in the place of that of a block device of
// the kernel.
func (t controlTree) blockFolder(d *Device) ctltree.Node {
	files := ctltree.Fixed{
		"unmap_device":   t.unmapDevice(d),
		"resize":         t.resizeFile(d),
		"remap_device":   t.remapDevice(d),
		"mapping_path":   ctltree.Text(func() string { return names.Spell(d.path) }),
		"state":          ctltree.Text(func() string { return d.State().String() }),
		"session":        ctltree.Text(func() string { return names.Spell(d.session.name) }),
		"access_mode":    ctltree.Text(d.mode.String),
		"nr_poll_queues": ctltree.Text(func() string { return strconv.Itoa(d.pollQueues) }),
	}
	dir := ctltree.Fixed{
		"rnbd": files, "ibnbd_client": files, "ibnbd": files,
		"size": ctltree.Text(func() string { return strconv.FormatUint(d.Limits().Size/blk.SectorSize, 10) }),
		"ro":   ctltree.Text(func() string { return flagText(d.Limits().ReadOnly) }),
		"stat": ctltree.Text(d.blockStat),
	}
	if dev, ok := deviceNumber(d.Location()); ok {
		dir["dev"] = ctltree.Text(func() string { return dev })
	}
	return dir
}

// blockStat returns the contents of the file stat of a block device.
func (d *Device) blockStat() string {
	var read, written uint64
	for i := range d.shares {
		read += d.shares[i].rx.Load()
		written += d.shares[i].tx.Load()
	}
	return ctltree.BlockStat(read, written, 0)
}

func flagText(b bool) string {
	if b {
		return "1"
	}
	return "0"
}

// deviceNumber returns MAJOR:MINOR of a front end's block device.
func deviceNumber(location string) (string, bool) {
	var st unix.Stat_t
	if !strings.HasPrefix(location, "/dev/") || unix.Stat(location, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return "", false
	}
	return fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)), true
}

// checkMapped returns an error if d is no longer mapped. A file may be kept open
// longer.
func (t controlTree) checkMapped(d *Device) error {
	if t.c.deviceAt(d.index) != d {
		return fmt.Errorf("device %s is not mapped any more: %w", d.name, syscall.ENODEV)
	}
	return nil
}

func (t controlTree) unmapDevice(d *Device) *ctltree.File {
	return ctltree.Command("Usage: echo <normal|force> > unmap_device", func(ctx context.Context, how string) error {
		if how != "normal" && how != "force" {
			return fmt.Errorf("unmap %s: write normal or force: %w", d.name, syscall.EINVAL)
		}
		if err := t.checkMapped(d); err != nil {
			return err
		}
		return t.c.Unmap(ctx, d.name, how == "force")
	})
}

func (t controlTree) resizeFile(d *Device) *ctltree.File {
	return ctltree.Command("Usage: echo <new size in sectors> > resize", func(_ context.Context, size string) error {
		sectors, err := strconv.ParseUint(size, 0, 64)
		if err != nil || strings.Contains(size, "_") {
			return numberError("resize "+d.name, size, err)
		}
		if err := t.checkMapped(d); err != nil {
			return err
		}
		return t.c.Resize(d.name, sectors)
	})
}

func (t controlTree) remapDevice(d *Device) *ctltree.File {
	return triggerFile("Usage: echo <1> > remap_device", func(ctx context.Context) error {
		if err := t.checkMapped(d); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, t.c.cfg.MapTimeout)
		defer cancel()
		_, err := t.c.Remap(ctx, d.name)
		return err
	})
}
