package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-client/internal/mapline"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// treeSpelling is one of the two generations of control files in the kernel's
// RTRS.
type treeSpelling struct {
	policy   string // name of the file
	addUsage string
	name     func(*session, rtrs.PathInfo) string // of a path's folder
	stats    func(*session, int) ctltree.Fixed
}

var (
	today = treeSpelling{
		policy:   "mpath_policy",
		addUsage: "Usage: echo [<source addr>@]<destination addr> > add_path\n\n*addr ::= [ ip:<ipv4|ipv6> | gid:<gid> ]",
		name:     pathName,
		stats:    pathStats,
	}
	older = treeSpelling{
		policy:   "mp_policy",
		addUsage: "Usage: echo [<source addr>,]<destination addr> > add_path\n\n*addr ::= [ ip:<ipv4|ipv6> | gid:<gid> ]",
		name:     func(_ *session, p rtrs.PathInfo) string { return verbs.TreeString(p.Addr.Dst.Addr()) },
		stats:    olderPathStats,
	}
)

// pathName returns SRC@DST, or DST alone before the system has chosen a source.
// The fabric is appended if it differs from that of the session's first path.
func pathName(s *session, p rtrs.PathInfo) string {
	name := verbs.TreeString(p.Addr.Dst.Addr())
	if p.Src.IsValid() {
		name = verbs.TreeString(p.Src) + "@" + name
	}
	if p.Fabric != s.fabric {
		name += "%" + p.Fabric
	}
	return name
}

// folderName returns the name of the session's folder: the spelling of its name, with "!"
// for a slash as in sysfs.
func (s *session) folderName() string { return strings.ReplaceAll(names.Spell(s.name), "/", "!") }

func (t controlTree) sessionFolders(sp *treeSpelling) ctltree.Dir {
	return ctltree.Listing{
		Names: func() []string {
			t.c.mu.Lock()
			defer t.c.mu.Unlock()
			var list []string
			for _, s := range t.c.sessions {
				list = append(list, s.folderName())
			}
			slices.Sort(list)
			return list
		},
		Node: func(name string) ctltree.Node {
			t.c.mu.Lock()
			defer t.c.mu.Unlock()
			for _, s := range t.c.sessions {
				if s.folderName() == name {
					return t.sessionFolder(s, sp)
				}
			}
			return nil
		},
	}
}

func (t controlTree) sessionFolder(s *session, sp *treeSpelling) ctltree.Node {
	return ctltree.Fixed{
		"add_path":               t.addPath(s, sp.addUsage),
		"max_reconnect_attempts": maxReconnects(s),
		sp.policy:                pathPolicy(s),
		"paths":                  pathFolders(s, sp),
	}
}

func (t controlTree) addPath(s *session, usage string) *ctltree.File {
	return ctltree.Command(usage, func(ctx context.Context, text string) error {
		p, err := mapline.ParseKernelPath(strings.TrimSpace(text), s.port)
		if err != nil {
			return fmt.Errorf("add path %q: %w: %w", text, syscall.EINVAL, err)
		}
		addr, err := t.c.pathAddress(ctx, p)
		if err != nil {
			return fmt.Errorf("add path %q: %w", text, err)
		}
		_, err = s.addPath(ctx, p.String(), addr)
		return err
	})
}

func maxReconnects(s *session) *ctltree.File {
	return &ctltree.File{
		Show: func() (string, error) {
			return fmt.Sprintln(s.transport.Timing().MaxReconnectAttempts), nil
		},
		Store: func(_ context.Context, data []byte) error {
			const what = "max_reconnect_attempts"
			n, err := strconv.ParseInt(ctltree.Word(data), 10, 32)
			if err != nil {
				return numberError(what, ctltree.Word(data), err)
			}
			return s.setMaxReconnects(int(n))
		},
	}
}

func pathPolicy(s *session) *ctltree.File {
	return &ctltree.File{
		Show: func() (string, error) {
			p := s.transport.Policy()
			return fmt.Sprintf("%s (%s: %d)\n", p, strings.ToUpper(p.Short()), p.Number()), nil
		},
		Store: func(_ context.Context, data []byte) error {
			return s.setPolicy(ctltree.Word(data))
		},
	}
}

// pathFolders has a folder for each path. If two have the same name, the number of
// the path is appended to the later ones.
func pathFolders(s *session, sp *treeSpelling) ctltree.Dir {
	named := func() map[string]int {
		out := map[string]int{}
		for _, p := range s.transport.Paths() {
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

// disconnectLimit is the time for which the kernel waits for a dead peer.
const disconnectLimit = 30 * time.Second

func pathFiles(s *session, id int, sp *treeSpelling) ctltree.Node {
	show := func(f func(rtrs.PathInfo) string) *ctltree.File {
		return &ctltree.File{Show: func() (string, error) {
			p, err := pathInfo(s, id)
			if err != nil {
				return "", err
			}
			return f(p) + "\n", nil
		}}
	}
	bounded := func(do func(context.Context, int) error) func(context.Context) error {
		return func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, disconnectLimit)
			defer cancel()
			return do(ctx, id)
		}
	}
	return ctltree.Fixed{
		"state":       show(stateWord),
		"reconnect":   triggerFile("Usage: echo 1 > reconnect", bounded(s.reconnectByHand)),
		"disconnect":  triggerFile("Usage: echo 1 > disconnect", bounded(s.transport.DisconnectPath)),
		"remove_path": triggerFile("Usage: echo 1 > remove_path", bounded(func(ctx context.Context, id int) error { return s.removePath(ctx, id, true) })),
		"hca_name":    show(func(p rtrs.PathInfo) string { return p.Device }),
		"hca_port":    show(func(p rtrs.PathInfo) string { return strconv.Itoa(p.Port) }),
		"src_addr":    show(srcAddr),
		"dst_addr":    show(func(p rtrs.PathInfo) string { return verbs.TreeString(p.Addr.Dst.Addr()) }),
		"cur_latency": show(func(p rtrs.PathInfo) string { return fmt.Sprintf("%d ns", p.Stats.Latency.Nanoseconds()) }),
		"stats":       sp.stats(s, id),
	}
}

// srcAddr returns the source address, empty before the system has chosen it.
func srcAddr(p rtrs.PathInfo) string {
	if !p.Src.IsValid() {
		return ""
	}
	return verbs.TreeString(p.Src)
}

func pathInfo(s *session, id int) (rtrs.PathInfo, error) {
	for _, p := range s.transport.Paths() {
		if p.ID == id {
			return p, nil
		}
	}
	return rtrs.PathInfo{}, fmt.Errorf("the path is gone: %w", syscall.ENODEV)
}

func stateWord(p rtrs.PathInfo) string {
	if p.State == rtrs.PathConnected {
		return "connected"
	}
	return "disconnected"
}

// reconnectByHand reconnects a path with the kernel's errors: EBUSY while the
// path is changing its state, ENOTCONN if it does not connect for any reason.
func (s *session) reconnectByHand(ctx context.Context, id int) error {
	p, err := pathInfo(s, id)
	if err != nil {
		return err
	}
	switch p.State {
	case rtrs.PathConnecting, rtrs.PathClosing, rtrs.PathDead:
		return fmt.Errorf("path %s is %s: %w", pathName(s, p), p.State, syscall.EBUSY)
	}
	err = s.transport.ReconnectPath(ctx, id)
	if err == nil || errors.Is(err, context.Canceled) {
		return err
	}
	return fmt.Errorf("%w: %w", syscall.ENOTCONN, err)
}
