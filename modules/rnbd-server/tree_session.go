package server

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// treeSpelling is one of the two generations of control files in the kernel's
// RTRS.
type treeSpelling struct {
	name  func(*session, rtrs.SrvPathInfo) string // of a path's folder
	stats func(*session, int) ctltree.Fixed
}

var (
	today = treeSpelling{name: pathName, stats: pathStats}
	older = treeSpelling{
		name:  func(_ *session, p rtrs.SrvPathInfo) string { return verbs.TreeString(p.Client.Addr()) },
		stats: olderPathStats,
	}
)

// pathName returns CLIENT@SERVER. The fabric is appended if it differs from
// that of the session's first path.
func pathName(s *session, p rtrs.SrvPathInfo) string {
	name := verbs.TreeString(p.Client.Addr()) + "@" + verbs.TreeString(p.Server.Addr())
	if p.Fabric != s.fabric {
		name += "%" + p.Fabric
	}
	return name
}

// folderName returns the name of the session's folders: the spelling of its name, with "!"
// for a slash as in sysfs.
func (s *session) folderName() string { return strings.ReplaceAll(names.Spell(s.name), "/", "!") }

func (t controlTree) sessionFolders(sp *treeSpelling) ctltree.Dir {
	return ctltree.Listing{
		Names: func() (list []string) {
			for _, s := range t.openSessions() {
				list = append(list, s.folderName())
			}
			return list
		},
		Node: func(name string) ctltree.Node {
			for _, s := range t.openSessions() {
				if s.folderName() == name {
					return ctltree.Fixed{"paths": pathFolders(s, sp)}
				}
			}
			return nil
		},
	}
}

// pathFolders has a folder for each path, from its INFO_REQ until it is closed. If
// two have the same name, the number of the path is appended to the later
// ones.
func pathFolders(s *session, sp *treeSpelling) ctltree.Dir {
	named := func() map[string]int {
		out := map[string]int{}
		for _, p := range s.transport.Paths() {
			if p.State == rtrs.SrvPathConnecting {
				continue
			}
			name := sp.name(s, p)
			if _, taken := out[name]; taken {
				name += "#" + strconv.Itoa(p.ID)
			}
			out[name] = p.ID
		}
		return out
	}
	return ctltree.Listing{
		Names: func() []string { return slices.Sorted(maps.Keys(named())) },
		Node: func(name string) ctltree.Node {
			if id, ok := named()[name]; ok {
				return pathFiles(s, id, sp)
			}
			return nil
		},
	}
}

func pathFiles(s *session, id int, sp *treeSpelling) ctltree.Node {
	show := func(f func(rtrs.SrvPathInfo) string) *ctltree.File {
		return &ctltree.File{Show: func() (string, error) {
			for _, p := range s.transport.Paths() {
				if p.ID == id {
					return f(p) + "\n", nil
				}
			}
			return "", fmt.Errorf("the path is gone: %w", syscall.ENODEV)
		}}
	}
	return ctltree.Fixed{
		"disconnect": digitFile("1", "Usage: echo 1 > disconnect", func(context.Context) error { return s.transport.DisconnectPath(id) }),
		"hca_name":   show(func(p rtrs.SrvPathInfo) string { return p.Device }),
		"hca_port":   show(func(p rtrs.SrvPathInfo) string { return strconv.Itoa(p.Port) }),
		"src_addr":   show(func(p rtrs.SrvPathInfo) string { return verbs.TreeString(p.Client.Addr()) }),
		"dst_addr":   show(func(p rtrs.SrvPathInfo) string { return verbs.TreeString(p.Server.Addr()) }),
		"stats":      sp.stats(s, id),
	}
}

// counterFile returns a file with the counters of a path. Writing digitToReset
// resets them.
func counterFile(s *session, id int, digitToReset string, kind rtrs.StatKind, show func(*rtrs.PathDetails) string) *ctltree.File {
	f := digitFile(digitToReset, "", func(context.Context) error { return s.transport.ResetStats(id, kind) })
	f.Show = func() (string, error) {
		d, err := s.transport.PathDetails(id)
		if err != nil {
			return "", err
		}
		return show(&d) + "\n", nil
	}
	return f
}

func pathStats(s *session, id int) ctltree.Fixed {
	return ctltree.Fixed{"rdma": counterFile(s, id, "1", rtrs.StatRDMA, func(d *rtrs.PathDetails) string {
		return fmt.Sprintf("%d %d %d %d", d.ReadCount, d.ReadBytes, d.WriteCount, d.WriteBytes)
	})}
}

// olderPathStats returns the files of earlier kernels, with their ways to
// reset them.
func olderPathStats(s *session, id int) ctltree.Fixed {
	return ctltree.Fixed{
		"rdma": counterFile(s, id, "0", rtrs.StatRDMA, func(d *rtrs.PathDetails) string {
			return fmt.Sprintf("%d %d %d %d %d", d.ReadCount, d.ReadBytes, d.WriteCount, d.WriteBytes, d.Inflight)
		}),
		"wc_completion": counterFile(s, id, "0", rtrs.StatWCCompletion, func(d *rtrs.PathDetails) string {
			return fmt.Sprintf("%d %d %d", d.Completions.Max(), d.Completions.Total(), d.Completions.Calls())
		}),
		"reset_all": digitFile("0", "echo 0 to reset all statistics", func(context.Context) error {
			return s.transport.ResetStats(id, rtrs.StatAll)
		}),
	}
}
