package server

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
)

// Tree returns the control files of s, by the places that ctltree.Mount gives
// them. docs/use/control-tree.md lists them. The caller may add to the
// directories before they are served.
func (s *Server) Tree() map[string]ctltree.Node {
	t := controlTree{s}
	class := ctltree.Fixed{"ctl": ctltree.Fixed{"devices": t.exportFolders()}}
	if s.cfg.Logs != nil {
		class["log_level"] = ctltree.LogLevels(t.s.cfg.Logs, t.s.logControl().SetOne)
	}
	return map[string]ctltree.Node{
		"block":               ctltree.Folder{}, // belongs to the client; tools expect it on every host
		"class/rnbd-server":   class,
		"class/rtrs-server":   t.sessionFolders(&today),
		"kernel/ibnbd_server": ctltree.Fixed{"devices": t.exportFolders()},
		"kernel/ibtrs_server": t.sessionFolders(&older),
		"module/rnbd_server": ctltree.Fixed{"parameters": ctltree.Fixed{
			"port_nr":         ctltree.Text(t.listenPort),
			"dev_search_path": ctltree.Text(t.searchPath),
		}},
		"module/rtrs_server": ctltree.Fixed{"parameters": ctltree.Fixed{
			"max_chunk_size":    ctltree.Text(func() string { return strconv.Itoa(s.cfg.ChunkSize) }),
			"sess_queue_depth":  ctltree.Text(func() string { return strconv.Itoa(s.cfg.QueueDepth) }),
			"always_invalidate": ctltree.Text(t.alwaysInvalidate),
		}},
	}
}

// listenPort returns the port of the first listener.
func (t controlTree) listenPort() string {
	if len(t.s.boundAddresses()) == 0 {
		return "0"
	}
	return strconv.Itoa(int(t.s.Addr(0).Port()))
}

func (t controlTree) searchPath() string {
	if t.s.cfg.SearchPath == "" {
		return "/"
	}
	return t.s.cfg.SearchPath
}

func (t controlTree) alwaysInvalidate() string {
	if t.s.cfg.AlwaysInvalidate {
		return "Y"
	}
	return "N"
}

// exportFolders has a folder for each node opened by a session: a block device
// under its kernel name, a file under its path.
func (t controlTree) exportFolders() ctltree.Dir {
	byName := func() map[string][]*mapping {
		out := map[string][]*mapping{}
		for _, s := range t.openSessions() {
			for _, m := range s.openMappings() {
				name := exportName(m.dev)
				out[name] = append(out[name], m)
			}
		}
		return out
	}
	return ctltree.Listing{
		Names: func() []string { return slices.Sorted(maps.Keys(byName())) },
		Node: func(name string) ctltree.Node {
			users := byName()[name]
			if len(users) == 0 {
				return nil
			}
			dir := ctltree.Fixed{"sessions": t.userFolders(func() []*mapping { return byName()[name] })}
			dev := users[0].dev
			if l := nodeLink(dev.key.id); l != "" {
				dir["block_dev"] = l
				return dir
			}
			// Tools take the last part of the link for the device's name, and
			// follow it to the files of a block device.
			dir["block_dev"] = ctltree.Link("../" + name)
			dir["size"] = ctltree.Text(func() string { return strconv.FormatUint(dev.limits.Load().Size/blk.SectorSize, 10) })
			dir["stat"] = ctltree.Text(func() string { return blockStat(byName()[name]) })
			return dir
		},
	}
}

func exportName(d *device) string {
	if name := kernelName(d.key.id); name != "" {
		return name
	}
	path := d.path
	if path == "" {
		path = d.name
	}
	return strings.ReplaceAll(names.Spell(path), "/", "!")
}

// kernelName returns the kernel's name of a block device; empty for other
// nodes.
func kernelName(id nodeID) string {
	if id.opaque != "" || id.ino != 0 {
		return ""
	}
	target, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(id.dev), unix.Minor(id.dev)))
	if err != nil {
		return ""
	}
	return filepath.Base(target)
}

// nodeLink returns a link to the kernel's folder of a block device, empty for
// other nodes. A mount of this tree over /sys does not hide its target.
func nodeLink(id nodeID) ctltree.Link {
	if kernelName(id) == "" {
		return ""
	}
	dir, err := filepath.EvalSymlinks(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(id.dev), unix.Minor(id.dev)))
	if err != nil {
		return ""
	}
	return ctltree.Link(dir)
}

// blockStat adds up the I/O of clients on a device.
func blockStat(users []*mapping) string {
	var read, written uint64
	var inFlight int64
	for _, m := range users {
		for i := range m.flows {
			read += m.flows[i].tx.Load()
			written += m.flows[i].rx.Load()
		}
		inFlight += m.inFlight()
	}
	return ctltree.BlockStat(read, written, inFlight)
}

// userFolders has a folder for each session. If a session has the device open by
// several names, the further ones have a dot and the id appended. A session's
// name has no dot.
func (t controlTree) userFolders(list func() []*mapping) ctltree.Dir {
	byName := func() map[string]*mapping {
		out := map[string]*mapping{}
		for _, m := range list() {
			name := m.session.folderName()
			if _, taken := out[name]; taken {
				name += "." + strconv.Itoa(int(m.id))
			}
			out[name] = m
		}
		return out
	}
	return ctltree.Listing{
		Names: func() []string { return slices.Sorted(maps.Keys(byName())) },
		Node: func(name string) ctltree.Node {
			if m := byName()[name]; m != nil {
				return t.useNode(m)
			}
			return nil
		},
	}
}

func (t controlTree) useNode(m *mapping) ctltree.Node {
	return ctltree.Fixed{
		"access_mode": ctltree.Text(m.mode.String),
		"read_only": ctltree.Text(func() string {
			if m.mode == blk.ReadOnly {
				return "1"
			}
			return "0"
		}),
		"mapping_path": ctltree.Text(func() string { return names.Spell(m.name) }),
		"force_close": digitFile("1", "Usage: echo 1 > force_close", func(context.Context) error {
			t.s.forceClose(m, "asked for in the control tree")
			return nil
		}),
	}
}
