package ctltree

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Options say how a tree is mounted. Both are needed.
type Options struct {
	// Name of the daemon; the mount table shows it with the process's id.
	Name   string
	Logger *slog.Logger
}

// Tree is mounted. Close takes it away.
type Tree struct {
	root   string
	name   string
	log    *slog.Logger
	owner  fuse.Owner
	born   time.Time
	ctx    context.Context // of all commands
	cancel context.CancelFunc

	undo []func() error // done by Close, the last first
}

// Mount serves places. Their names are paths below the folder root: a Dir becomes a mount, a
// Link a link in the folder, a Folder a folder. Folders are made, and removed by Close if they
// are empty then. Mounts of dead daemons are removed. EBUSY: another daemon serves a place, or
// something else is mounted there; ENOTEMPTY: a mount would hide files. On an error nothing is
// left behind.
//
// Without the right to mount, the program fusermount3 is used; only the
// process's user sees the files then.
func Mount(root string, places map[string]Node, o Options) (_ *Tree, err error) {
	if root, err = filepath.Abs(root); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(root, 0o755); err != nil {
		return nil, fmt.Errorf("control files: %w", err)
	}
	unlock, err := lock(root)
	if err != nil {
		return nil, err
	}
	defer unlock()
	t := &Tree{
		root: root, name: o.Name, log: o.Logger, born: time.Now(),
		owner: fuse.Owner{Uid: uint32(os.Geteuid()), Gid: uint32(os.Getegid())},
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	for _, place := range slices.Sorted(maps.Keys(places)) {
		if err := t.put(place, places[place]); err != nil {
			t.takeAway()
			return nil, fmt.Errorf("control files at %s: %w", filepath.Join(root, place), err)
		}
	}
	return t, nil
}

func (t *Tree) put(place string, n Node) error {
	path := filepath.Join(t.root, place)
	if d, ok := n.(Dir); ok {
		return t.mount(place, path, d)
	}
	if _, ok := n.(Folder); ok {
		return t.folder(path)
	}
	target, ok := n.(Link)
	if !ok {
		return fmt.Errorf("a place is a directory or a link: %w", syscall.EINVAL)
	}
	if err := t.folder(filepath.Dir(path)); err != nil {
		return err
	}
	if old, err := os.Readlink(path); err != nil || old != string(target) { // else a daemon that was killed has left it
		if err := os.Symlink(string(target), path); err != nil {
			return err
		}
	}
	t.undo = append(t.undo, func() error { return os.Remove(path) })
	return nil
}

// folder makes the folders down to path. Close removes those that are empty.
func (t *Tree) folder(path string) error {
	if path == t.root {
		return nil
	}
	if err := t.folder(filepath.Dir(path)); err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	t.undo = append(t.undo, func() error {
		_ = os.Remove(path) // others may use it
		return nil
	})
	return nil
}

func (t *Tree) mount(place, path string, d Dir) error {
	if err := clearStale(path); err != nil {
		return err
	}
	if err := t.folder(path); err != nil {
		return err
	}
	if entries, err := os.ReadDir(path); err != nil {
		return err
	} else if len(entries) > 0 {
		return fmt.Errorf("the folder has files that a mount would hide: %w", syscall.ENOTEMPTY)
	}
	never := time.Duration(0)
	opts := &fs.Options{
		EntryTimeout: &never, AttrTimeout: &never, // no NegativeTimeout: the absence of a name is not cached
		Logger: slog.NewLogLogger(t.log.Handler(), slog.LevelError),
		MountOptions: fuse.MountOptions{
			Name: t.name, FsName: source(t.name), MaxWrite: 2 * MaxStore, DisableReadDirPlus: true,
			Options: []string{"default_permissions", "nosuid", "nodev", "noexec"},
			Logger:  slog.NewLogLogger(t.log.Handler(), slog.LevelError),
		},
	}
	raw := fs.NewNodeFS(t.newInode(place, d), opts)
	server, err := serveDirect(path, raw, &opts.MountOptions)
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EACCES) {
		server, err = fuse.NewServer(raw, path, &opts.MountOptions) // by fusermount3
	}
	if err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	go server.Serve()
	t.undo = append(t.undo, func() error { return detach(path) })
	return server.WaitMount()
}

// source is the source of our mounts in the mount table.
func source(name string) string { return fmt.Sprintf("%s:%d", name, os.Getpid()) }

// serveDirect mounts without help. The descriptor is closed on exec: with it,
// a child could answer in our place, and would keep the mount alive when we
// are gone.
func serveDirect(path string, raw fuse.RawFileSystem, o *fuse.MountOptions) (*fuse.Server, error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("open /dev/fuse", err)
	}
	data := fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d,default_permissions,allow_other", fd, os.Geteuid(), os.Getegid())
	if err := unix.Mount(o.FsName, path, "fuse."+o.Name, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, data); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("mount", err)
	}
	server, err := fuse.NewServer(raw, fmt.Sprintf("/dev/fd/%d", fd), o)
	if err != nil {
		_ = detach(path)
	}
	return server, err
}

// Close ends the commands under way and unmounts the tree, even if files are
// open.
func (t *Tree) Close() error {
	t.cancel()
	unlock, err := lock(t.root)
	if err != nil {
		return errors.Join(err, t.takeAway())
	}
	defer unlock()
	return t.takeAway()
}

func (t *Tree) takeAway() error {
	t.cancel()
	var errs []error
	for _, f := range slices.Backward(t.undo) {
		errs = append(errs, f())
	}
	t.undo = nil
	return errors.Join(errs...)
}

// lockPatience is how long a daemon waits for others that mount in the same
// folder.
const lockPatience = 10 * time.Second

// lock keeps other daemons from mounting and unmounting below root.
func lock(root string) (unlock func(), err error) {
	f, err := os.Open(root)
	if err != nil {
		return nil, fmt.Errorf("control files: %w", err)
	}
	for end := time.Now().Add(lockPatience); ; time.Sleep(5 * time.Millisecond) {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if err != unix.EINTR && time.Now().After(end) {
			f.Close()
			return nil, fmt.Errorf("control files: lock %s: %w", root, err)
		}
	}
}
