package plugin

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// socketDir is the directory of the sockets between a plugin and its host. The host
// holds a lock on it for as long as it lives, so that other hosts can tell the
// directories that hosts have left behind which were killed.
type socketDir struct {
	path string
	lock *os.File // the locked file ownerFile
}

const (
	socketDirPrefix = "rnbd-plugin-"
	ownerFile       = "owner"
)

// maxSocketBase is the longest path in bytes of the folder of a socketDir. An address
// holds 107 bytes. socketDir takes 23 of them ("/rnbd-plugin-" and up to 10 digits),
// the folder of go-plugin 21 and the plugin's socket 17.
const maxSocketBase = 107 - 23 - 21 - 17

// cleaned has the folders that this process has searched for leftovers of dead hosts.
var cleaned sync.Map

// newSocketDir makes a directory in base, the folder of the host's own sockets, or
// in a temporary folder if base is empty, too long or cannot be written to. Where
// the plugin is another user, all users have to reach it.
func newSocketDir(base string, otherUser bool) (*socketDir, error) {
	var errs []error
	for _, in := range []string{base, os.TempDir(), "/tmp"} {
		if in == "" || len(in) > maxSocketBase || otherUser && !isOpenToAll(in) {
			continue
		}
		if _, done := cleaned.LoadOrStore(in, true); !done {
			removeOrphans(in)
		}
		d, err := newSocketDirIn(in)
		if err == nil {
			return d, nil
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		return nil, fmt.Errorf("the folders for the plugin's socket, %q and %q, are too long or closed to the plugin's user: %w", base, os.TempDir(), syscall.ENAMETOOLONG)
	}
	return nil, fmt.Errorf("no folder for the plugin's socket: %w", errors.Join(errs...))
}

// isOpenToAll reports whether all users can reach what is in dir.
func isOpenToAll(dir string) bool {
	st, err := os.Stat(dir)
	return err == nil && st.Mode().Perm()&0o001 != 0
}

func newSocketDirIn(base string) (*socketDir, error) {
	dir, err := os.MkdirTemp(base, socketDirPrefix)
	if err != nil {
		return nil, err
	}
	d := &socketDir{path: dir}
	// The file gets its name when it is locked: before that no other host takes
	// the directory for an orphan.
	unnamed := filepath.Join(dir, "."+ownerFile)
	if d.lock, err = os.OpenFile(unnamed, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err == nil {
		err = lockNow(d.lock)
	}
	if err == nil {
		err = os.Rename(unnamed, filepath.Join(dir, ownerFile))
	}
	if err != nil {
		d.remove()
		return nil, err
	}
	return d, nil
}

func lockNow(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }

// remove removes the directory with what is in it. nil: there is none.
func (d *socketDir) remove() {
	if d == nil {
		return
	}
	_ = os.RemoveAll(d.path)
	if d.lock != nil {
		d.lock.Close()
	}
}

// removeOrphans removes the directories below base that belong to this user, and to
// no host that lives. One that cannot be removed is left.
func removeOrphans(base string) {
	dirs, err := filepath.Glob(filepath.Join(base, socketDirPrefix+"*"))
	if err != nil {
		return
	}
	for _, dir := range dirs {
		if st, err := os.Lstat(dir); err == nil && st.IsDir() && st.Sys().(*syscall.Stat_t).Uid == uint32(os.Getuid()) {
			removeOrphan(dir)
		}
	}
}

func removeOrphan(dir string) {
	f, err := os.OpenFile(filepath.Join(dir, ownerFile), os.O_RDWR|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return // not one of ours, or not ready
	}
	defer f.Close()
	if lockNow(f) == nil {
		_ = os.RemoveAll(dir)
	}
}
