package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// Bounds of a list of names: docs/extend/protocol/rnbd.md, "Lists of names".
const (
	maxLists      = 4     // LISTs under way, of all sessions
	maxListNames  = 10000 // in a list
	maxListLooked = 65536 // directory entries that are read
	maxListDepth  = 8     // depth of folders
)

// onList handles LIST. A session has one LIST at a time.
func (s *Server) onList(ctx context.Context, op *rtrs.Op, sess *session, msg rnbdwire.List) error {
	size := op.ReplyLen()
	switch {
	case !s.cfg.List:
		return fmt.Errorf("list: this server lists no names: %w", syscall.EINVAL)
	case !msg.IsValid() || size < rnbdwire.ListRspMin || size > rnbdwire.ListRspMax:
		return fmt.Errorf("list: message of %d bytes, reply of %d: %w", len(msg), size, syscall.EINVAL)
	case !sess.listing.CompareAndSwap(false, true):
		return fmt.Errorf("list: the session has a LIST under way: %w", syscall.EBUSY)
	}
	defer sess.listing.Store(false)
	after := msg.After()
	select {
	case s.lists <- struct{}{}:
		defer func() { <-s.lists }()
	case <-ctx.Done():
		return fmt.Errorf("list: %d LISTs are under way: %w", maxLists, syscall.EBUSY)
	}
	page, err := s.listPage(ctx, sess, after, size)
	if err != nil {
		return fmt.Errorf("list: %w", err)
	}
	copy(op.Data(), page)
	return nil
}

// listPage returns a page of size bytes. A file system that does not answer
// occupies one of the places for lookups, as in lookUp.
func (s *Server) listPage(ctx context.Context, sess *session, after string, size int) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.lookUpTimeout)
	defer cancel()
	if !s.acquireLookUp(ctx, sess) {
		return nil, fmt.Errorf("other names that were asked for do not resolve: %w", syscall.EBUSY)
	}
	type result struct {
		page []byte
		err  error
	}
	done := make(chan result, 1)
	go func() {
		page, err := s.makePage(ctx, sess, after, size)
		s.releaseLookUp(sess)
		done <- result{page, err}
	}()
	select {
	case r := <-done:
		return r.page, r.err
	case <-ctx.Done():
		return nil, fmt.Errorf("the file system does not answer: %w", syscall.ETIMEDOUT)
	}
}

// makePage returns a page of the names after the name after, in the order of
// their bytes.
func (s *Server) makePage(ctx context.Context, sess *session, after string, size int) ([]byte, error) {
	mem := make([]byte, size)
	page := rnbdwire.NewListPage(mem)
	jail, err := s.jail.jailFor(sess.provedIdentity())
	if err != nil {
		return nil, err
	}
	names, flags, err := jail.listNames(ctx, sess.name)
	if err != nil {
		return nil, err
	}
	names, flags = jail.addVolumes(ctx, names, flags)
	listed := s.listedNames(ctx)
	for name := range listed {
		names = append(names, name)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	from, found := slices.BinarySearch(names, after)
	if found {
		from++
	}
	users := s.nodeUsers()
	for _, name := range names[from:] {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("it takes too long: %w", syscall.ETIMEDOUT)
		}
		e, id := rnbdwire.ListEntry{Name: name}, nodeID{}
		if l, ok := listed[name]; ok {
			if s.checkAllowed(sess, name, blk.ReadOnly) != nil {
				continue
			}
			e.Sectors, id = l.size/blk.SectorSize, l.id
		} else {
			n, err := s.openListed(sess, jail, name)
			if err != nil { // a link that leads nowhere, a file that has gone, or one that is not for the client
				continue
			}
			e.Sectors, e.Block, id = n.size/blk.SectorSize, n.block, n.id
			n.close()
		}
		if u := users[id]; u != nil {
			e.Readers, e.Writers, e.User = u.readers, u.writers, u.name
		}
		if !page.Add(e) {
			flags |= rnbdwire.ListMore
			break
		}
	}
	page.Finish(flags)
	return mem, nil
}

// listedName is a name that a plugin lists.
type listedName struct {
	size uint64 // bytes
	id   nodeID
}

// pluginListTime is the time for a plugin to list its names.
const pluginListTime = time.Second

// listedNames asks the plugins of opaque names for theirs: those that the rules lead to
// them and that OPEN can take. Plugins that do not run, or do not answer, list none.
func (s *Server) listedNames(ctx context.Context) map[string]listedName {
	all := map[string]listedName{}
	for _, p := range s.plugins {
		in, err := p.sup.Current()
		if err != nil || !p.info().ListsNames || p.info().Names != plugin.NamesOpaque {
			continue
		}
		limited, cancel := context.WithTimeout(ctx, pluginListTime)
		names, err := in.ListNames(limited, maxListNames)
		cancel()
		if err != nil {
			p.log.Warn("plugin does not list its names", "err", err)
			continue
		}
		for _, n := range names {
			if n.Name == "" || len(n.Name) >= rnbdwire.NameSize || strings.Contains(n.Name, "..") || strings.Contains(n.Name, "\x00") || s.pluginByRule(n.Name) != p {
				continue
			}
			all[n.Name] = listedName{n.Size, opaqueID(p, n.Name)}
		}
	}
	return all
}

// openListed opens a name that the session may open in any mode. What allows more than
// reading allows reading.
func (s *Server) openListed(sess *session, jail jail, name string) (*node, error) {
	if p, _ := jail.pool(name); p == nil {
		if err := s.checkAllowed(sess, name, blk.ReadOnly); err != nil {
			return nil, err
		}
	}
	n, err := jail.openName(sess.name, name)
	if err != nil {
		return nil, err
	}
	if err := s.judgeNode(sess, n, name, blk.ReadOnly); err != nil {
		n.close()
		return nil, err
	}
	return n, nil
}

// addVolumes adds the names of the volumes of pools to those below the search path,
// without the ones that a pool's name hides, and sorts them.
func (j jail) addVolumes(ctx context.Context, names []string, flags uint32) ([]string, uint32) {
	if len(j.pools) == 0 {
		return names, flags
	}
	names = slices.DeleteFunc(names, func(name string) bool { p, _ := j.pool(name); return p != nil })
	for _, p := range j.pools {
		volumes, err := p.List(ctx)
		if err != nil {
			continue // the client is told of it when it opens a volume
		}
		for _, v := range volumes {
			if len(names) >= maxListNames {
				flags |= rnbdwire.ListCut
				break
			}
			names = append(names, p.Config().Name+"/"+v.String())
		}
	}
	slices.Sort(names)
	return names, flags &^ rnbdwire.ListUnsearched
}

// nodeUse counts the users of a node.
type nodeUse struct {
	readers, writers uint16
	name             string // a session that uses it, a writer if there is one
}

func (s *Server) nodeUsers() map[nodeID]*nodeUse {
	users := map[nodeID]*nodeUse{}
	for i := range s.sessions {
		sess := s.sessions[i].Load()
		if sess == nil {
			continue
		}
		for _, m := range sess.allMappings() {
			id := m.dev.key.id
			u := users[id]
			if u == nil {
				u = &nodeUse{}
				users[id] = u
			}
			if m.mode == blk.ReadOnly {
				u.readers = min(u.readers, math.MaxUint16-1) + 1
				if u.name == "" {
					u.name = sess.name
				}
				continue
			}
			if u.writers == 0 {
				u.name = sess.name
			}
			u.writers = min(u.writers, math.MaxUint16-1) + 1
		}
	}
	return users
}

// listNames returns the names that a session can open below the search path,
// sorted, and flags of a ListRsp. Links are listed and not followed to folders.
// Names that begin with a dot and names that OPEN cannot take are left out.
func (j jail) listNames(ctx context.Context, session string) (listNames []string, flags uint32, err error) {
	if !j.filesAllowed() {
		return nil, rnbdwire.ListUnsearched, nil
	}
	if session == "" && strings.Contains(j.searchPath, sessionMarker) {
		return nil, 0, fmt.Errorf("the session has no name, and each has a folder of its own by name: %w", syscall.EINVAL)
	}
	root, err := os.OpenFile(j.sessionRoot(session), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, fmt.Errorf("the search path cannot be opened: %w", errnoOf(err))
	}
	defer root.Close()
	w := nameWalk{ctx: ctx, root: root, maxNames: maxListNames, maxLooked: maxListLooked}
	w.addFolder("", 0)
	if ctx.Err() != nil {
		return nil, 0, fmt.Errorf("it takes too long: %w", syscall.ETIMEDOUT)
	}
	slices.Sort(w.names)
	if w.cut {
		flags |= rnbdwire.ListCut
	}
	return w.names, flags, nil
}

// nameWalk collects the names below a folder.
type nameWalk struct {
	ctx                 context.Context
	root                *os.File
	maxNames, maxLooked int // bounds
	names               []string
	looked              int
	cut                 bool // more names exist than the bounds allow
}

// addFolder adds the names in a folder. A folder that cannot be read counts as
// empty.
func (w *nameWalk) addFolder(name string, depth int) {
	path := name
	if path == "" {
		path = "."
	}
	fd, err := unix.Openat2(int(w.root.Fd()), path, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return
	}
	dir := os.NewFile(uintptr(fd), fmt.Sprintf("/proc/self/fd/%d", fd)) // the path is for lstat, if the file system does not report kinds of entries
	defer dir.Close()
	for {
		entries, err := dir.ReadDir(256)
		for _, e := range entries {
			if w.looked++; w.looked > w.maxLooked || len(w.names) >= w.maxNames {
				w.cut = true
				return
			}
			w.addEntry(name, e, depth)
		}
		if err != nil || w.ctx.Err() != nil {
			if err != nil && err != io.EOF {
				w.cut = true
			}
			return
		}
	}
}

// addEntry adds one entry of a folder.
func (w *nameWalk) addEntry(folder string, e os.DirEntry, depth int) {
	name := e.Name()
	if strings.HasPrefix(name, ".") || strings.Contains(name, "..") {
		return
	}
	if folder != "" {
		name = folder + "/" + name
	}
	if len(name) >= rnbdwire.NameSize {
		return
	}
	switch e.Type() {
	case os.ModeDir:
		if depth++; depth > maxListDepth {
			w.cut = true
			return
		}
		w.addFolder(name, depth)
	case 0, os.ModeDevice, os.ModeSymlink:
		w.names = append(w.names, name)
	}
}
