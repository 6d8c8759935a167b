package ctltree

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// inode is a node as the kernel knows it: a name in a directory, with the node
// that was found there last.
type inode struct {
	fs.Inode
	tree *Tree
	path string // below the tree's folder, for the log
	node atomic.Pointer[Node]
}

var (
	_ fs.NodeLookuper   = (*inode)(nil)
	_ fs.NodeReaddirer  = (*inode)(nil)
	_ fs.NodeGetattrer  = (*inode)(nil)
	_ fs.NodeSetattrer  = (*inode)(nil)
	_ fs.NodeReadlinker = (*inode)(nil)
	_ fs.NodeOpener     = (*inode)(nil)
)

func (t *Tree) newInode(path string, n Node) *inode {
	i := &inode{tree: t, path: path}
	i.node.Store(&n)
	return i
}

func (i *inode) current() Node { return *i.node.Load() }

// Lookup finds name in a directory. The kernel keeps its entry as long as the
// name exists, so that a shell may sit in a directory; the node behind the
// entry is renewed at each lookup.
func (i *inode) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	dir, ok := i.current().(Dir)
	if !ok {
		return nil, syscall.ENOTDIR
	}
	n := dir.Lookup(name)
	if n == nil {
		return nil, syscall.ENOENT
	}
	i.tree.setAttr(n, &out.Attr)
	if old := i.GetChild(name); old != nil && old.Mode() == n.mode()&syscall.S_IFMT {
		old.Operations().(*inode).node.Store(&n)
		return old, 0
	}
	child := i.tree.newInode(i.path+"/"+name, n)
	return i.NewInode(ctx, child, fs.StableAttr{Mode: n.mode() & syscall.S_IFMT}), 0
}

// Readdir lists a directory.
func (i *inode) Readdir(context.Context) (fs.DirStream, syscall.Errno) {
	dir, ok := i.current().(Dir)
	if !ok {
		return nil, syscall.ENOTDIR
	}
	var entries []fuse.DirEntry
	for _, name := range dir.List() {
		if n := dir.Lookup(name); n != nil {
			entries = append(entries, fuse.DirEntry{Name: name, Mode: n.mode() & syscall.S_IFMT})
		}
	}
	return fs.NewListDirStream(entries), 0
}

// Getattr implements stat.
func (i *inode) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	i.tree.setAttr(i.current(), &out.Attr)
	return 0
}

// Setattr takes the truncation that comes with opening for writing, and new
// times, and does nothing: both have no meaning here.
func (i *inode) Setattr(_ context.Context, _ fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if in.Valid&(fuse.FATTR_MODE|fuse.FATTR_UID|fuse.FATTR_GID) != 0 {
		return syscall.EPERM
	}
	i.tree.setAttr(i.current(), &out.Attr)
	return 0
}

func (t *Tree) setAttr(n Node, out *fuse.Attr) {
	out.Mode = n.mode()
	out.Nlink = 1
	out.Owner = t.owner
	out.Blksize = MaxStore
	switch n := n.(type) {
	case *File:
		out.Size = MaxStore // as Linux's
	case Link:
		out.Size = uint64(len(n))
	}
	out.SetTimes(&t.born, &t.born, &t.born)
}

// Readlink implements readlink.
func (i *inode) Readlink(context.Context) ([]byte, syscall.Errno) {
	l, ok := i.current().(Link)
	if !ok {
		return nil, syscall.EINVAL
	}
	return []byte(l), 0
}

// Open refuses an access that the file does not have, for privileged users too.
func (i *inode) Open(_ context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	f, ok := i.current().(*File)
	if !ok {
		return nil, 0, syscall.EISDIR
	}
	access := flags & syscall.O_ACCMODE
	if access != syscall.O_RDONLY && f.Store == nil || access != syscall.O_WRONLY && f.Show == nil {
		return nil, 0, syscall.EACCES
	}
	return &handle{inode: i, file: f}, fuse.FOPEN_DIRECT_IO, 0
}

// handle is an open file.
type handle struct {
	inode *inode
	file  *File

	mu    sync.Mutex
	shown bool
	text  string // as of the last read at offset 0
}

var (
	_ fs.FileReader = (*handle)(nil)
	_ fs.FileWriter = (*handle)(nil)
)

// Read renders the text again at offset 0 and continues in the same text at
// other offsets.
func (h *handle) Read(_ context.Context, dst []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if off == 0 || !h.shown {
		text, err := h.file.Show()
		if err != nil {
			h.inode.tree.log.Debug("control file cannot be read", "file", h.inode.path, "err", err)
			return nil, errnoOf(err)
		}
		h.text, h.shown = text, true
	}
	if off >= int64(len(h.text)) {
		return fuse.ReadResultData(nil), 0
	}
	return fuse.ReadResultData(dst[:copy(dst, h.text[off:])]), 0
}

// Write runs one command, whatever the offset. It comes back when the command
// is done, the writer is interrupted, or the tree is closed.
func (h *handle) Write(interrupt context.Context, data []byte, _ int64) (uint32, syscall.Errno) {
	n := len(data)
	if n > MaxStore {
		return 0, h.inode.refuse(fmt.Errorf("a command has at most %d bytes: %w", MaxStore, syscall.EINVAL))
	}
	ctx, cancel := context.WithCancel(h.inode.tree.ctx)
	defer cancel()
	data = append([]byte(nil), data...) // the caller's is used again when Write returns
	done := make(chan error, 1)
	go func() { done <- h.store(ctx, data) }()
	select {
	case err := <-done:
		if err != nil {
			return 0, h.inode.refuse(err)
		}
		return uint32(n), 0
	case <-interrupt.Done():
		return 0, h.inode.refuse(fmt.Errorf("the writer was interrupted: %w", syscall.EINTR))
	case <-ctx.Done():
		return 0, syscall.ENODEV
	}
}

// store runs the command. One that panics has failed, as a Show that does.
func (h *handle) store(ctx context.Context, data []byte) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return h.file.Store(ctx, data)
}

// refuse logs the text of err, since the writer gets only the errno.
func (i *inode) refuse(err error) syscall.Errno {
	i.tree.log.Warn("control file refused a write", "file", i.path, "err", err)
	return errnoOf(err)
}
