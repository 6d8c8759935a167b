package plugin

import (
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

// cleanOnce removes what dead hosts have left, once per process.
var cleanOnce sync.Once

// newSocketDir makes a directory with a short name: a socket's whole path may have
// 107 bytes.
func newSocketDir() (*socketDir, error) {
	base := os.TempDir()
	if len(base) > 40 {
		base = "/tmp"
	}
	cleanOnce.Do(func() { removeOrphans(base) })
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
